"""`meshwright proxy` as a new user meets it, on the simulator: no process is started here."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli.main import main

Ran = tuple[int, str, str]
Tool = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(["proxy", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


SIM = ("--backend", "sim", "--cluster", "ideal")
MISTAKES: dict[str, tuple[list[str], str]] = {
    "no name": ([], "the name of a proxy is missing: give one of gpt2, bert"),
    "name": (["gpt"], "unknown proxy 'gpt'"),
    "world": (["gpt3", "--nproc", "6"], "6 ranks are not a multiple of stages × shards = 96 × 4 = 384: use 384 ranks"),
    "too many ranks": (["gpt3"], "gpt3 needs 384 ranks: use fewer stages, shards or experts, --backend sim, or --nproc 384"),
    "arguments": (["gpt3", "1", "2", "3"], "takes 2 arguments (STAGES SCALE), 3 are given"),
    "not a number": (["gpt2", "many"], "layers 'many' is not a whole number"),
    "key": (["gpt3", "--set", "shrads=2"], "did you mean 'shards'?"),
    "value": (["gpt3", *SIM, "--set", "order=zigzag"], "unknown value for proxy gpt3.order:"),
    "type": (["gpt3", *SIM, "--set", "stages=two"], "expected int"),
    "scale": (["gpt3", *SIM, "--scale-down", "0.5"], "give 1 or more"),
    "memory": (["gpt3", "2", "--nproc", "8", "--set", "hidden=20000000"], "use --scale-down"),
    "cluster": (["gpt2", "--backend", "sim", "--cluster", "mars"], "unknown cluster 'mars'"),
    "ideal": (["gpt2", "--backend", "sim", "--cluster", "ideal:x"], "write it like ideal:64"),
    "no GPU": (["gpt2", "4", "2", "--nproc", "4", "--scale-down", "999", "--device", "cuda"], "use --backend gloo"),
    "no file": (["nope.json"], "nope.json: No such file"),
    "no plan": (["--plan", "nope.json"], "nope.json: No such file"),
    "runs": (["gpt2", "--runs", "0"], "--runs"),
    "compute": (["gpt2", "--compute", "guess"], "--compute"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_change(name: str, run: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments, says = MISTAKES[name]
    code, out, err = run(*arguments)
    lines = [line for line in err.splitlines() if not line.startswith("·")]
    assert code == 2 and out == "" and len(lines) == 1 and says in lines[0], err


def test_all_that_is_written(run: Tool, tmp_path: Path) -> None:
    code, out, err = run("gpt3", "4", "2", *SIM, "--set", "shards=2", "--trace", "trace.json", "--csv", "table.csv", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["world"] == 8 and found["step_s"]["median"] == pytest.approx((8 + 3) * 47.745e-3)
    assert {"median", "p95", "max"} == set(found["step_s"])
    wanted = {"name", "op", "group", "calls", "bytes", "median_s", "p95_s", "max_s", "bandwidth", "share", "exposed_s", "overlapped_s"}
    assert all(wanted <= set(row) for row in found["collectives"])
    assert [rank["ranks"] for rank in found["ranks"]] == [[0, 4], [1, 5], [2, 6], [3, 7]]  # two shards are alike
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"X", "M"} and len({e["pid"] for e in events}) == 4
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(found["step_s"]["max"] * 1e6)
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert {row["rank"] for row in rows} == {"all", "0", "1", "2", "3"} and float(rows[0]["calls"]) > 0


def test_a_table_for_people(run: Tool) -> None:
    code, out, _ = run("cosmoflow", *SIM)
    assert code == 0 and out.startswith("cosmoflow on 4 ranks, sim: step 93.6 ms") and "halo/forward" in out


def test_a_schedule_is_written_and_read_again(run: Tool) -> None:
    assert run("dlrm", "--nproc", "4", "-o", "dlrm.json")[0] == 0
    direct, again = (json.loads(run(name, *SIM, *more, "--json")[1]) for name, more in (("dlrm", ["--nproc", "4"]), ("dlrm.json", [])))
    assert direct["step_s"] == again["step_s"] and direct["collectives"] == again["collectives"]
    assert "is for 4 ranks, not 8: use 4" in run("dlrm.json", *SIM, "--nproc", "8")[2]


def test_a_seed_gives_the_same_figures(run: Tool) -> None:
    first, again, other = (json.loads(run("cosmoflow", *SIM, "--jitter", "0.1", "--seed", seed, "--json")[1])["step_s"] for seed in "112")
    assert first == again != other
