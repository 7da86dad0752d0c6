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
_TURN_S, _TURN_WARMUP_S = 0.3, 0.1  # several periods of a CPU quota; a rank that has waited may use a period's quota at once
_TURN_ROUNDS, _MAX_TURNS = 4, 4  # how often each rank has its turn; turns in a round


def measure_oversubscription(comm: Comm, stopwatch: Stopwatch) -> float:
    """Ranks per core: wall-clock time over CPU time of the same work, while all ranks are busy."""
    if stopwatch.clock is time.perf_counter:
        return 1.0
    a = torch.randn(128, 128)
    ratios = []
    for _ in range(3):
        comm.barrier()
        wall_start, cpu_start = time.perf_counter(), time.thread_time()
        while time.perf_counter() - wall_start < _OVERSUBSCRIPTION_S:
            torch.mm(a, a)
        ratios.append((time.perf_counter() - wall_start) / (time.thread_time() - cpu_start))
    return max(statistics.median(ratios), 1.0)


def measure_in_turns(comm: Comm) -> list[float]:
    """The speed of this rank, matmuls per second of wall-clock time, in each of several turns; the others wait meanwhile. Of more than four ranks
    every fourth works at the same time."""
    a = torch.randn(128, 128)

    def matmuls_per_second(seconds: float) -> float:
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            torch.mm(a, a)
            count += 1
        return count / (time.perf_counter() - start)

    turns, speeds = min(comm.size, _MAX_TURNS), []
    for turn in range(turns * _TURN_ROUNDS):
        comm.barrier()
        if turn % turns == comm.rank % turns:
            matmuls_per_second(_TURN_WARMUP_S)
            speeds.append(matmuls_per_second(_TURN_S))
    return speeds


def collective_curves(
    comm: Comm, pair_comm: Comm | None, device: torch.device, backend: str, device_type: str
) -> tuple[dict[str, SizeCurve], dict[str, SizeCurve]]:
    """(seconds, core-busy seconds) of every collective among all ranks by the bytes that a rank must send; also among the two ranks of each pair,
    and of messages between them, while all pairs communicate."""
    measured = {f"{backend}/{op}": points for op, points in _measure_collectives(comm, device, device_type).items()}
    if pair_comm is not None and pair_comm.size == 2:
        if comm.size > 2:
            measured |= {f"{backend}/{op}/2": points for op, points in _measure_collectives(pair_comm, device, device_type).items()}
        measured[f"{backend}/send"] = _measure_p2p(pair_comm, device, device_type)
    wall, busy = ({name: monotone_seconds(tuple((p[0], p[i]) for p in points)) for name, points in measured.items()} for i in (1, 2))
    return wall, busy if device.type == "cpu" else {}


