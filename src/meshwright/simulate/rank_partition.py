"""Partitions the ranks of a schedule into classes with identical timing, so that each class is simulated once.

[Note: equivalent ranks]
Ranks start in one class if they share a program, a speed, a failure time and an overlap behaviour. They stay in it only if, in each group that
the program uses, they communicate with ranks of the same classes over links of the same classes; for messages also at the same positions in the
group. Links are in one class if they are equally fast and carry equally many calls of each class. Refining the classes of ranks, calls and links
to a fixed point gives classes whose members have the same times in any deterministic run: data- and tensor-parallel ranks share a class, stages do
not, and a straggler separates only the ranks that it communicates with, directly or indirectly. Since all links of a class carry the same load,
their fair shares are equal, and one link of each class is enough to compute them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from meshwright.core.schedule import Schedule
from meshwright.simulate.call_graph import CallGraph, IntArray, LinkUsage, canonical_ids, find_link_usage, hash_values, splitmix64
from meshwright.simulate.disturbances import Disturbances
from meshwright.simulate.network_model import Network

LinkLoads = Mapping[int, tuple[tuple[int, float], ...]]  # call class → link classes, with the bytes on one such link per byte that a rank sends


@dataclass(frozen=True)
class LinkClasses:
    """The classes of links in one epoch: the capacity of each, and the load that calls put on it."""

    start_s: float
    capacity: tuple[float, ...]
    loads: LinkLoads


@dataclass(frozen=True)
class RankPartition:
    """`class_of[rank]` is a rank's class; `representatives[class]` the first rank of a class, which is simulated for all."""

    class_of: tuple[int, ...]
    representatives: tuple[int, ...]
    call_graph: CallGraph
    call_classes: IntArray = field(repr=False)  # call number → call class
    link_epochs: tuple[LinkClasses, ...] = ()  # in order of time; empty if no links are shared

    def ranks_in(self, rank_class: int) -> list[int]:
        return [rank for rank, mine in enumerate(self.class_of) if mine == rank_class]

    @property
    def class_sizes(self) -> list[int]:
        """Number of ranks in each class."""
        return np.bincount(np.array(self.class_of), minlength=len(self.representatives)).tolist()


def partition_ranks(schedule: Schedule, network: Network, disturbances: Disturbances, *, separate: bool = False) -> RankPartition:
    """The classes of a schedule's ranks; with `separate` every rank is a class."""
    sites = CallGraph(schedule, network)
    crossed = find_link_usage(sites, network, disturbances)
    if separate:
        ranks, edges, links = (np.arange(n) for n in (schedule.world, sites.num_calls, len(crossed.directed_links)))
    else:
        ranks, edges, links = _refine(sites, crossed, _initial_classes(sites, network, disturbances))
    first = np.unique(ranks, return_index=True)[1]
    shared = _link_epochs(crossed, edges, links, disturbances) if crossed.directed_links else ()
    return RankPartition(tuple(ranks.tolist()), tuple(first.tolist()), sites, edges, shared)


def _initial_classes(call_graph: CallGraph, network: Network, disturbances: Disturbances) -> IntArray:
    speeds, deaths = disturbances.slowdowns, disturbances.failure_times
    alike = {rank: (speeds.get(rank, 1.0), deaths.get(rank)) for rank in {*speeds, *deaths}}
    numbers = {sign: at + 1 for at, sign in enumerate(dict.fromkeys(alike.values()))}
    found = call_graph.programs * (len(numbers) + 1)
    for rank, sign in alike.items():
        found[rank] += numbers[sign]
    behaviour = hash_values([network.overlap_behavior(rank) for rank in range(len(found))])
    return canonical_ids(splitmix64(found) + behaviour)


def _refine(call_graph: CallGraph, link_usage: LinkUsage, rank_classes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    edges, links = canonical_ids(hash_values(call_graph.call_signatures)), canonical_ids(hash_values(link_usage.link_signatures))
    known = -1
    while True:
        met = call_graph.sum_by_call.reduce(splitmix64(splitmix64(rank_classes)[call_graph.edge_ranks] + call_graph.edge_roles))
        edges = canonical_ids(
            splitmix64(splitmix64(edges) + met)
            + link_usage.sum_by_call.reduce(splitmix64(splitmix64(links)[link_usage.use_links] + link_usage.use_hashes))
        )
        signs = splitmix64(edges)
        rank_classes = canonical_ids(
            splitmix64(splitmix64(rank_classes) + call_graph.sum_by_rank.reduce(splitmix64(signs[call_graph.edge_calls] + call_graph.edge_roles)))
        )
        links = canonical_ids(
            splitmix64(splitmix64(links) + link_usage.sum_by_link.reduce(splitmix64(signs[link_usage.use_calls] + link_usage.use_hashes)))
        )
        count = sum(int(x.max(initial=-1)) for x in (rank_classes, edges, links))
        if count == known:
            return rank_classes, edges, links
        known = count


def _link_epochs(link_usage: LinkUsage, call_classes: IntArray, link_classes: IntArray, disturbances: Disturbances) -> tuple[LinkClasses, ...]:
    """For each epoch, the capacity of one link of each class and the loads that cross it."""
    first = np.unique(link_classes, return_index=True)[1]
    stands = np.zeros(len(link_classes), dtype=bool)
    stands[first] = True
    found = []
    for number, at in enumerate(disturbances.link_change_times):
        hops = [link_usage.directed_links[i] for i in first]
        capacity = tuple(hop.bandwidth * disturbances.bandwidth_factor(hop.key, at) for hop in hops)
        mine = stands[link_usage.use_links] & (link_usage.use_epochs == number)
        loads: dict[int, dict[int, float]] = {}
        for edge, link, share in zip(
            call_classes[link_usage.use_calls[mine]].tolist(),
            link_classes[link_usage.use_links[mine]].tolist(),
            link_usage.use_loads[mine].tolist(),
            strict=True,
        ):
            on = loads.setdefault(edge, {})
            on[link] = on.get(link, 0.0) + share
        found.append(LinkClasses(at, capacity, {edge: tuple(on.items()) for edge, on in loads.items()}))
    return tuple(found)
