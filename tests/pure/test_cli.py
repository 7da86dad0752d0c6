"""The command line as a new user meets it: every mistake is one line that says what to change, and nothing is ignored."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fake_inputs import calibration

from meshwright.cli.main import app, main
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan
from meshwright.core.serialization import from_data
from meshwright.describe.discover import discover
from meshwright.orchestrate import Orchestrator, RunConfig, calibrate

Ran = tuple[int, str, str]
Tool = Callable[..., Ran]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, on a machine of CPUs that was measured before, so that nothing is probed and no process is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for ranks in (1, 2, 3, 4):
        assert calibrate.save_to_cache(calibration(ranks), discover(os.environ, ranks=ranks), os.environ)
    monkeypatch.setattr(Orchestrator, "fork_server", _no_process)
    return tmp_path


def _no_process(_: Orchestrator, threads: int | None = None) -> None:
    """Planning may warm a process up, which is left out here; asking for a number of threads is the beginning of a run."""
    assert threads is None, "a run would begin"


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Tool:
    """One command line: exit code, standard output, standard error."""

    def call(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def complaint(ran: Ran) -> str:
    """The one line that a wrong request leaves on standard error, progress aside."""
    code, out, err = ran
    lines = [line for line in err.splitlines() if not line.startswith("·")]
    assert "Traceback" not in err
    assert len(lines) == 1, err
    assert lines[0].startswith("meshwright: ")
    assert code == 2, err
    assert out == ""
    return lines[0].removeprefix("meshwright: ")


# Wrong requests


MISTAKES: dict[str, tuple[list[str], str]] = {
    "verb": (["frobnicate"], "unknown verb 'frobnicate'"),
    "misspelt verb": (["trian"], "did you mean 'train'?"),
    "sub-verb": (["describe", "modl"], "did you mean 'model'?"),
    "flag": (["train", "--stesp", "4"], "did you mean '--steps'?"),
    "far flag": (["plan", "vae", "--zzz"], "unknown flag --zzz; --help lists the flags"),
    "flag without value": (["plan", "vae", "--mesh"], "--mesh"),
    "no model": (["plan"], "MODEL"),
    "model": (["describe", "model", "gpt2-124"], "unknown model 'gpt2-124'; did you mean 'gpt2-124m'?"),
    "far model": (["plan", "qqq"], "one of: cnn, cosmoflow"),
    "second model": (["plan", "vae", "cnn"], "cnn"),
    "argument after a model": (["train", "vae", "extra"], "unexpected argument 'extra': only a script takes arguments"),
    "argument after describe": (["describe", "model", "vae", "extra"], "extra"),
    "not a number": (["plan", "vae", "--global-batch", "lots"], "'--global-batch': Input should be a valid integer"),
    "not a finite number": (["plan", "vae", "--set", "clip=NaN"], "clip=NaN: input should be a finite number"),
    "set key": (["plan", "vae", "--set", "zreo=1"], "unknown key 'zreo' in --set; did you mean 'zero'?"),
    "set without value": (["plan", "vae", "--set", "zero"], "--set zero: write it as key=value"),
    "set nothing": (["plan", "vae", "--set", "=1"], "unknown key ''"),
    "set value": (["plan", "vae", "--set", "zero=7"], "zero=7: input should be 0, 1, 2 or 3"),
    "set layer": (["plan", "gpt-tiny", "--set", "recompute.block.0=full"], "unknown layer 'block.0' in recompute; did you mean 'blocks.0'?"),
    "set fp8": (["plan", "vae", "--set", "precision=fp8"], "use bf16"),
    "set word": (["plan", "vae", "--set", "recompute=some"], "recompute=\"some\": input should be 'none', 'selective' or 'full'"),
    "set type": (["plan", "vae", "--set", "steps=many"], 'steps="many"'),
    "set fraction": (["plan", "vae", "--set", "nproc=1.5"], "nproc=1.5"),
    "nproc": (["plan", "vae", "--nproc", "0"], "nproc=0: input should be greater than or equal to 1"),
    "batch": (["plan", "vae", "--global-batch", "0"], "global_batch=0: input should be greater than or equal to 1"),
    "seed": (["train", "vae", "--seed", "-1"], "seed=-1: input should be greater than or equal to 0"),
    "steps": (["train", "vae", "--steps", "0"], "steps=0"),
    "dropout": (["plan", "gpt-tiny", "--set", "dropout=1"], "dropout=1: input should be less than 1"),
    "seq": (["plan", "gpt-tiny", "--seq", "65"], "use --seq 64 or less"),
    "no seq": (["plan", "vae", "--seq", "8"], "vae takes no sequence length"),
    "axis": (["plan", "vae", "--mesh", "dq=2"], "unknown mesh axis 'dq' in --mesh dq=2; did you mean 'dp'?"),
    "degree": (["plan", "vae", "--mesh", "dp=0"], "mesh axis dp: a degree is at least 1"),
    "degree word": (["plan", "vae", "--mesh", "dp=two"], "needs a whole number, like dp=2"),
    "mesh and nproc": (["plan", "vae", "--mesh", "dp=2", "--nproc", "4"], "--nproc 4 and --mesh dp=2 (2 ranks) disagree: change one of them"),
    "stage": (["plan", "vae", "--mesh", "dp=2", "--set", "zero=2"], "use --mesh shard=2"),
    "schedule alone": (["plan", "vae", "--mesh", "dp=2", "--set", "schedule=gpipe"], "mesh dp=2 has none: use --mesh pp=2, or leave it out"),
    "placements alone": (["plan", "vae", "--nproc", "1", "--set", 'placements={"encoder": "replicate"}'], "mesh dp=1 has none: use --mesh tp=2"),
    "no such layer": (["plan", "vae", "--nproc", "2", "--set", 'placements={"encodr": "replicate"}'], "unknown layer 'encodr' in placements"),
    "placement": (["plan", "vae", "--nproc", "2", "--set", 'placements={"encoder": "row"}'], "unknown placement 'row' in placements: encoder"),
    "devices": (["plan", "vae", "--devices", "a"], "give numbers, like --devices 0,2"),
    "device": (["plan", "vae", "--devices", "99"], "there is no device 99"),
    "device twice": (["plan", "vae", "--devices", "0,0"], "a device is named twice"),
    "no plan": (["train", "vae", "--plan", "nope.json"], "nope.json: No such file"),
    "no config": (["train", "nope.json"], "nope.json: No such file"),
    "no script": (["train", "nope.py"], "nope.py: no such file"),
    "no package": (["plan", "nope.models:make"], "cannot import nope.models"),
    "no attribute": (["plan", "json:nope"], "json has no 'nope'"),
    "not callable": (["plan", "json:__doc__"], "not a function"),
    "no hugging face folder": (["plan", "hf:nope"], "there is no nope"),
    "no run": (["report", "nope"], "start one with `meshwright train`"),
    "no run to watch": (["watch"], "start one with `meshwright train`"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_change(name: str, run: Tool) -> None:
    arguments, says = MISTAKES[name]
    assert says in complaint(run(*arguments))


@pytest.mark.parametrize("name", ["set key", "batch", "model", "mesh and nproc"])
def test_a_mistake_prints_no_json(name: str, run: Tool) -> None:
    assert complaint(run(*MISTAKES[name][0], "--json"))


def test_a_batch_that_does_not_divide_names_one_that_does(run: Tool) -> None:
    line = complaint(run("plan", "vae", "--global-batch", "7", "--mesh", "dp=2"))
    assert "global batch 7 does not divide into 2 data ranks" in line
    for batch in re.findall(r"\d+", line.rpartition("--global-batch to ")[2]):
        assert run("plan", "vae", "--global-batch", batch, "--mesh", "dp=2")[0] == 0


FILES: dict[str, tuple[str, list[str], str]] = {
    "broken configuration": ('{"model": "vae",', ["train", "x.json"], "x.json:1: not JSON"),
    "broken plan": ("{\n\nplan", ["train", "vae", "--plan", "x.json"], "x.json:3: not JSON"),
    "configuration key": ('{"model": "vae", "stpes": 3}', ["train", "x.json"], "unknown key 'stpes' in x.json; did you mean 'steps'?"),
    "configuration value": ('{"model": 3}', ["train", "x.json"], "x.json: model=3: input should be a valid string"),
    "configuration list": ("[1]", ["train", "x.json"], "x.json: a run's configuration is one JSON object"),
    "plan key": ('{"model": "vae", "global_batch": 8, "mesg": {}}', ["train", "vae", "--plan", "x.json"], "did you mean 'mesh'?"),
    "plan inner key": ('{"model": "vae", "global_batch": 8, "memory": {"zer": 1}}', ["train", "vae", "--plan", "x.json"], "in x.json.memory"),
    "plan list": ("[]", ["train", "vae", "--plan", "x.json"], "x.json: expected an object, found []"),
    "plan type": ('{"model": "vae", "global_batch": "8"}', ["train", "vae", "--plan", "x.json"], "x.json.global_batch: expected int"),
    "plan without a batch": ('{"model": "vae"}', ["train", "vae", "--plan", "x.json"], "x.json: the key 'global_batch' is missing"),
    "newer plan": ('{"model": "vae", "global_batch": 8, "version": 9}', ["train", "vae", "--plan", "x.json"], "version 9"),
    "another batch": ('{"model": "vae", "global_batch": 8}', ["train", "vae", "--plan", "x.json", "--global-batch", "9"], "has global_batch 8"),
    "another device": ('{"model": "vae", "global_batch": 8, "device": "cuda"}', ["train", "vae", "--plan", "x.json"], "x.json is for 1 × cuda"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_named_with_the_place(name: str, run: Tool, here: Path) -> None:
    text, arguments, says = FILES[name]
    (here / "x.json").write_text(text)
    assert says in complaint(run(*arguments))


@pytest.mark.parametrize("arguments", [["train", "x.json"], ["train", "vae", "--plan", "x.json"]], ids=["configuration", "plan"])
def test_a_file_that_is_not_text(arguments: list[str], run: Tool, here: Path) -> None:
    (here / "x.json").write_bytes(b"\xff\xfe")
    assert "x.json" in complaint(run(*arguments))


def test_a_file_in_the_place_of_the_run_folder(run: Tool, here: Path) -> None:
    (here / "runs").write_text("")
    code, out, err = run("train", "vae", "--steps", "1")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "meshwright: cannot make a run folder in runs: Not a directory; choose another with --run-dir"


def test_a_file_in_the_place_of_the_run_folder_is_one_line(run: Tool, here: Path) -> None:
    (here / "runs").write_text("")
    complaint(run("train", "vae", "--steps", "1"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the test with a file in the folder's place covers it")
def test_a_run_folder_that_cannot_be_written(run: Tool, here: Path) -> None:
    (here / "locked").mkdir(mode=0o500)
    code, _, err = run("train", "vae", "--steps", "1", "--run-dir", str(here / "locked"))
    assert code == 2
    assert "choose another with --run-dir" in err.splitlines()[-1]


@pytest.mark.parametrize("where", ["missing/plan.json", "."])
def test_a_plan_that_cannot_be_written(where: str, run: Tool) -> None:
    assert where in complaint(run("plan", "vae", "-o", where))


@pytest.mark.parametrize("setting", ["steps=true", "learning_rate=Infinity", "timeout_s=Infinity"])
def test_a_value_that_makes_no_sense(setting: str, run: Tool) -> None:
    assert setting.partition("=")[0] in complaint(run("plan", "vae", "--set", setting))


def test_a_backend_that_does_not_exist(run: Tool) -> None:
    assert "gloo" in complaint(run("plan", "vae", "--set", "backend=glow"))


def test_an_empty_mesh(run: Tool) -> None:
    assert "--mesh" in complaint(run("plan", "vae", "--mesh", ""))


def test_a_number_of_ranks_beyond_all_machines(run: Tool) -> None:
    assert "nproc" in complaint(run("plan", "vae", "--nproc", "99999999999999999999"))


def test_a_line_break_in_a_name_does_not_break_the_line(run: Tool) -> None:
    complaint(run("plan", "a\nb"))


def test_brackets_in_a_path(run: Tool, here: Path) -> None:
    folder = here / "a[/x]"
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(MODELS)
    code, out, _ = run("describe", "model", f"{folder}/models.py:Good")
    assert code == 0
    assert "a[/x]" in out


def test_long_progress_stays_on_its_line(run: Tool, here: Path) -> None:
    folder = here / ("long" * 30)
    folder.mkdir()
    (folder / "models.py").write_text(MODELS)
    code, _, err = run("describe", "model", f"{folder}/models.py:Good", "--json")
    assert code == 0
    assert all(line.startswith("·") for line in err.splitlines())


def test_the_path_of_a_report_is_one_line(run: Tool, here: Path) -> None:
    runs = here / ("long" * 30)
    (runs / "mine").mkdir(parents=True)
    (runs / "mine" / "job.json").write_text("{}")
    code, out, _ = run("report", "mine", "--run-dir", str(runs))
    assert code == 0
    assert out == f"{runs}/mine/report.html\n"


# A plan that is given


def prepare(**settings: Any) -> None:
    with Orchestrator(RunConfig(**settings), os.environ, lambda _: None) as orchestrator:
        orchestrator.prepare()


@pytest.fixture
def vae_plan(here: Path) -> Path:
    Plan("vae", 64, Mesh(dp=2), memory=MemoryPolicy(units=("encoder.1",))).save(here / "plan.json")
    return here / "plan.json"


def test_a_plan_for_this_model_is_taken(vae_plan: Path) -> None:
    prepare(model="vae", plan=str(vae_plan))


@pytest.mark.parametrize("model", ["cnn", "gpt-mini"])
def test_a_plan_for_another_model_is_refused(model: str, vae_plan: Path) -> None:
    with pytest.raises(RequestError, match="vae"):
        prepare(model=model, plan=str(vae_plan))


@pytest.mark.parametrize(
    "settings",
    [
        {"nproc": 4},
        {"mesh": "shard=4"},
        {"zero": 3},
        {"recompute": "full"},
        {"micro_batches": 4},
        {"backend": "nccl"},
        {"schedule": "1f1b"},
        {"schedule": "gpipe"},
        {"placements": {"encoder.1": "replicate"}},
    ],
    ids=str,
)
def test_a_wish_that_the_plan_does_not_hold_is_refused(settings: dict[str, Any], vae_plan: Path) -> None:
    with pytest.raises(RequestError):
        prepare(model="vae", plan=str(vae_plan), **settings)


def test_a_plan_of_another_schedule_or_placement_is_refused(here: Path) -> None:
    prepared = RunConfig(model="gpt-tiny", mesh="pp=2,tp=2", schedule="1f1b", micro_batches=2, placements={"head": "replicate"})
    with Orchestrator(prepared, os.environ, lambda _: None) as orchestrator:
        orchestrator.prepare().plan.save(here / "plan.json")
    prepare(model="gpt-tiny", plan=str(here / "plan.json"), schedule="1f1b", placements={"head": "replicate"})
    with pytest.raises(RequestError, match="has schedule 1f1b, the request gpipe: change one of them"):
        prepare(model="gpt-tiny", plan=str(here / "plan.json"), schedule="gpipe")
    with pytest.raises(RequestError, match=r"has placements .*replicate.*, the request .*column"):
        prepare(model="gpt-tiny", plan=str(here / "plan.json"), placements={"head": "column"})


def test_a_plan_with_a_unit_that_the_model_lacks_is_refused(here: Path) -> None:
    Plan("vae", 64, Mesh(dp=2), memory=MemoryPolicy(units=("nope",))).save(here / "plan.json")
    with pytest.raises(RequestError, match="nope"):
        prepare(model="vae", plan=str(here / "plan.json"))


# Right requests


def test_no_verb_at_all_shows_the_verbs(run: Tool) -> None:
    code, out, err = run()
    assert code == 0
    assert err == ""
    for verb in ("describe", "plan", "train", "report", "watch", "doctor"):
        assert verb in out


def test_describe_model_prints_one_object_with_its_keys(run: Tool) -> None:
    code, out, err = run("describe", "model", "gpt-tiny", "--json")
    assert code == 0
    found = json.loads(out)
    totals = {"parameters", "flops_forward", "flops_backward", "activation_bytes"}
    assert totals | {"layers"} <= set(found)
    assert found["batch"] == 16
    for layer in found["layers"]:
        assert totals | {"name", "output_bytes"} <= set(layer)
    for key in totals:
        assert found[key] == sum(layer[key] for layer in found["layers"])
    assert all(line.startswith("·") for line in err.splitlines())


def test_describe_model_goes_with_the_batch_and_the_length(run: Tool) -> None:
    def flops(*flags: str) -> float:
        return json.loads(run("describe", "model", "gpt-tiny", "--json", *flags)[1])["flops_forward"]

    assert flops("--global-batch", "8") == 4 * flops("--global-batch", "2")
    assert flops("--seq", "32") < flops()
    assert flops("--set", "global_batch=8") == flops("--global-batch", "8")


def test_describe_model_shows_a_table(run: Tool) -> None:
    code, out, _ = run("describe", "model", "gpt-tiny")
    assert code == 0
    assert "blocks.0 (Block) × 2" in out
    assert "120.6 k" in out
    assert "tied, counted once: head.weight" in out


def test_describe_cluster_prints_one_object(run: Tool) -> None:
    code, out, err = run("describe", "cluster", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["cluster"]["nodes"][0]["devices"]


def test_plan_prints_ranked_plans_that_can_be_loaded(run: Tool, here: Path) -> None:
    code, out, err = run("plan", "vae", "--nproc", "2", "--json", "-o", "best.json")
    assert code == 0
    found = json.loads(out)
    assert {"plans", "why", "seconds"} <= set(found)
    fits = [entry["fits"] for entry in found["plans"]]
    assert fits == sorted(fits, reverse=True)
    for entry in found["plans"]:
        assert from_data(Plan, entry["plan"], "plan").world == 2
        assert entry["estimate"]["step_s"] > 0
        assert entry["reason"] == entry["estimate"]["reason"]
    assert found["why"].startswith("Chosen: ")
    assert Plan.load(here / "best.json") == from_data(Plan, found["plans"][0]["plan"], "plan")
    assert all(line.startswith("·") for line in err.splitlines())


def test_plan_shows_a_table_and_how_to_run_it(run: Tool) -> None:
    code, out, _ = run("plan", "vae", "--nproc", "2", "--set", "recompute=none", "-o", "p.json")
    assert code == 0
    assert "Chosen: " in out
    assert "meshwright train vae --plan p.json" in " ".join(out.split())


def test_a_flag_wins_over_set_which_wins_over_the_file(here: Path) -> None:
    from meshwright.cli.options import make_config

    (here / "c.json").write_text('{"steps": 1, "seed": 1, "global_batch": 1}')
    config = make_config(here / "c.json", ["seed=2", "global_batch=2"], global_batch=3, seq=None)
    assert (config.steps, config.seed, config.global_batch, config.seq) == (1, 2, 3, None)


def test_a_device_may_be_picked(run: Tool) -> None:
    code, out, _ = run("describe", "cluster", "--devices", "0", "--json")
    assert code == 0
    assert [d["index"] for d in json.loads(out)["cluster"]["nodes"][0]["devices"]] == [0]


# Help


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, child in (inner or {}).items():
        yield from verbs(child, (*path, name))


VERBS = dict(verbs(typer.main.get_command(app)))


def examples(command: Any) -> list[list[str]]:
    """The command lines in a verb's own help."""
    return [shlex.split(line.partition("meshwright ")[2]) for line in (command.help or "").splitlines() if "meshwright " in line]


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_help_of_every_verb_has_an_example(path: tuple[str, ...], run: Tool) -> None:
    code, out, err = run(*path, "--help")
    assert (code, err) == (0, "")
    shown = " ".join(out.split())
    assert "Example" in shown
    for example in examples(VERBS[path]):
        assert all(part in shown for part in ("meshwright " + " ".join(path), *example))


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_examples_in_help_are_right(path: tuple[str, ...]) -> None:
    """Parsed, not run: the verb, its flags and their values."""
    found = examples(VERBS[path])
    assert found
    for example in found:
        assert tuple(example[: len(path)]) == path
        VERBS[path].make_context(" ".join(path), example[len(path) :])


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_every_verb_that_prints_takes_json(path: tuple[str, ...]) -> None:
    flags = {flag for parameter in VERBS[path].params for flag in parameter.opts}
    assert "--json" in flags or path == ("watch",)


