"""Runs any schedule: executes this rank's program action by action over torch.distributed and records a span for each action.

Computation is a sleep, as in the original proxies, or matrix products of as many FLOPs. A collective is launched asynchronously and completed where
the program waits for it; the time that the rank waits there is exposed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist

from meshwright.comm import Ledger, TorchComm
from meshwright.core.comm import Comm, Work
from meshwright.core.schedule import COLLECTIVE_OPS, COMPUTE_OPS, P2P_OPS, Action, Schedule
from meshwright.core.span import Span
from meshwright.schedule.planned_ledger import ledger_name
from meshwright.simulate.jitter import jitter_factors

_SPIN_S = 2e-5  # the end of a sleep is busy-waited
_PR_SET_TIMERSLACK = 29  # prctl option: nanoseconds by which Linux may wake a thread late
_START_DELAY_S = 0.01  # from the barrier to the common start of a step
_MATMUL_SIZE = {"cpu": 256, "cuda": 2048}  # side of the square matrix of a real computation
_DTYPES = {4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}
_ALIGNMENT_BYTES = 64  # tensors begin at multiples of this
_MIN_BUFFER_BYTES = 1 << 26  # smallest communication buffer: those of all ranks together exceed the caches


@dataclass(frozen=True)
class RunPolicy:
    """How a schedule is run. `jitter` is the relative variation of computation times, reproducible by `seed`."""

    warm: int = 8
    runs: int = 128
    seed: int = 0
    jitter: float = 0.0
    compute: Literal["wait", "real"] = "wait"
    backend: str = "gloo"
    device: Literal["cpu", "cuda"] = "cpu"
    timeout_s: float = 300.0


class ScheduleRunner:
    """One rank of one schedule. All ranks create it, after the process group is initialised: creating subgroups is collective."""

    def __init__(self, schedule: Schedule, rank: int, device: torch.device, policy: RunPolicy, groups: GroupComms | None = None) -> None:
        self.rank, self.policy, self.device = rank, policy, device
        self.program = schedule.program_for(rank)
        groups = groups or GroupComms()
        self.ledger = groups.ledger
        self._comms = groups.comms_for(schedule, rank)
        self._buffer = groups.buffer
        self._buffer.reserve(buffer_bytes(schedule, rank), device)
        self._kernel = _MatmulKernel(device) if policy.compute == "real" else None

    def run_step(self, step_index: int) -> list[Span]:
        """Run one step, started on all ranks together; return its spans in order of end time."""
        self.align_ranks()
        return self.run_step_now(step_index)

    def run_step_now(self, step_index: int) -> list[Span]:
        """Run one step without aligning the ranks first."""
        return _StepRun(self, step_index).spans

    def align_ranks(self) -> None:
        """Wait for a common start time. Ranks that share cores leave a barrier milliseconds apart, and the last one's delay would be in every rank's
        step. So rank 0 broadcasts a time shortly after the barrier, and all ranks that share its clock wait for it."""
        if not dist.is_initialized():
            return
        dist.barrier()
        moment = torch.tensor([time.time() + _START_DELAY_S], dtype=torch.float64, device=self.device)
        dist.broadcast(moment, 0)
        delay = moment.item() - time.time()
        if 0 < delay <= _START_DELAY_S:
            precise_sleep(delay)

    def launch(self, action: Action) -> Work:
        """Launch one call."""
        comm, name = self._comms[action.axis], ledger_name(action.name)
        tensor, second = self._buffer.tensors_for(action, comm.size)
        comm = comm.sync if action.is_blocking else comm
        match action.op:
            case "all_reduce":
                return comm.all_reduce(tensor, name)
            case "all_gather":
                return comm.all_gather(tensor, second, name)
            case "reduce_scatter":
                return comm.reduce_scatter(second, tensor, name)
            case "broadcast":
                return comm.broadcast(tensor, name)
            case "all_to_all":
                share, remainder = divmod(tensor.numel(), comm.size)
                rows = [share + (i < remainder) for i in range(comm.size)]
                return comm.all_to_all(second, tensor, name, rows, rows)
            case "send":
                return comm.exchange([(action.peer, tensor)], [], name)
            case _:
                return comm.exchange([], [(action.peer, second)], name)

    def compute(self, action: Action, factor: float) -> None:
        if self._kernel is None:
            precise_sleep(action.seconds * factor)
        else:
            self._kernel(action.flops * factor)


class _StepRun:
    """The execution of one step."""

    def __init__(self, runner: ScheduleRunner, step_index: int) -> None:
        self.runner = runner
        self.spans: list[Span] = []
        self.in_flight: dict[str, _TimedCall] = {}
        self.started_at = time.perf_counter()
        jitter = jitter_factors(runner.policy.seed, runner.rank, step_index, runner.policy.jitter)
        for action in runner.program:
            self._poll()
            for name in action.depends_on:
                self._complete(name)
            if action.op in COMPUTE_OPS:
                start = time.perf_counter()
                runner.compute(action, next(jitter))
                self.spans.append(Span(action.name, action.op, "", 0, 0, start - self.started_at, time.perf_counter() - self.started_at))
            elif action.op != "wait":
                start = time.perf_counter()
                self.in_flight[action.name] = _TimedCall(action, runner._comms[action.axis].size, runner.launch(action), start)
                if action.is_blocking:
                    self._complete(action.name)
        for name in list(self.in_flight):
            self._complete(name)

    def _poll(self) -> None:
        """Poll calls without a completion callback. The original proxies test their requests here too, for MPI's progress."""
        for call in self.in_flight.values():
            call.poll()

    def _complete(self, name: str) -> None:
        if (call := self.in_flight.pop(name, None)) is not None:
            self.spans.append(call.complete(self.started_at, self.runner.device))


