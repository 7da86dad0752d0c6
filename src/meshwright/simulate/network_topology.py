"""Network topologies: which links a message between two ranks crosses. The simulator knows a network's shape only through these.

`path(source, target, down_links)` returns links with stable keys: two paths with the same key share that link. Links are directed; a duplex link is
two. `down_links` are the keys of links that are down: the path avoids them, or is empty if it cannot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from meshwright.core import node_topology
from meshwright.core.cluster import Cluster

NO_LINKS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """A link in one direction. Keys are hierarchical: `network/3/out` is a part of `network/3` and of `network`."""

    key: str
    latency_s: float
    bandwidth: float  # bytes/s

    def __hash__(self) -> int:
        return hash(self.key)  # called millions of times; a str caches its hash


class Topology(Protocol):
    """The shape of a network."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...

    def path(self, source: int, target: int, down_links: frozenset[str] = NO_LINKS) -> tuple[DirectedLink, ...]: ...

    def link_keys(self) -> Iterable[str]:
        """All link keys, so that a misspelt key is an error."""
        ...


class NonBlockingTopology:
    """Every device has its own outgoing and incoming link, to its node's other devices and to the network; the network itself is non-blocking."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._node = [index for index, node in enumerate(cluster.nodes) for _ in node.devices]  # by rank
        self._links: dict[tuple[bool, int, str], DirectedLink] = {}

    @property
    def world(self) -> int:
        return len(self._cluster.devices)

    def path(self, source: int, target: int, down_links: frozenset[str] = NO_LINKS) -> tuple[DirectedLink, ...]:
        intra_node = self._node[source] == self._node[target]
        direct = self._direct_path(intra_node, source, target)
        if not down_links or not _is_down(direct, down_links):
            return direct
        return next((path for path in self._detour_paths(intra_node, source, target) if not _is_down(path, down_links)), ())

    def link_keys(self) -> Iterable[str]:
        return (self._link(*link).key for link in product((True, False), range(self.world), ("out", "in")))

    def _direct_path(self, intra_node: bool, source: int, target: int) -> tuple[DirectedLink, ...]:
        return self._link(intra_node, source, "out"), self._link(intra_node, target, "in")

    def _detour_paths(self, intra_node: bool, source: int, target: int) -> Iterable[tuple[DirectedLink, ...]]:
        """Paths around a link that is down: over the network instead of within the node, or through another device of either node."""
        if intra_node:
            yield self._direct_path(False, source, target)
            return
        for peer in self._node_peers(source):
            yield (*self._direct_path(True, source, peer), *self._direct_path(False, peer, target))
        for peer in self._node_peers(target):
            yield (*self._direct_path(False, source, peer), *self._direct_path(True, peer, target))

    def _node_peers(self, rank: int) -> Iterable[int]:
        first = bisect_left(self._node, self._node[rank])
        return (r for r in range(first, first + len(self._cluster.nodes[self._node[rank]].devices)) if r != rank)

    def _link(self, intra_node: bool, rank: int, direction: str) -> DirectedLink:
        key = (intra_node, rank, direction)
        if key not in self._links:
            link = self._cluster.nodes[self._node[rank]].link if intra_node else self._cluster.link
            self._links[key] = DirectedLink(f"{link.name}/{rank}/{direction}", link.latency_s, link.bandwidth)
        return self._links[key]


class RoutedTopology:
    """The links of a cluster whose routes are known. There is one route between two ranks, so a link that is down has no detour."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._links: dict[tuple[str | int, ...], DirectedLink] = {}

    @property
    def world(self) -> int:
        return len(self._cluster.devices)

    def path(self, source: int, target: int, down_links: frozenset[str] = NO_LINKS) -> tuple[DirectedLink, ...]:
        path = tuple(map(self._link, self._cluster.path(source, target)))
        return () if _is_down(path, down_links) else path

    def link_keys(self) -> Iterable[str]:
        """The links between each rank and the next, and between ranks one node apart: every kind of link, and every device's own."""
        for distance in dict.fromkeys((1, len(self._cluster.nodes[0].devices))):
            for rank in range(self.world):
                yield from (link.key for link in self.path(rank, (rank + distance) % self.world))

    def _link(self, hop: node_topology.PathHop) -> DirectedLink:
        if hop.key not in self._links:
            self._links[hop.key] = DirectedLink("/".join(map(str, hop.key)), hop.latency_s, hop.bandwidth)
        return self._links[hop.key]


def topology_of(cluster: Cluster) -> Topology:
    return RoutedTopology(cluster) if cluster.has_topology else NonBlockingTopology(cluster)


def _is_down(path: tuple[DirectedLink, ...], down_links: frozenset[str]) -> bool:
    return any(link.key in down_links for link in path)
