"""Benchmarks collectives on a given Comm as nccl-tests and the OSU benchmarks do: every operation by size, timed call by call, results checked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from meshwright.core.calibration import AlphaBetaModel, SizeCurve
from meshwright.core.comm import Comm, Work
from meshwright.core.routes import ALGORITHMS, parse_route_name
from meshwright.core.schedule import wire_factor
from meshwright.describe.collective_probe import fit_alpha_beta

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send")
_MIN_CALLS, _MAX_CALLS = 5, 200  # calls per size
_WARMUP_CALLS = 2
BUFFERS_PER_RANK = 2.5  # full-size tensors that a rank holds during a benchmark, with the backend's copies


@dataclass(frozen=True)
class RankTimings:
    """One rank's timings of one operation and size."""

    op: str
    bytes: int
    seconds: tuple[float, ...]
    correct: bool
    way: str = ""  # route such as gloo:shared, where several were measured


@dataclass(frozen=True)
class CollectiveResult:
    """Timings merged over all ranks: a call lasts until the slowest rank is done. Bandwidths as nccl-tests defines them."""

    backend: str  # or backend:algorithm
    op: str
    ranks: int
    bytes: int
    calls: int
    median_s: float
    p95_s: float
    p99_s: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    correct: bool


def measure_routes(
    routes: Mapping[str, Comm], device: torch.device, operations: Sequence[str], sizes: Sequence[int], budget_s: float
) -> list[RankTimings]:  # fmt: skip
    """Time the operations by size; every rank calls this at the same time. `budget_s` is per operation and size. Calls of several routes of one
    group, such as gloo and gloo:shared, are interleaved, so that a disturbance affects all of them."""
    timings: dict[str, list[RankTimings]] = {route: [] for route in routes}
    for op in operations:
        supported = {route: comm for route, comm in routes.items() if parse_route_name(route)[1] in ("flat", *ALGORITHMS.get(op, ()))}
        for size in sizes:
            for timing in _measure_size(supported, device, op, size, budget_s):
                timings[timing.way].append(timing)
    return list(chain.from_iterable(timings.values()))


def merge_ranks(backend: str, timings_by_rank: Sequence[Sequence[RankTimings]]) -> list[CollectiveResult]:
    """The results over all ranks, from every rank's timings."""
    results = []
    for timings in zip(*timings_by_rank, strict=True):
        times = [max(call) for call in zip(*(timing.seconds for timing in timings), strict=True)]
        first, ranks, calls = timings[0], len(timings), len(times)
        median = statistics.median(times)
        percentiles = statistics.quantiles(times, n=100, method="inclusive")
        rate = first.bytes / median
        bandwidths, correct = (rate, rate * wire_factor(first.op, ranks)), all(timing.correct for timing in timings)
        seconds = median, percentiles[94], percentiles[98]
        results.append(CollectiveResult(first.way or backend, first.op, ranks, first.bytes, calls, *seconds, *bandwidths, correct))
    return results


def fit_by_operation(points: Sequence[CollectiveResult]) -> dict[str, AlphaBetaModel]:
    """'gloo/all_reduce' → α and β, over the bytes that a rank must send."""
    return {name: fit_alpha_beta(samples) for name, samples in _samples_by_name(points).items()}


def timing_curves(points: Sequence[CollectiveResult]) -> dict[str, SizeCurve]:
    """'gloo:shared/all_reduce' → seconds by size, over the bytes that a rank must send."""
    return {name: tuple(sorted(dict(samples).items())) for name, samples in _samples_by_name(points).items()}


def _samples_by_name(points: Sequence[CollectiveResult]) -> dict[str, list[tuple[float, float]]]:
    samples: dict[str, list[tuple[float, float]]] = {}
    for p in points:
        samples.setdefault(f"{p.backend}/{p.op}", []).append((p.bytes * wire_factor(p.op, p.ranks), p.median_s))
    return samples


