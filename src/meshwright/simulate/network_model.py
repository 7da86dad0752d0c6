"""Networks as numbers: how long a call takes among which ranks, what it keeps busy meanwhile, and which links it shares with others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from meshwright.core.calibration import AlphaBetaModel, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.group_bandwidth import GroupBandwidth
from meshwright.core.schedule import P2P_OPS, wire_factor
from meshwright.cost.collective_cost import alpha_beta_of, effective_link
from meshwright.simulate.network_topology import NO_LINKS, DirectedLink, Topology, topology_of


@dataclass(frozen=True, slots=True)
class CallCost:
    """One call once everybody is there: what passes before its first byte, its bytes and how fast they go at most, what passes after the last."""

    gap_s: float = 0.0  # the next call on its wire, or of its group, waits for this
    bytes_sent: float = 0.0  # by a rank
    max_rate: float = float("inf")  # bytes/s
    latency_s: float = 0.0  # the next need not wait for this

    @property
    def busy_s(self) -> float:
        return self.gap_s + self.bytes_sent / self.max_rate


@dataclass(frozen=True, slots=True)
class OverlapBehavior:
    """How a rank's device makes calls."""

    stream_ordered: bool = False  # one that must wait for another is left to the device and the rank goes on, as on a GPU's streams
    interference: float = 0.0  # of the time of one that runs beside computation, the part that the rank cannot compute in


