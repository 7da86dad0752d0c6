"""A run of two ranks to which faults are done, and what a fault leaves: used by test_faults.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MESHWRIGHT = [sys.executable, "-m", "meshwright.cli.main"]
PATIENCE_S = 240  # a busy machine is no failure


@dataclass
class Run:
    """A live `meshwright train` of two ranks. Its temporary folders are made in `temporary`."""

    process: subprocess.Popen[str]
    runs: Path
    temporary: Path

    @property
    def folder(self) -> Path:
        return next(iter(self.runs.iterdir()))

    def events(self) -> list[dict[str, Any]]:
        lines = [line for path in self.runs.glob("*/events-*.jsonl") for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines if line]

    def steps(self) -> int:
        return sum(path.read_text().count('"step_s"') for path in self.runs.glob("*/metrics.jsonl"))

    def rank(self, rank: int) -> int:
        """The process of a rank."""
        return next(int(e["data"]["pid"]) for e in self.events() if e["kind"] == "start" and e["rank"] == rank)

    def fork_server(self) -> int:
        return int(Path(f"/proc/{self.rank(0)}/stat").read_text().rsplit(")", 1)[1].split()[1])

    def await_steps(self, count: int) -> None:
        """Wait for `count` more steps."""
        wanted = self.steps() + count
        await_condition(lambda: self.steps() >= wanted or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()


@dataclass(frozen=True)
class Outcome:
    """How a run ended and what it left."""

    code: int
    seconds: float
    error: str  # stderr
    faults: list[dict[str, Any]]
    stops: list[str]  # reasons of stop events
    left: set[str]


def await_condition(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def start_run(place: Path, *words: str, runs: Path | None = None, model: str = "gpt-tiny", steps: int = 100_000, **kwargs: Any) -> Run:
    temporary = place / "tmp"
    temporary.mkdir()
    runs = runs or place / "runs"
    command = [*MESHWRIGHT, "train", model, "--steps", str(steps), "--nproc", "2", "--run-dir", str(runs), *words]
    env = {**os.environ, "TMPDIR": str(temporary)}
    with (place / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL, stderr=stderr, env=env, text=True, **kwargs)
    return Run(process, runs, temporary)


def finish(run: Run, act: Callable[[Run], None], since: int = 3) -> Outcome:
    """Do a fault to a run after some steps, and wait for the end of all its processes."""
    run.await_steps(since)
    pids = [run.fork_server(), run.rank(0), run.rank(1)]
    start = time.monotonic()
    act(run)
    code = run.process.wait(timeout=PATIENCE_S)
    seconds = time.monotonic() - start
    await_condition(lambda: all(map(is_gone, pids)))
    await_condition(lambda: not list(run.temporary.glob("meshwright-*")))
    events = run.events()
    left = {"run folder"} | ({"report"} if (run.folder / "report.html").exists() else set())
    left |= {"result"} if (run.folder / "result.json").exists() else set()
    error = (run.temporary.parent / "stderr").read_text()
    faults = [e["data"] for e in events if e["kind"] == "fault"]
    return Outcome(code, seconds, error, faults, [e["data"]["reason"] for e in events if e["kind"] == "stop"], left)


def send(number: signal.Signals, to: str, times: int = 1) -> Callable[[Run], None]:
    """The fault that sends a signal to 'supervisor', 'fork server' or 'one rank'."""

    def act(run: Run) -> None:
        pid = {"supervisor": lambda: run.process.pid, "fork server": run.fork_server, "one rank": lambda: run.rank(1)}[to]()
        for i in range(times):
            time.sleep(0.3 * (i > 0))
            os.kill(pid, number)

    return act
