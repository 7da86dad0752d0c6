"""Which links a message between two ranks crosses. Everything that the simulator knows of a network's shape, it asks here.

A topology answers `path(source, target, without)` with links that have a stable key: two paths that name the same key share that link. A link is
one way; what goes both ways is two. `without` names links that are down: the answer goes around them, or is empty where there is no way around.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from meshwright.core import node_topology
from meshwright.core.cluster import Cluster

NO_LINKS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DirectedLink:
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

    def path(self, source: int, target: int, down_links: frozenset[str] = NO_LINKS) -> tuple[DirectedLink, ...]: ...

    def link_keys(self) -> Iterable[str]:
        """Every key there is, so that a misspelt one is an error."""
        ...


class NonBlockingTopology:
    """Every device has a way out and a way in of its own, to its node's other devices and to the network, and the network itself is never full."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._node = [index for index, node in enumerate(cluster.nodes) for _ in node.devices]  # of each rank
        self._links: dict[tuple[bool, str], dict[int, DirectedLink]] = {(near, way): {} for near in (True, False) for way in ("out", "in")}

    @property
    def world(self) -> int:
        return len(self._cluster.devices)

    def path(self, source: int, target: int, down_links: frozenset[str] = NO_LINKS) -> tuple[DirectedLink, ...]:
        near = self._node[source] == self._node[target]
        direct = self._direct_path(near, source, target)
        if not down_links or not _is_down(direct, down_links):
            return direct
        return next((way for way in self._detour_paths(near, source, target) if not _is_down(way, down_links)), ())

    def link_keys(self) -> Iterable[str]:
        for rank in range(self.world):
            for inside in (True, False):
                for way in ("out", "in"):
                    yield self._link(inside, rank, way).key

    def _direct_path(self, intra_node: bool, source: int, target: int) -> tuple[DirectedLink, ...]:
        return self._link(intra_node, source, "out"), self._link(intra_node, target, "in")

    def _detour_paths(self, intra_node: bool, source: int, target: int) -> Iterable[tuple[DirectedLink, ...]]:
        """Over the network where the node's own link is down; through a neighbour on either side where a device's way to the network is."""
        if intra_node:
            yield self._direct_path(False, source, target)
            return
        for here in self._node_peers(source):
            yield (*self._direct_path(True, source, here), *self._direct_path(False, here, target))
        for there in self._node_peers(target):
            yield (*self._direct_path(False, source, there), *self._direct_path(True, there, target))

    def _node_peers(self, rank: int) -> Iterable[int]:
        first = bisect_left(self._node, self._node[rank])
        return (r for r in range(first, first + len(self._cluster.nodes[self._node[rank]].devices)) if r != rank)

    def _link(self, intra_node: bool, rank: int, direction: str) -> DirectedLink:
        known = self._links[intra_node, direction]
        if rank not in known:
            link = self._cluster.nodes[self._node[rank]].link if intra_node else self._cluster.link
            known[rank] = DirectedLink(f"{link.name}/{rank}/{direction}", link.latency_s, link.bandwidth)
        return known[rank]


class RoutedTopology:
    """The wires of a cluster whose routes are known. There is one route between two ranks: what is down on it has no way around."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._links: dict[tuple[str | int, ...], DirectedLink] = {}

    @property
    def world(self) -> int:
        return len(self._cluster.devices)

    def path(self, source: int, target: int, down_links: frozenset[str] = NO_LINKS) -> tuple[DirectedLink, ...]:
        found = tuple(map(self._link, self._cluster.path(source, target)))
        return () if _is_down(found, down_links) else found

    def link_keys(self) -> Iterable[str]:
        """Those between ranks one, and one node, apart: every sort of wire, and every device's own."""
        each = len(self._cluster.nodes[0].devices)
        for apart in dict.fromkeys((1, each)):
            for rank in range(self.world):
                yield from (hop.key for hop in self.path(rank, (rank + apart) % self.world))

    def _link(self, hop: node_topology.PathHop) -> DirectedLink:
        if hop.key not in self._links:
            self._links[hop.key] = DirectedLink("/".join(map(str, hop.key)), hop.latency_s, hop.bandwidth)
        return self._links[hop.key]


def topology_of(cluster: Cluster) -> Topology:
    return RoutedTopology(cluster) if cluster.has_topology else NonBlockingTopology(cluster)


def _is_down(path: tuple[DirectedLink, ...], down_links: frozenset[str]) -> bool:
    return any(hop.key in down_links for hop in path)
