"""What a group of ranks gets of the wires between them: bandwidth for a ring and for an all-to-all, latency, and the wire that decides.

[Note: counting by sort]
A group's ring is walked once, and its hops are counted by sort: node uplinks, leaf uplinks, wires along a torus's first dim. If every other
rank is in a group like this one, as with the groups of a mesh axis, all of them together use a sort's wires as this one does: a wire by which r
ranks leave carries r × visits / members rings. So contention among a hundred thousand ranks follows from one group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.core.calibration import Line
from meshwright.core.topology import Hop, Link, Path

_MOST = 1024  # edges that are looked at one by one; of more, as many evenly scattered ones
_EVEN = (0.7548776662466927, 0.5698402909980532)  # their multiples, modulo 1, scatter evenly over a square
_TREES = ("all_reduce", "broadcast")  # short messages of these go along trees, of the others around
LAUNCH_S = 3e-5  # before the first byte moves. Fitted, with the efficiencies of the catalog: docs/decisions/016-clusters.md

Edge = tuple[int, int]
Pattern = Literal["ring", "all_to_all"]


@dataclass(frozen=True)
class Reach:
    """A group's share of the wires in one pattern of communication."""

    pattern: Pattern
    ranks: int
    nodes: int
    hops: int  # of the longest path
    switch_hops: int  # of these, between two switches
    inside_s: float  # latency between two of one node
    between_s: float  # and of two nodes
    rate: float  # bytes/s that each rank sends
    slowest: str  # the link that decides it
    sharing: float  # of that link's bandwidth, one rank's share is one in so many

    @property
    def link(self) -> Link:
        """As if one link joined them all."""
        return Link(self.slowest, max(self.inside_s, self.between_s), self.rate)

    def line(self, op: str) -> Line:
        """α–β of one collective among them."""
        if op in _TREES:
            way = (self.ranks / self.nodes - 1) * self.inside_s + (self.nodes - 1).bit_length() * self.between_s
        else:
            way = (self.ranks - self.nodes) * self.inside_s + (self.nodes - 1) * self.between_s
        return Line(LAUNCH_S + (2 if op == "all_reduce" else 1) * way, self.rate)


@dataclass(frozen=True)
class Ways:
    """What reach() asks of a cluster."""

    path: Callable[[int, int], Path]
    node: Callable[[int], int]
    rings: Callable[[int, int], int]  # (node, members) → rings that run side by side within it
    size: int  # ranks in all


@dataclass
class _Sort:
    """The hops of one sort that were seen; `hop` is one of them."""

    hop: Hop
    visits: float = 0.0
    keys: Counter[tuple[str | int, ...]] = field(default_factory=Counter)
    places: set[tuple[str | int, ...]] = field(default_factory=set)


def reach(ways: Ways, ranks: Sequence[int], pattern: Pattern = "ring", everyone: bool = True) -> Reach:
    """What `ranks` get. `everyone`: all other ranks are at it too, in groups like this one; else these are alone on the network."""
    order = sorted(ranks)
    nodes = {rank: ways.node(rank) for rank in order}
    held = Counter(nodes.values())
    edges, stand_for = _pairs(order) if pattern == "all_to_all" else _around(order, nodes)
    paths = [ways.path(*edge) for edge in edges]
    sorts = _sorts(paths, stand_for)
    if pattern == "ring":
        rings = ways.rings(nodes[order[0]], min(m for m in held.values() if m > 1)) if len(held) < len(order) else 1
        rate, sharing, slowest = min(_ring_share(sort, len(order), min(held.values()), rings, everyone) for sort in sorts)
    else:
        rate, sharing, slowest = min(_pairs_share(sort, len(order), ways.size, everyone) for sort in sorts)
    delays = [(nodes[a] == nodes[b], sum(hop.latency_s for hop in path)) for (a, b), path in zip(edges, paths, strict=True)]
    return Reach(
        pattern=pattern,
        ranks=len(order),
        nodes=len(held),
        hops=max(map(len, paths)),
        switch_hops=max(sum(hop.switches for hop in path) for path in paths),
        inside_s=max((delay for near, delay in delays if near), default=0.0),
        between_s=max((delay for near, delay in delays if not near), default=0.0),
        rate=rate,
        slowest=slowest,
        sharing=sharing,
    )