class Network(Protocol):
    """What the engine asks."""

    def overlap_behavior(self, rank: int) -> OverlapBehavior: ...

    @property
    def duplex(self) -> bool:
        """A rank's wire carries one call in each direction at once."""
        ...

    def call_cost(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> CallCost:
        """Without what it shares with others. `blocks`: its ranks stand still for it."""
        ...

    def group_signature(self, ranks: tuple[int, ...]) -> Hashable:
        """Calls among groups for which this is equal take equally long by themselves."""
        ...

    def exclusive_link(self, ranks: tuple[int, ...]) -> str:
        """What these ranks share while they communicate: of the calls on one wire a rank makes one at a time. Empty: no limit."""
        ...

    def link_loads(self, op: str, ranks: tuple[int, ...], down_links: frozenset[str] = NO_LINKS) -> Mapping[DirectedLink, float]:
        """The links that a call crosses, with the bytes that cross each for every byte that a rank sends. Calls under way at once share a
        link's bandwidth. Empty: it shares nothing."""
        ...


_NO_INTERFERENCE = OverlapBehavior()


@dataclass(frozen=True)
class IdealNetwork:
    """A network that costs nothing: what is left is computation and the order of things."""

    duplex: bool = True

    def overlap_behavior(self, rank: int) -> OverlapBehavior:
        return _NO_INTERFERENCE

    def call_cost(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> CallCost:
        return CallCost()

    def group_signature(self, ranks: tuple[int, ...]) -> Hashable:
        return None

    def exclusive_link(self, ranks: tuple[int, ...]) -> str:
        return ""

    def link_loads(self, op: str, ranks: tuple[int, ...], down_links: frozenset[str] = NO_LINKS) -> Mapping[DirectedLink, float]:
        return {}


@dataclass(frozen=True)
class AlphaBetaNetwork:
    """Measured α–β lines where there are any, otherwise the figures of the link that joins the ranks. More ranks than devices share
    one machine, or are as far apart as several machines are. `contended`: calls on one link go one after the other, but for the part of their
    latency that was seen to pass side by side."""

    cluster: Cluster
    rates: Rates
    backend: str = "gloo"
    contended: bool = True
    bandwidth_scale: float = 1.0  # every link's bandwidth, times this: what would a better network give?
    duplex: bool = True  # both directions at once; not where the cores of one machine copy every byte
    overlap_by_rank: Sequence[OverlapBehavior] = ()  # by rank, one for all, or none: like ranks that lose nothing by calls

    def overlap_behavior(self, rank: int) -> OverlapBehavior:
        return _overlap_of(self.overlap_by_rank, self.rates, rank)

    def call_cost(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> CallCost:
        if len(ranks) < 2:
            return CallCost()
        line = alpha_beta_of(op, len(ranks), self.backend, self.rates, effective_link(self.cluster, ranks, op))
        return _call_cost(line, size * wire_factor(op, len(ranks)), line.bytes_per_s * self.bandwidth_scale)

    def group_signature(self, ranks: tuple[int, ...]) -> Hashable:
        return effective_link(self.cluster, ranks, ""), len(ranks)

    def exclusive_link(self, ranks: tuple[int, ...]) -> str:
        link = effective_link(self.cluster, ranks, "")
        return (link.slowest if isinstance(link, GroupBandwidth) else link.name) if self.contended else ""

    def link_loads(self, op: str, ranks: tuple[int, ...], down_links: frozenset[str] = NO_LINKS) -> Mapping[DirectedLink, float]:
        return {}


@dataclass(frozen=True)
class FabricNetwork:
    """Links that groups share. A collective goes around a ring of its ranks, all-to-all from each to each; where several calls cross a link at
    once, they share it max–min fairly. What a call costs before its first byte is as the closed form has it; its bytes go as fast as its links,
    and no faster than was measured where something was."""

    topology: Topology
    cluster: Cluster
    rates: Rates
    backend: str = "nccl"
    contended: bool = True
    bandwidth_scale: float = 1.0
    overlap_by_rank: Sequence[OverlapBehavior] = ()  # by rank, one for all, or none: like ranks that lose nothing by calls
    duplex: bool = True

    @classmethod
    def from_cluster(cls, cluster: Cluster, rates: Rates, **options: object) -> FabricNetwork:
        """With the cluster's own routes; where none are known, no shape but nodes and one network."""
        return cls(topology_of(cluster), cluster, rates, **options)  # type: ignore[arg-type]

    def overlap_behavior(self, rank: int) -> OverlapBehavior:
        return _overlap_of(self.overlap_by_rank, self.rates, rank)

    def call_cost(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> CallCost:
        if len(ranks) < 2:
            return CallCost()
        line = alpha_beta_of(op, len(ranks), self.backend, self.rates, self.cluster.link_between(ranks))
        most = line.bytes_per_s * self.bandwidth_scale if self.rates.collectives else float("inf")  # else the line is the links' own figures
        if not self.contended:
            links = (hop.bandwidth / share for hop, share in self._crossed_links(op, ranks).items())
            most = min(most, *links)
        return _call_cost(line, size * wire_factor(op, len(ranks)), most)

    def group_signature(self, ranks: tuple[int, ...]) -> Hashable:
        return self.cluster.link_between(ranks), len(ranks)

    def exclusive_link(self, ranks: tuple[int, ...]) -> str:
        return ""

    def link_loads(self, op: str, ranks: tuple[int, ...], down_links: frozenset[str] = NO_LINKS) -> Mapping[DirectedLink, float]:
        return self._crossed_links(op, ranks, down_links) if self.contended else {}

    def _crossed_links(self, op: str, ranks: tuple[int, ...], down_links: frozenset[str] = NO_LINKS) -> Mapping[DirectedLink, float]:
        found: dict[DirectedLink, float] = {}
        for source, target, share in _traffic_pairs(op, ranks):
            for hop in self.topology.path(source, target, down_links) or self.topology.path(source, target):  # no way around: it waits at the link
                found[hop] = found.get(hop, 0.0) + share
        return (
            found
            if self.bandwidth_scale == 1
            else {replace(hop, bandwidth=hop.bandwidth * self.bandwidth_scale): share for hop, share in found.items()}
        )


def _overlap_of(overlap_by_rank: Sequence[OverlapBehavior], rates: Rates, rank: int) -> OverlapBehavior:
    return overlap_by_rank[rank % len(overlap_by_rank)] if overlap_by_rank else OverlapBehavior(rates.async_dispatch)


def traffic_pattern(op: str) -> str:
    """How the ranks of a call talk: all calls of one pattern cross the same links."""
    return "message" if op in P2P_OPS else "all_to_all" if op == "all_to_all" else "ring"


def _traffic_pairs(op: str, ranks: tuple[int, ...]) -> list[tuple[int, int, float]]:
    """Who sends to whom, and how much of what a rank sends."""
    kind = traffic_pattern(op)
    if kind == "message":
        return [(ranks[0], ranks[1], 1.0)]
    if kind == "ring":
        return [(rank, ranks[(at + 1) % len(ranks)], 1.0) for at, rank in enumerate(ranks)]
    return [(a, b, 1.0 / (len(ranks) - 1)) for a in ranks for b in ranks if a != b]


def _call_cost(line: AlphaBetaModel, bytes_sent: float, max_rate: float) -> CallCost:
    gap = line.alpha_s if line.gap_s is None else min(line.gap_s, line.alpha_s)
    return CallCost(gap, bytes_sent, max_rate, line.alpha_s - gap)
