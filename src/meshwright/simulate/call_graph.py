"""The calls of a schedule as a graph in arrays: which ranks take part in which collective or message, and which links each of these crosses.

A hundred thousand ranks make some hundred thousand calls; with arrays, partition refinement (rank_partition.py) takes moments. Classes are
distinguished by sums of 64-bit hashes; even at that size the probability of a collision is about 10^-8.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.core.schedule import COLLECTIVE_OPS, Schedule
from meshwright.simulate.disturbances import Disturbances
from meshwright.simulate.network_model import Network, traffic_pattern
from meshwright.simulate.network_topology import DirectedLink

IntArray = NDArray[np.int64]
HashArray = NDArray[np.uint64]
CallKey = tuple[str, str, int, int]  # pattern, axis, and either the group's number and -1, or the two ranks of a message


class CallGraph:
    """The numbered calls of a schedule: one for each group and pattern, and for each pair that sends. `edge_ranks`, `edge_calls` and `edge_roles`
    list which rank takes part in which call in which role."""

    def __init__(self, schedule: Schedule, network: Network) -> None:
        self.schedule = schedule
        self.programs: IntArray = np.array([schedule.program_of_rank.get(str(rank), 0) for rank in range(schedule.world)], dtype=np.int64)
        self._tables = {axis: _GroupTable(groups, schedule.world) for axis, groups in schedule.groups.items()}
        self._first_call: dict[tuple[str, str], int] = {}  # pattern and axis of collectives → the number of their first group's call
        self._message_calls: dict[CallKey, int] = {}
        self.call_signatures: list[Hashable] = []
        self.calls: list[tuple[str, tuple[int, ...]]] = []  # operation and ranks
        none = np.zeros(0, dtype=np.int64)
        edges = [(none, none, 0), *self._add_collectives(network), *self._add_messages(network)]
        self.edge_ranks, self.edge_calls = (np.concatenate([e[i] for e in edges]) for i in (0, 1))
        self.edge_roles: HashArray = np.concatenate([np.full(len(ranks), role, dtype=np.uint64) for ranks, _, role in edges])
        self.num_calls = len(self.calls)
        self.sum_by_call, self.sum_by_rank = SegmentSum(self.edge_calls, self.num_calls), SegmentSum(self.edge_ranks, schedule.world)

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        return self.schedule.groups[axis][self._tables[axis].group_of_rank[rank]]

    def call_number(self, op: str, axis: str, source: int, target: int = -1) -> int:
        """The number of the collective of `source`'s group, or of the message from `source` to `target`."""
        pattern = traffic_pattern(op)
        if pattern == "message":
            return self._message_calls[pattern, axis, source, target]
        return self._first_call[pattern, axis] + int(self._tables[axis].group_of_rank[source])

    def _add_collectives(self, network: Network) -> Iterator[tuple[IntArray, IntArray, int]]:
        for axis, op in dict.fromkeys((a.axis, a.op) for program in self.schedule.programs for a in program if a.op in COLLECTIVE_OPS):
            pattern = traffic_pattern(op)
            if (pattern, axis) in self._first_call or axis not in self._tables:
                continue
            table, start = self._tables[axis], len(self.calls)
            self._first_call[pattern, axis] = start
            for group in table.groups:
                self._add_call(pattern, axis, op, group, network)
            rows, columns = np.nonzero(table.members >= 0)
            yield table.members[rows, columns], rows + start, _fnv1a(pattern, axis)

    def _add_messages(self, network: Network) -> Iterator[tuple[IntArray, IntArray, int]]:
        for number, program in enumerate(self.schedule.programs):
            for axis, peer in dict.fromkeys((a.axis, a.peer) for a in program if a.op == "send" and a.axis in self._tables):
                table = self._tables[axis]
                sources = np.nonzero((self.programs == number) & (table.group_of_rank >= 0))[0]
                targets = table.members[table.group_of_rank[sources], peer]
                start = len(self.calls)
                for pair in zip(sources.tolist(), targets.tolist(), strict=True):
                    self._message_calls["message", axis, *pair] = len(self.calls)
                    self._add_call("message", axis, "send", pair, network)
                calls = np.arange(start, len(self.calls))
                yield sources, calls, _fnv1a("send", axis, peer)
                for index in np.unique(table.index_in_group[sources]).tolist():
                    of_index = table.index_in_group[sources] == index
                    yield targets[of_index], calls[of_index], _fnv1a("recv", axis, index)

    def _add_call(self, pattern: str, axis: str, op: str, ranks: tuple[int, ...], network: Network) -> None:
        self.call_signatures.append((pattern, axis, network.exclusive_link(ranks), network.group_signature(ranks)))
        self.calls.append((op, ranks))


