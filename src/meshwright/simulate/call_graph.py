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
        parts = [*self._add_collectives(network), *self._add_messages(network)]
        empty = np.zeros(0, dtype=np.int64)
        self.edge_ranks, self.edge_calls = (np.concatenate([p[i] for p in parts]) if parts else empty for i in (0, 1))
        self.edge_roles: HashArray = (
            np.concatenate([np.full(len(ranks), tag, dtype=np.uint64) for ranks, _, tag in parts]) if parts else empty.astype(np.uint64)
        )
        self.num_calls = len(self.calls)
        self.sum_by_call, self.sum_by_rank = SegmentSum(self.edge_calls, self.num_calls), SegmentSum(self.edge_ranks, schedule.world)

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        return self.schedule.groups[axis][self._tables[axis].group_of_rank[rank]]

    def call_number(self, op: str, axis: str, source: int, target: int = -1) -> int:
        """The number of the collective of `source`'s group, or of the message from `source` to `target`."""
        kind = traffic_pattern(op)
        if kind == "message":
            return self._message_calls[kind, axis, source, target]
        return self._first_call[kind, axis] + int(self._tables[axis].group_of_rank[source])

    def _add_collectives(self, network: Network) -> Iterator[tuple[IntArray, IntArray, int]]:
        for axis, op in dict.fromkeys((a.axis, a.op) for program in self.schedule.programs for a in program if a.op in COLLECTIVE_OPS):
            kind = traffic_pattern(op)
            if (kind, axis) in self._first_call or axis not in self._tables:
                continue
            table, start = self._tables[axis], len(self.calls)
            self._first_call[kind, axis] = start
            for group in table.groups:
                self.call_signatures.append((kind, axis, network.exclusive_link(group), network.group_signature(group)))
                self.calls.append((op, group))
            places, columns = np.nonzero(table.members >= 0)
            yield table.members[places, columns], places + start, _fnv1a(kind, axis)

    def _add_messages(self, network: Network) -> Iterator[tuple[IntArray, IntArray, int]]:
        for number, program in enumerate(self.schedule.programs):
            for axis, peer in dict.fromkeys((a.axis, a.peer) for a in program if a.op == "send" and a.axis in self._tables):
                table = self._tables[axis]
                sources = np.nonzero((self.programs == number) & (table.group_of_rank >= 0))[0]
                targets = table.members[table.group_of_rank[sources], peer]
                start = len(self.calls)
                for at, pair in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
                    self._message_calls["message", axis, pair[0], pair[1]] = start + at
                    self.call_signatures.append(("message", axis, network.exclusive_link(pair), network.group_signature(pair)))
                    self.calls.append(("send", pair))
                edges = np.arange(start, len(self.calls))
                yield sources, edges, _fnv1a("send", axis, peer)
                for place in np.unique(table.index_in_group[sources]).tolist():
                    mine = table.index_in_group[sources] == place
                    yield targets[mine], edges[mine], _fnv1a("recv", axis, place)


class _GroupTable:
    """The groups of one axis: one row of members per group, padded with -1, and the row and column of every rank."""

    def __init__(self, groups: Sequence[tuple[int, ...]], world: int) -> None:
        self.groups = groups
        width = max(map(len, groups), default=0)
        self.members: IntArray = np.array(
            [group if len(group) == width else (*group, *[-1] * (width - len(group))) for group in groups], dtype=np.int64
        )
        self.members = self.members.reshape(len(groups), width)
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
    edges: list[int] = []
    links: list[int] = []
    shares: list[float] = []
    moments: list[int] = []
    at_first = [network.link_loads(op, ranks) for op, ranks in call_graph.calls]
    keys = {hop.key for used in at_first for hop in used}
    for moment, at in enumerate(disturbances.link_change_times):
        down = disturbances.down_links(keys, at)
        for edge, used in enumerate(at_first):
            if down and any(hop.key in down for hop in used):
                op, ranks = call_graph.calls[edge]
                used = network.link_loads(op, ranks, down)
            edges += [edge] * len(used)
            links += [numbers.setdefault(hop, len(numbers)) for hop in used]
            shares += used.values()
        moments += [moment] * (len(edges) - len(moments))
    hops = list(numbers)
    changes = disturbances.link_change_times if disturbances.degrade else ()
    kinds = [(hop.latency_s, hop.bandwidth, tuple(disturbances.bandwidth_factor(hop.key, at) for at in changes)) for hop in hops]
    weights, when = np.array(shares, dtype=np.float64), np.array(moments, dtype=np.int64)
    tags = splitmix64(weights.view(np.uint64) ^ splitmix64(when))
    mine, crossed = np.array(edges, dtype=np.int64), np.array(links, dtype=np.int64)
    return LinkUsage(hops, kinds, mine, crossed, weights, when, tags, SegmentSum(mine, call_graph.num_calls), SegmentSum(crossed, len(hops)))


class SegmentSum:
    """Sums values by segment id; made once for ids that are used repeatedly."""

    def __init__(self, segment_ids: IntArray, num_segments: int) -> None:
        self._order = np.argsort(segment_ids, kind="stable")
        ordered = segment_ids[self._order]
        self._segment_starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, dtype=np.int64)
        self._segment_ids = ordered[self._segment_starts]
        self._num_segments = num_segments

    def reduce(self, values: HashArray) -> HashArray:
        found = np.zeros(self._num_segments, dtype=np.uint64)
        if len(self._order):
            found[self._segment_ids] = np.add.reduceat(values[self._order], self._segment_starts)
        return found


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
    found = 1469598103934665603
    for byte in "/".join(map(str, parts)).encode():
        found = (found ^ byte) * 1099511628211 % 2**64
    return found