# In a process of its own


def tool(*arguments: str, cwd: Path) -> Ran:
    code = "import sys; from meshwright.cli.main import main; main(sys.argv[1:])"
    environ = {**os.environ, "XDG_CACHE_HOME": str(cwd / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd, env=environ, timeout=100)
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.parametrize("name", ["misspelt verb", "flag", "model"])
def test_a_mistake_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    arguments, says = MISTAKES[name]
    assert says in complaint(tool(*arguments, cwd=tmp_path))


def loaded_by(code: str, modules: set[str], cwd: Path) -> set[str]:
    """Which of these modules a process has loaded when it ends, having run `code`."""
    look = f"import atexit, sys\natexit.register(lambda: print(*({modules!r} & sys.modules.keys()), file=sys.stderr))\n"
    ran = subprocess.run([sys.executable, "-c", look + code], capture_output=True, text=True, timeout=100, cwd=cwd)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["describe", "--help"]], ids=" ".join)
def test_help_does_not_wait_for_torch(arguments: list[str], tmp_path: Path) -> None:
    code = f"from meshwright.cli.main import main; main({arguments!r})"
    assert (
        loaded_by(code, {"torch", "numpy", "meshwright.orchestrate", "meshwright.plan", "meshwright.schedule", "meshwright.observe"}, tmp_path)
        == set()
    )


