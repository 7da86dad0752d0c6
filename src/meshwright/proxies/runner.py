"""One runner for any schedule: this rank's program, action by action, over torch.distributed, with the clock read around everything.

Computation is a wait, as in the original proxies, or matrix products of as many FLOPs. A collective is handed over and looked at again where
the program waits for it; the time that the rank stands still there is what is exposed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist

from meshwright.comm import Ledger, TorchComm
from meshwright.core.comm import Comm, Pending
from meshwright.core.schedule import COLLECTIVES, COMPUTES, MESSAGES, Action, Schedule
from meshwright.core.span import Span
from meshwright.schedule.ledger import run_name
from meshwright.simulate.jitter import factors

_SPIN_S = 2e-5  # at the end of a wait, spent asking for the time
_SLACK = 29  # PR_SET_TIMERSLACK: by how many nanoseconds Linux may wake a thread late
_AHEAD_S = 0.01  # before a step
_EDGE = {"cpu": 256, "cuda": 2048}  # side of the matrices of a real computation
_TYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}
_LINE = 64  # bytes that tensors begin at multiples of
_STRETCH = 1 << 26  # bytes of memory that calls go along, at least: all ranks' together are more than caches hold


@dataclass(frozen=True)
class RunPolicy:
    """How a schedule is run. `jitter` varies computation by that share, the same for a seed."""

    warm: int = 8
    runs: int = 128
    seed: int = 0
    jitter: float = 0.0
    compute: Literal["wait", "real"] = "wait"
    backend: str = "gloo"
    device: Literal["cpu", "cuda"] = "cpu"
    timeout_s: float = 300.0


class Runner:
    """One rank of one schedule. Made after the process group; every rank makes it, since groups are made together."""

    def __init__(self, schedule: Schedule, rank: int, device: torch.device, policy: RunPolicy, groups: GroupComms | None = None) -> None:
        self.rank, self.policy, self.device = rank, policy, device
        self.program = schedule.of(rank)
        groups = groups or GroupComms()
        self.ledger = groups.ledger
        self._comms = groups.of(schedule, rank)
        self._memory = groups.memory
        self._memory.reserve(buffer_bytes(schedule, rank), device)
        self._compute = _Kernel(device) if policy.compute == "real" else None

    def step(self, run: int) -> list[Span]:
        """One step, from when everybody is here; its spans in order of their ends."""
        self.together()
        return self.walk(run)

    def walk(self, run: int) -> list[Span]:
        """One step, from now."""
        return _Step(self, run).spans

    def together(self) -> None:
        """Ranks leave a barrier milliseconds apart where they share cores, and the last one's delay would be in everybody's step: rank 0 names
        a moment soon after, for which all wait who share its clock."""
        if not dist.is_initialized():
            return
        dist.barrier()
        moment = torch.tensor([time.time() + _AHEAD_S], dtype=torch.float64, device=self.device)
        dist.broadcast(moment, 0)
        left = moment.item() - time.time()
        if 0 < left <= _AHEAD_S:
            wait(left)

    def start(self, action: Action) -> Pending:
        """Hand one call over."""
        comm, name = self._comms[action.axis], run_name(action.name)
        whole, part = self._memory.of(action, comm.size)
        comm = comm.at_once if action.blocks else comm
        match action.op:
            case "all_reduce":
                return comm.all_reduce(whole, name)
            case "all_gather":
                return comm.all_gather(whole, part, name)
            case "reduce_scatter":
                return comm.reduce_scatter(part, whole, name)
            case "broadcast":
                return comm.broadcast(whole, name)
            case "all_to_all":
                rows = _dealt(whole.numel(), comm.size)
                return comm.all_to_all(part, whole, name, rows, rows)
            case "send":
                return comm.exchange([(action.peer, whole)], [], name)
            case _:
                return comm.exchange([], [(action.peer, part)], name)

    def compute(self, action: Action, factor: float) -> None:
        if self._compute is None:
            wait(action.seconds * factor)
        else:
            self._compute(action.flops * factor)


class _Step:
    """The walk through one step."""

    def __init__(self, runner: Runner, run: int) -> None:
        self.runner = runner
        self.spans: list[Span] = []
        self.flights: dict[str, _Flight] = {}
        self.begun = time.perf_counter()
        vary = factors(runner.policy.seed, runner.rank, run, runner.policy.jitter)
        for action in runner.program:
            self._look()
            for name in action.waits:
                self._land(name)
            if action.op in COMPUTES:
                start = time.perf_counter()
                runner.compute(action, next(vary))
                self.spans.append(Span(action.name, action.op, "", 0, 0, start - self.begun, time.perf_counter() - self.begun))
            elif action.op != "wait":
                start = time.perf_counter()
                self.flights[action.name] = _Flight(action, runner._comms[action.axis].size, runner.start(action), start)
                if action.blocks:
                    self._land(action.name)
        for name in list(self.flights):
            self._land(name)

    def _look(self) -> None:
        """Ask the calls that do not tell whether they are over; the originals test their requests here too, to keep MPI going."""
        for flight in self.flights.values():
            flight.look()

    def _land(self, name: str) -> None:
        flight = self.flights.pop(name, None)
        if flight is not None:
            self.spans.append(flight.land(self.begun, self.runner.device))


class _Flight:
    """A call under way. Its end is taken where a backend says so by itself, otherwise when it is waited for."""

    def __init__(self, action: Action, group: int, work: Pending, started: float) -> None:
        self.action, self.group, self.work = action, 2 if action.op in MESSAGES else group, work
        self.begun = started if action.blocks else time.perf_counter()  # what blocks may be over already; the rest is handed over now
        self.ended = 0.0
        future = None if action.blocks else _future(work)
        self._asked = future is None and hasattr(work, "is_completed")
        if future is not None:
            future.add_done_callback(self._done)

    def _done(self, _: object) -> None:
        self.ended = time.perf_counter()

    def look(self) -> None:
        if self._asked and not self.ended and self.work.is_completed():  # type: ignore[attr-defined]
            self._done(None)

    def land(self, zero: float, device: torch.device) -> Span:
        asked = self.begun if self.action.blocks else time.perf_counter()
        self.work.wait()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # NCCL's wait only orders streams
        now = time.perf_counter()
        ended = min(self.ended, now) if self.ended and device.type == "cpu" else now
        action = self.action
        return Span(action.name, action.op, action.axis, self.group, _size(action), self.begun - zero, ended - zero, max(now - asked, 0.0))


def _future(work: Any) -> Any:
    """What a backend's work promises; some have none."""
    try:
        return work.get_future()
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def wait(seconds: float) -> None:
    """Stand still for exactly so long, and leave the core to others meanwhile. Linux wakes sleepers 50 µs late unless it is asked not to."""
    until = time.perf_counter() + seconds
    if seconds > _SPIN_S:
        _ask(_SLACK, ctypes.c_ulong(1))
        time.sleep(seconds - _SPIN_S)
        _ask(_SLACK, ctypes.c_ulong(0))  # what is usual again
    while time.perf_counter() < until:
        pass


