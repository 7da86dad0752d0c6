"""Network models for the simulator: the duration of a call by operation, size and ranks, what it occupies, and which links it shares with others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from meshwright.core.calibration import AlphaBetaModel, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.group_bandwidth import GroupBandwidth
from meshwright.core.node_topology import FullyConnected
from meshwright.core.schedule import P2P_OPS, wire_factor
from meshwright.cost.collective_cost import alpha_beta_of, effective_link
from meshwright.simulate.network_topology import NO_LINKS, DirectedLink, Topology, topology_of


@dataclass(frozen=True, slots=True)
class CallCost:
    """A call's cost once all its ranks have arrived: the time before its first byte, its bytes and their maximum rate, the time after the last."""

    gap_s: float = 0.0  # before the first byte; the next call on its link, or of its group, waits for it
    bytes_sent: float = 0.0  # per rank
    max_rate: float = float("inf")  # bytes/s
    latency_s: float = 0.0  # after the last byte; the next call need not wait for it

    @property
    def busy_s(self) -> float:
        return self.gap_s + self.bytes_sent / self.max_rate


@dataclass(frozen=True, slots=True)
class OverlapBehavior:
    """How communication overlaps with computation on a rank's device."""

    stream_ordered: bool = False  # a call that depends on another waits on the device while the rank goes on, as on CUDA streams
    interference: float = 0.0  # share of an overlapped call's time in which the rank cannot compute


_NO_INTERFERENCE = OverlapBehavior()


