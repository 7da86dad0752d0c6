"""Who meets whom over what, as arrays: every group that calls something, every pair that sends, and every link that one of them crosses.

A hundred thousand ranks make some hundred thousand meetings; arrays make their refinement (fold.py) a matter of moments. Classes are told apart by
sums of 64-bit hashes: that two of them meet by chance is as likely as one in 10^8 even there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.core.schedule import COLLECTIVES, Schedule
from meshwright.simulate.disturb import Disturbances
from meshwright.simulate.network import Network, pattern
from meshwright.simulate.topology import Hop

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Key = tuple[str, str, int, int]  # pattern, axis, and the group's number and -1, or the two ranks of a message


class Meetings:
    """A schedule's meetings, numbered. `ranks`, `edges` and `tags` list who takes part in which one as what."""

    def __init__(self, schedule: Schedule, network: Network) -> None:
        self.schedule = schedule
        self.programs: Ints = np.array([schedule.ranks.get(str(rank), 0) for rank in range(schedule.world)], dtype=np.int64)
        self._tables = {axis: _Table(groups, schedule.world) for axis, groups in schedule.groups.items()}
        self._starts: dict[tuple[str, str], int] = {}  # pattern and axis of collectives → the number of their first group's meeting
        self._pairs: dict[Key, int] = {}
        self.kinds: list[Hashable] = []
        self.calls: list[tuple[str, tuple[int, ...]]] = []  # operation and ranks
        parts = [*self._collectives(network), *self._messages(network)]
        empty = np.zeros(0, dtype=np.int64)
        self.ranks, self.edges = (np.concatenate([p[i] for p in parts]) if parts else empty for i in (0, 1))
        self.tags: Words = (
            np.concatenate([np.full(len(ranks), tag, dtype=np.uint64) for ranks, _, tag in parts]) if parts else empty.astype(np.uint64)
        )
        self.count = len(self.calls)
        self.by_edge, self.by_rank = Sums(self.edges, self.count), Sums(self.ranks, schedule.world)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        return self.schedule.groups[axis][self._tables[axis].homes[rank]]

    def edge(self, op: str, axis: str, source: int, target: int = -1) -> int:
        """The number of one meeting: of a rank's group, or of a message between two."""
        kind = pattern(op)
        if kind == "message":
            return self._pairs[kind, axis, source, target]
        return self._starts[kind, axis] + int(self._tables[axis].homes[source])

    def _collectives(self, network: Network) -> Iterator[tuple[Ints, Ints, int]]:
        for axis, op in dict.fromkeys((a.axis, a.op) for program in self.schedule.programs for a in program if a.op in COLLECTIVES):
            kind = pattern(op)
            if (kind, axis) in self._starts or axis not in self._tables:
                continue
            table, start = self._tables[axis], len(self.calls)
            self._starts[kind, axis] = start
            for group in table.groups:
                self.kinds.append((kind, axis, network.wire(group), network.like(group)))
                self.calls.append((op, group))
            places, columns = np.nonzero(table.members >= 0)
            yield table.members[places, columns], places + start, _tag(kind, axis)

    def _messages(self, network: Network) -> Iterator[tuple[Ints, Ints, int]]:
        for number, program in enumerate(self.schedule.programs):
            for axis, peer in dict.fromkeys((a.axis, a.peer) for a in program if a.op == "send" and a.axis in self._tables):
                table = self._tables[axis]
                sources = np.nonzero((self.programs == number) & (table.homes >= 0))[0]
                targets = table.members[table.homes[sources], peer]
                start = len(self.calls)
                for at, pair in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
                    self._pairs["message", axis, pair[0], pair[1]] = start + at
                    self.kinds.append(("message", axis, network.wire(pair), network.like(pair)))
                    self.calls.append(("send", pair))
                edges = np.arange(start, len(self.calls))
                yield sources, edges, _tag("send", axis, peer)
                for place in np.unique(table.places[sources]).tolist():
                    mine = table.places[sources] == place
                    yield targets[mine], edges[mine], _tag("recv", axis, place)


