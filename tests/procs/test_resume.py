"""A run goes on, and what it has left is used, as a user asks for it on the command line."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from meshwright.checkpoint.manifest import FILE_NAME, read_manifest
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.job import load_dataset, load_task
from tests.procs.test_train import MESHWRIGHT, meshwright

Command = Callable[..., tuple[str, str]]
QUICK = ("--set", "profile=false", "--set", "verify=false")
INPUTS = ("job.json", "plan.json", "cluster.json", "ledger.json", "estimate.json")


@pytest.fixture(scope="module")
def trained(pool: Any) -> dict[str, Any]:
    """Results of runs that several tests look at, by name."""
    return {}


@pytest.fixture
def train(command: Command, ground: Path, trained: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """`train` with the words; a run that has a name is made once."""

    def run(name: str, *words: str) -> dict[str, Any]:
        if name not in trained:
            named = ("--set", f"name={name}") if "--resume" not in words else ()
            trained[name] = json.loads(command("train", *words, *named, *QUICK, "--json")[0])
        return trained[name]  # type: ignore[no-any-return]

    return run


def first(train: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """20 steps on two ranks, with checkpoints of 10 and 20."""
    return train("first", "gpt-tiny", "--steps", "20", "--mesh", "shard=2", "--set", "zero=3", "--set", "checkpoint_every=10")


def copied(ground: Path, name: str, to: str) -> Path:
    shutil.copytree(ground / "runs" / name, ground / "runs" / to)
    return ground / "runs" / to


def test_a_run_that_goes_on_is_one_that_was_never_stopped(command: Command, train: Any, ground: Path) -> None:
    """Under the same plan to the last bit, digest included; under another within rounding."""
    straight = first(train)
    for folder in (copied(ground, "first", "same"), copied(ground, "first", "other")):
        shutil.rmtree(folder / "checkpoints" / "20")
    same = json.loads(command("train", "--resume", "same", "--set", "verify=false", "--json")[0])
    assert same["state_digest"] == straight["state_digest"] and same["losses"] == straight["losses"] and same["first_step"] == 0
    assert same["validation"] == straight["validation"]
    other = json.loads(command("train", "--resume", "other", "--mesh", "tp=2", "--set", "verify=false", "--json")[0])
    assert other["plan"]["mesh"]["tp"] == [2] and other["losses"] == pytest.approx(straight["losses"], rel=1e-4)


def test_a_checkpoint_begins_a_run_of_its_own(command: Command, train: Any, ground: Path) -> None:
    straight = first(train)
    before = {path.name: path.stat().st_mtime_ns for path in (ground / "runs" / "first").iterdir()}
    branch = json.loads(command("train", "--resume", "runs/first/checkpoints/10", *QUICK, "--json")[0])
    assert branch["run"] != straight["run"] and branch["state_digest"] == straight["state_digest"] and branch["first_step"] == 10
    assert {path.name: path.stat().st_mtime_ns for path in (ground / "runs" / "first").iterdir()} == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 143), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_prints_the_line_that_goes_on(command: Command, ground: Path, number: signal.Signals, code: int) -> None:
    name = f"stopped-{number.name.lower()}"
    words = ("gpt-tiny", "--steps", "100000", "--nproc", "2", "--set", f"name={name}", "--set", "checkpoint_every=none")
    process = subprocess.Popen([*MESHWRIGHT, "train", *words, *QUICK], cwd=ground, stderr=subprocess.PIPE, text=True)
    metrics = ground / "runs" / name / "metrics.jsonl"
    try:
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
            time.sleep(0.1)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == code, said
    (saved,) = (ground / "runs" / name / "checkpoints").iterdir()
    assert f"stopped after step {saved.name}; to go on: meshwright train --resume runs/{name}\n" in said
    step = int(saved.name)
    result = json.loads(command("train", "--resume", f"runs/{name}", "--steps", str(step + 2), *QUICK, "--json")[0])
    assert len(result["losses"]) == step + 2 and result["first_step"] == 0


REFUSED = {
    "another batch": (["--global-batch", "24"], r"trained with global_batch=16, and the request says 24: leave it out, or --set allow_changes=true"),
    "other data": (["--data", "patterns"], r"trained with data=null, and the request says \"patterns\""),
    "another optimizer": (["--set", "optimizer=sgd"], r"trained with optimizer=\"adamw\""),
    "nothing left": (["--steps", "20"], r"it has done 20 of 20 steps: give more with --steps"),
    "another model": (["--set", "model=llama-tiny", "--set", "allow_changes=true"], r"another model: the model has the parameter embedding\.weight"),
    "another shape": (["--set", "model=wide.py:gpt", "--set", "allow_changes=true"], r"embedding\.tokens\.weight has the shape \(256, 64\) in it"),
    "weights too": (["--init-from", "first"], r"leave one of them out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_cannot_go_on_with_is_one_line_and_overwrites_nothing(command: Command, train: Any, ground: Path, case: str) -> None:
    first(train)
    words, expected = REFUSED[case]
    (ground / "wide.py").write_text(
        "from dataclasses import replace\nfrom meshwright import zoo\nfrom meshwright.zoo.gpt import GPT\n\n\n"
        "def gpt():\n    task = zoo.load('gpt-tiny')\n"
        "    return replace(task, build=lambda: GPT(replace(task.build().config, width=96)))\n"
    )
    before = {name: (ground / "runs" / "first" / name).read_bytes() for name in INPUTS}
    _, err = command("train", "--resume", "first", *(() if "--steps" in words else ("--steps", "30")), *words, "--set", "verify=false", expect=2)
    line = err.strip().splitlines()[-1]
    assert line.startswith("meshwright: ") and re.search(expected, line), line
    assert {name: (ground / "runs" / "first" / name).read_bytes() for name in INPUTS} == before
    assert sorted(p.name for p in (ground / "runs" / "first" / "checkpoints").iterdir()) == ["10", "20"]


def test_a_missing_shard_is_named_and_an_older_checkpoint_is_used(command: Command, train: Any, ground: Path) -> None:
    straight = first(train)
    folder = copied(ground, "first", "broken")
    (folder / "checkpoints" / "20" / "rank-00001.safetensors").unlink()
    out, _ = command("train", "--resume", "broken", "--steps", "21", *QUICK, "--json")
    result = json.loads(out)
    assert result["losses"][:20] == pytest.approx(straight["losses"], rel=1e-4)
    (event,) = (e for e in map(json.loads, (folder / "events-0.jsonl").read_text().splitlines()) if e["kind"] == "resumed")
    assert event["step"] == 10 and "rank-00001.safetensors: no such file or directory" in event["data"]["problems"][0]
    for file in (folder / "checkpoints").glob("*/rank-00000.safetensors"):
        file.unlink()
    _, err = command("train", "--resume", "broken", "--steps", "30", *QUICK, expect=2)
    assert "there is no whole checkpoint in it" in err and "rank-00000.safetensors" in err and "Traceback" not in err


def test_a_newer_format_is_refused(command: Command, train: Any, ground: Path) -> None:
    first(train)
    folder = copied(ground, "first", "newer")
    for step in ("10", "20"):
        path = folder / "checkpoints" / step / FILE_NAME
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}))
    _, err = command("train", "--resume", "newer", "--steps", "30", *QUICK, expect=2)
    assert err.strip().splitlines()[-1].endswith("it has format version 9, and this Meshwright reads up to 1: use a newer one")


def test_other_data_begin_anew_where_that_is_allowed(command: Command, train: Any, ground: Path) -> None:
    first(train)
    copied(ground, "first", "moved")
    words = ("--seq", "20", "--global-batch", "8", "--steps", "22", "--set", "allow_changes=true", "--set", "weight_decay=0.5")
    result = json.loads(command("train", "--resume", "moved", *words, *QUICK, "--json")[0])
    assert len(result["losses"]) == 22 and result["plan"]["global_batch"] == 8
    steps = [10, 20, 22]
    assert sorted(int(p.name) for p in (ground / "runs" / "moved" / "checkpoints").iterdir()) == steps[-2:]
    state = read_manifest(ground / "runs" / "moved" / "checkpoints" / "22").state
    assert state["data"]["position"] == 16 and state["session"]["param_groups"][0]["weight_decay"] == 0.5


# -- what a run hands on --


def test_weights_come_from_everything_that_has_them(command: Command, train: Any, ground: Path) -> None:
    """A run by its name, its folder of weights, a checkpoint, exports of three kinds: all begin a run with the same loss."""
    first(train)
    for kind, source in (("hf", "exported-hf"), ("dcp", "exported-dcp"), ("torch", "exported-torch")):
        command("checkpoints", "export", "first", source, "--to", kind)
    command("checkpoints", "import", "exported-dcp", "imported-dcp")
    command("checkpoints", "import", "exported-torch/state.pt", "imported-torch")
    shutil.rmtree(copied(ground, "first", "interrupted") / "model")
    losses = {}
    for source in ("first", "runs/first/model", "runs/first/checkpoints/20", "interrupted", "exported-hf", "imported-dcp", "imported-torch"):
        words = ("gpt-tiny", "--init-from", source, "--steps", "1", "--mesh", "tp=2", "--set", "export=false", "--set", "validate_batches=0")
        losses[source] = json.loads(command("train", *words, *QUICK, "--json")[0])["losses"]
    assert len({tuple(found) for found in losses.values()}) == 1, losses
    fresh = json.loads(command("train", "gpt-tiny", "--steps", "1", *QUICK, "--json")[0])["losses"]
    assert losses["first"][0] < fresh[0] - 0.5, "they are the trained weights"


def test_weights_of_other_software_are_pointed_to_their_import(command: Command, ground: Path) -> None:
    (ground / "weights.pt").touch()
    _, err = command("train", "gpt-tiny", "--init-from", "./weights.pt", expect=2)
    assert "meshwright checkpoints import weights.pt FOLDER" in err
    _, err = command("train", "gpt-tiny", "--init-from", "runs/none", expect=2)
    assert err.strip() == "meshwright: --init-from runs/none: there is no such folder"


def test_names_that_do_not_match_are_listed(command: Command, train: Any, ground: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    first(train)
    tensors = safetensors.load_file(ground / "runs" / "first" / "model" / "model.safetensors")
    del tensors["transformer.ln_f.weight"]
    (ground / "changed").mkdir()
    safetensors.save_file({**tensors, "extra.weight": torch.ones(3)}, ground / "changed" / "model.safetensors")
    words = ("gpt-tiny", "--init-from", "changed", "--steps", "1", "--nproc", "1", *QUICK)
    err = meshwright("train", *words, cwd=ground).stderr
    assert "1 tensors of the model are not in it, and stay as initialised (norm.weight); 1 tensors in it are not of the model" in err
    assert "(extra.weight)" in err
    safetensors.save_file({**tensors, "transformer.ln_f.weight": torch.ones(3)}, ground / "changed" / "model.safetensors")
    _, err = command("train", *words, expect=2)
    assert "transformer.ln_f.weight has the shape (3,) in it, and norm.weight has (64,) in the model" in err.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "hf"])
def test_transformers_reads_what_a_finished_run_leaves(command: Command, ground: Path, name: str) -> None:
    """`AutoModelForCausalLM.from_pretrained` gives the loss that the run's validation had."""
    transformers = pytest.importorskip("transformers")
    if name == "hf":
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
            tie_word_embeddings=True,
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(ground / "small")
        name = "hf:small"
    words = (name, "--steps", "6", "--mesh", "tp=2", "--global-batch", "8", "--seq", "32", "--set", "validate_batches=2")
    result = json.loads(command("train", *words, *QUICK, "--json")[0])
    job = RunConfig(**json.loads((ground / result["run"] / "job.json").read_text()))
    model = transformers.AutoModelForCausalLM.from_pretrained(ground / result["model"]).eval()
    tokens = load_dataset(job, load_task(job), "validation").batch(torch.arange(16))["tokens"]
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    losses = [F.cross_entropy(logits[rows].flatten(0, 1), tokens[rows, 1:].flatten()) for rows in (slice(0, 8), slice(8, 16))]
    assert float(sum(losses)) / 2 == pytest.approx(result["validation"][-1]["loss"], rel=1e-5)


def test_the_best_checkpoint_is_kept_and_named(command: Command, ground: Path) -> None:
    words = ("--steps", "40", "--nproc", "1", "--set", "learning_rate=0.05", "--set", "keep_checkpoints=1", "--set", "validate_every=5")
    result = json.loads(command("train", "gpt-tiny", *words, "--set", "name=best", "--set", "checkpoint_every=20", *QUICK, "--json")[0])
    best = min(result["validation"][:-1], key=lambda v: v["loss"])
    kept = sorted(int(p.name) for p in (ground / "runs" / "best" / "checkpoints").iterdir())
    assert kept == sorted({best["step"] + 1, 40})
    assert read_manifest(ground / "runs" / "best" / "checkpoints" / "40").state["best"] == {"step": best["step"] + 1, "loss": best["loss"]}
    out, _ = command("checkpoints", "ls", "best")
    assert f"validation loss {best['loss']:.4f}, the best" in " ".join(out.split())
    command("checkpoints", "prune", "best", "--keep", "1")
    assert sorted(int(p.name) for p in (ground / "runs" / "best" / "checkpoints").iterdir()) == kept