_ask: Callable[..., object] = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)


class _Kernel:
    """Matrix products that add up to a number of FLOPs: a tall matrix, as tall as it takes, times a square one."""

    def __init__(self, device: torch.device) -> None:
        self.edge, self.device = _EDGE[device.type], device
        self.square = torch.ones(self.edge, self.edge, device=device)
        self.tall = torch.zeros(16 * self.edge, self.edge, device=device)
        self.out = torch.empty_like(self.tall)

    def __call__(self, flops: float) -> None:
        rows = round(flops / (2.0 * self.edge**2))
        while rows > 0:
            now = min(rows, self.tall.shape[0])
            torch.mm(self.tall[:now], self.square, out=self.out[:now])
            rows -= now
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class _Memory:
    """What calls communicate, one after the other along a stretch that no cache holds, and from its start again. A job's tensors lie like that: one
    that a call before left in the caches would be a lucky one, and how much of it is left depends on what else is run. What is in it does not matter,
    only that it is real; calls under way at once may share some."""

    def __init__(self) -> None:
        self._of_item: dict[int, torch.Tensor] = {}  # one stretch as numbers of so many bytes each
        self._length = self._at = 0

    def reserve(self, length: int, device: torch.device) -> None:
        if length > self._length:
            stretch = torch.zeros(_whole_lines(length), dtype=torch.uint8, device=device)
            self._of_item, self._length, self._at = {item: stretch.view(dtype) for item, dtype in _TYPES.items()}, length, 0

    def of(self, action: Action, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole tensor, and this rank's part of it, or as much again where the whole is exchanged; otherwise the whole is both."""
        item, whole, part = _shape(action.op, _size(action), group)
        end = self._at + _whole_lines(whole * item) + _whole_lines(part * item)
        if end > self._length:
            self._at, end = 0, end - self._at
        numbers, first, second = self._of_item[item], self._at // item, (self._at + _whole_lines(whole * item)) // item
        self._at = end
        tensor = numbers[first : first + whole]
        return tensor, numbers[second : second + part] if part else tensor


@cache
def _shape(op: str, size: int, group: int) -> tuple[int, int, int]:
    """Bytes of a number, numbers of the whole and of the part: the widest type that divides. A gather of what does not divide is rounded up, as it
    would be padded."""
    parts = group if op in ("all_gather", "reduce_scatter") else 1
    item = next((i for i in (4, 2) if size % (i * parts) == 0), 1)
    part = -(-size // (item * parts))
    return item, part * parts, part if parts > 1 or op == "all_to_all" else 0


def _whole_lines(length: int) -> int:
    return -(-length // _LINE) * _LINE


def _size(action: Action) -> int:
    return action.bytes if action.likely is None else action.likely


def buffer_bytes(schedule: Schedule, rank: int) -> int:
    """What a rank's memory for calls will take."""
    members = schedule.members(rank)
    calls = ((a, len(members[a.axis])) for a in schedule.of(rank) if a.op in COLLECTIVES or a.op in MESSAGES)
    shapes = {_shape(a.op, _size(a), group) for a, group in calls}
    return max([_STRETCH, *(_whole_lines(whole * item) + _whole_lines(part * item) for item, whole, part in shapes)])


def _dealt(rows: int, ways: int) -> Sequence[int]:
    return [rows // ways + (1 if i < rows % ways else 0) for i in range(ways)]


class GroupComms:
    """A Comm for each name and list of ranks, and the memory that calls go along. Names that join the same ranks have one each all the same, so
    that their calls do not mix; schedules that are run by turns share them."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.memory = _Memory()
        self._made: dict[tuple[str, tuple[int, ...]], Comm | None] = {}

    def of(self, schedule: Schedule, rank: int) -> dict[str, Comm]:
        """Collective: every rank asks for the same schedules in the same order."""
        found: dict[str, Comm] = {}
        for axis, groups in sorted(schedule.groups.items()):
            for ranks in groups:
                if len(ranks) > 1 and (axis, ranks) not in self._made:
                    group = dist.new_group(list(ranks))
                    self._made[axis, ranks] = TorchComm(group, self.ledger) if rank in ranks else None
                if rank in ranks and (comm := self._made.get((axis, ranks))) is not None:
                    found[axis] = comm
        return found


Said = Callable[[str], None]


def run_steps(runner: Runner, policy: RunPolicy, say: Said) -> list[list[Span]]:
    """Warm up, then run; every timed step's spans. `say` hears about it once a second."""
    found = []
    told = time.monotonic()
    for run in range(-policy.warm, policy.runs):
        spans = runner.step(max(run, 0))
        if run < 0:
            runner.ledger.take()
        else:
            found.append(spans)
        if time.monotonic() - told > 1.0:
            told = time.monotonic()
            say(f"warm-up {run + policy.warm + 1} of {policy.warm}" if run < 0 else f"run {run + 1} of {policy.runs}")
    return found
