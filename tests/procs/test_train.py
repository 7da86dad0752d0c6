"""`meshwright train` as a user runs it: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data
from tests.procs.test_launch import gone

Command = Callable[..., tuple[str, str]]
MESHWRIGHT = [sys.executable, "-m", "meshwright.cli.main"]


def meshwright(*words: str, cwd: Path, expect: int = 0, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*MESHWRIGHT, *words], cwd=cwd, capture_output=True, text=True, timeout=240, env={**os.environ, **(env or {})})
    assert done.returncode == expect, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def place(ground: Path) -> Path:
    return ground


def test_the_whole_way(place: Path) -> None:
    """Model to report, on two ranks: every file of the folder is there, and predicted stands beside measured."""
    words = ("gpt-tiny", "--steps", "12", "--nproc", "2", "--set", "validate_every=5", "--json")
    result = json.loads(meshwright("train", *words, cwd=place).stdout)
    folder = place / result["run"]
    for name in ("plan.json", "estimate.json", "cluster.json", "job.json", "metrics.jsonl", "events-0.jsonl", "events-1.jsonl", "trace.json"):
        assert (folder / name).exists(), name
    assert len(result["losses"]) == 12
    assert result["losses"][-1] < result["losses"][0]
    assert [v["step"] for v in result["validation"]] == [4, 9, 11]
    assert len(result["measured"]["memory_bytes"]) == len(result["predicted"]["memory_bytes"]) == 2
    assert result["measured"]["step_s"] > 0
    assert result["measured"]["exposed_communication_s"] >= 0
    assert re.fullmatch("[0-9a-f]{32}", result["state_digest"])
    assert result["faults"] == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    page = (folder / "report.html").read_text()
    assert "gpt-tiny" in page
    assert not re.search(r"(src|href)=[\"']https?://", page)
    assert Plan.load(folder / "plan.json").world == 2


def test_a_transformers_model_trains_with_the_defaults(place: Path, command: Command) -> None:
    """The learning rate and warm-up come from its width and depth, are in job.json and in the explanation, and the loss falls."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 1024}
    (place / "wide.config").mkdir()
    (place / "wide.config" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    words = ("--seq", "16", "--global-batch", "4", "--steps", "20", "--nproc", "1", "--set", "validate_batches=0", "--json")
    result = json.loads(command("train", "hf:wide.config", *words)[0])
    job, losses = json.loads((place / result["run"] / "job.json").read_text()), result["losses"]
    assert (job["learning_rate"], job["warmup_steps"]) == (4.5e-4, 10)
    assert "scaled to width 1024" in json.loads((place / result["run"] / "estimate.json").read_text())["why"]
    assert sum(losses[-3:]) / 3 < losses[0]
    assert max(losses[3:]) <= 1.1 * losses[0]


def test_any_number_of_ranks_gives_the_same_curve(command: Command) -> None:
    """The same global batches whoever reads them: losses agree between one rank, two ranks and ZeRO-3."""

    def curve(*words: str) -> dict[str, Any]:
        settings = ("precision=fp64", "profile=false", "digest=false")
        common = ("vae", "--steps", "8", "--global-batch", "16", *(word for setting in settings for word in ("--set", setting)), "--json")
        return json.loads(command("train", *common, *words)[0])  # type: ignore[no-any-return]

    one, two = curve("--nproc", "1"), curve("--mesh", "dp=2")
    cut = curve("--mesh", "shard=2", "--set", "zero=3", "--set", "micro_batches=2")
    assert one["state_digest"] is None, "it is computed where it is asked for"
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-9)
    assert cut["losses"] == pytest.approx(one["losses"], rel=1e-9)
    assert cut["validation"][0]["loss"] == pytest.approx(one["validation"][0]["loss"], rel=1e-9)


def test_a_plan_written_edited_and_run(place: Path, command: Command) -> None:
    command("plan", "gpt-tiny", "--mesh", "dp=2", "--global-batch", "8", "-o", "plan.json")
    edited = json.loads((place / "plan.json").read_text())
    edited["mesh"].update(dp=1, shard=2)
    edited["memory"]["zero"] = 2
    (place / "plan.json").write_text(json.dumps(edited))
    result = json.loads(command("train", "gpt-tiny", "--plan", "plan.json", "--steps", "3", "--json")[0])
    assert result["plan"]["memory"]["zero"] == 2
    assert result["plan"]["global_batch"] == 8


def test_a_failing_rank_is_shown_once_and_first(place: Path) -> None:
    """A model that breaks in training: exit 1, its rank and traceback once, and the report tells the story."""
    (place / "broken.py").write_text(
        "import torch, torch.distributed as dist\n"
        "import meshwright as mw\n"
        "class Broken(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a = torch.nn.Linear(4, 4)\n"
        "        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if dist.is_initialized() and dist.get_rank() == 1 and self.calls == 3:\n"
        "            raise ArithmeticError('planted on rank 1')\n"
        "        return self.a(x)\n"
        "def loss(model, batch):\n"
        "    return model(batch['x']).square().mean()\n"
        "def task():\n"
        "    return mw.Task('broken', Broken, loss, {'x': mw.Field((4,))}, global_batch=8)\n"
    )
    done = meshwright("train", "broken.py:task", "--mesh", "dp=2", "--set", "verify=false", "--steps", "9", cwd=place, expect=1)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ArithmeticError: planted on rank 1") == 2  # at the end of the traceback, and in the last line
    assert "rank 1 failed" in done.stderr
    newest = max((place / "runs").glob("broken*"), key=lambda p: p.stat().st_mtime)
    assert "planted on rank 1" in (newest / "report.html").read_text()


