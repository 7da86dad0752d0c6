"""`meshwright simulate` as a new user meets it, on a machine that was measured before: no process is started here."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fake_inputs import calibration

from meshwright.cli.main import main
from meshwright.core.cluster import Cluster, Device, Link, Node
from meshwright.core.serialization import write_json
from meshwright.describe.discover import discover
from meshwright.orchestrate import calibrate
from meshwright.orchestrate.scaling import parse_rank_counts, scale_mesh

Ran = tuple[int, str, str]
Tool = Callable[..., Ran]
GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
FILE = ("--cluster", "two.json")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for ranks in (None, 1, 2, 4):
        assert calibrate.save_to_cache(calibration(ranks or os.cpu_count() or 1), discover(os.environ, ranks=ranks), os.environ)
    devices = tuple(Device("cuda", "made-up", i, 80 * 10**9, {"bf16": 1e15}, 3e12) for i in range(2))
    write_json(
        tmp_path / "two.json", Cluster("two", (Node("node", devices, 16, 10**12, link=Link("inside", 5e-6, 4e11)),), Link("outside", 5e-6, 5e10))
    )

    def call(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


MISTAKES: dict[str, tuple[list[str], str]] = {
    "model": (["gpt-tny"], "did you mean 'gpt-tiny'?"),
    "cluster": (["gpt-tiny", "--cluster", "mars"], "unknown cluster 'mars'"),
    "number": (["gpt-tiny", "--cluster", "ideal:x"], "write it like ideal:64"),
    "no file": (["gpt-tiny", "--cluster", "nope.json"], "nope.json: No such file"),
    "no plan": (["nope.json"], "nope.json: No such file"),
    "rank": (["gpt-tiny", *FILE, "--mesh", "dp=2", "--slow", "2=1.5"], "slow 2: there is no such rank: ranks are 0 to 1"),
    "factor": (["gpt-tiny", *FILE, "--slow", "1=-2"], "give a factor above 0"),
    "no factor": (["gpt-tiny", *FILE, "--slow", "1"], "write it as RANK=FACTOR, like 3=1.5"),
    "fail": (["gpt-tiny", *FILE, "--fail", "1=2"], "write it as RANK@SECONDS, like 3@0.5"),
    "link": (["gpt-tiny", *FILE, "--mesh", "dp=2", "--degrade", "insid=0.5"], "did you mean 'inside'?"),
    "no links": (["gpt-tiny", "--cluster", "ideal", "--mesh", "dp=2", "--degrade", "inside=0.5"], "simulate a cluster file, which has links"),
    "jitter": (["gpt-tiny", *FILE, "--jitter", "-1"], "as a share of each computation's time, from 0 to 1"),
    "file of faults": (["gpt-tiny", *FILE, "--disturb", "two.json"], "unknown key"),
    "scale": (["gpt-tiny", *FILE, "--scale", "8...16"], "write it like 8..4096 or 8,24,64"),
    "weak alone": (["gpt-tiny", *FILE, "--weak"], "--weak has no effect without --scale"),
    "restart alone": (["gpt-tiny", *FILE, "--restart", "5"], "--restart has no effect without --mtbf"),
    "folder alone": (["gpt-tiny", *FILE, "-o", "study"], "-o has no effect without --scale or --mtbf"),
    "storage": (["gpt-tiny", *FILE, "--mtbf", "9", "--storage", "0"], "give bytes a second above 0"),
    "scale of a trace": (["gpt-tiny", *FILE, "--scale", "1..2", "--trace", "t.json"], "leave one of them out"),
    "mesh": (["gpt-tiny", *FILE, "--mesh", "dp=64"], "needs 64 devices"),
    "mtbf": (["gpt-tiny", *FILE, "--mtbf", "0"], "give hours above 0"),
    "checkpoint": (["gpt-tiny", *FILE, "--mtbf", "9", "--checkpoint", "-1"], "give seconds above 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_change(name: str, run: Tool) -> None:
    arguments, says = MISTAKES[name]
    code, out, err = run(*arguments)
    lines = [line for line in err.splitlines() if not line.startswith("·")]
    assert code == 2 and out == "" and len(lines) == 1 and says in lines[0], err


def test_what_json_holds_and_a_timeline_that_opens(run: Tool, tmp_path: Path) -> None:
    code, out, err = run("gpt-tiny", "--cluster", "two.json:4", "--mesh", "pp=2,dp=2,tp=2", "--trace", "trace.json", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert {"step_s", "mfu", "tokens_per_s", "memory_bytes", "breakdown", "error", "closed_form"} <= set(found)
    assert sum(found["breakdown"].values()) == pytest.approx(found["step_s"])
    assert found["memory_bytes"]["total"] == sum(size for kind, size in found["memory_bytes"].items() if kind != "total")
    assert found["ranks"] == 8 and found["lost"] is None and found["tokens_per_s"] > 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= set(e) for e in events) and {e["ph"] for e in events} == {"X", "M"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(found["step_s"] * 1e6, rel=1e-3)


def test_a_plan_is_simulated_as_it_is(run: Tool, tmp_path: Path) -> None:
    from meshwright.core.mesh import Mesh
    from meshwright.core.plan import Plan

    for schedule in ("1f1b", "zero_bubble"):
        Plan("gpt-tiny", 16, Mesh(pp=2, dp=2), 4, schedule=schedule, device="cuda", backend="nccl").save(tmp_path / "plan.json")  # type: ignore[arg-type]
        code, out, err = run("plan.json", "--cluster", "two.json:2", "--json")
        assert code == 0 and schedule in json.loads(out)["plan"], err
    code, _, err = run("plan.json", "--cluster", "two.json:2", "--mesh", "dp=4")
    assert code == 2 and "plan.json is simulated as it is, and --mesh would change it" in err
    code, _, err = run("plan.json", "--cluster", "two.json")
    assert code == 2 and "is for 4 ranks, the cluster has 2 devices" in err


def test_a_seed_gives_one_answer(run: Tool) -> None:
    answers = [json.loads(run("gpt-tiny", *FILE, "--mesh", "dp=2", "--jitter", "0.2", "--seed", seed, "--json")[1]) for seed in ("1", "1", "2")]
    steps = [a["step_s"] for a in answers]
    assert steps[0] == steps[1] != steps[2] and answers[0]["undisturbed_s"] == answers[2]["undisturbed_s"]


def test_a_file_of_disturbances(run: Tool, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"slow": {"1": 2.0}, "degrade": [{"link": "outside", "factor": 0.5, "at": 0.0}]}')
    written = json.loads(run("gpt-tiny", "--cluster", "two.json:2", "--mesh", "dp=4", "--disturb", "bad.json", "--json")[1])
    flags = run("gpt-tiny", "--cluster", "two.json:2", "--mesh", "dp=4", "--slow", "1=2", "--degrade", "outside=0.5", "--json")[1]
    assert written["step_s"] == json.loads(flags)["step_s"] > written["undisturbed_s"]


def test_a_curve_goes_on_where_no_plan_is_legal(run: Tool, tmp_path: Path) -> None:
    code, out, err = run("gpt-tiny", *FILE, "--mesh", "dp=2", "--scale", "2,6,32", "--global-batch", "32", "-o", "study", "--json")
    assert code == 0, err
    found = json.loads(out)
    first, second, third = found["points"]
    assert first["efficiency"] == 1 and third["ranks"] == 32 and 0 < third["efficiency"] <= 1.01
    assert second["step_s"] is None and "does not divide" in second["reason"]
    rows = list(csv.DictReader((tmp_path / "study" / "scaling.csv").open()))
    assert [row["ranks"] for row in rows] == ["2", "6", "32"]
    assert (tmp_path / "study" / "scaling.svg").read_text().startswith("<svg")


def test_sizes_and_meshes_that_grow() -> None:
    from meshwright.core.mesh import Mesh

    assert parse_rank_counts("8..64") == [8, 16, 32, 64] and parse_rank_counts("24,8") == [8, 24]
    assert str(scale_mesh(Mesh(pp=2, dp=2, tp=(4,)), 64)) == "pp=2,dp=8,tp=4"
    assert str(scale_mesh(Mesh(shard=2, tp=(2,)), 16)) == "shard=8,tp=2"


def examples() -> list[str]:
    section = GUIDE.read_text(encoding="utf-8").partition("\n## Simulation\n")[2].partition("\n## ")[0]
    return re.findall(r"^meshwright simulate ([^#\n]+)", section, re.MULTILINE)


@pytest.mark.parametrize("example", examples())
def test_every_example_of_the_guide_runs(example: str, run: Tool, tmp_path: Path) -> None:
    code, out, err = run(*shlex.split(example))
    assert code == 0, err
    assert "step" in out or "Lost" in out or "scaling" in out
    figure = {"--mtbf": "goodput.svg", "--scale": "scaling.svg"}
    for flag, name in figure.items():
        assert flag not in example or ElementTree.parse(tmp_path / "study" / name).getroot().tag.endswith("svg")


def test_every_example_of_the_help_runs(run: Tool) -> None:
    import inspect

    from meshwright.cli.simulate_command import simulate

    for example in re.findall(r"^ *meshwright simulate (.+)", inspect.getdoc(simulate) or "", re.M):
        code, out, err = run(*shlex.split(example))
        assert code == 0 and out, err
