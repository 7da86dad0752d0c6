"""Orders of the mesh axes. By default pipeline stages are farthest apart and tensor-parallel ranks adjacent; where links between nodes are slower
than those within, another order may keep more of the traffic inside nodes.

[Note: candidate axis orders]
The candidates put one axis innermost and leave the others in the default order, if some axis then has more or fewer of its ranks on one node. They
cover every choice of the innermost axis; the order of the others matters less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.core.cluster import Cluster
from meshwright.core.mesh import AXES, Mesh
from meshwright.core.rank_devices import assign_rank_devices
from meshwright.cost.collective_cost import group_strides

_GROUP_AXES = ("data", "replica", *AXES)  # groups that run collectives


def alternative_axis_orders(mesh: Mesh, cluster: Cluster) -> Iterator[Mesh]:
    """The same mesh in other axis orders; none on one node, nor where CPU and GPU ranks are mixed."""
    near = len(cluster.nodes[0].devices)
    active = [axis for axis in AXES if mesh.degree(axis) > 1]
    if mesh.order or len(active) < 2 or near == 1 or mesh.size <= near or assign_rank_devices(cluster, mesh.size):
        return
    seen = {_ranks_on_first_node(mesh, near)}
    for axis in reversed(active[:-1]):
        other = replace(mesh, order=(*(a for a in active if a != axis), axis))
        sign = _ranks_on_first_node(other, near)
        if sign not in seen:
            seen.add(sign)
            yield other


def _ranks_on_first_node(mesh: Mesh, devices_per_node: int) -> tuple[int, ...]:
    """How many ranks of the first group of each axis are on the first node."""
    return tuple(_count_on_node(devices_per_node, group_strides(axis, mesh)) for axis in _GROUP_AXES)


def _count_on_node(devices_per_node: int, axis_strides: Sequence[tuple[int, int]]) -> int:
    found = [0]
    for stride, degree in axis_strides:
        found = [rank for first in found for rank in range(first, min(first + stride * degree, devices_per_node), stride)]
    return len(found)
