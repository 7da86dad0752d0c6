"""Benchmarks collectives on a given Comm as nccl-tests and the OSU benchmarks do: every operation by size, timed call by call, results checked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


def measure_collectives(comm: Comm, device: torch.device, operations: Sequence[str], sizes: Sequence[int], budget_s: float) -> list[RankTimings]:
    """Time the operations by size; every rank calls this at the same time. `budget_s` is per operation and size."""
    return measure_routes({"": comm}, device, operations, sizes, budget_s)


def measure_routes(
    routes: Mapping[str, Comm], device: torch.device, operations: Sequence[str], sizes: Sequence[int], budget_s: float
) -> list[RankTimings]:  # fmt: skip
    """`measure_collectives` for several routes of one group, such as gloo and gloo:shared, interleaved, so that a disturbance affects all of them."""
    found: dict[str, list[RankTimings]] = {route: [] for route in routes}
    for op in operations:
        having = {w: comm for w, comm in routes.items() if parse_route_name(w)[1] in ("flat", *ALGORITHMS.get(op, ()))}
        for size in sizes:
            for timed in _measure_size(having, device, op, size, budget_s):
                found[timed.way].append(timed)
    return [timed for of_way in found.values() for timed in of_way]


def merge_ranks(backend: str, timings_by_rank: Sequence[Sequence[RankTimings]]) -> list[CollectiveResult]:
    """The results over all ranks, from every rank's timings."""
    found = []
    for cells in zip(*timings_by_rank, strict=True):
        times = [max(call) for call in zip(*(cell.seconds for cell in cells), strict=True)]
        first, ranks = cells[0], len(cells)
        median = statistics.median(times)
        tail = statistics.quantiles(times, n=100, method="inclusive")
        rate = first.bytes / median
        factor = wire_factor(first.op, ranks)
        correct = all(cell.correct for cell in cells)
        found.append(
            CollectiveResult(first.way or backend, first.op, ranks, first.bytes, len(times), median, tail[94], tail[98], rate, rate * factor, correct)
        )
    return found


def fit_by_operation(points: Sequence[CollectiveResult]) -> dict[str, AlphaBetaModel]:
    """'gloo/all_reduce' → α and β, over the bytes that a rank must send."""
    names = dict.fromkeys((p.backend, p.op) for p in points)
    return {
        f"{backend}/{op}": fit_alpha_beta([(p.bytes * wire_factor(op, p.ranks), p.median_s) for p in points if (p.backend, p.op) == (backend, op)])
        for backend, op in names
    }


def timing_curves(points: Sequence[CollectiveResult]) -> dict[str, SizeCurve]:
    """'gloo:shared/all_reduce' → seconds by size, over the bytes that a rank must send."""
    found: dict[str, list[tuple[float, float]]] = {}
    for p in points:
        found.setdefault(f"{p.backend}/{p.op}", []).append((p.bytes * wire_factor(p.op, p.ranks), p.median_s))
    return {name: tuple(sorted(dict(of_way).items())) for name, of_way in found.items()}


