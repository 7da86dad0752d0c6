"""A run of two ranks under mpirun to which faults are done, and what a fault leaves: used by test_mpi_faults.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.core.task import Task

PATIENCE_S = 400  # a busy machine is no failure
RAISING_STEP = 3
SLOW_S = 70


def raising_task() -> Task:
    """gpt-tiny, whose loss raises on rank 1 in its fourth step."""
    from meshwright import zoo

    task, calls = zoo.load("gpt-tiny"), []

    def loss(model: Any, batch: Any) -> Any:
        calls.append(0)
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "1" and len(calls) > RAISING_STEP:
            raise ValueError("planted")
        return task.loss(model, batch)

    return replace(task, name="raising", loss=loss)


def slow_task() -> Task:
    """gpt-tiny, for which rank 0 takes long to plan: it reads the task a first time there, and again where it trains."""
    from meshwright import zoo

    if os.environ.get("OMPI_COMM_WORLD_RANK") == "0" and not os.environ.get("MESHWRIGHT_TEST_SLEPT"):
        os.environ["MESHWRIGHT_TEST_SLEPT"] = "1"
        time.sleep(SLOW_S)
    return replace(zoo.load("gpt-tiny"), name="slow")


@dataclass
class MpiRun:
    """A live `meshwright train --backend mpi` of two ranks; its temporary files are made in `place`/tmp."""

    supervisor: subprocess.Popen[str]
    place: Path

    def records(self, pattern: str) -> list[dict[str, Any]]:
        lines = [line for path in self.place.glob(f"runs/*/{pattern}") for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines if line]

    def steps(self) -> int:
        return len(self.records("metrics.jsonl"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.records("events-*.jsonl") if event["kind"] == kind]

    def rank(self, rank: int) -> int:
        return next(int(event["data"]["pid"]) for event in self.events("start") if event["rank"] == rank)

    def mpirun(self) -> int:
        return int(Path(f"/proc/{self.rank(0)}/stat").read_text().rsplit(")", 1)[1].split()[1])

    def pids(self) -> list[int]:
        return [self.supervisor.pid, self.mpirun(), self.rank(0), self.rank(1)]

    def said(self) -> str:
        return (self.place / "stderr").read_text()

    def await_steps(self, count: int) -> None:
        wanted = self.steps() + count
        await_condition(lambda: self.steps() >= wanted or self.supervisor.poll() is not None)
        assert self.supervisor.poll() is None, self.said()

    def left(self) -> list[str]:
        """Temporary files that are left; torch's own cache of compiled code is not ours."""
        return sorted(path.name for path in (self.place / "tmp").iterdir() if not path.name.startswith("torchinductor"))


def await_condition(condition: Callable[[], bool]) -> float:
    """Wait for it; returns the seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < PATIENCE_S, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - start


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


@contextmanager
def mpi_run(place: Path, *words: str, model: str = "gpt-tiny") -> Iterator[MpiRun]:
    """A run that trains; what is left of it is killed at the end of the block."""
    (place / "tmp").mkdir(parents=True)
    command = [sys.executable, "-m", "meshwright.cli.main", "train", model, "--backend", "mpi", "--nproc", "2", "--steps", "100000"]
    command += ["--run-dir", str(place / "runs"), "--set", "profile=false", *words]
    with (place / "stderr").open("w") as stderr:
        env = {**os.environ, "TMPDIR": str(place / "tmp"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr, text=True, start_new_session=True)
    run, pids = MpiRun(process, place), [process.pid]
    try:
        await_condition(lambda: run.steps() > 0 or process.poll() is not None)
        with suppress(OSError, StopIteration):
            pids = run.pids()
        yield run
    finally:
        for pid in pids:
            if not is_gone(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()


def await_end(run: MpiRun, pids: list[int]) -> tuple[float, float]:
    """Seconds until the command has ended, and until mpirun and the ranks are gone."""
    start = time.monotonic()
    await_condition(lambda: run.supervisor.poll() is not None)
    ended = time.monotonic() - start
    await_condition(lambda: all(map(is_gone, pids)))
    return ended, time.monotonic() - start
