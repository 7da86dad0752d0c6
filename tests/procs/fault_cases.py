"""A run of two ranks to which faults are done, and what a fault leaves: used by test_faults.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.observe.jsonl_tail import read_records

MESHWRIGHT = [sys.executable, "-m", "meshwright.cli.main"]
PATIENCE_S = 240  # a busy machine is no failure


@dataclass
class Run:
    """A live `meshwright train` of two ranks. Its temporary folders are made in `temporary`."""

    process: subprocess.Popen[str]
    runs: Path
    temporary: Path
    pids: list[int] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return next(iter(self.runs.iterdir()))

    def stderr(self) -> str:
        return (self.temporary.parent / "stderr").read_text()

    def events(self) -> list[dict[str, Any]]:
        return [record for path in self.runs.glob("*/events-*.jsonl") for record in read_records(path)]

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
        assert self.process.poll() is None, self.stderr()[-3000:]


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


def start_run(
    place: Path, *words: str, runs: Path | None = None, model: str = "gpt-tiny", steps: int = 100_000, environ: Mapping[str, str] | None = None
) -> Run:
    temporary = place / "tmp"
    temporary.mkdir()
    runs = runs or place / "runs"
    command = [*MESHWRIGHT, "train", model, "--steps", str(steps), "--nproc", "2", "--run-dir", str(runs), *words]
    env = {**os.environ, "TMPDIR": str(temporary), **(environ or {})}
    with (place / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL, stderr=stderr, env=env, text=True)
    return Run(process, runs, temporary)


def finish(run: Run, act: Callable[[Run], None]) -> Outcome:
    """Do a fault to a run after some steps, and wait for the end of all its processes."""
    run.await_steps(3)
    run.pids = [run.fork_server(), run.rank(0), run.rank(1)]
    start = time.monotonic()
    act(run)
    return wait_for_end(run, start)


def wait_for_end(run: Run, start: float = 0.0) -> Outcome:
    try:
        code = run.process.wait(timeout=PATIENCE_S)
    finally:
        run.process.kill()
    seconds = time.monotonic() - start
    await_condition(lambda: all(map(is_gone, run.pids)))
    await_condition(lambda: not list(run.temporary.glob("meshwright-*")))
    events = run.events()
    left = {"run folder"} | ({"report"} if (run.folder / "report.html").exists() else set())
    left |= {"result"} if (run.folder / "result.json").exists() else set()
    faults = [e["data"] for e in events if e["kind"] == "fault"]
    return Outcome(code, seconds, run.stderr(), faults, [e["data"]["reason"] for e in events if e["kind"] == "stop"], left)


def send(number: signal.Signals, to: str, times: int = 1) -> Callable[[Run], None]:
    """The fault that sends a signal to 'supervisor', 'fork server' or 'one rank'."""

    def act(run: Run) -> None:
        pid = {"supervisor": lambda: run.process.pid, "fork server": run.fork_server, "one rank": lambda: run.rank(1)}[to]()
        for i in range(times):
            time.sleep(0.3 * (i > 0))
            os.kill(pid, number)

    return act


# A model whose rank 1 misbehaves in its fourth training step, as the variable FAULT says. Each rank calls forward once a step.
FAULTY_TASK = """
import os, resource, sys, time
import torch, torch.distributed as dist
import meshwright as mw

def limit(which, value):
    resource.setrlimit(which, (value, resource.getrlimit(which)[1]))

def misbehave(fault):
    if fault == "exception":
        raise ArithmeticError("planted")
    if fault == "exit 3":
        sys.exit(3)
    if fault == "sleep":
        time.sleep(600)
    if fault == "descriptors":
        limit(resource.RLIMIT_NOFILE, 1 + max(map(int, os.listdir("/proc/self/fd"))))
        files = [open("/dev/null") for _ in range(1000)]
    if fault == "memory":
        limit(resource.RLIMIT_AS, 1 << 20)
        torch.ones(10**9)

class Faulty(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.calls = 0
    def forward(self, x):
        if dist.is_initialized():
            self.calls += 1
            if dist.get_rank() == 1 and self.calls == 4:
                misbehave(os.environ["FAULT"])
        return self.a(x)

def loss(model, batch):
    return model(batch["x"]).square().mean()

def task():
    return mw.Task("faulty", Faulty, loss, {"x": mw.Field((4,))}, global_batch=8)
"""

# A launch without a run: what limits on the supervisor and the fork server do. {limit} is done before the pool starts.
LAUNCH_SCRIPT = """
import os, resource, sys
from meshwright.launch import ForkServer, RankFailure, WorkerPool
def limit(pid, which, value):
    resource.prlimit(pid, which, (value, resource.getrlimit(which)[1]))
server = ForkServer(1, os.environ)
try:
    if {warm}:
        WorkerPool(server, 1).close()  # waits until the fork server has imported torch
    {limit}
    with WorkerPool(server, 100) as workers:
        pass
except RankFailure as failure:
    sys.exit("meshwright: " + str(failure))
finally:
    server.close()
"""
