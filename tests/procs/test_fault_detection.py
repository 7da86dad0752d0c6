"""Faults are rehearsed with --inject, found, and named: which rank, where it stands, which parameter. Outcomes, not times."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.procs.fault_cases import FAULTY_TASK, MESHWRIGHT, PATIENCE_S

pytestmark = pytest.mark.timeout(900)  # a busy machine is no failure

# Two layers; the second batch's loss is no other than the first's, but for its samples.
MODEL = """
import torch, meshwright as mw
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))
def loss(model, batch):
    return model(batch["x"]).square().mean()
def task():
    return mw.Task("small", Model, loss, {"x": mw.Field((4,))}, global_batch=8)
"""


@dataclass(frozen=True)
class Ended:
    code: int
    error: str
    result: dict[str, Any]
    folder: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for path in sorted(self.folder.glob("events-*.jsonl")) for line in path.read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]


def train(place: Path, *words: str, model: str = "small.py:task", steps: int = 12, plan: str = "dp=2") -> Ended:
    place.mkdir(exist_ok=True)
    (place / "small.py").write_text(MODEL)
    command = [*MESHWRIGHT, "train", model, "--mesh", plan, "--steps", str(steps), "--run-dir", f"runs-{time.time()}", "--json"]
    quick = ("--set", "verify=false", "--set", "profile=false", "--set", "warmup_steps=2", "--set", "max_restarts=0")
    done = subprocess.run([*command, *quick, *words], cwd=place, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    folder = next(iter(place.glob(f"{command[command.index('--run-dir') + 1]}/*")), place)
    return Ended(done.returncode, done.stderr, json.loads(done.stdout) if done.stdout.strip() else {}, folder)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            "hang",
            r"rank 1 hangs: no progress for .* in step 5; rank 0 waits for it in all_reduce 'loss' \(number \d+\); it stands at \w+.py:\d+ in _hang",
        ),
        (
            "stop",
            r"rank 1 failed: stopped: its process is stopped \(SIGSTOP\); no progress for .* in step 5; rank 0 waits for it in all_reduce 'loss'",
        ),
        ("raise", r"rank 1 failed: InjectedFaultError: injected by --inject raise:rank=1,step=5"),
        ("exit", r"rank 1 failed: exit 1: the worker process ended"),
        ("kill", r"rank 1 failed: killed by SIGKILL: the worker process ended"),
    ],
)
def test_a_rehearsed_fault_is_named(fault: str, line: str, tmp_path: Path) -> None:
    ended = train(tmp_path, "--inject", f"{fault}:rank=1,step=5")
    assert ended.code == 1
    assert re.search(line, ended.error.strip().splitlines()[-1]), ended.error[-3000:]
    assert f"a fault will be injected: --inject {fault}:rank=1,step=5" in ended.error
    assert [(e["rank"], e["step"]) for e in ended.events("injected")] == [(1, 5)]
    (recorded,) = ended.events("fault")
    assert recorded["data"]["rank"] == 1
    if fault in ("hang", "stop"):
        assert "rank 0 stands at" in recorded["data"]["traceback"]


def test_the_users_own_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY_TASK)
    monkeypatch.setenv("FAULT", "sleep")
    ended = train(tmp_path, model="faulty.py:task")
    assert "it stands at faulty.py:15 in misbehave" in ended.error.strip().splitlines()[-1], ended.error[-3000:]


@pytest.mark.parametrize("plan", ["dp=2", "shard=2", "pp=2"])
def test_who_hangs_does_not_depend_on_the_plan(plan: str, tmp_path: Path) -> None:
    words = ("--set", "zero=3") if plan == "shard=2" else ()
    ended = train(tmp_path, "--inject", "hang:rank=1,step=5", *words, model="gpt-tiny", plan=plan)
    assert "meshwright: rank 1 hangs: " in ended.error, ended.error[-3000:]


def weights(ended: Ended) -> dict[str, Any]:
    return load_file(ended.folder / "model" / "model.safetensors")


@pytest.mark.parametrize(("plan", "zero"), [("dp=2", 0), ("shard=2", 1), ("shard=2", 2), ("shard=2", 3)])
@pytest.mark.parametrize("clip", [1, 0])
def test_a_step_that_is_not_finite_is_left_out(plan: str, zero: int, clip: int, tmp_path: Path) -> None:
    """A run whose last step is skipped ends with the parameters of a run that is one step shorter."""
    words = ("--set", f"zero={zero}", "--set", f"clip={clip}", "--set", "on_nan=skip")
    skipped = train(tmp_path, *words, "--inject", "nan:rank=1,step=7", steps=8, plan=plan)
    assert skipped.code == 0, skipped.error[-3000:]
    assert "comes from rank 1, and first from its gradient of b." in skipped.error
    assert "the step is skipped (1 so far)" in skipped.error
    assert skipped.result["skipped_steps"] == [7]
    shorter = train(tmp_path, *words, steps=7, plan=plan)
    assert shorter.result["skipped_steps"] == []
    assert shorter.result["losses"] == skipped.result["losses"][:7]
    mine, theirs = weights(skipped), weights(shorter)
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in mine)


_SAVES = ("--set", "checkpoint_every=1", "--set", "keep_checkpoints=100")


def test_nan_ends_the_run_in_the_same_step_and_nothing_is_saved(tmp_path: Path) -> None:
    ended = train(tmp_path, "--inject", "nan:rank=1,step=5", *_SAVES)
    assert ended.code == 1
    last = ended.error.strip().splitlines()[-1]
    assert "rank 1 failed: NonFiniteLossError" in last
    assert "the gradient is not finite at step 5" in last
    assert "and first from its gradient of b." in last
    saved = {int(path.name) for path in (ended.folder / "checkpoints").iterdir() if path.name.isdecimal()}
    assert max(saved, default=0) <= 5
    assert [(e["rank"], e["data"]["rollback"]) for e in ended.events("fault")] == [(1, False)]


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    ended = train(
        tmp_path, "--inject", "nan:rank=1,step=5", "--set", "on_nan=continue", "--set", "checkpoint_every=1", "--set", "keep_checkpoints=100"
    )
    assert ended.code == 0, ended.error[-3000:]
    assert "the parameters are not finite, so they are not saved" in ended.error
    saved = {int(path.name) for path in (ended.folder / "checkpoints").iterdir() if path.name.isdecimal()}
    assert saved
    assert max(saved) <= 5


def test_many_skipped_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    words = [word for step in range(4, 15) for word in ("--inject", f"nan:rank=0,step={step}")]
    ended = train(tmp_path, *words, "--set", "on_nan=skip", steps=20)
    assert ended.code == 1
    assert "10 steps in a row were skipped" in ended.error.strip().splitlines()[-1]
    assert {e["step"] for e in ended.events("skipped")} == set(range(4, 13))


@pytest.mark.parametrize(("again", "skipped"), [(0, []), (1, [5])])
def test_rollback_takes_the_step_again_and_skips_what_comes_back(again: int, skipped: list[int], tmp_path: Path) -> None:
    ended = train(tmp_path, "--inject", f"nan:rank=1,step=5,again={again}", "--set", "on_nan=rollback", "--set", "max_restarts=3")
    assert ended.code == 0, ended.error[-3000:]
    assert [(e["rank"], e["data"]["rollback"]) for e in ended.events("fault")] == [(1, True)]
    assert len(ended.events("restart")) == 1
    assert ended.result["skipped_steps"] == skipped
    assert len(ended.result["losses"]) == 12


@pytest.mark.prove  # beside other work nobody may be slow in 16 of 20 steps
def test_a_slow_rank_is_named_once(tmp_path: Path) -> None:
    ended = train(tmp_path, "--inject", "slow:rank=1,factor=3", "--set", "validate_batches=0", model="gpt-mini", steps=70)
    assert ended.code == 0, ended.error[-3000:]
    assert ended.error.count("rank 1 is slow: ") == 1, ended.error[-3000:]
    assert [e["data"]["slow_rank"] for e in ended.events("slow")] == [1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--inject", "kill:rank=2,step=3"), "--inject kill:rank=2,step=3: there is no rank 2: the run has 2 ranks, counted from 0"),
        (("--inject", "kill:rank=1,step=12"), "there is no step 12: the run has 12 steps, counted from 0"),
        (("--set", "inject=explode:rank=1,step=3"), "unknown fault 'explode'"),
        (("--set", "hang_s=-1"), "hang_s=-1: give seconds above 0, auto or none"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], line: str, tmp_path: Path) -> None:
    ended = train(tmp_path, *words)
    assert ended.code == 2
    assert ended.error.strip().splitlines()[-1].count(line) == 1, ended.error