class Network(Protocol):
    """The engine's interface to a network model."""

    def overlap_behavior(self, rank: int) -> OverlapBehavior:
        return _NO_INTERFERENCE

    @property
    def duplex(self) -> bool:
        """Whether a rank's link carries one call in each direction at once."""
        ...

    def call_cost(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> CallCost:
        """The cost of a call without contention. `blocks`: its ranks wait for it."""
        ...

    def group_signature(self, ranks: tuple[int, ...]) -> Hashable:
        """Calls among groups with equal signatures take equally long without contention."""
        ...

    def exclusive_link(self, ranks: tuple[int, ...]) -> str:
        """The link that these ranks occupy while they communicate: a rank runs one call at a time on it. Empty: no limit."""
        return ""

    def link_loads(self, op: str, ranks: tuple[int, ...], down_links: frozenset[str] = NO_LINKS) -> Mapping[DirectedLink, float]:
        """The links that a call crosses, with the bytes on each link per byte that a rank sends. Concurrent calls share a link's bandwidth.
        Empty: the call shares no link."""
        return {}


@dataclass(frozen=True)
class IdealNetwork(Network):
    """A network where communication takes no time: only computation and dependencies count."""

    duplex: bool = True

    def call_cost(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> CallCost:
        return CallCost()

    def group_signature(self, ranks: tuple[int, ...]) -> Hashable:
        return None


@dataclass(frozen=True)
class _ClusterNetwork(Network):
    cluster: Cluster
    rates: Rates
    backend: str = "gloo"
    contended: bool = True
    bandwidth_scale: float = 1.0  # factor on every link's bandwidth, to ask what a better network would give
    duplex: bool = True  # both directions at once; False where the cores of one machine copy every byte
    overlap_by_rank: Sequence[OverlapBehavior] = ()  # by rank, or one for all; empty: no interference

    def overlap_behavior(self, rank: int) -> OverlapBehavior:
        by_rank = self.overlap_by_rank
        return by_rank[rank % len(by_rank)] if by_rank else OverlapBehavior(self.rates.async_dispatch)


@dataclass(frozen=True)
class AlphaBetaNetwork(_ClusterNetwork):
    """Measured α–β models where there are any, otherwise the figures of the link between the ranks; with more ranks than devices, of the
    link that spans all devices. `contended`: calls on one link run one after the other, except for the part of their latency that was measured
    to overlap."""

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


@dataclass(frozen=True)
class FabricNetwork(_ClusterNetwork):
    """A topology whose links are shared by groups. A collective is a ring of its ranks, an all-to-all sends between all pairs; concurrent calls
    share a link max-min fairly. The time before a call's first byte is that of the estimate, by the same code. Its bytes go at the rate of its
    links, limited by the measured rate if there is one."""

    topology: Topology = field(kw_only=True)
    backend: str = "nccl"

    @classmethod
    def from_cluster(cls, cluster: Cluster, rates: Rates, **options: object) -> FabricNetwork:
        """The network of a cluster: its routes if they are known, otherwise nodes on one non-blocking network."""
        return cls(cluster, rates, topology=topology_of(cluster), **options)  # type: ignore[arg-type]

    def call_cost(self, op: str, size: int, ranks: tuple[int, ...], *, blocks: bool = False) -> CallCost:
        if len(ranks) < 2:
            return CallCost()
        line = alpha_beta_of(op, len(ranks), self.backend, self.rates, effective_link(self.cluster, ranks, op))
        rate = line.bytes_per_s * self.bandwidth_scale if self.rates.collectives else float("inf")  # if not measured, the line is the link's own
        if not self.contended:
            rate = min(rate, *(link.bandwidth / load for link, load in self._crossed_links(op, ranks).items()))
        return _call_cost(line, size * wire_factor(op, len(ranks)), rate)

    def group_signature(self, ranks: tuple[int, ...]) -> Hashable:
        link = self.cluster.link_between(ranks) if self.contended else effective_link(self.cluster, ranks, "")
        return link, len(ranks)  # where links are shared, the links that calls cross tell the rest

    def link_loads(self, op: str, ranks: tuple[int, ...], down_links: frozenset[str] = NO_LINKS) -> Mapping[DirectedLink, float]:
        return self._crossed_links(op, ranks, down_links) if self.contended else {}

    def _crossed_links(self, op: str, ranks: tuple[int, ...], down_links: frozenset[str] = NO_LINKS) -> Mapping[DirectedLink, float]:
        loads: dict[DirectedLink, float] = {}
        pattern = "all_to_all" if traffic_pattern(op) == "ring" and self._has_disjoint_rings(ranks) else traffic_pattern(op)
        for source, target, share in _traffic_pairs(pattern, ranks):
            for link in self.topology.path(source, target, down_links) or self.topology.path(source, target):  # no detour: the call waits at the link
                loads[link] = loads.get(link, 0.0) + share
        scale = self.bandwidth_scale
        return loads if scale == 1 else {replace(link, bandwidth=link.bandwidth * scale): load for link, load in loads.items()}

    def _has_disjoint_rings(self, ranks: tuple[int, ...]) -> bool:
        """Whether the ranks share a node with a wire between every two devices. One ring per neighbour then goes over wires of its own, and
        together they load the wires as an all-to-all does."""
        node = self.cluster.node_index(min(ranks))
        return node == self.cluster.node_index(max(ranks)) and isinstance(self.cluster.nodes[node].inside, FullyConnected)


def traffic_pattern(op: str) -> str:
    """The traffic pattern of an operation: all calls of one pattern among the same ranks cross the same links."""
    return "message" if op in P2P_OPS else "all_to_all" if op == "all_to_all" else "ring"


def _traffic_pairs(pattern: str, ranks: tuple[int, ...]) -> list[tuple[int, int, float]]:
    """Pairs of sender and receiver, each with its share of the bytes that a rank sends."""
    if pattern == "message":
        return [(ranks[0], ranks[1], 1.0)]
    if pattern == "ring":
        return [(rank, ranks[(i + 1) % len(ranks)], 1.0) for i, rank in enumerate(ranks)]
    return [(a, b, 1.0 / (len(ranks) - 1)) for a in ranks for b in ranks if a != b]


def _call_cost(line: AlphaBetaModel, bytes_sent: float, max_rate: float) -> CallCost:
    gap = line.alpha_s if line.gap_s is None else min(line.gap_s, line.alpha_s)
    return CallCost(gap, bytes_sent, max_rate, line.alpha_s - gap)