def test_planning_does_not_wait_for_what_ranks_run(tmp_path: Path) -> None:
    parts = {"torch._dynamo", "torch.distributed.pipelining", "torch.distributed.tensor", "sympy", "transformers", "matplotlib", "tensorboard"}
    assert loaded_by("import meshwright.orchestrate", parts, tmp_path) == set()


MODELS = """
from torch import nn
from meshwright import Field

class Good(nn.Module):
    fields = {"x": Field((8,))}
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 2)
    def forward(self, x):
        return self.b(self.a(x))
    def loss(self, batch):
        return self(batch["x"]).mean()

class Bad(Good):
    def forward(self, x):
        return self.a(self.b(x))
"""


def test_a_users_own_model_is_described(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    code, out, _ = tool("describe", "model", "models:Good", "--json", cwd=tmp_path)
    assert code == 0
    assert json.loads(out)["parameters"] == 36 + 10


def test_a_users_wrong_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    assert "Bad can be neither traced nor run" in complaint(tool("describe", "model", "models.py:Bad", cwd=tmp_path))


def test_an_unwritable_run_folder_is_refused_before_anything_is_measured(run: Tool, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("probed or traced before the refusal")

    monkeypatch.setattr(calibrate, "probe", too_late)
    monkeypatch.setattr(Orchestrator, "prepare", too_late)
    (here / "file").write_text("")
    code, _, err = run("train", "gpt-tiny", "--run-dir", "file/runs")
    assert code == 2
    assert len(err.strip().splitlines()) == 1 and "cannot make a run folder in file/runs: Not a directory" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_verb_with_its_code(number: signal.Signals, code: int, run: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.cli import stop_signals

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr("meshwright.cli.plan_command.require_torch", lambda: os.kill(os.getpid(), number))
    try:
        ended, _, err = run("plan", "gpt-tiny")
        assert signal.getsignal(number) == signal.SIG_IGN
        for n in before:
            signal.signal(n, signal.default_int_handler)
        handler = stop_signals.StopSignals()
        with pytest.raises(KeyboardInterrupt) as first:
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt) as second:
            os.kill(os.getpid(), number)
    finally:
        for n, old in before.items():
            signal.signal(n, old)
    assert ended == code
    assert err.strip() == f"meshwright: {'interrupted' if code == 130 else 'stopped by SIGTERM'}"
    assert (first.value.at_once, second.value.at_once, handler.received) == (False, True, number)  # type: ignore[attr-defined]