class _AllReduceBothWays(torch.autograd.Function):
    """An all-reduce in forward and in backward, as tensor parallelism does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, all_reduce: Callable[[torch.Tensor], object]) -> torch.Tensor:
        ctx.all_reduce = all_reduce
        out = x.clone()
        all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone()
        ctx.all_reduce(grad)
        return grad, None


def in_layer_overhead(comm: Comm) -> float:
    """Seconds that a collective inside a layer takes beyond the bare call: ranks reach it through autograd, each at its own pace."""
    weights = [torch.randn(_CHAIN_WIDTH, _CHAIN_WIDTH).div_(_CHAIN_WIDTH).requires_grad_() for _ in range(_CHAIN_LAYERS)]
    inputs = torch.randn(8 * _CHAIN_WIDTH, _CHAIN_WIDTH)

    def run_chain(all_reduce: Callable[[torch.Tensor], object]) -> float:
        x = inputs
        start = time.perf_counter()
        for weight in weights:
            x = _AllReduceBothWays.apply(torch.mm(x, weight).tanh(), all_reduce)
        x.sum().backward()
        return time.perf_counter() - start

    with_calls, plain, bare = [], [], []
    for _ in range(_CHAIN_RUNS):
        comm.barrier()
        plain.append(run_chain(lambda _: None))
        comm.barrier()
        with_calls.append(run_chain(lambda tensor: comm.sync.all_reduce(tensor, "probe").wait()))
        bare.append(_seconds_between_work(lambda: comm.sync.all_reduce(inputs.clone(), "probe"), torch.device("cpu"), _LARGE_MESSAGE_BYTES)[0])
    per_call = (statistics.fmean(with_calls) - statistics.fmean(plain)) / (2 * _CHAIN_LAYERS)
    return max(per_call - statistics.fmean(bare), 0.0)


def _measure_collectives(comm: Comm, device: torch.device, device_type: str) -> dict[str, list[tuple[float, float, float]]]:
    curves = {}
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        points = []
        for size in _MESSAGE_SIZES[device_type]:
            full = torch.ones(size // 4 // comm.size * comm.size, device=device)
            shard = torch.ones(full.numel() // comm.size, device=device)
            call = partial(_call_collective, comm.sync, op, full, shard)
            points.append((size * wire_factor(op, comm.size), *_seconds_between_work(call, device, size)))
        curves[op] = points
    return curves


def _seconds_between_work(call: Callable[[], Work], device: torch.device, size: int) -> tuple[float, float]:
    """Mean seconds of a call that follows CPU work, as in a step, including the wait for other ranks; and the CPU time that a rank's process spent
    in it. Every rank must make the same number of calls, or they would deadlock."""
    a = torch.randn(64, 64, device=device)
    calls = _CALLS_PER_SIZE if size < _LARGE_MESSAGE_BYTES else _CALLS_PER_SIZE // 3
    wall_s, cpu_s = 0.0, 0.0
    for i in range(calls + 2):
        work_start = time.thread_time()
        while device.type == "cpu" and time.thread_time() - work_start < _WORK_BETWEEN_CALLS_S:
            torch.mm(a, a)
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        call().wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        wall_s += time.perf_counter() - wall_start if i > 1 else 0.0
        cpu_s += time.process_time() - cpu_start if i > 1 else 0.0
    return wall_s / calls, cpu_s / calls


def _measure_p2p(pair_comm: Comm, device: torch.device, device_type: str) -> list[tuple[float, float, float]]:
    """A message's time is half of a ping-pong."""
    points = []
    for size in _MESSAGE_SIZES[device_type]:
        message = [(1 - pair_comm.rank, torch.ones(size // 4, device=device))]

        def ping_pong(message: PeerTensors = message) -> Work:
            sends = pair_comm.rank == 0
            pair_comm.exchange(message if sends else [], [] if sends else message, "probe").wait()
            return pair_comm.exchange([] if sends else message, message if sends else [], "probe")

        wall_s, cpu_s = _seconds_between_work(ping_pong, device, size)
        points.append((float(size), wall_s / 2, cpu_s / 2))
    return points


def _call_collective(comm: Comm, op: str, full: torch.Tensor, shard: torch.Tensor) -> Work:
    if op == "all_reduce":
        return comm.all_reduce(full, "probe")
    if op == "all_to_all":
        split_sizes = [shard.numel()] * comm.size
        return comm.all_to_all(torch.empty_like(full), full, "probe", split_sizes, split_sizes)
    return comm.all_gather(full, shard, "probe") if op == "all_gather" else comm.reduce_scatter(shard, full, "probe")


def fit_alpha_beta(samples: list[tuple[float, float]]) -> AlphaBetaModel:
    """α–β by least squares on relative error, so that small messages count as much as large ones."""
    weights = [1.0 / (t * t) for _, t in samples]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, samples, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, samples, strict=True)) / total
    covariance = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, samples, strict=True))
    variance = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, samples, strict=True))
    slope = covariance / variance if variance else 0.0
    if slope <= 0:  # noise larger than the effect: use only the largest message
        size, seconds = samples[-1]
        return AlphaBetaModel(min(t for _, t in samples), size / seconds)
    return AlphaBetaModel(max(mean_t - slope * mean_x, min(t for _, t in samples) * 0.1), 1.0 / slope)


def measure_overlap(comm: Comm, device: torch.device, device_type: str) -> float:
    """The share of a collective that is hidden when it runs beside computation of about the same length."""
    tensor = torch.ones(2**20 if device_type == "cpu" else 2**26, device=device)
    n = 256 if device.type == "cpu" else 2048
    a = torch.randn(n, n, device=device)
    watch = Stopwatch(device, 0.0)  # wall-clock time: ranks that share a core hide nothing

    def mean_seconds(work: Callable[[], object]) -> float:
        comm.barrier()
        return statistics.fmean(watch.time_once(work) for _ in range(7))

    collective_s = mean_seconds(lambda: comm.all_reduce(tensor, "probe").wait())
    matmul_s = mean_seconds(lambda: torch.mm(a, a))
    count = min(max(int(collective_s / max(matmul_s, 1e-7)), 1), 1000)  # per rank: one may compute far faster than another

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, a)

    def both() -> None:
        work = comm.all_reduce(tensor, "probe")
        compute()
        work.wait()

    compute_s, both_s = mean_seconds(compute), mean_seconds(both)
    return min(max((collective_s + compute_s - both_s) / min(collective_s, compute_s), 0.0), 1.0)
