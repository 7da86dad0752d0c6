"""Faults of a run under mpirun: its supervisor, mpirun or a rank is killed, stopped or fails. docs/faults.md has them as a table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.mpi_launcher import find_mpirun, mpirun_command
from tests.procs.mpi_faults import MpiRun, await_condition, await_end, mpi_run

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="needs mpirun")
RAISING, SLOW = (f"{Path(__file__).parent / 'mpi_faults.py'}:{name}" for name in ("raising_task", "slow_task"))


def report(run: MpiRun, seconds: tuple[float, float]) -> None:
    """For the table; shown by `pytest -s`."""
    faults = [(f["data"]["rank"], f["data"]["kind"], f["step"]) for f in run.events("fault")]
    stops = [s["data"]["reason"] for s in run.events("stop")]
    last = run.said().strip().splitlines()[-1:]
    times = f"{seconds[0]:.1f} s, all gone {seconds[1]:.1f} s"
    print(f"\ncode {run.supervisor.returncode}; {times}; faults {faults}; stops {stops}; left {run.left()}; said {last}")


def test_the_supervisor_is_killed(tmp_path: Path, measured: None) -> None:
    """mpirun and the ranks die with it, also while mpirun's ranks only listen: they open no port beyond loopback."""
    with mpi_run(tmp_path) as run:
        pids = run.pids()
        ports = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=False).stdout.splitlines()
        assert not [line for line in ports for pid in pids[2:] if f"pid={pid}," in line and "127.0.0.1" not in line.split()[3]]
        run.supervisor.kill()
        report(run, await_end(run, pids))
        steps = run.steps()
        time.sleep(1)
        assert run.steps() == steps


def test_a_rank_is_killed(tmp_path: Path, measured: None) -> None:
    with mpi_run(tmp_path) as run:
        run.await_steps(3)
        pids = run.pids()
        os.kill(run.rank(1), signal.SIGKILL)
        report(run, await_end(run, pids))
        assert run.supervisor.returncode == 1
        assert "meshwright: rank 1 failed: killed by SIGKILL" in run.said() and "Traceback" not in run.said() and "-----" not in run.said()
        (fault,) = run.events("fault")
        assert (fault["data"]["rank"], fault["data"]["kind"]) == (1, "killed by SIGKILL") and fault["step"] >= 3
        assert list(run.place.glob("runs/*/report.html")) and not run.left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_supervisor_is_told_to_stop(tmp_path: Path, measured: None, number: signal.Signals, code: int) -> None:
    with mpi_run(tmp_path) as run:
        pids = run.pids()
        run.supervisor.send_signal(number)
        report(run, await_end(run, pids))
        assert run.supervisor.returncode == code and len(run.events("stop")) == 1 and not run.events("fault")
        assert "Traceback" not in run.said() and list(run.place.glob("runs/*/report.html")) and not run.left()
        (saved,) = run.place.glob("runs/*/checkpoints/*/manifest.json")
        assert int(saved.parent.name) == run.steps() and f"stopped after step {saved.parent.name}; to go on: meshwright train --resume" in run.said()


@pytest.mark.prove
def test_ctrl_c_twice(tmp_path: Path, measured: None) -> None:
    with mpi_run(tmp_path) as run:
        pids = run.pids()
        os.kill(pids[1], signal.SIGSTOP)  # an mpirun that does not end its ranks
        run.supervisor.send_signal(signal.SIGINT)
        time.sleep(0.5)
        run.supervisor.send_signal(signal.SIGINT)
        report(run, await_end(run, pids))
        assert run.supervisor.returncode == 130 and "Traceback" not in run.said()


@pytest.mark.prove
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_mpirun_ends(tmp_path: Path, measured: None, number: signal.Signals) -> None:
    with mpi_run(tmp_path) as run:
        pids = run.pids()
        os.kill(pids[1], number)
        report(run, await_end(run, pids))
        assert run.supervisor.returncode == 1 and "mpirun, which started the ranks, ended" in run.said() and "Traceback" not in run.said()
        assert [fault["data"]["kind"] for fault in run.events("fault")] == ["mpirun"]


