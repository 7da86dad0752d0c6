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
        return [rank for rank, number in enumerate(self.class_of) if number == rank_class]

    @property
    def class_sizes(self) -> list[int]:
        """Number of ranks in each class."""
        return np.bincount(np.array(self.class_of), minlength=len(self.representatives)).tolist()


def partition_ranks(schedule: Schedule, network: Network, disturbances: Disturbances, *, separate: bool = False) -> RankPartition:
    """The classes of a schedule's ranks; with `separate` every rank is a class."""
    call_graph = CallGraph(schedule, network)
    usage = find_link_usage(call_graph, network, disturbances)
    if separate:
        ranks, calls, links = (np.arange(n) for n in (schedule.world, call_graph.num_calls, len(usage.directed_links)))
    else:
        ranks, calls, links = _refine(call_graph, usage, _initial_classes(call_graph, network, disturbances))
    representatives = np.unique(ranks, return_index=True)[1]
    epochs = _link_epochs(usage, calls, links, disturbances) if usage.directed_links else ()
    return RankPartition(tuple(ranks.tolist()), tuple(representatives.tolist()), call_graph, calls, epochs)


def _initial_classes(call_graph: CallGraph, network: Network, disturbances: Disturbances) -> IntArray:
    slowdowns, failures = disturbances.slowdowns, disturbances.failure_times
    disturbed = {rank: (slowdowns.get(rank, 1.0), failures.get(rank)) for rank in {*slowdowns, *failures}}
    numbers = {disturbance: number for number, disturbance in enumerate(dict.fromkeys(disturbed.values()), 1)}
    classes = call_graph.programs * (len(numbers) + 1)
    for rank, disturbance in disturbed.items():
        classes[rank] += numbers[disturbance]
    return canonical_ids(splitmix64(classes) + hash_values([network.overlap_behavior(rank) for rank in range(len(classes))]))


def _refine(graph: CallGraph, usage: LinkUsage, ranks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The classes of ranks, calls and links, refined from the initial classes of `ranks` until their number stays the same."""
    calls, links = canonical_ids(hash_values(graph.call_signatures)), canonical_ids(hash_values(usage.link_signatures))
    before = -1
    while True:
        by_ranks = graph.sum_by_call.reduce(splitmix64(splitmix64(ranks)[graph.edge_ranks] + graph.edge_roles))
        by_links = usage.sum_by_call.reduce(splitmix64(splitmix64(links)[usage.use_links] + usage.use_hashes))
        calls = canonical_ids(splitmix64(splitmix64(calls) + by_ranks) + by_links)
        hashes = splitmix64(calls)
        ranks = canonical_ids(splitmix64(splitmix64(ranks) + graph.sum_by_rank.reduce(splitmix64(hashes[graph.edge_calls] + graph.edge_roles))))
        links = canonical_ids(splitmix64(splitmix64(links) + usage.sum_by_link.reduce(splitmix64(hashes[usage.use_calls] + usage.use_hashes))))
        count = sum(int(ids.max(initial=-1)) for ids in (ranks, calls, links))
        if count == before:
            return ranks, calls, links
        before = count


def _link_epochs(usage: LinkUsage, call_classes: IntArray, link_classes: IntArray, disturbances: Disturbances) -> tuple[LinkClasses, ...]:
    """For each epoch, the capacity of one link of each class and the loads that cross it."""
    first = np.unique(link_classes, return_index=True)[1]
    is_first = np.zeros(len(link_classes), dtype=bool)
    is_first[first] = True
    links = [usage.directed_links[i] for i in first]
    epochs = []
    for number, start in enumerate(disturbances.link_change_times):
        capacity = tuple(link.bandwidth * disturbances.bandwidth_factor(link.key, start) for link in links)
        used = is_first[usage.use_links] & (usage.use_epochs == number)
        columns = (call_classes[usage.use_calls[used]], link_classes[usage.use_links[used]], usage.use_loads[used])
        loads: dict[int, dict[int, float]] = {}
        for call_class, link_class, load in zip(*(column.tolist() for column in columns), strict=True):
            by_link = loads.setdefault(call_class, {})
            by_link[link_class] = by_link.get(link_class, 0.0) + load
        epochs.append(LinkClasses(start, capacity, {call_class: tuple(by_link.items()) for call_class, by_link in loads.items()}))
    return tuple(epochs)
