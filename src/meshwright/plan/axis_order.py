"""Orders of the mesh axes. By default pipeline stages are farthest apart and tensor-parallel ranks adjacent; where links between nodes are slower
than those within, another order may keep more of the traffic inside nodes.

[Note: candidate axis orders]
The candidates put one axis innermost and leave the others in the default order, if some axis then has more or fewer of its ranks on one node. They
cover every choice of the innermost axis; the order of the others matters less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.core.cluster import Cluster
from meshwright.core.mesh import AXES, Mesh
from meshwright.core.rank_devices import assign_rank_devices
from meshwright.cost.collective_cost import group_strides

_GROUP_AXES = ("data", "replica", *AXES)  # groups that run collectives


def alternative_axis_orders(mesh: Mesh, cluster: Cluster) -> Iterator[Mesh]:
    """The same mesh in other axis orders; none on one node, nor where CPU and GPU ranks are mixed."""
    node_size = len(cluster.nodes[0].devices)
    active = [axis for axis in AXES if mesh.degree(axis) > 1]
    if mesh.order or len(active) < 2 or node_size == 1 or mesh.size <= node_size or assign_rank_devices(cluster, mesh.size):
        return
    seen = [_ranks_on_first_node(mesh, node_size)]
    for axis in reversed(active[:-1]):
        other = replace(mesh, order=(*(a for a in active if a != axis), axis))
        counts = _ranks_on_first_node(other, node_size)
        if counts not in seen:
            seen.append(counts)
            yield other


def _ranks_on_first_node(mesh: Mesh, node_size: int) -> list[int]:
    """How many ranks of the first group of each axis are on the first node."""
    counts = []
    for axis in _GROUP_AXES:
        ranks = [0]
        for stride, degree in group_strides(axis, mesh):
            ranks = [rank for first in ranks for rank in range(first, min(first + stride * degree, node_size), stride)]
        counts.append(len(ranks))
    return counts
