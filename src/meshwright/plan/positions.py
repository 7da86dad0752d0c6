"""How ranks along cp share the positions of every sample: of a sequence that attention runs over, or of the space that convolutions do."""

from __future__ import annotations

import math

from meshwright.core.context import ContextPolicy
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.spatial import SpatialPolicy
from meshwright.core.strand import Flow
from meshwright.core.tensor import TensorPolicy
from meshwright.plan.context import choose_context, share_meetings
from meshwright.plan.spatial import choose_spatial

Grid = tuple[TensorPolicy, TensorPolicy]


def share_positions(
    mesh: Mesh, flow: Flow | None, tensor: Grid, precision: str, grid: tuple[int, ...] = ()
) -> tuple[Grid, ContextPolicy, SpatialPolicy]:  # fmt: skip
    """Positions of sequences where the model attends, of space where it does not, or where a grid is asked for; and tensor parallelism
    on what is left of them."""
    if mesh.cp == 1:
        if grid:
            raise RequestError(f"spatial is the grid of the ranks of cp, and mesh {mesh} has none: use --mesh cp={math.prod(grid)}")
        return tensor, ContextPolicy(), SpatialPolicy()
    if flow is None:
        raise RequestError(f"mesh {mesh}: sharing positions needs the model's dataflow, and this model's loss is not known: pass loss_fn")
    if grid or not any(op.name == "attention" for op in flow.operations):
        return tensor, ContextPolicy(), choose_spatial(flow, mesh.cp, grid)
    context = choose_context(flow, mesh.cp, tensor[0], precision)
    return (share_meetings(flow, tensor[0], mesh.cp), share_meetings(flow, tensor[1], mesh.cp)), context, SpatialPolicy()