class _Table:
    """The groups of one axis: members in rows, filled up with -1, and every rank's row and column."""

    def __init__(self, groups: Sequence[tuple[int, ...]], world: int) -> None:
        self.groups = groups
        width = max(map(len, groups), default=0)
        self.members: Ints = np.array([group if len(group) == width else (*group, *[-1] * (width - len(group))) for group in groups], dtype=np.int64)
        self.members = self.members.reshape(len(groups), width)
        self.homes: Ints = np.full(world, -1, dtype=np.int64)
        self.places: Ints = np.full(world, -1, dtype=np.int64)
        rows, columns = np.nonzero(self.members >= 0)
        self.homes[self.members[rows, columns]] = rows
        self.places[self.members[rows, columns]] = columns


@dataclass(frozen=True)
class Crossings:
    """Which meetings cross which links, moment by moment, with how many bytes for each that a rank sends."""

    hops: Sequence[Hop]
    kinds: Sequence[Hashable]  # of links
    edges: Ints
    links: Ints
    shares: NDArray[np.float64]
    moments: Ints
    tags: Words
    by_edge: Sums
    by_link: Sums


def crossings(meetings: Meetings, network: Network, disturbed: Disturbances) -> Crossings:
    numbers: dict[Hop, int] = {}
    edges: list[int] = []
    links: list[int] = []
    shares: list[float] = []
    moments: list[int] = []
    at_first = [network.uses(op, ranks) for op, ranks in meetings.calls]
    keys = {hop.key for used in at_first for hop in used}
    for moment, at in enumerate(disturbed.moments):
        down = disturbed.down(keys, at)
        for edge, used in enumerate(at_first):
            if down and any(hop.key in down for hop in used):
                op, ranks = meetings.calls[edge]
                used = network.uses(op, ranks, down)
            edges += [edge] * len(used)
            links += [numbers.setdefault(hop, len(numbers)) for hop in used]
            shares += used.values()
        moments += [moment] * (len(edges) - len(moments))
    hops = list(numbers)
    changes = disturbed.moments if disturbed.degrade else ()
    kinds = [(hop.latency_s, hop.bandwidth, tuple(disturbed.left(hop.key, at) for at in changes)) for hop in hops]
    weights, when = np.array(shares, dtype=np.float64), np.array(moments, dtype=np.int64)
    tags = mixed(weights.view(np.uint64) ^ mixed(when))
    mine, crossed = np.array(edges, dtype=np.int64), np.array(links, dtype=np.int64)
    return Crossings(hops, kinds, mine, crossed, weights, when, tags, Sums(mine, meetings.count), Sums(crossed, len(hops)))


class Sums:
    """Adds up values by number, over and over for the same numbers."""

    def __init__(self, numbers: Ints, count: int) -> None:
        self._order = np.argsort(numbers, kind="stable")
        ordered = numbers[self._order]
        self._starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, dtype=np.int64)
        self._into = ordered[self._starts]
        self._count = count

    def sums(self, values: Words) -> Words:
        found = np.zeros(self._count, dtype=np.uint64)
        if len(self._order):
            found[self._into] = np.add.reduceat(values[self._order], self._starts)
        return found


def mixed(numbers: NDArray[np.generic]) -> Words:
    """Every number as 64 bits that look random (splitmix64)."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)


def hashed(values: Sequence[Hashable]) -> Words:
    """The same for the same value, whatever it is; in order of appearance, so that every process gets the same."""
    numbers: dict[Hashable, int] = {}
    return mixed(np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64))


def numbered(signs: Words) -> Ints:
    """Classes from 0 on, in the order in which they first appear."""
    _, first, inverse = np.unique(signs, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return np.asarray(rank[inverse.reshape(-1)], dtype=np.int64)


def _tag(*parts: str | int) -> int:
    """Of a role: stable text to 64 bits."""
    found = 1469598103934665603
    for byte in "/".join(map(str, parts)).encode():
        found = (found ^ byte) * 1099511628211 % 2**64
    return found
