"""Routes: which calls of a plan use another backend than the plan's process group, or another algorithm than that backend's own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from meshwright.core.backends import backend_traits
from meshwright.core.errors import RequestError, unknown_name_error

Algorithm = Literal["flat", "two-level", "shared"]
# Algorithms other than "flat", the backend's own. See [Note: algorithms] in comm/composed_collectives.py.
ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {"all_reduce": ("two-level", "shared"), "all_gather": ("shared",), "reduce_scatter": ("shared",)}


@dataclass(frozen=True)
class Route:
    """Calls of `op` in which a rank sends at least `min_sent_bytes` bytes use `backend` and `algorithm`, up to the size at which the operation's
    next route begins."""

    op: str
    backend: str
    min_sent_bytes: int = 0
    algorithm: Algorithm = "flat"

    @property
    def route_name(self) -> str:
        return route_name(self.backend, self.algorithm)


def route_name(backend: str, algorithm: str) -> str:
    """'gloo' for the backend's own collectives, 'gloo:shared' for those through shared memory; measurements have the same names."""
    return backend if algorithm == "flat" else f"{backend}:{algorithm}"


def parse_route_name(route: str) -> tuple[str, str]:
    backend, _, algorithm = route.partition(":")
    return backend, algorithm or "flat"


def choose_route(routes: Sequence[Route], op: str, sent_bytes: float, backend: str) -> str:
    """The route of one call; `backend` itself unless a route applies. It depends only on what all ranks know, so they choose the same."""
    candidates = [r for r in routes if r.op == op and r.min_sent_bytes <= sent_bytes]
    return max(candidates, key=lambda r: r.min_sent_bytes).route_name if candidates else backend


def group_by_node(ranks: Sequence[int], ranks_per_node: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The group indices of a group's ranks, node by node; `ranks_per_node` is how many ranks of the world each node has."""
    starts = list(accumulate(ranks_per_node[:-1]))  # the first rank of every node but the first
    by_node: dict[int, list[int]] = {}
    for index, rank in enumerate(ranks):
        by_node.setdefault(bisect_right(starts, rank), []).append(index)
    return tuple(map(tuple, by_node.values()))


def has_two_levels(ranks: Sequence[int], ranks_per_node: Sequence[int]) -> bool:
    """Whether a group spans several nodes with equally many, and several, ranks on each."""
    counts = [len(node) for node in group_by_node(ranks, ranks_per_node)]
    return len(counts) > 1 and counts[0] > 1 and len(set(counts)) == 1


def is_applicable(algorithm: str, ranks: Sequence[int], ranks_per_node: Sequence[int]) -> bool:
    """Whether a group can use the algorithm: two-level needs two levels, and shared memory a single node."""
    if algorithm == "two-level":
        return has_two_levels(ranks, ranks_per_node)
    return algorithm != "shared" or len(group_by_node(ranks, ranks_per_node)) == 1


def applicable_routes(routes: Sequence[Route], ranks: Sequence[int], ranks_per_node: Sequence[int]) -> tuple[Route, ...]:
    """The routes that a group can use."""
    return tuple(r for r in routes if is_applicable(r.algorithm, ranks, ranks_per_node))


def routes_for_world(routes: Sequence[Route], ranks_per_node: Sequence[int], world: int) -> tuple[tuple[Route, ...], tuple[int, ...]]:
    """Routes and ranks per node, reduced to the first `world` ranks of those they were made for."""
    counts = (min(n, max(world - sum(ranks_per_node[:i]), 0)) for i, n in enumerate(ranks_per_node))
    reduced = tuple(n for n in counts if n) if sum(ranks_per_node) >= world else ()
    return applicable_routes(routes, range(world), reduced), reduced


def check_routes(routes: Sequence[Route], backend: str, ranks_per_node: Sequence[int], world: int) -> None:
    for route in routes:
        if not (backend_traits(route.backend).routable and backend_traits(backend).routable):
            where = f"{route.op} uses {route.backend} in a plan for {backend}"
            raise RequestError(f"plan: sync.routes are for gloo and mpi, and {where}: leave sync.routes out")
        if route.algorithm != "flat" and route.algorithm not in ALGORITHMS.get(route.op, ()):
            raise unknown_name_error("algorithm", route.algorithm, ("flat", *ALGORITHMS.get(route.op, ())), f"plan: sync.routes for {route.op}")
        if route.algorithm == "two-level" and not ranks_per_node:
            raise RequestError("plan: a two-level route needs the number of ranks on each node: give sync.ranks_per_node, like [2, 2]")
    if routes and backend_traits(backend).launchers:
        raise RequestError(f"plan: sync.routes need process groups over gloo, and the plan's backend is {backend}: set backend=gloo")
    if ranks_per_node and (sum(ranks_per_node) != world or min(ranks_per_node) < 1):
        given = f"{list(ranks_per_node)} has {sum(ranks_per_node)} ranks"
        raise RequestError(f"plan: sync.ranks_per_node={given}, and the mesh has {world}: give positive numbers that sum to {world}")
