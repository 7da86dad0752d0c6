"""A run whose ranks are killed ends as if they had not been: the same losses, the same state to the last bit, and nothing left in memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.checkpoint_folder import problems_of
from meshwright.checkpoint.manifest import read_manifest
from tests.procs.fault_cases import FAULTY_TASK, MESHWRIGHT, PATIENCE_S, Outcome, Run, await_condition, start_run, wait_for_end

pytestmark = pytest.mark.timeout(600)  # a busy machine is no failure
STEPS = 40
ALWAYS = ("--set", "digest=true", "--set", "profile=false", "--set", "verify=false")
SNAPSHOTS = ("--set", "snapshot_every=4")
SHARED_MEMORY = Path("/dev/shm")
Act = Callable[[Run], None]


def left_in_memory(run: Run) -> list[str]:
    return [path.name for path in SHARED_MEMORY.glob(f"meshwright-*-{run.process.pid}-*")]


def start_pid(run: Run, rank: int, generation: int = 0) -> int | None:
    starts = [e for e in run.events() if e["kind"] == "start" and e["rank"] == rank and e["generation"] == generation]
    return int(starts[0]["data"]["pid"]) if starts else None


def kill(rank: int, generation: int = 0) -> Act:
    def act(run: Run) -> None:
        await_condition(lambda: start_pid(run, rank, generation) is not None or run.process.poll() is not None)
        pid = start_pid(run, rank, generation)
        assert pid is not None, run.stderr()[-3000:]
        os.kill(pid, signal.SIGKILL)

    return act


def disturbed(place: Path, words: tuple[str, ...], *acts: Act, model: str = "gpt-tiny", steps: int = STEPS) -> tuple[dict[str, Any], Outcome, Run]:
    """The result of a run to which something is done once it has done ten steps."""
    place.mkdir(exist_ok=True)
    run = start_run(place, *ALWAYS, *words, model=model, steps=steps)
    run.await_steps(10)
    for act in acts:
        act(run)
    outcome = wait_for_end(run)
    assert outcome.code == 0, outcome.error[-3000:]
    assert not left_in_memory(run)
    return json.loads((run.folder / "result.json").read_text()), outcome, run


def undisturbed(place: Path, words: tuple[str, ...], model: str = "gpt-tiny") -> dict[str, Any]:
    """The same run without a fault, and without snapshots."""
    place.mkdir()
    run = start_run(place, *ALWAYS, *words, "--set", "max_restarts=0", model=model, steps=STEPS)
    outcome = wait_for_end(run)
    assert outcome.code == 0, outcome.error[-3000:]
    return json.loads((run.folder / "result.json").read_text())  # type: ignore[no-any-return]


def assert_same(result: dict[str, Any], straight: dict[str, Any]) -> None:
    assert (result["state_digest"], result["losses"]) == (straight["state_digest"], straight["losses"])
    assert (result["first_step"], result["validation"]) == (0, straight["validation"])


MESHES = [
    pytest.param(("--mesh", "dp=2", "--set", "validate_every=6"), "gpt-tiny", 0, id="dp, rank 0"),
    pytest.param(("--mesh", "shard=2", "--set", "zero=3"), "gpt-tiny", 1, id="ZeRO-3, rank 1"),
    pytest.param(("--mesh", "tp=2"), "gpt-tiny", 0, id="tp, rank 0", marks=pytest.mark.prove),
    pytest.param(("--mesh", "pp=2"), "gpt-tiny", 1, id="pp, rank 1", marks=pytest.mark.prove),
    pytest.param(("--mesh", "dp=2", "--set", "dropout=0.2"), "gpt-tiny", 1, id="dropout", marks=pytest.mark.prove),
    pytest.param(("--mesh", "dp=2", "--set", "batchnorm=local"), "norms.py:task", 1, id="statistics of each rank"),
]
NORMS_TASK = """
import torch
import meshwright as mw

def build():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

