"""Which links a message between two ranks crosses. Everything that the simulator knows of a network's shape, it asks here.

A topology answers `path(source, target, without)` with links that have a stable key: two paths that name the same key share that link. A link is
one way; what goes both ways is two. `without` names links that are down: the answer goes around them, or is empty where there is no way around.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from meshwright.core import topology
from meshwright.core.cluster import Cluster

NOTHING_DOWN: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Hop:
    """One link, one way. Keys are words with slashes, from the whole to the part: `network/3/out` is a part of `network/3` and of `network`."""

    key: str
    latency_s: float
    bandwidth: float  # bytes/s

    def __hash__(self) -> int:
        return hash(self.key)  # asked millions of times, and text keeps its hash


class Topology(Protocol):
    """The shape of a network."""

    @property
    def world(self) -> int:
        """Ranks that it joins."""
        ...

    def path(self, source: int, target: int, without: frozenset[str] = NOTHING_DOWN) -> tuple[Hop, ...]: ...

    def links(self) -> Iterable[str]:
        """Every key there is, so that a misspelt one is an error."""
        ...


class Flat:
    """Every device has a way out and a way in of its own, to its node's other devices and to the network, and the network itself is never full."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._node = [index for index, node in enumerate(cluster.nodes) for _ in node.devices]  # of each rank
        self._hops: dict[tuple[bool, str], dict[int, Hop]] = {(near, way): {} for near in (True, False) for way in ("out", "in")}

    @property
    def world(self) -> int:
        return len(self._cluster.devices)

    def path(self, source: int, target: int, without: frozenset[str] = NOTHING_DOWN) -> tuple[Hop, ...]:
        near = self._node[source] == self._node[target]
        direct = self._leg(near, source, target)
        if not without or not _down(direct, without):
            return direct
        return next((way for way in self._detours(near, source, target) if not _down(way, without)), ())

    def links(self) -> Iterable[str]:
        for rank in range(self.world):
            for inside in (True, False):
                for way in ("out", "in"):
                    yield self._hop(inside, rank, way).key

    def _leg(self, near: bool, source: int, target: int) -> tuple[Hop, ...]:
        return self._hop(near, source, "out"), self._hop(near, target, "in")

    def _detours(self, near: bool, source: int, target: int) -> Iterable[tuple[Hop, ...]]:
        """Over the network where the node's own link is down; through a neighbour on either side where a device's way to the network is."""
        if near:
            yield self._leg(False, source, target)
            return
        for here in self._neighbours(source):
            yield (*self._leg(True, source, here), *self._leg(False, here, target))
        for there in self._neighbours(target):
            yield (*self._leg(False, source, there), *self._leg(True, there, target))

    def _neighbours(self, rank: int) -> Iterable[int]:
        first = bisect_left(self._node, self._node[rank])
        return (r for r in range(first, first + len(self._cluster.nodes[self._node[rank]].devices)) if r != rank)

    def _hop(self, near: bool, rank: int, way: str) -> Hop:
        known = self._hops[near, way]
        if rank not in known:
            link = self._cluster.nodes[self._node[rank]].link if near else self._cluster.link
            known[rank] = Hop(f"{link.name}/{rank}/{way}", link.latency_s, link.bandwidth)
        return known[rank]


class Wired:
    """The wires of a cluster whose routes are known. There is one route between two ranks: what is down on it has no way around."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._hops: dict[tuple[str | int, ...], Hop] = {}

    @property
    def world(self) -> int:
        return len(self._cluster.devices)

    def path(self, source: int, target: int, without: frozenset[str] = NOTHING_DOWN) -> tuple[Hop, ...]:
        found = tuple(map(self._hop, self._cluster.path(source, target)))
        return () if _down(found, without) else found

    def links(self) -> Iterable[str]:
        """Those between ranks one, and one node, apart: every sort of wire, and every device's own."""
        each = len(self._cluster.nodes[0].devices)
        for apart in dict.fromkeys((1, each)):
            for rank in range(self.world):
                yield from (hop.key for hop in self.path(rank, (rank + apart) % self.world))

    def _hop(self, wire: topology.Hop) -> Hop:
        if wire.key not in self._hops:
            self._hops[wire.key] = Hop("/".join(map(str, wire.key)), wire.latency_s, wire.bandwidth)
        return self._hops[wire.key]


def topology_of(cluster: Cluster) -> Topology:
    return Wired(cluster) if cluster.routed else Flat(cluster)


def _down(way: tuple[Hop, ...], without: frozenset[str]) -> bool:
    return any(hop.key in without for hop in way)
