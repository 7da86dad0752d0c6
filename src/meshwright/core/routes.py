"""Routes: which calls of a plan go another way than the backend's own that its ranks meet by: over another backend, by another algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.core.backends import backend_traits
from meshwright.core.errors import RequestError, unknown

Algorithm = Literal["flat", "two-level", "shared"]
# What there is beside "flat", the backend's own. See [Note: algorithms] in comm/composed.py.
ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {
    "all_reduce": ("two-level", "shared"),
    "all_gather": ("shared",),
    "reduce_scatter": ("shared",),
}


@dataclass(frozen=True)
class Route:
    """Calls of `op` in which a rank sends at least `sent` bytes go over `backend`, by `algorithm`, up to where the operation's next route begins."""

    op: str
    backend: str
    sent: int = 0
    algorithm: Algorithm = "flat"

    @property
    def way(self) -> str:
        return way_name(self.backend, self.algorithm)


def way_name(backend: str, algorithm: str) -> str:
    """'gloo' for its own collectives, 'gloo:shared' for those through shared memory; measurements have such names too."""
    return backend if algorithm == "flat" else f"{backend}:{algorithm}"


def way_parts(way: str) -> tuple[str, str]:
    backend, _, algorithm = way.partition(":")
    return backend, algorithm or "flat"


def way(routes: Sequence[Route], op: str, sent: float, backend: str) -> str:
    """The way of one call; `backend` itself unless a route says otherwise. It depends on what all ranks know, so they choose alike."""
    begun = [r for r in routes if r.op == op and r.sent <= sent]
    return max(begun, key=lambda r: r.sent).way if begun else backend


def on_nodes(ranks: Sequence[int], nodes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The places of a group's ranks, node by node; `nodes` says how many ranks of the world each node has."""
    starts = [sum(nodes[:i]) for i in range(1, len(nodes))]
    found: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        found.setdefault(sum(rank >= start for start in starts), []).append(place)
    return tuple(map(tuple, found.values()))


def has_levels(ranks: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether a group spans several nodes with equally many, and several, ranks on each."""
    counts = [len(node) for node in on_nodes(ranks, nodes)]
    return len(counts) > 1 and counts[0] > 1 and len(set(counts)) == 1


def applies(algorithm: str, ranks: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether a group can go by it: two levels need two, and memory is shared on one node alone."""
    if algorithm == "two-level":
        return has_levels(ranks, nodes)
    return algorithm != "shared" or len(on_nodes(ranks, nodes)) == 1


def fitting(routes: Sequence[Route], ranks: Sequence[int], nodes: Sequence[int]) -> tuple[Route, ...]:
    """Those that a group can take."""
    return tuple(r for r in routes if applies(r.algorithm, ranks, nodes))


def for_world(routes: Sequence[Route], nodes: Sequence[int], world: int) -> tuple[tuple[Route, ...], tuple[int, ...]]:
    """Both for the first ranks of those that they were made for."""
    cut = [min(n, max(world - sum(nodes[:i]), 0)) for i, n in enumerate(nodes)]
    kept = tuple(n for n in cut if n) if sum(nodes) >= world else ()
    return fitting(routes, range(world), kept), kept


def check_routes(routes: Sequence[Route], backend: str, nodes: Sequence[int], world: int) -> None:
    for route in routes:
        if not (backend_traits(route.backend).routable and backend_traits(backend).routable):
            raise RequestError(
                f"plan: sync.routes join gloo and mpi, and {route.op} goes over {route.backend} in a plan for {backend}: leave them out"
            )
        if route.algorithm != "flat" and route.algorithm not in ALGORITHMS.get(route.op, ()):
            raise unknown("algorithm", route.algorithm, ("flat", *ALGORITHMS.get(route.op, ())), f"plan: sync.routes for {route.op}")
        if route.algorithm == "two-level" and not nodes:
            raise RequestError("plan: sync.routes has two-level, and sync.nodes does not say how many ranks each node has: give them, like [2, 2]")
    if routes and backend_traits(backend).launchers:
        raise RequestError(f"plan: sync.routes need ranks that meet by gloo, and the plan's backend is {backend}: set backend=gloo")
    if nodes and (sum(nodes) != world or min(nodes) < 1):
        raise RequestError(f"plan: sync.nodes {list(nodes)} are {sum(nodes)} ranks, and the mesh has {world}: give as many")