class _TimedCall:
    """A call in flight. Its end time comes from the backend's future or from polling, otherwise from the wait."""

    def __init__(self, action: Action, group: int, work: Work, started: float) -> None:
        self.action, self.group, self.work = action, 2 if action.op in P2P_OPS else group, work
        self.started_at = started if action.is_blocking else time.perf_counter()  # a blocking call may be complete already; an async one starts here
        self.ended_at = 0.0
        future = None if action.is_blocking else _future(work)
        self._needs_polling = future is None and hasattr(work, "is_completed")
        if future is not None:
            future.add_done_callback(self._on_done)

    def _on_done(self, _: object) -> None:
        self.ended_at = time.perf_counter()

    def poll(self) -> None:
        if self._needs_polling and not self.ended_at and self.work.is_completed():  # type: ignore[attr-defined]
            self._on_done(None)

    def complete(self, step_start: float, device: torch.device) -> Span:
        wait_start = self.started_at if self.action.is_blocking else time.perf_counter()
        self.work.wait()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # NCCL's wait only orders streams
        now = time.perf_counter()
        ended = min(self.ended_at, now) if self.ended_at and device.type == "cpu" else now
        action, start, end = self.action, self.started_at - step_start, ended - step_start
        return Span(action.name, action.op, action.axis, self.group, _payload_bytes(action), start, end, max(now - wait_start, 0.0))


def _future(work: Any) -> Any:
    """The work's future; None if the backend has none."""
    try:
        return work.get_future()
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def precise_sleep(seconds: float) -> None:
    """Sleep for exactly `seconds`, leaving the core to other threads. By default Linux wakes sleepers 50 µs late (timer slack)."""
    until = time.perf_counter() + seconds
    if seconds > _SPIN_S:
        _prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))
        time.sleep(seconds - _SPIN_S)
        _prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0))  # resets the default
    while time.perf_counter() < until:
        pass


_prctl: Callable[..., object] = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)


