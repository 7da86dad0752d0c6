"""What a run does after a fault: which faults a restart can mend, how long it waits, when it gives up, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.core.event import Event, Fault
from meshwright.observe.run_folder import RunFolder
from meshwright.observe.run_status import infer_status
from meshwright.orchestrate import snapshot_folder
from meshwright.orchestrate.generations import saved_states, steps_done
from meshwright.orchestrate.recovery import Failure, SavedState, is_restartable, judge


def fault(kind: str, message: str = "", rank: int = 1, secondary: bool = False) -> Fault:
    return Fault(1.0, rank, kind, message, secondary=secondary)


def failed(at: int, state: int | None, kind: str = "killed by SIGKILL") -> Failure:
    return Failure(fault(kind), at, None if state is None else SavedState("/dev/shm/x", state, "snapshot"))


MENDABLE = [
    fault("killed by SIGKILL"),
    fault("killed by SIGSEGV"),
    fault("exit 3"),
    fault("stopped"),
    fault("Timeout"),
    fault("RuntimeError", "Connection closed by peer", secondary=True),
    fault("DistBackendError", "NCCL error in: …, remote process exited"),
    fault("AcceleratorError", "CUDA error: uncorrectable ECC error encountered"),
    fault("RuntimeError", "CUDA error: an illegal memory access was encountered"),
]
FINAL = [
    fault("RequestError", "no such file"),
    fault("NonFiniteLossError", "the loss is nan"),
    fault("NonFiniteLossError", "the loss is nan", secondary=True),
    fault("ArithmeticError", "planted"),
    fault("OutOfMemoryError", "CUDA out of memory"),
    fault("RuntimeError", "CUDA error: out of memory"),
    fault("AcceleratorError", "CUDA error: device-side assert triggered"),
    fault("DistBackendError", "NCCL error: ncclInvalidUsage"),
    fault("fork server", "ended (exit 1)", rank=-1),
    fault("launch", "cannot start 2 ranks", rank=-1),
    fault("exit 143 (SIGTERM)"),  # somebody asked it to end
]


@pytest.mark.parametrize("case", [*((f, True) for f in MENDABLE), *((f, False) for f in FINAL)], ids=lambda case: f"{case[0].kind} {case[0].message}")
def test_which_faults_a_restart_can_mend(case: tuple[Fault, bool]) -> None:
    assert is_restartable(case[0]) == case[1]
    assert judge([Failure(case[0], 3, None)], 3).restarts == case[1]


def test_a_run_that_comes_further_is_restarted_without_end_and_without_delay() -> None:
    failures: list[Failure] = []
    for step in range(0, 200, 10):
        failures.append(failed(step + 3, step))
        verdict = judge(failures, 1)
        assert verdict.restarts and verdict.delay_s == 0


def test_a_crash_loop_waits_longer_each_time_and_ends_with_a_diagnosis() -> None:
    failures, delays = [failed(5, 2), failed(25, 20)], []
    for _ in range(4):
        failures.append(failed(42, 40))
        verdict = judge(failures, 4, "runs/a/logs")
        assert verdict.restarts
        delays.append(verdict.delay_s)
    assert delays == [0, 1, 2, 4]
    verdict = judge([*failures, failed(43, 40)], 4, "runs/a/logs")
    assert not verdict.restarts
    assert "rank 1 failed 5 times at steps 42, 43, and no restart came further: if memory was short" in verdict.fault.message
    exits = [failed(4, None, "exit 3")] * 4
    assert (
        "rank 1 failed 4 times at step 4, and no restart came further: runs/a/logs/rank-1.log may say why"
        in judge(exits, 3, "runs/a/logs").fault.message
    )


def test_zero_restarts_leave_the_fault_as_it_is() -> None:
    assert judge([failed(3, 2)], 0) == judge([failed(3, 2)], 0)
    assert not judge([failed(3, 2)], 0).restarts and judge([failed(3, 2)], 0).fault == fault("killed by SIGKILL")


def test_one_line_says_what_happened_and_from_where_the_run_goes_on() -> None:
    line = "rank 1 was killed by SIGKILL at step 7; the run goes on from step 6 (a snapshot in memory), restart 1"
    assert judge([failed(7, 6)], 3).line == line
    assert judge([failed(7, None, "stopped")], 3).line == "rank 1 is stopped at step 7; the run begins again: it has no saved state, restart 1"
    assert judge([failed(7, 6), failed(9, 6, "exit 3")], 3).line.endswith(
        "rank 1 ended (exit 3) at step 9; the run goes on from step 6 (a snapshot in memory) in 1 s, restart 2"
    )


def test_the_last_step_is_read_from_the_end_of_the_metrics(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert steps_done(run) == 0
    records = [*({"time": 1, "step": step, "loss": 2.0} for step in range(5000)), {"time": 1, "step": 4999, "validation_loss": 1.0}]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"time":1,"step":50']))
    assert steps_done(run) == 5000
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"time":2,"step":4200,"loss":null}', ""]))  # done again
    assert steps_done(run) == 4201


def test_a_script_has_no_steps_that_are_known() -> None:
    state = SavedState("/dev/shm/x", 6, "snapshot")
    line = judge([Failure(fault("exit 3"), None, state)], 3).line
    assert line == "rank 1 ended (exit 3); the run goes on from step 6 (a snapshot in memory), restart 1"
    assert "failed 2 times, and no restart" in judge([Failure(fault("exit 3"), None, state)] * 2, 1).fault.message


def made_state(root: Path, step: int) -> None:
    (root / str(step)).mkdir(parents=True)
    (root / str(step) / "manifest.json").write_text("{}")


def test_the_freshest_state_comes_first(tmp_path: Path) -> None:
    run, snapshots = RunFolder(tmp_path / "run"), tmp_path / "memory"
    for step in (10, 20, 30):
        made_state(run.path / "checkpoints", step)
    made_state(snapshots, 30)
    made_state(snapshots, 25)
    assert [(s.step, s.kind) for s in saved_states(run, snapshots)] == [(30, "snapshot"), (30, "checkpoint"), (25, "snapshot"), (20, "checkpoint")]
    assert [s.step for s in saved_states(run, None)] == [30, 20]
    assert saved_states(RunFolder(tmp_path / "new"), tmp_path / "none") == ()


def test_a_run_that_was_restarted_is_running_while_its_supervisor_lives() -> None:
    start = Event(1.0, 0, "start", data={"pid": 2**22 + 1, "host": os.uname().nodename})
    killed = Fault(2.0, 0, "killed by SIGKILL", "")
    restart = Event(2.1, 0, "restart", data={"pid": os.getpid(), "host": os.uname().nodename}, generation=1)
    assert infer_status([start], [killed], False, 2.0, 2.5).state == "failed"
    assert infer_status([start, restart], [killed], False, 2.1, 2.5).state == "running"
    again = Event(2.4, 0, "start", data=start.data, generation=1)
    status = infer_status([start, restart, again], [killed], False, 2.4, 2.5)
    assert (status.state, status.started_at) == ("running", 1.0)


def test_a_folder_of_snapshots_is_private_and_goes_with_the_run(tmp_path: Path) -> None:
    with snapshot_folder.snapshot_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "5").mkdir()
        snapshot_folder.remove_stale(tmp_path)  # its owner lives
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_folders_whose_owner_is_gone_are_removed_and_others_stay(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from meshwright.orchestrate.snapshot_folder import snapshot_folder\n"
        "import os; c = snapshot_folder(Path(sys.argv[1])); c.__enter__(); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (stale,) = tmp_path.iterdir()
    namespace, pid, started = stale.name.split("-")[1:4]
    elsewhere = tmp_path / f"meshwright-{int(namespace) + 1}-{pid}-{started}-abcdefgh"  # of a container that shares this memory
    another = tmp_path / "meshwright-notes"
    elsewhere.mkdir()
    another.mkdir()
    snapshot_folder.remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([elsewhere, another])


def test_there_are_no_snapshots_where_there_is_no_room(tmp_path: Path) -> None:
    assert snapshot_folder.lack_of_room(1, 0, tmp_path) == f"{tmp_path} is no file system in memory"
    if snapshot_folder.lack_of_room(1, 0):
        pytest.skip("this machine has no /dev/shm")
    assert "are free in /dev/shm" in snapshot_folder.lack_of_room(2**60, 0)
    assert "of memory are free" in snapshot_folder.lack_of_room(1, 2**60)