def loss(model, batch):
    return (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean()

def task():
    return mw.Task("norms", build, loss, {"x": mw.Field((6,))}, global_batch=8)
"""


@pytest.mark.parametrize(("words", "model", "rank"), MESHES)
def test_a_run_that_lost_a_rank_is_the_run_that_did_not(words: tuple[str, ...], model: str, rank: int, tmp_path: Path) -> None:
    (tmp_path / "norms.py").write_text(NORMS_TASK)
    model = str(tmp_path / model) if ".py" in model else model
    result, outcome, run = disturbed(tmp_path / "killed", (*words, *SNAPSHOTS), kill(rank), model=model)
    assert_same(result, undisturbed(tmp_path / "straight", words, model))
    (fault,), (restart,) = result["faults"], result["restarts"]
    assert (fault["rank"], fault["kind"]) == (rank, "killed by SIGKILL")
    assert (restart["failed_rank"], restart["source"]) == (rank, "snapshot")
    assert restart["step"] % 4 == 0 and 8 <= restart["step"] <= restart["failed_at"] and restart["seconds"] > 0
    happened = f"rank {rank} was killed by SIGKILL at step {restart['failed_at']}"
    assert f"meshwright: {happened}; the run goes on from step {restart['step']} (a snapshot in memory), restart 1\n" in outcome.error
    assert "1 fault during the run, 1 restart" in (run.folder / "report.html").read_text()
    assert {e["generation"] for e in run.events() if e["kind"] == "end"} == {1}


def test_faults_one_after_the_other(tmp_path: Path) -> None:
    """A rank that is killed while it starts again is one more fault; without snapshots the run goes on from a checkpoint."""
    words = ("--mesh", "dp=2", "--set", "checkpoint_every=4", "--set", "snapshot_every=none")
    result, _, run = disturbed(tmp_path / "killed", words, kill(1), kill(0, generation=1))
    assert_same(result, undisturbed(tmp_path / "straight", words))
    assert [fault["rank"] for fault in result["faults"]] == [1, 0] and [r["generation"] for r in result["restarts"]] == [1, 2]
    assert result["restarts"][-1]["source"] == "checkpoint" and result["checkpoint"]["step"] == STEPS
    assert [e["generation"] for e in run.events() if e["kind"] == "fault"] == [0, 1]


def test_a_broken_snapshot_gives_way_to_a_checkpoint(tmp_path: Path) -> None:
    def spoil_and_kill(run: Run) -> None:
        pids = [start_pid(run, rank) for rank in (0, 1)]
        for pid in pids:
            os.kill(pid or 0, signal.SIGSTOP)
        (root,) = SHARED_MEMORY.glob(f"meshwright-*-{run.process.pid}-*")
        for path in root.glob("[0-9]*/*.safetensors"):
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
        os.kill(pids[1] or 0, signal.SIGKILL)

    words = ("--mesh", "dp=2", "--set", "checkpoint_every=6")
    result, outcome, _ = disturbed(tmp_path / "killed", (*words, "--set", "snapshot_every=1"), spoil_and_kill)
    assert_same(result, undisturbed(tmp_path / "straight", words))
    assert result["restarts"][0]["source"] == "checkpoint" and "its bytes were changed" in outcome.error


def test_a_crash_loop_ends_with_a_diagnosis(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY_TASK)
    words = ("--set", "max_restarts=1", "--set", "snapshot_every=none")
    run = start_run(tmp_path, *ALWAYS, *words, model="faulty.py:task", steps=STEPS, environ={"FAULT": "exit 3"})
    outcome = wait_for_end(run)
    assert outcome.code == 1 and len(outcome.faults) == 2
    assert "rank 1 failed 2 times at step 3, and no restart came further" in outcome.error.splitlines()[-1]
    assert outcome.error.count("the run begins again") == 1


def test_a_run_that_comes_further_each_time_is_never_given_up(tmp_path: Path) -> None:
    """Rank 1 ends in each generation's fourth step, after a snapshot."""
    (tmp_path / "faulty.py").write_text(FAULTY_TASK)
    words = ("--set", "max_restarts=1", "--set", "snapshot_every=1", "--set", "validate_batches=0")
    run = start_run(tmp_path, *ALWAYS, *words, model="faulty.py:task", steps=12, environ={"FAULT": "exit 3"})
    outcome = wait_for_end(run)
    assert outcome.code == 0, outcome.error[-3000:]
    result = json.loads((run.folder / "result.json").read_text())
    assert len(result["losses"]) == 12 and len(result["restarts"]) == len(result["faults"]) >= 3


def test_a_run_that_cannot_be_mended_leaves_its_newest_snapshot_as_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY_TASK)
    run = start_run(tmp_path, *ALWAYS, "--set", "snapshot_every=1", model="faulty.py:task", steps=12, environ={"FAULT": "exception"})
    outcome = wait_for_end(run)
    assert outcome.code == 1 and len(outcome.faults) == 1 and not left_in_memory(run)
    (saved,) = (run.folder / "checkpoints").iterdir()
    assert saved.name in ("2", "3")
    assert f"meshwright: step {saved.name} is saved; to go on from it: meshwright train --resume {run.folder}\n" in outcome.error
    assert not list(problems_of(saved, read_manifest(saved)))


