"""Networks as numbers: how long a call takes among which ranks, what it keeps busy meanwhile, and which links it shares with others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from meshwright.core.calibration import Line, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.reach import Reach
from meshwright.core.schedule import MESSAGES, wire_factor
from meshwright.cost.collective import joined, line_of
from meshwright.simulate.topology import NOTHING_DOWN, Hop, Topology, topology_of


@dataclass(frozen=True, slots=True)
class Call:
    """One call once everybody is there: what passes before its first byte, its bytes and how fast they go at most, what passes after the last."""

    gap_s: float = 0.0  # the next call on its wire, or of its group, waits for this
    sent: float = 0.0  # by a rank
    most: float = float("inf")  # bytes/s
    rest_s: float = 0.0  # the next need not wait for this

    @property
    def busy_s(self) -> float:
        return self.gap_s + self.sent / self.most


@dataclass(frozen=True, slots=True)
class Habits:
    """How a rank's device makes calls."""

    queued: bool = False  # one that must wait for another is left to the device and the rank goes on, as on a GPU's streams
    steals: float = 0.0  # of the time of one that runs beside computation, the part that the rank cannot compute in


class Network(Protocol):
    """What the engine asks."""

    def habits(self, rank: int) -> Habits: ...

    @property
    def duplex(self) -> bool:
        """A rank's wire carries one call in each direction at once."""
        ...

    def call(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> Call:
        """Without what it shares with others. `blocks`: its ranks stand still for it."""
        ...

    def like(self, ranks: tuple[int, ...]) -> Hashable:
        """Calls among groups for which this is equal take equally long by themselves."""
        ...

    def wire(self, ranks: tuple[int, ...]) -> str:
        """What these ranks share while they communicate: of the calls on one wire a rank makes one at a time. Empty: no limit."""
        ...

    def uses(self, op: str, ranks: tuple[int, ...], without: frozenset[str] = NOTHING_DOWN) -> Mapping[Hop, float]:
        """The links that a call crosses, with the bytes that cross each for every byte that a rank sends. Calls under way at once share a
        link's bandwidth. Empty: it shares nothing."""
        ...


_PLAIN = Habits()


@dataclass(frozen=True)
class Ideal:
    """A network that costs nothing: what is left is computation and the order of things."""

    duplex: bool = True

    def habits(self, rank: int) -> Habits:
        return _PLAIN

    def call(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> Call:
        return Call()

    def like(self, ranks: tuple[int, ...]) -> Hashable:
        return None

    def wire(self, ranks: tuple[int, ...]) -> str:
        return ""

    def uses(self, op: str, ranks: tuple[int, ...], without: frozenset[str] = NOTHING_DOWN) -> Mapping[Hop, float]:
        return {}


@dataclass(frozen=True)
class Linked:
    """Measured α–β lines where there are any, otherwise the figures of the link that joins the ranks. More ranks than devices share
    one machine, or are as far apart as several machines are. `contended`: calls on one link go one after the other, but for the part of their
    latency that was seen to pass side by side."""

    cluster: Cluster
    rates: Rates
    backend: str = "gloo"
    contended: bool = True
    faster: float = 1.0  # every link's bandwidth, times this: what would a better network give?
    duplex: bool = True  # both directions at once; not where the cores of one machine copy every byte
    each: Sequence[Habits] = ()  # by rank, one for all, or none: like ranks that lose nothing by calls

    def habits(self, rank: int) -> Habits:
        return _habits(self.each, self.rates, rank)

    def call(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> Call:
        if len(ranks) < 2:
            return Call()
        line = line_of(op, len(ranks), self.backend, self.rates, joined(self.cluster, ranks, op))
        return _call(line, size * wire_factor(op, len(ranks)), line.bytes_per_s * self.faster)

    def like(self, ranks: tuple[int, ...]) -> Hashable:
        return joined(self.cluster, ranks, ""), len(ranks)

    def wire(self, ranks: tuple[int, ...]) -> str:
        link = joined(self.cluster, ranks, "")
        return (link.slowest if isinstance(link, Reach) else link.name) if self.contended else ""

    def uses(self, op: str, ranks: tuple[int, ...], without: frozenset[str] = NOTHING_DOWN) -> Mapping[Hop, float]:
        return {}


@dataclass(frozen=True)
class Fabric:
    """Links that groups share. A collective goes around a ring of its ranks, all-to-all from each to each; where several calls cross a link at
    once, they share it max–min fairly. What a call costs before its first byte is as the closed form has it; its bytes go as fast as its links,
    and no faster than was measured where something was."""

    topology: Topology
    cluster: Cluster
    rates: Rates
    backend: str = "nccl"
    contended: bool = True
    faster: float = 1.0
    each: Sequence[Habits] = ()  # by rank, one for all, or none: like ranks that lose nothing by calls
    duplex: bool = True

    @classmethod
    def of(cls, cluster: Cluster, rates: Rates, **choices: object) -> Fabric:
        """With the cluster's own routes; where none are known, no shape but nodes and one network."""
        return cls(topology_of(cluster), cluster, rates, **choices)  # type: ignore[arg-type]

    def habits(self, rank: int) -> Habits:
        return _habits(self.each, self.rates, rank)

    def call(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> Call:
        if len(ranks) < 2:
            return Call()
        line = line_of(op, len(ranks), self.backend, self.rates, self.cluster.link_between(ranks))
        most = line.bytes_per_s * self.faster if self.rates.collectives else float("inf")  # else the line is the links' own figures
        if not self.contended:
            links = (hop.bandwidth / share for hop, share in self._crossed(op, ranks).items())
            most = min(most, *links)
        return _call(line, size * wire_factor(op, len(ranks)), most)

    def like(self, ranks: tuple[int, ...]) -> Hashable:
        return self.cluster.link_between(ranks), len(ranks)

    def wire(self, ranks: tuple[int, ...]) -> str:
        return ""

    def uses(self, op: str, ranks: tuple[int, ...], without: frozenset[str] = NOTHING_DOWN) -> Mapping[Hop, float]:
        return self._crossed(op, ranks, without) if self.contended else {}

    def _crossed(self, op: str, ranks: tuple[int, ...], without: frozenset[str] = NOTHING_DOWN) -> Mapping[Hop, float]:
        found: dict[Hop, float] = {}
        for source, target, share in _pairs(op, ranks):
            for hop in self.topology.path(source, target, without) or self.topology.path(source, target):  # no way around: it waits at the link
                found[hop] = found.get(hop, 0.0) + share
        return found if self.faster == 1 else {replace(hop, bandwidth=hop.bandwidth * self.faster): share for hop, share in found.items()}


def _habits(each: Sequence[Habits], rates: Rates, rank: int) -> Habits:
    return each[rank % len(each)] if each else Habits(rates.queued)


def pattern(op: str) -> str:
    """How the ranks of a call talk: all calls of one pattern cross the same links."""
    return "message" if op in MESSAGES else "all_to_all" if op == "all_to_all" else "ring"


def _pairs(op: str, ranks: tuple[int, ...]) -> list[tuple[int, int, float]]:
    """Who sends to whom, and how much of what a rank sends."""
    kind = pattern(op)
    if kind == "message":
        return [(ranks[0], ranks[1], 1.0)]
    if kind == "ring":
        return [(rank, ranks[(at + 1) % len(ranks)], 1.0) for at, rank in enumerate(ranks)]
    return [(a, b, 1.0 / (len(ranks) - 1)) for a in ranks for b in ranks if a != b]


def _call(line: Line, sent: float, most: float) -> Call:
    gap = line.alpha_s if line.gap_s is None else min(line.gap_s, line.alpha_s)
    return Call(gap, sent, most, line.alpha_s - gap)
