"""Measures ranks together: seconds of collectives and messages by size, the share hidden behind computation, and the number of ranks per core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from meshwright.core.calibration import AlphaBetaModel, SizeCurve, monotone_seconds
from meshwright.core.comm import Comm, PeerTensors, Work
from meshwright.core.schedule import wire_factor
from meshwright.describe.stopwatch import Stopwatch

_MESSAGE_SIZES = {"cpu": (2**12, 2**17, 2**20, 2**22, 2**24), "cuda": (2**12, 2**18, 2**22, 2**26, 2**28)}
_CALLS_PER_SIZE = 12  # per operation and size
_LARGE_MESSAGE_BYTES = 2**22  # from this size on, a third as many calls is enough
_CHAIN_LAYERS, _CHAIN_WIDTH, _CHAIN_RUNS = 6, 64, 4  # a chain of layers with an all-reduce after each; how often it is run
_WORK_BETWEEN_CALLS_S = 0.001  # CPU work before each call: in a step, ranks arrive from computation, and not simultaneously
_OVERSUBSCRIPTION_S = 0.1  # seconds of work, on all ranks at once


def measure_oversubscription(comm: Comm, stopwatch: Stopwatch) -> float:
    """Ranks per core: wall-clock time over CPU time of the same work, while all ranks are busy."""
    if stopwatch.clock is time.perf_counter:
        return 1.0
    a = torch.randn(128, 128)
    found = []
    for _ in range(3):
        comm.barrier()
        begun, worked = time.perf_counter(), time.thread_time()
        while time.perf_counter() - begun < _OVERSUBSCRIPTION_S:
            torch.mm(a, a)
        found.append((time.perf_counter() - begun) / (time.thread_time() - worked))
    return max(statistics.median(found), 1.0)


def collective_curves(
    comm: Comm, pair_comm: Comm | None, device: torch.device, backend: str, device_type: str
) -> tuple[dict[str, SizeCurve], dict[str, SizeCurve]]:
    """(seconds, core-busy seconds) of every collective among all ranks by the bytes that a rank must send; also among the two ranks of each pair,
    and of messages between them, while all pairs communicate."""
    found = {f"{backend}/{op}": points for op, points in _measure_collectives(comm, device, device_type).items()}
    if pair_comm is not None and pair_comm.size == 2:
        if comm.size > 2:
            found |= {f"{backend}/{op}/2": points for op, points in _measure_collectives(pair_comm, device, device_type).items()}
        found[f"{backend}/send"] = _measure_p2p(pair_comm, device, device_type)
    takes, keeps = ({name: monotone_seconds(tuple((p[0], p[at]) for p in points)) for name, points in found.items()} for at in (1, 2))
    return takes, keeps if device.type == "cpu" else {}


class _AllReduceBothWays(torch.autograd.Function):
    """An all-reduce in forward and in backward, as tensor parallelism does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, all_reduce: Callable[[torch.Tensor], object]) -> torch.Tensor:
        ctx.meet = all_reduce
        whole = x.clone()
        all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = grads[0].clone()
        ctx.meet(whole)
        return whole, None


def in_layer_overhead(comm: Comm) -> float:
    """Seconds that a collective inside a layer takes beyond the bare call: ranks reach it through autograd, each at its own pace."""
    weights = [torch.randn(_CHAIN_WIDTH, _CHAIN_WIDTH).div_(_CHAIN_WIDTH).requires_grad_() for _ in range(_CHAIN_LAYERS)]
    given = torch.randn(8 * _CHAIN_WIDTH, _CHAIN_WIDTH)

    def run_chain(meet: Callable[[torch.Tensor], object]) -> float:
        x = given
        begun = time.perf_counter()
        for weight in weights:
            x = _AllReduceBothWays.apply(torch.mm(x, weight).tanh(), meet)
        x.sum().backward()
        return time.perf_counter() - begun

    with_calls, plain, bare = [], [], []
    for _ in range(_CHAIN_RUNS):
        comm.barrier()
        plain.append(run_chain(lambda _: None))
        comm.barrier()
        with_calls.append(run_chain(lambda whole: comm.sync.all_reduce(whole, "probe").wait()))
        bare.append(_seconds_between_work(lambda: comm.sync.all_reduce(given.clone(), "probe"), torch.device("cpu"), _LARGE_MESSAGE_BYTES)[0])
    each = (statistics.fmean(with_calls) - statistics.fmean(plain)) / (2 * _CHAIN_LAYERS)
    return max(each - statistics.fmean(bare), 0.0)