NAN_MODEL = """
import torch, torch.distributed as dist
import meshwright as mw
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.calls = torch.nn.Linear(4, 4), 0
    def forward(self, x):
        self.calls += dist.is_initialized()
        return self.a(x) * (float("nan") if self.calls >= 3 and dist.get_rank() == 1 else 1.0)
def loss(model, batch):
    return model(batch["x"]).square().mean()
def task():
    return mw.Task("nan", Model, loss, {"x": mw.Field((4,))}, global_batch=8)
"""
_NAN = "the loss is nan at step 2 (learning rate "


def _reject(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def test_a_loss_that_is_nan_ends_the_run_at_its_step(place: Path, command: Command) -> None:
    """Every rank ends; the line, the events and the report name the step and the rank whose part was NaN."""
    (place / "nan.py").write_text(NAN_MODEL)
    _, err = command("train", "nan.py:task", "--mesh", "dp=2", "--steps", "500", "--run-dir", "nan", expect=1)
    last = err.strip().splitlines()[-1]
    assert _NAN in last
    assert "gradient norm nan); it comes from rank 1, whose own part is nan" in last
    assert "on_nan=continue" in last
    assert "Traceback" not in err
    (folder,) = (place / "nan").iterdir()
    lines = [json.loads(line, parse_constant=_reject) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    found = [line for line in lines if line.get("kind") == "nan"]
    assert {(line["rank"], line["step"]) for line in found} == {(0, 2), (1, 2)}
    assert [line["rank"] for line in lines if line.get("kind") == "fault"] == [1]
    assert _NAN in (folder / "report.html").read_text()


def test_a_run_may_go_on_after_nan(place: Path, command: Command) -> None:
    (place / "nan.py").write_text(NAN_MODEL)
    words = ("--mesh", "dp=2", "--steps", "9", "--set", "on_nan=continue", "--run-dir", "nan-on", "--json")
    out, _ = command("train", "nan.py:task", *words)
    result = json.loads(out, parse_constant=_reject)
    assert result["losses"][2:] == [None] * 7
    (folder,) = (place / "nan-on").iterdir()
    for path in [*folder.glob("*.json"), *folder.glob("*.jsonl")]:
        for text in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
            json.loads(text, parse_constant=_reject)
    assert "7 values not finite" in (folder / "report.html").read_text()


def test_ctrl_c_ends_everything(place: Path) -> None:
    process = subprocess.Popen(
        [*MESHWRIGHT, "train", "gpt-mini", "--steps", "5000", "--nproc", "2", "--run-dir", "interrupted"],
        cwd=place, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step"):
            break
    events = list((place / "interrupted").glob("*/events-*.jsonl"))
    pids = [json.loads(path.read_text().splitlines()[0])["data"]["pid"] for path in events]
    assert len(pids) == 2
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=120) == 130
    assert "Traceback" not in rest
    assert "interrupted" in rest
    assert all(gone(pid) for pid in pids)
    assert list((place / "interrupted").glob("*/report.html"))


def test_started_by_torchrun(place: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    words = ["-m", "meshwright.cli.main", "train", "gpt-tiny", "--steps", "5", "--json", "--run-dir", "adopted"]
    done = subprocess.run([*torchrun, *words], cwd=place, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert from_data(Mesh, result["plan"]["mesh"], "mesh").size == 2  # whichever axis the planner takes on this machine
    assert len(result["losses"]) == 5


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_compiled_blocks(pool: Any) -> None:
    from meshwright.core.plan import MemoryPolicy
    from meshwright.core.serialization import to_data

    memory = MemoryPolicy(units=("blocks.0", "blocks.1"))
    curves = [
        pool.run(
            "procs.jobs:train_curve", world=1, timeout_s=280, dtype="float32", steps=3, model={"zoo": "gpt-tiny"},
            plan=to_data(Plan("gpt-tiny", 4, memory=memory, compile=compile)),
        )[0]["losses"]
        for compile in ("none", "blocks")
    ]  # fmt: skip
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_fp16_scales_the_loss_and_skips_what_overflows(pool: Any) -> None:
    grown = pool.run("procs.jobs:fp16_steps", world=2)[0]
    assert grown["skipped"][0], "a first scale of 2^40 must overflow"
    assert not grown["skipped"][-1], "halving must end the overflow"
    assert grown["moved"] == [not s for s in grown["skipped"]]


def test_out_of_memory_is_an_answer(command: Command) -> None:
    _, err = command("train", "llama3-405b", "--seq", "64", "--global-batch", "2", "--steps", "1", "--nproc", "1", expect=2)
    last = err.strip().splitlines()[-1]
    assert "No plan fits in memory" in last
    assert re.search(r"needs [\d.]+ [GT]B a device, this one has [\d.]+ GB", last)
    assert "What would help" in last


@pytest.mark.parametrize("mesh", ["dp=2", "shard=2", "tp=2", "pp=2"])
def test_models_are_born_in_pieces_with_the_values_of_one_process(command: Any, mesh: str) -> None:
    """Every rank makes its own pieces only; nothing is broadcast, and the losses are one device's."""
    words = ("train", "gpt-tiny", "--steps", "4", "--json", "--seed", "3", "--set", "profile=false")
    alone = json.loads(command(*words, "--mesh", "dp=1")[0])
    spread = json.loads(command(*words, "--mesh", mesh, *(("--set", "zero=3") if mesh == "shard=2" else ()))[0])
    assert spread["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    events = [json.loads(line) for line in (Path(spread["run"]) / "events-1.jsonl").read_text().splitlines()]
    born = next(event["data"] for event in events if event["kind"] == "born")
    ledger = next(event["data"] for event in events if event["kind"] == "ledger" and event["data"]["phase"] == "start-up")
    assert born == {"sharded": True, "reason": ""} and ledger["differences"] == []