@pytest.mark.prove
def test_a_rank_ends_by_another_signal(tmp_path: Path, measured: None) -> None:
    with mpi_run(tmp_path) as run:
        pids = run.pids()
        os.kill(run.rank(1), signal.SIGSEGV)
        report(run, await_end(run, pids))
        assert run.supervisor.returncode == 1 and "rank 1 failed: killed by SIGSEGV" in run.said()
        assert [(f["data"]["rank"], f["data"]["kind"]) for f in run.events("fault")] == [(1, "killed by SIGSEGV")]


@pytest.mark.prove
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_rank_is_told_to_stop(tmp_path: Path, measured: None, number: signal.Signals, code: int) -> None:
    """All ranks save and stop, after the same step."""
    with mpi_run(tmp_path) as run:
        pids = run.pids()
        os.kill(run.rank(1), number)
        report(run, await_end(run, pids))
        assert run.supervisor.returncode == code and "to go on: meshwright train --resume" in run.said() and not run.events("fault")


@pytest.mark.prove
def test_a_rank_is_stopped(tmp_path: Path, measured: None) -> None:
    """The rank that does not come is named, not the one that waited for it."""
    with mpi_run(tmp_path, "--set", "timeout_s=20") as run:
        pids = run.pids()
        os.kill(run.rank(1), signal.SIGSTOP)
        report(run, await_end(run, pids))
        assert run.supervisor.returncode == 1 and "rank 1 did not arrive at" in run.said()
        assert [(f["data"]["rank"], f["data"]["kind"]) for f in run.events("fault")] == [(1, "Timeout")]


@pytest.mark.prove
def test_a_rank_raises(tmp_path: Path, measured: None) -> None:
    with mpi_run(tmp_path, model=RAISING) as run:
        await_condition(lambda: run.supervisor.poll() is not None)
        report(run, (0, 0))
        assert run.supervisor.returncode == 1 and "meshwright: rank 1 failed: ValueError: planted" in run.said()
        primary: list[Any] = [f["data"] for f in run.events("fault") if not f["data"]["secondary"]]
        assert [(f["rank"], f["kind"]) for f in primary] == [(1, "ValueError")] and "in loss" in primary[0]["traceback"]
        assert list(run.place.glob("runs/*/report.html"))


@pytest.mark.prove
@pytest.mark.parametrize("who", [0, 1], ids=["supervisor", "mpirun"])
def test_what_only_watches_is_stopped(tmp_path: Path, measured: None, who: int) -> None:
    """The ranks train on, and the run goes on when it is continued."""
    with mpi_run(tmp_path) as run:
        pids = run.pids()
        os.kill(pids[who], signal.SIGSTOP)
        run.await_steps(20)
        os.kill(pids[who], signal.SIGCONT)
        run.await_steps(5)
        run.supervisor.send_signal(signal.SIGINT)
        report(run, await_end(run, pids))
        assert run.supervisor.returncode == 130


@pytest.mark.prove
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_ranks_wait_for_a_rank_0_that_plans_for_longer_than_the_timeout(tmp_path: Path, measured: None, backend: str) -> None:
    start, environ = mpirun_command(2, {"OMP_NUM_THREADS": "1"})
    train = [sys.executable, "-m", "meshwright.cli.main", "train", SLOW, "--backend", backend, "--steps", "2", "--run-dir", str(tmp_path)]
    done = subprocess.run([*start, *train, "--set", "timeout_s=60"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "waiting for rank 0, which measures this machine and plans" in done.stderr


@pytest.mark.prove
@pytest.mark.parametrize("words", [["--launcher", "mpi", "--backend", "gloo"], ["--backend", "auto", "--launcher", "mpi"]], ids=["gloo", "auto"])
def test_other_backends_under_mpirun_meet_without_a_port(tmp_path: Path, measured: None, words: list[str]) -> None:
    with mpi_run(tmp_path, *words) as run:
        pids = run.pids()
        ports = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=False).stdout.splitlines()
        assert not [line for line in ports for pid in pids[2:] if f"pid={pid}," in line and "127.0.0.1" not in line.split()[3]]
        os.kill(pids[1], signal.SIGKILL)
        report(run, await_end(run, pids))
        assert run.supervisor.returncode == 1
