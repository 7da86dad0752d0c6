"""The links between any two ranks of a cluster, inside nodes and between them, and what a group of ranks gets of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.core.fabric import FatTree
from meshwright.core.reach import Pattern, Reach, Ways, reach
from meshwright.core.topology import Extent, Hop, Link, Path, Place

if TYPE_CHECKING:
    from meshwright.core.cluster import Cluster


class ClusterTopology:
    """What was worked out for a group is kept: it is asked for again and again."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._shape = Extent(len(cluster.nodes), -(-len(cluster.devices) // len(cluster.nodes)))
        self._group_bandwidths: dict[tuple[Pattern, bool, Sequence[int]], Reach] = {}

    def path(self, source: int, target: int) -> Path:
        """The wires from one rank to another, in order."""
        cluster, fabric = self._cluster, self._cluster.fabric
        a, b = cluster.place(source), cluster.place(target)
        if source == target:
            return ()
        if a.node == b.node:
            return self._intra_node_path(a, b)
        if fabric is None:
            return (_dedicated_hop("network", a, cluster.link),)
        path = fabric.path(a, b, self._shape)
        if isinstance(fabric, FatTree) and fabric.rails and a.at != b.at and b.at < len(cluster.nodes[a.node].devices):
            return (*self._intra_node_path(a, Place(a.node, b.at)), *path)
        return path

    def _intra_node_path(self, a: Place, b: Place) -> Path:
        node = self._cluster.nodes[a.node]
        return node.inside.path(a, b, self._shape) if node.inside is not None else (_dedicated_hop("inside", a, node.link),)

    def group_bandwidth(self, ranks: Sequence[int], pattern: Pattern, all_groups_active: bool) -> Reach:
        """What each of `ranks` gets of the wires in a collective, alone or while all other ranks communicate too, in groups like this one."""
        key = (pattern, all_groups_active, ranks)
        if key not in self._group_bandwidths:
            ways = Ways(self.path, self._cluster.node_index, self._rings_in_node, self._shape.nodes * self._shape.ranks)
            self._group_bandwidths[key] = reach(ways, ranks, pattern, all_groups_active)
        return self._group_bandwidths[key]

    def _rings_in_node(self, node: int, members: int) -> int:
        inside = self._cluster.nodes[node].inside
        return inside.rings(members) if inside is not None else 1


def _dedicated_hop(kind: str, a: Place, link: Link) -> Hop:
    """A wire that nobody else uses."""
    return Hop((kind, *a), link.name, link.latency_s, link.reached, 1, 1 << 62)
