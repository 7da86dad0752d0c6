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

from meshwright.core.calibration import AlphaBetaModel
from meshwright.core.node_topology import Link, LinkPath, PathHop

_MAX_EDGES = 1024  # edges that are looked at one by one; of more, as many evenly scattered ones
_LOW_DISCREPANCY = (0.7548776662466927, 0.5698402909980532)  # their multiples, modulo 1, scatter evenly over a square
_TREE_OPS = ("all_reduce", "broadcast")  # short messages of these go along trees, of the others around
COLLECTIVE_LAUNCH_S = 3e-5  # before the first byte moves. Fitted, with the efficiencies of the catalog: docs/decisions/016-clusters.md

Edge = tuple[int, int]
TrafficPattern = Literal["ring", "all_to_all"]


@dataclass(frozen=True)
class GroupBandwidth:
    """A group's share of the wires in one pattern of communication."""

    pattern: TrafficPattern
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

    def alpha_beta(self, op: str) -> AlphaBetaModel:
        """α–β of one collective among them."""
        if op in _TREE_OPS:
            way = (self.ranks / self.nodes - 1) * self.inside_s + (self.nodes - 1).bit_length() * self.between_s
        else:
            way = (self.ranks - self.nodes) * self.inside_s + (self.nodes - 1) * self.between_s
        return AlphaBetaModel(COLLECTIVE_LAUNCH_S + (2 if op == "all_reduce" else 1) * way, self.rate)


@dataclass(frozen=True)
class TopologyQueries:
    """What reach() asks of a cluster."""

    path: Callable[[int, int], LinkPath]
    node: Callable[[int], int]
    rings: Callable[[int, int], int]  # (node, members) → rings that run side by side within it
    world: int  # ranks in all


@dataclass
class _HopUsage:
    """The hops of one sort that were seen; `hop` is one of them."""

    hop: PathHop
    visits: float = 0.0
    keys: Counter[tuple[str | int, ...]] = field(default_factory=Counter)
    source_keys: set[tuple[str | int, ...]] = field(default_factory=set)


def compute_group_bandwidth(
    topology: TopologyQueries, ranks: Sequence[int], pattern: TrafficPattern = "ring", all_groups_active: bool = True
) -> GroupBandwidth:
    """What `ranks` get. `all_groups_active`: all other ranks are at it too, in groups like this one; else these are alone on the network."""
    order = sorted(ranks)
    nodes = {rank: topology.node(rank) for rank in order}
    held = Counter(nodes.values())
    edges, stand_for = _all_to_all_edges(order) if pattern == "all_to_all" else _ring_edges(order, nodes)
    paths = [topology.path(*edge) for edge in edges]
    sorts = _usage_by_kind(paths, stand_for)
    if pattern == "ring":
        rings = topology.rings(nodes[order[0]], min(m for m in held.values() if m > 1)) if len(held) < len(order) else 1
        rate, sharing, slowest = min(_ring_bandwidth(sort, len(order), min(held.values()), rings, all_groups_active) for sort in sorts)
    else:
        rate, sharing, slowest = min(_all_to_all_bandwidth(sort, len(order), topology.world, all_groups_active) for sort in sorts)
    delays = [(nodes[a] == nodes[b], sum(hop.latency_s for hop in path)) for (a, b), path in zip(edges, paths, strict=True)]
    return GroupBandwidth(
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


def _ring_bandwidth(usage: _HopUsage, group_size: int, min_ranks_per_node: int, rings: int, all_groups_active: bool) -> tuple[float, float, str]:
    """(bytes/s of one group's rings, rings on one wire, the wire's name)."""
    hop, load = usage.hop, float(max(usage.keys.values()))
    if all_groups_active:
        load = max(load, hop.source_ranks * usage.visits / group_size)
    rate = hop.bandwidth * (rings if hop.is_dedicated else 1) / load
    return min(rate, hop.lane_bandwidth * min_ranks_per_node) if hop.lane_bandwidth else rate, load, hop.link_name


def _all_to_all_bandwidth(usage: _HopUsage, group_size: int, size: int, all_groups_active: bool) -> tuple[float, float, str]:
    """The same while all send to all, as much to each: of a rank's bytes, how many pass such a wire, and how many ranks have it."""
    hop, pairs = usage.hop, group_size * (group_size - 1)
    crossing = usage.visits / pairs
    wires, places = (_estimate_distinct(seen, usage) for seen in (len(usage.keys), len(usage.source_keys)))
    load = crossing * group_size / wires
    if all_groups_active:  # as the group's own wires have it, or as all wires of the sort do
        load = max(load, crossing * hop.source_ranks * places / wires, crossing * size / hop.kind_count)
    return min(hop.bandwidth / load, hop.lane_bandwidth / crossing) if hop.lane_bandwidth else hop.bandwidth / load, load, hop.link_name


def _estimate_distinct(sampled: int, usage: _HopUsage) -> float:
    """How many different ones there are, where `sampled` were among those looked at: draws from w give w (1 - exp(-draws / w)) different ones."""
    draws = usage.keys.total()
    if usage.visits <= draws or sampled >= usage.hop.kind_count:
        return sampled
    low, high = float(sampled), float(usage.hop.kind_count)
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * -math.expm1(-draws / middle) < sampled else (low, middle)
    return low


def _usage_by_kind(paths: Sequence[LinkPath], weights: Sequence[float]) -> list[_HopUsage]:
    """The hops of `paths` by sort; each path stands for so many like it."""
    found: dict[str | int, _HopUsage] = {}
    for path, weight in zip(paths, weights, strict=True):
        for hop in path:
            sort = found.setdefault(hop.kind, _HopUsage(hop))
            sort.visits += weight
            sort.keys[hop.key] += 1
            sort.source_keys.add(hop.source_key)
    return list(found.values())


def _ring_edges(ranks: Sequence[int], nodes: Mapping[int, int]) -> tuple[list[Edge], list[float]]:
    """The ring's edges, within nodes and between them, and how many each stands for."""
    edges: list[Edge] = []
    weights: list[float] = []
    both: tuple[list[Edge], list[Edge]] = ([], [])
    for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
        both[nodes[a] == nodes[b]].append((a, b))
    for every in both:
        some = (
            every
            if len(every) <= _MAX_EDGES
            else [every[int((n + n * _LOW_DISCREPANCY[0] % 1.0) * len(every) / _MAX_EDGES)] for n in range(_MAX_EDGES)]
        )
        edges += some
        weights += [len(every) / max(len(some), 1)] * len(some)
    return edges, weights


def _all_to_all_edges(ranks: Sequence[int]) -> tuple[list[Edge], list[float]]:
    """Who sends to whom, and how many such pairs each stands for."""
    count = len(ranks)
    if count * (count - 1) <= _MAX_EDGES:
        edges = [(a, b) for a in ranks for b in ranks if a != b]
    else:
        places = (
            (int(number * _LOW_DISCREPANCY[0] % 1.0 * count), int(number * _LOW_DISCREPANCY[1] % 1.0 * (count - 1))) for number in range(_MAX_EDGES)
        )
        edges = [(ranks[first], ranks[second + (second >= first)]) for first, second in places]
    return edges, [count * (count - 1) / len(edges)] * len(edges)