def _ring_share(sort: _Sort, members: int, fewest: int, rings: int, everyone: bool) -> tuple[float, float, str]:
    """(bytes/s of one group's rings, rings on one wire, the wire's name)."""
    hop, load = sort.hop, float(max(sort.keys.values()))
    if everyone:
        load = max(load, hop.ranks * sort.visits / members)
    rate = hop.bandwidth * (rings if hop.own else 1) / load
    return min(rate, hop.lane * fewest) if hop.lane else rate, load, hop.link


def _pairs_share(sort: _Sort, members: int, size: int, everyone: bool) -> tuple[float, float, str]:
    """The same while all send to all, as much to each: of a rank's bytes, how many pass such a wire, and how many ranks have it."""
    hop, pairs = sort.hop, members * (members - 1)
    crossing = sort.visits / pairs
    wires, places = (_distinct(seen, sort) for seen in (len(sort.keys), len(sort.places)))
    load = crossing * members / wires
    if everyone:  # as the group's own wires have it, or as all wires of the sort do
        load = max(load, crossing * hop.ranks * places / wires, crossing * size / hop.alike)
    return min(hop.bandwidth / load, hop.lane / crossing) if hop.lane else hop.bandwidth / load, load, hop.link


def _distinct(seen: int, sort: _Sort) -> float:
    """How many different ones there are, where `seen` were among those looked at: draws from w give w (1 - exp(-draws / w)) different ones."""
    draws = sort.keys.total()
    if sort.visits <= draws or seen >= sort.hop.alike:
        return seen
    low, high = float(seen), float(sort.hop.alike)
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * -math.expm1(-draws / middle) < seen else (low, middle)
    return low


def _sorts(paths: Sequence[Path], stand_for: Sequence[float]) -> list[_Sort]:
    """The hops of `paths` by sort; each path stands for so many like it."""
    found: dict[str | int, _Sort] = {}
    for path, weight in zip(paths, stand_for, strict=True):
        for hop in path:
            sort = found.setdefault(hop.sort, _Sort(hop))
            sort.visits += weight
            sort.keys[hop.key] += 1
            sort.places.add(hop.near)
    return list(found.values())


def _around(order: Sequence[int], nodes: Mapping[int, int]) -> tuple[list[Edge], list[float]]:
    """The ring's edges, within nodes and between them, and how many each stands for."""
    edges: list[Edge] = []
    weights: list[float] = []
    both: tuple[list[Edge], list[Edge]] = ([], [])
    for a, b in zip(order, (*order[1:], order[0]), strict=True):
        both[nodes[a] == nodes[b]].append((a, b))
    for every in both:
        some = every if len(every) <= _MOST else [every[int((n + n * _EVEN[0] % 1.0) * len(every) / _MOST)] for n in range(_MOST)]
        edges += some
        weights += [len(every) / max(len(some), 1)] * len(some)
    return edges, weights


def _pairs(order: Sequence[int]) -> tuple[list[Edge], list[float]]:
    """Who sends to whom, and how many such pairs each stands for."""
    count = len(order)
    if count * (count - 1) <= _MOST:
        edges = [(a, b) for a in order for b in order if a != b]
    else:
        places = ((int(number * _EVEN[0] % 1.0 * count), int(number * _EVEN[1] % 1.0 * (count - 1))) for number in range(_MOST))
        edges = [(order[first], order[second + (second >= first)]) for first, second in places]
    return edges, [count * (count - 1) / len(edges)] * len(edges)
