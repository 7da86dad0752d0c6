"""Paths of links between any two ranks of a cluster, within and between nodes, and the bandwidth that a group of ranks gets on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.core.fabric import FatTree
from meshwright.core.group_bandwidth import GroupBandwidth, TopologyQueries, TrafficPattern, compute_group_bandwidth
from meshwright.core.node_topology import ClusterShape, DeviceLocation, Link, LinkPath, PathHop

if TYPE_CHECKING:
    from meshwright.core.cluster import Cluster


class ClusterTopology:
    """Path and bandwidth queries on one cluster. A group's bandwidth is cached: cost models ask for it repeatedly."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._shape = ClusterShape(len(cluster.nodes), -(-len(cluster.devices) // len(cluster.nodes)))
        self._group_bandwidths: dict[tuple[TrafficPattern, bool, Sequence[int]], GroupBandwidth] = {}

    def path(self, source: int, target: int) -> LinkPath:
        """The links from one rank to another, in order."""
        cluster, fabric = self._cluster, self._cluster.fabric
        a, b = cluster.location(source), cluster.location(target)
        if source == target:
            return ()
        if a.node == b.node:
            return self._intra_node_path(a, b)
        if fabric is None:
            return (_uncontended_hop("network", a, cluster.link),)
        path = fabric.path(a, b, self._shape)
        if isinstance(fabric, FatTree) and fabric.rails and a.local_index != b.local_index and b.local_index < len(cluster.nodes[a.node].devices):
            return (*self._intra_node_path(a, DeviceLocation(a.node, b.local_index)), *path)
        return path

    def _intra_node_path(self, a: DeviceLocation, b: DeviceLocation) -> LinkPath:
        node = self._cluster.nodes[a.node]
        return node.inside.path(a, b, self._shape) if node.inside is not None else (_uncontended_hop("inside", a, node.link),)

    def group_bandwidth(self, ranks: Sequence[int], pattern: TrafficPattern, all_groups_active: bool) -> GroupBandwidth:
        """The bandwidth of each of `ranks` in a collective: alone, or while all other ranks communicate too, in groups like this one."""
        key = (pattern, all_groups_active, ranks)
        if key not in self._group_bandwidths:
            queries = TopologyQueries(self.path, self._cluster.node_index, self._shape.ranks)
            self._group_bandwidths[key] = compute_group_bandwidth(queries, ranks, pattern, all_groups_active)
        return self._group_bandwidths[key]


def _uncontended_hop(kind: str, a: DeviceLocation, link: Link) -> PathHop:
    """A hop that no other path shares."""
    return link.hop((kind, *a), 1, 1 << 62)