class _MatmulKernel:
    """Matrix products that add up to a number of FLOPs: a tall matrix, with as many rows as needed, times a square one."""

    def __init__(self, device: torch.device) -> None:
        self.size, self.device = _MATMUL_SIZE[device.type], device
        self.square = torch.ones(self.size, self.size, device=device)
        self.tall = torch.zeros(16 * self.size, self.size, device=device)
        self.out = torch.empty_like(self.tall)

    def __call__(self, flops: float) -> None:
        rows = round(flops / (2.0 * self.size**2))
        while rows > 0:
            n = min(rows, self.tall.shape[0])
            torch.mm(self.tall[:n], self.square, out=self.out[:n])
            rows -= n
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class _CommBuffer:
    """A ring buffer larger than the caches, from which calls take their tensors one after the other. In a real job, tensors are rarely in the caches
    from an earlier call, and how much of them is depends on what else runs. The contents do not matter, only that the memory is real; concurrent
    calls may share some of it."""

    def __init__(self) -> None:
        self._views: dict[int, torch.Tensor] = {}  # the buffer as a tensor of each item size
        self._capacity = self._offset = 0

    def reserve(self, length: int, device: torch.device) -> None:
        if length > self._capacity:
            buffer = torch.zeros(_align_up(length), dtype=torch.uint8, device=device)
            self._views, self._capacity, self._offset = {itemsize: buffer.view(dtype) for itemsize, dtype in _DTYPES.items()}, length, 0

    def tensors_for(self, action: Action, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor of a call, and a second one: this rank's shard, or for an all-to-all the output; other calls have only one."""
        itemsize, numel, second_numel = _tensor_sizes(action.op, _payload_bytes(action), group)
        end = self._offset + _align_up(numel * itemsize) + _align_up(second_numel * itemsize)
        if end > self._capacity:
            self._offset, end = 0, end - self._offset
        buffer, first, second = self._views[itemsize], self._offset // itemsize, (self._offset + _align_up(numel * itemsize)) // itemsize
        self._offset = end
        tensor = buffer[first : first + numel]
        return tensor, buffer[second : second + second_numel] if second_numel else tensor


@cache
def _tensor_sizes(op: str, size: int, group: int) -> tuple[int, int, int]:
    """Item size and elements of a call's two tensors, with the widest dtype that divides the size. If a gather's size does not divide by the group,
    it is rounded up, as it would be padded."""
    shards = group if op in ("all_gather", "reduce_scatter") else 1
    itemsize = next((i for i in (4, 2) if size % (i * shards) == 0), 1)
    numel = -(-size // (itemsize * shards))
    return itemsize, numel * shards, numel if shards > 1 or op == "all_to_all" else 0


def _align_up(length: int) -> int:
    return -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _payload_bytes(action: Action) -> int:
    return action.bytes if action.expected_bytes is None else action.expected_bytes


def buffer_bytes(schedule: Schedule, rank: int) -> int:
    """Bytes of a rank's communication buffer."""
    groups = schedule.groups_of(rank)
    calls = [a for a in schedule.program_for(rank) if a.op in COLLECTIVE_OPS or a.op in P2P_OPS]
    shapes = {_tensor_sizes(a.op, _payload_bytes(a), len(groups[a.axis])) for a in calls}
    return max([_MIN_BUFFER_BYTES, *(_align_up(first * itemsize) + _align_up(second * itemsize) for itemsize, first, second in shapes)])


class GroupComms:
    """A Comm for each axis and list of ranks, and the communication buffer. Axes with the same ranks have separate Comms, so that their calls do not
    mix. Schedules that run in turns share them."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.buffer = _CommBuffer()
        self._comms: dict[tuple[str, tuple[int, ...]], Comm | None] = {}

    def comms_for(self, schedule: Schedule, rank: int) -> dict[str, Comm]:
        """The Comm of each axis for this rank. Collective: every rank calls it for the same schedules in the same order."""
        comms: dict[str, Comm] = {}
        for axis, groups in sorted(schedule.groups.items()):
            for ranks in groups:
                if len(ranks) > 1 and (axis, ranks) not in self._comms:
                    group = dist.new_group(list(ranks))
                    self._comms[axis, ranks] = TorchComm(group, self.ledger) if rank in ranks else None
                if rank in ranks and (comm := self._comms.get((axis, ranks))) is not None:
                    comms[axis] = comm
        return comms


LogCallback = Callable[[str], None]


def run_steps(runner: ScheduleRunner, policy: RunPolicy, log_progress: LogCallback) -> list[list[Span]]:
    """Run the warm-up and the timed steps; return the spans of each timed step. `log_progress` is called about once a second."""
    steps = []
    logged_at = time.monotonic()
    for run in range(-policy.warm, policy.runs):
        spans = runner.run_step(max(run, 0))
        if run < 0:
            runner.ledger.drain()
        else:
            steps.append(spans)
        if time.monotonic() - logged_at > 1.0:
            logged_at = time.monotonic()
            log_progress(f"warm-up {run + policy.warm + 1} of {policy.warm}" if run < 0 else f"run {run + 1} of {policy.runs}")
    return steps