def _measure_size(routes: Mapping[str, Comm], device: torch.device, op: str, size: int, budget_s: float) -> list[RankTimings]:
    cases = {route: _CollectiveCase(comm, device, op, size) for route, comm in routes.items()}
    comm = next(iter(routes.values()))
    correct, took = {}, []
    for route, case in cases.items():
        case.fill_inputs()
        case.start().wait()
        correct[route] = case.is_correct()
        for _ in range(_WARMUP_CALLS):
            comm.barrier()
            begun = time.perf_counter()
            case.start().wait()
        took.append(time.perf_counter() - begun)
    # Every rank must make the same number of calls, or they would deadlock; fast routes make several calls in each round.
    slowest = torch.tensor(took, dtype=torch.float64, device=device)
    comm.all_reduce(slowest, "bench", "max").wait()
    each = {route: max(seconds, 1e-6) for route, seconds in zip(cases, slowest.tolist(), strict=True)}
    counts = {route: int(min(max(budget_s / each[route], _MIN_CALLS), _MAX_CALLS)) for route in cases}
    turns = min(counts.values())
    seconds: dict[str, list[float]] = {route: [] for route in routes}
    for turn in range(turns):
        order = list(cases)[turn % len(cases) :] + list(cases)[: turn % len(cases)]
        for route in (w for w in order for _ in range(counts[w] // turns)):
            comm.barrier()
            begun = time.perf_counter()
            cases[route].start().wait()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[route].append(time.perf_counter() - begun)
    return [RankTimings(op, case.bytes, tuple(seconds[route]), correct[route], route) for route, case in cases.items()]


class _CollectiveCase:
    """Buffers of one size, the collective on them, and the expected result: rank r contributes r + 1 everywhere."""

    def __init__(self, comm: Comm, device: torch.device, op: str, size: int) -> None:
        self._comm, self._op = comm.sync, op
        n = comm.size
        part = max(size // 4 // n, 1) if op not in ("all_reduce", "broadcast", "reduce", "send") else max(size // 4, 1)
        whole = part if op in ("all_reduce", "broadcast", "reduce", "send") else part * n
        self.bytes = whole * 4
        self._full_buffer = torch.empty(whole, device=device)
        needs_other = op in ("all_to_all", "send")
        self._other = (
            torch.empty(whole if needs_other else part, device=device) if op not in ("all_reduce", "broadcast", "reduce") else self._full_buffer
        )
        self._split_sizes = [part] * n

    def fill_inputs(self) -> None:
        mine = float(self._comm.rank + 1)
        if self._op in ("all_gather", "gather"):
            self._other.fill_(mine)
            self._full_buffer.zero_()
        else:
            if self._other is not self._full_buffer:
                self._other.zero_()
            self._full_buffer.fill_(mine)

    def start(self) -> Work:
        comm, whole, other = self._comm, self._full_buffer, self._other
        root = comm.rank == 0
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        routes: dict[str, Callable[[], Work]] = {
            "all_reduce": lambda: comm.all_reduce(whole, "bench"),
            "all_gather": lambda: comm.all_gather(whole, other, "bench"),
            "reduce_scatter": lambda: comm.reduce_scatter(other, whole, "bench"),
            "all_to_all": lambda: comm.all_to_all(other, whole, "bench", self._split_sizes, self._split_sizes),
            "broadcast": lambda: comm.broadcast(whole, "bench"),
            "reduce": lambda: comm.reduce(whole, "bench"),
            "gather": lambda: comm.gather(whole if root else None, other, "bench"),
            "scatter": lambda: comm.scatter(other, whole if root else None, "bench"),
            "send": lambda: comm.exchange([(right, whole)], [(left, other)], "bench"),
        }
        return routes[self._op]()

    def is_correct(self) -> bool:
        """Whether the result of the first call is as expected."""
        n, me = self._comm.size, self._comm.rank
        total, ranks = float(n * (n + 1) // 2), torch.arange(1.0, n + 1, device=self._full_buffer.device)
        everyone = ranks.repeat_interleave(self._split_sizes[0]) if self._op in ("all_gather", "gather", "all_to_all") else ranks
        wanted: dict[str, tuple[torch.Tensor, float | torch.Tensor]] = {
            "all_reduce": (self._full_buffer, total),
            "all_gather": (self._full_buffer, everyone),
            "reduce_scatter": (self._other, total),
            "all_to_all": (self._other, everyone),
            "broadcast": (self._full_buffer, 1.0),
            "reduce": (self._full_buffer if me == 0 else ranks[:1], total if me == 0 else 1.0),
            "gather": (self._full_buffer if me == 0 else ranks[:1], everyone if me == 0 else 1.0),
            "scatter": (self._other, 1.0),
            "send": (self._other, float((me - 1) % n + 1)),
        }
        found, value = wanted[self._op]
        return bool((found == value).all())