# A script whose rank 1 kills itself once, after its 17th of 36 steps. It leaves a hash of the weights.
SCRIPT = """
import hashlib, os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
import meshwright as mw

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
loader = DataLoader(TensorDataset(torch.randn(96, 6)), batch_size=8, shuffle=True)

def loss_fn(model, batch):
    return model(batch[0]).square().mean()

recover = "keep" not in sys.argv
run = mw.prepare(model, optimizer, loader, scheduler, loss_fn=loss_fn, mesh="dp=2", recover=recover)
if "resume" in sys.argv:
    run.resume("checkpoints")
steps = 0
for epoch in range(run.epoch, 3):
    for batch in run.loader:
        if "own" in sys.argv:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            scheduler.step()
        else:
            run.step(batch, loss_fn)
        steps += 1
        if "kill" in sys.argv and steps == 17 and run.rank == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
state = run.state_dict()
if run.is_first:
    print("steps", steps)
    print("weights", hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state.values())).hexdigest())
"""


def scripted(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    place.mkdir()
    (place / "script.py").write_text(SCRIPT)
    command = [*MESHWRIGHT, "train", "script.py", "--nproc", "2", "--set", "snapshot_every=4", "--set", "verify=false", "--", *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("loop", ["step", pytest.param("own", marks=pytest.mark.prove)])
def test_a_script_that_resumes_goes_on_in_the_middle_of_a_pass(loop: str, tmp_path: Path) -> None:
    killed, straight = scripted(tmp_path / "killed", "resume", "kill", loop), scripted(tmp_path / "straight", loop)
    assert killed.returncode == straight.returncode == 0, killed.stderr[-3000:]
    assert killed.stdout.splitlines()[-1] == straight.stdout.splitlines()[-1]
    assert re.search(r"rank 1 was killed by SIGKILL; the run goes on from step (12|16) \(a snapshot in memory\), restart 1", killed.stderr)
    assert {killed.stdout.split()[1], straight.stdout.split()[1]} <= {"20", "24", "36"}


@pytest.mark.parametrize("words", [("kill",), pytest.param(("resume", "kill", "keep"), marks=pytest.mark.prove)])
def test_a_script_that_does_not_say_that_it_goes_on_ends(words: tuple[str, ...], tmp_path: Path) -> None:
    ended = scripted(tmp_path / "killed", *words)
    assert ended.returncode == 1 and "restart" not in ended.stderr
    assert "rank 1 failed: killed by SIGKILL" in ended.stderr


def test_a_killed_supervisor_leaves_no_process_and_nothing_in_memory(tmp_path: Path) -> None:
    run = start_run(tmp_path, *ALWAYS, *SNAPSHOTS)
    run.await_steps(10)
    assert left_in_memory(run)
    run.pids = [run.fork_server(), run.rank(0), run.rank(1)]
    run.process.kill()
    wait_for_end(run)  # waits for the processes that the run names, and for its temporary folders
    await_condition(lambda: not left_in_memory(run))