def _measure_size(routes: Mapping[str, Comm], device: torch.device, op: str, size: int, budget_s: float) -> list[RankTimings]:
    cases = {route: _CollectiveCase(comm, device, op, size) for route, comm in routes.items()}
    comm = next(iter(routes.values()))
    correct, warmup_seconds = {}, []
    for route, case in cases.items():
        case.fill_inputs()
        case.start().wait()
        correct[route] = case.is_correct()
        for _ in range(_WARMUP_CALLS):
            comm.barrier()
            start = time.perf_counter()
            case.start().wait()
        warmup_seconds.append(time.perf_counter() - start)
    # Every rank must make the same number of calls, or they would deadlock; fast routes make several calls in each round.
    slowest = torch.tensor(warmup_seconds, dtype=torch.float64, device=device)
    comm.all_reduce(slowest, "bench", "max").wait()
    calls = {route: int(min(max(budget_s / max(s, 1e-6), _MIN_CALLS), _MAX_CALLS)) for route, s in zip(cases, slowest.tolist(), strict=True)}
    rounds = min(calls.values())
    seconds: dict[str, list[float]] = {route: [] for route in routes}
    for i in range(rounds):
        order = list(cases)[i % len(cases) :] + list(cases)[: i % len(cases)]
        for route in (r for r in order for _ in range(calls[r] // rounds)):
            comm.barrier()
            start = time.perf_counter()
            cases[route].start().wait()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[route].append(time.perf_counter() - start)
    return [RankTimings(op, case.bytes, tuple(seconds[route]), correct[route], route) for route, case in cases.items()]


class _CollectiveCase:
    """Buffers of one size, the collective on them, and the expected result: rank r contributes r + 1 everywhere."""

    def __init__(self, comm: Comm, device: torch.device, op: str, size: int) -> None:
        self._comm, self._op = comm.sync, op
        shards = 1 if op in ("all_reduce", "broadcast", "reduce", "send") else comm.size
        shard = max(size // 4 // shards, 1)
        self.bytes = 4 * shard * shards
        self._full = torch.empty(shard * shards, device=device)
        self._other = self._full  # the other operand: another full tensor, a shard, or none for operations in place
        if op not in ("all_reduce", "broadcast", "reduce"):
            self._other = torch.empty_like(self._full) if op in ("all_to_all", "send") else torch.empty(shard, device=device)
        self._split_sizes = [shard] * comm.size

    def fill_inputs(self) -> None:
        source, target = (self._other, self._full) if self._op in ("all_gather", "gather") else (self._full, self._other)
        target.zero_()
        source.fill_(float(self._comm.rank + 1))

    def start(self) -> Work:
        comm, full, other = self._comm, self._full, self._other
        root = comm.rank == 0
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        calls: dict[str, Callable[[], Work]] = {
            "all_reduce": lambda: comm.all_reduce(full, "bench"),
            "all_gather": lambda: comm.all_gather(full, other, "bench"),
            "reduce_scatter": lambda: comm.reduce_scatter(other, full, "bench"),
            "all_to_all": lambda: comm.all_to_all(other, full, "bench", self._split_sizes, self._split_sizes),
            "broadcast": lambda: comm.broadcast(full, "bench"),
            "reduce": lambda: comm.reduce(full, "bench"),
            "gather": lambda: comm.gather(full if root else None, other, "bench"),
            "scatter": lambda: comm.scatter(other, full if root else None, "bench"),
            "send": lambda: comm.exchange([(right, full)], [(left, other)], "bench"),
        }
        return calls[self._op]()

    def is_correct(self) -> bool:
        """Whether the result of the first call is as expected."""
        n, rank, full = self._comm.size, self._comm.rank, self._full
        if self._op in ("reduce", "gather") and rank:
            return True  # only rank 0 has a result
        total, ranks = float(n * (n + 1) // 2), torch.arange(1.0, n + 1, device=full.device)
        gathered = ranks.repeat_interleave(self._split_sizes[0]) if self._op in ("all_gather", "gather", "all_to_all") else ranks
        expected: dict[str, tuple[torch.Tensor, float | torch.Tensor]] = {
            "all_reduce": (full, total),
            "all_gather": (full, gathered),
            "reduce_scatter": (self._other, total),
            "all_to_all": (self._other, gathered),
            "broadcast": (full, 1.0),
            "reduce": (full, total),
            "gather": (full, gathered),
            "scatter": (self._other, 1.0),
            "send": (self._other, float((rank - 1) % n + 1)),
        }
        result, value = expected[self._op]
        return bool((result == value).all())
