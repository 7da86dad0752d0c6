"""The bandwidth of a group of ranks on the links between them, for a ring and for an all-to-all, its latency, and the bottleneck link.

[Note: counting by kind]
A group's ring is walked once, and its hops are counted by kind: node uplinks, leaf uplinks, links along a torus's first dim. If every other
rank is in a group like this one, as with the groups of a mesh axis, all groups together load the links of a kind as this one does: a link that
carries the outgoing traffic of r ranks is part of r × visits / members rings. So contention among a hundred thousand ranks follows from one group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.core.calibration import AlphaBetaModel
from meshwright.core.node_topology import Link, LinkPath, PathHop

_MAX_EDGES = 1024  # more edges than this are sampled evenly
_LOW_DISCREPANCY = (0.7548776662466927, 0.5698402909980532)  # their multiples, modulo 1, are evenly distributed over a square
_TREE_OPS = ("all_reduce", "broadcast")  # short messages of these go along trees, of the others around rings
COLLECTIVE_LAUNCH_S = 3e-5  # before the first byte moves. Fitted, with the efficiencies of the catalog: docs/decisions/016-clusters.md

Edge = tuple[int, int]
TrafficPattern = Literal["ring", "all_to_all"]


@dataclass(frozen=True)
class GroupBandwidth:
    """A group's bandwidth and latency in one traffic pattern."""

    pattern: TrafficPattern
    ranks: int
    nodes: int
    hops: int  # of the longest path
    switch_hops: int  # of `hops`, those between two switches
    inside_s: float  # latency between two ranks of one node
    between_s: float  # latency between ranks of two nodes
    rate: float  # bytes/s that each rank sends
    slowest: str  # the bottleneck link
    sharing: float  # by how many that link's bandwidth is shared

    @property
    def link(self) -> Link:
        """One link with this group's latency and bandwidth."""
        return Link(self.slowest, max(self.inside_s, self.between_s), self.rate)

    def alpha_beta(self, op: str) -> AlphaBetaModel:
        """The α–β model of one collective of the group."""
        if op in _TREE_OPS:
            way = (self.ranks / self.nodes - 1) * self.inside_s + (self.nodes - 1).bit_length() * self.between_s
        else:
            way = (self.ranks - self.nodes) * self.inside_s + (self.nodes - 1) * self.between_s
        return AlphaBetaModel(COLLECTIVE_LAUNCH_S + (2 if op == "all_reduce" else 1) * way, self.rate)


@dataclass(frozen=True)
class TopologyQueries:
    """The queries that `compute_group_bandwidth` makes on a cluster."""

    path: Callable[[int, int], LinkPath]
    node: Callable[[int], int]
    rings: Callable[[int, int], int]  # (node, members) → rings that run in parallel within it
    world: int  # number of ranks


@dataclass
class _HopUsage:
    """The use of hops of one kind by a group's paths; `hop` is one of these hops."""

    hop: PathHop
    visits: float = 0.0
    keys: Counter[tuple[str | int, ...]] = field(default_factory=Counter)
    source_keys: set[tuple[str | int, ...]] = field(default_factory=set)


def compute_group_bandwidth(
    topology: TopologyQueries, ranks: Sequence[int], pattern: TrafficPattern = "ring", all_groups_active: bool = True
) -> GroupBandwidth:
    """The bandwidth of `ranks`. `all_groups_active`: all other ranks communicate too, in groups like this one; else the network is idle."""
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
    """(bytes/s of one group's rings, rings on one link, the link's name)."""
    hop, load = usage.hop, float(max(usage.keys.values()))
    if all_groups_active:
        load = max(load, hop.source_ranks * usage.visits / group_size)
    rate = hop.bandwidth * (rings if hop.is_dedicated else 1) / load
    return min(rate, hop.lane_bandwidth * min_ranks_per_node) if hop.lane_bandwidth else rate, load, hop.link_name


def _all_to_all_bandwidth(usage: _HopUsage, group_size: int, size: int, all_groups_active: bool) -> tuple[float, float, str]:
    """The same for a uniform all-to-all, from the fraction of a rank's bytes that crosses links of this kind, and the ranks that share one."""
    hop, pairs = usage.hop, group_size * (group_size - 1)
    crossing = usage.visits / pairs
    wires, places = (_estimate_distinct(seen, usage) for seen in (len(usage.keys), len(usage.source_keys)))
    load = crossing * group_size / wires
    if all_groups_active:  # load on the group's own links, or on all links of the kind
        load = max(load, crossing * hop.source_ranks * places / wires, crossing * size / hop.kind_count)
    return min(hop.bandwidth / load, hop.lane_bandwidth / crossing) if hop.lane_bandwidth else hop.bandwidth / load, load, hop.link_name


def _estimate_distinct(sampled: int, usage: _HopUsage) -> float:
    """The number of distinct links, where the sample has `sampled`: draws from w links give w (1 - exp(-draws / w)) distinct ones."""
    draws = usage.keys.total()
    if usage.visits <= draws or sampled >= usage.hop.kind_count:
        return sampled
    low, high = float(sampled), float(usage.hop.kind_count)
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * -math.expm1(-draws / middle) < sampled else (low, middle)
    return low


def _usage_by_kind(paths: Sequence[LinkPath], weights: Sequence[float]) -> list[_HopUsage]:
    """The hops of `paths` by kind; each path counts `weights` times."""
    found: dict[str | int, _HopUsage] = {}
    for path, weight in zip(paths, weights, strict=True):
        for hop in path:
            sort = found.setdefault(hop.kind, _HopUsage(hop))
            sort.visits += weight
            sort.keys[hop.key] += 1
            sort.source_keys.add(hop.source_key)
    return list(found.values())


def _ring_edges(ranks: Sequence[int], nodes: Mapping[int, int]) -> tuple[list[Edge], list[float]]:
    """The ring's edges (or a sample), within nodes and between them, and how many edges each represents."""
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
    """Pairs of (sender, receiver) (or a sample), and how many pairs each represents."""
    count = len(ranks)
    if count * (count - 1) <= _MAX_EDGES:
        edges = [(a, b) for a in ranks for b in ranks if a != b]
    else:
        places = (
            (int(number * _LOW_DISCREPANCY[0] % 1.0 * count), int(number * _LOW_DISCREPANCY[1] % 1.0 * (count - 1))) for number in range(_MAX_EDGES)
        )
        edges = [(ranks[first], ranks[second + (second >= first)]) for first, second in places]
    return edges, [count * (count - 1) / len(edges)] * len(edges)
