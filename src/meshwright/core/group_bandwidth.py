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
    switch_hops: int  # between two switches, of the path with the most
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
            latency = (self.ranks / self.nodes - 1) * self.inside_s + (self.nodes - 1).bit_length() * self.between_s
        else:
            latency = (self.ranks - self.nodes) * self.inside_s + (self.nodes - 1) * self.between_s
        return AlphaBetaModel(COLLECTIVE_LAUNCH_S + (2 if op == "all_reduce" else 1) * latency, self.rate)


@dataclass(frozen=True)
class TopologyQueries:
    """The queries that `compute_group_bandwidth` makes on a cluster."""

    path: Callable[[int, int], LinkPath]
    node: Callable[[int], int]
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
    counts = Counter(nodes.values()).values()  # ranks on each node
    edges, weights = _all_to_all_edges(order) if pattern == "all_to_all" else _ring_edges(order, nodes)
    paths = [topology.path(*edge) for edge in edges]
    usages = _usage_by_kind(paths, weights)
    if pattern == "ring":
        rings = min((count - 1 for count in counts if count > 1), default=1)
        rate, sharing, slowest = min(_ring_bandwidth(usage, len(order), min(counts), rings, all_groups_active) for usage in usages)
    else:
        rate, sharing, slowest = min(_all_to_all_bandwidth(usage, len(order), topology.world, all_groups_active) for usage in usages)
    latencies = [(nodes[a] == nodes[b], sum(hop.latency_s for hop in path)) for (a, b), path in zip(edges, paths, strict=True)]
    inside_s, between_s = (max((latency for inside, latency in latencies if inside == wanted), default=0.0) for wanted in (True, False))
    switch_hops = max(sum(hop.switches for hop in path) for path in paths)
    return GroupBandwidth(pattern, len(order), len(counts), switch_hops, inside_s, between_s, rate, slowest, sharing)


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
    links, sources = (_estimate_distinct(sampled, usage) for sampled in (len(usage.keys), len(usage.source_keys)))
    load = crossing * group_size / links
    if all_groups_active:  # load on the group's own links, or on all links of the kind
        load = max(load, crossing * hop.source_ranks * sources / links, crossing * size / hop.kind_count)
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
    usages: dict[str | int, _HopUsage] = {}
    for path, weight in zip(paths, weights, strict=True):
        for hop in path:
            usage = usages.setdefault(hop.kind, _HopUsage(hop))
            usage.visits += weight
            usage.keys[hop.key] += 1
            usage.source_keys.add(hop.source_key)
    return list(usages.values())


def _ring_edges(ranks: Sequence[int], nodes: Mapping[int, int]) -> tuple[list[Edge], list[float]]:
    """The ring's edges (or a sample), within nodes and between them, and how many edges each represents."""
    edges: list[Edge] = []
    weights: list[float] = []
    ring = list(zip(ranks, (*ranks[1:], ranks[0]), strict=True))
    for inside in (False, True):
        sample = candidates = [(a, b) for a, b in ring if (nodes[a] == nodes[b]) == inside]
        if len(candidates) > _MAX_EDGES:
            sample = [candidates[int((n + n * _LOW_DISCREPANCY[0] % 1.0) * len(candidates) / _MAX_EDGES)] for n in range(_MAX_EDGES)]
        edges += sample
        weights += [len(candidates) / max(len(sample), 1)] * len(sample)
    return edges, weights


def _all_to_all_edges(ranks: Sequence[int]) -> tuple[list[Edge], list[float]]:
    """Pairs of (sender, receiver) (or a sample), and how many pairs each represents."""
    count = len(ranks)
    if count * (count - 1) <= _MAX_EDGES:
        edges = [(a, b) for a in ranks for b in ranks if a != b]
    else:
        x, y = _LOW_DISCREPANCY
        pairs = ((int(n * x % 1.0 * count), int(n * y % 1.0 * (count - 1))) for n in range(_MAX_EDGES))
        edges = [(ranks[first], ranks[second + (second >= first)]) for first, second in pairs]
    return edges, [count * (count - 1) / len(edges)] * len(edges)