def _measure_collectives(comm: Comm, device: torch.device, device_type: str) -> dict[str, list[tuple[float, float, float]]]:
    found = {}
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        points = []
        for size in _MESSAGE_SIZES[device_type]:
            whole = torch.ones(size // 4 // comm.size * comm.size, device=device)
            part = torch.ones(whole.numel() // comm.size, device=device)
            call = partial(_call_collective, comm.sync, op, whole, part)
            points.append((size * wire_factor(op, comm.size), *_seconds_between_work(call, device, size)))
        found[op] = points
    return found


def _seconds_between_work(call: Callable[[], Work], device: torch.device, size: int) -> tuple[float, float]:
    """Mean seconds of a call that follows CPU work, as in a step, including the wait for other ranks; and the CPU time that a rank's process spent
    in it. Every rank must make the same number of calls, or they would deadlock."""
    a = torch.randn(64, 64, device=device)
    calls = _CALLS_PER_SIZE if size < _LARGE_MESSAGE_BYTES else _CALLS_PER_SIZE // 3
    total, kept = 0.0, 0.0
    for number in range(calls + 2):
        begun = time.thread_time()
        while device.type == "cpu" and time.thread_time() - begun < _WORK_BETWEEN_CALLS_S:
            torch.mm(a, a)
        begun, worked = time.perf_counter(), time.process_time()
        call().wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        total += time.perf_counter() - begun if number > 1 else 0.0
        kept += time.process_time() - worked if number > 1 else 0.0
    return total / calls, kept / calls


def _measure_p2p(pair_comm: Comm, device: torch.device, device_type: str) -> list[tuple[float, float, float]]:
    """A message's time is half of a ping-pong."""
    points = []
    for size in _MESSAGE_SIZES[device_type]:
        message = [(1 - pair_comm.rank, torch.ones(size // 4, device=device))]

        def ping_pong(message: PeerTensors = message) -> Work:
            sends = pair_comm.rank == 0
            pair_comm.exchange(message if sends else [], [] if sends else message, "probe").wait()
            return pair_comm.exchange([] if sends else message, message if sends else [], "probe")

        seconds, kept = _seconds_between_work(ping_pong, device, size)
        points.append((float(size), seconds / 2, kept / 2))
    return points


def _call_collective(comm: Comm, op: str, whole: torch.Tensor, part: torch.Tensor) -> Work:
    if op == "all_reduce":
        return comm.all_reduce(whole, "probe")
    if op == "all_to_all":
        rows = [part.numel()] * comm.size
        return comm.all_to_all(torch.empty_like(whole), whole, "probe", rows, rows)
    return comm.all_gather(whole, part, "probe") if op == "all_gather" else comm.reduce_scatter(part, whole, "probe")


def fit_alpha_beta(samples: list[tuple[float, float]]) -> AlphaBetaModel:
    """α–β by least squares on relative error, so that small messages count as much as large ones."""
    weights = [1.0 / (t * t) for _, t in samples]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, samples, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, samples, strict=True)) / total
    above = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, samples, strict=True))
    below = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, samples, strict=True))
    slope = above / below if below else 0.0
    if slope <= 0:  # noise larger than the effect: take the largest message alone
        size, seconds = samples[-1]
        return AlphaBetaModel(min(t for _, t in samples), size / seconds)
    return AlphaBetaModel(max(mean_t - slope * mean_x, min(t for _, t in samples) * 0.1), 1.0 / slope)


def measure_overlap(comm: Comm, device: torch.device, device_type: str) -> float:
    """The share of a collective that is hidden when it runs beside computation of about the same length."""
    whole = torch.ones(2**20 if device_type == "cpu" else 2**26, device=device)
    n = 256 if device.type == "cpu" else 2048
    a = torch.randn(n, n, device=device)
    watch = Stopwatch(device, 0.0)  # wall-clock time: ranks that share a core hide nothing

    def times(work: Callable[[], object]) -> float:
        comm.barrier()
        return statistics.fmean(watch.time_once(work) for _ in range(7))

    alone = times(lambda: comm.all_reduce(whole, "probe").wait())
    one = times(lambda: torch.mm(a, a))
    count = min(max(int(alone / max(one, 1e-7)), 1), 1000)  # per rank: one may compute far faster than another

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, a)

    def both() -> None:
        work = comm.all_reduce(whole, "probe")
        compute()
        work.wait()

    busy = times(compute)
    together = times(both)
    return min(max((alone + busy - together) / min(alone, busy), 0.0), 1.0)