class _GroupTable:
    """The groups of one axis: one row of members per group, padded with -1, and the row and column of every rank."""

    def __init__(self, groups: Sequence[tuple[int, ...]], world: int) -> None:
        self.groups = groups
        width = max(map(len, groups), default=0)
        padded = [(*group, *[-1] * (width - len(group))) for group in groups]
        self.members: IntArray = np.array(padded, dtype=np.int64).reshape(len(groups), width)
        self.group_of_rank: IntArray = np.full(world, -1, dtype=np.int64)
        self.index_in_group: IntArray = np.full(world, -1, dtype=np.int64)
        rows, columns = np.nonzero(self.members >= 0)
        self.group_of_rank[self.members[rows, columns]] = rows
        self.index_in_group[self.members[rows, columns]] = columns


@dataclass(frozen=True)
class LinkUsage:
    """Which calls cross which links in which epoch, with the bytes on the link per byte that a rank sends."""

    directed_links: Sequence[DirectedLink]
    link_signatures: Sequence[Hashable]
    use_calls: IntArray
    use_links: IntArray
    use_loads: NDArray[np.float64]
    use_epochs: IntArray
    use_hashes: HashArray
    sum_by_call: SegmentSum
    sum_by_link: SegmentSum


def find_link_usage(call_graph: CallGraph, network: Network, disturbances: Disturbances) -> LinkUsage:
    numbers: dict[DirectedLink, int] = {}
    uses: list[tuple[int, int, float, int]] = []  # call, link, load, epoch
    initial = [network.link_loads(op, ranks) for op, ranks in call_graph.calls]
    keys = {link.key for loads in initial for link in loads}
    for epoch, time in enumerate(disturbances.link_change_times):
        down = disturbances.down_links(keys, time)
        for call, loads in enumerate(initial):
            if down and any(link.key in down for link in loads):
                loads = network.link_loads(*call_graph.calls[call], down)
            uses += [(call, numbers.setdefault(link, len(numbers)), load, epoch) for link, load in loads.items()]
    calls, links, epochs = (np.array([use[i] for use in uses], dtype=np.int64) for i in (0, 1, 3))
    use_loads = np.array([load for _, _, load, _ in uses], dtype=np.float64)
    times = disturbances.link_change_times if disturbances.degrade else ()
    signatures = [(link.latency_s, link.bandwidth, tuple(disturbances.bandwidth_factor(link.key, time) for time in times)) for link in numbers]
    hashes = splitmix64(use_loads.view(np.uint64) ^ splitmix64(epochs))
    by_call, by_link = SegmentSum(calls, call_graph.num_calls), SegmentSum(links, len(numbers))
    return LinkUsage(list(numbers), signatures, calls, links, use_loads, epochs, hashes, by_call, by_link)


class SegmentSum:
    """Sums values by segment id; made once for ids that are used repeatedly."""

    def __init__(self, segment_ids: IntArray, num_segments: int) -> None:
        self._order = np.argsort(segment_ids, kind="stable")
        ordered = segment_ids[self._order]
        self._segment_starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, dtype=np.int64)
        self._segment_ids = ordered[self._segment_starts]
        self._num_segments = num_segments

    def reduce(self, values: HashArray) -> HashArray:
        sums = np.zeros(self._num_segments, dtype=np.uint64)
        if len(self._order):
            sums[self._segment_ids] = np.add.reduceat(values[self._order], self._segment_starts)
        return sums


def splitmix64(numbers: NDArray[np.generic]) -> HashArray:
    """Hash every number to 64 bits (splitmix64)."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)


def hash_values(values: Sequence[Hashable]) -> HashArray:
    """Equal hashes for equal values. They derive from the order of first appearance, so every process gets the same ones."""
    numbers: dict[Hashable, int] = {}
    return splitmix64(np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64))


def canonical_ids(hashes: HashArray) -> IntArray:
    """Class ids from 0 on, in order of first appearance."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return np.asarray(rank[inverse.reshape(-1)], dtype=np.int64)


def _fnv1a(*parts: str | int) -> int:
    """The 64-bit FNV-1a hash of a role, the same in every process."""
    value = 1469598103934665603
    for byte in "/".join(map(str, parts)).encode():
        value = (value ^ byte) * 1099511628211 % 2**64
    return value
