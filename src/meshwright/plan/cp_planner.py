"""Chooses how the ranks of the cp axis shard the positions of every sample: of a sequence that attention runs over, or of the space that
convolutions run over."""

from __future__ import annotations

import math

from meshwright.core.context_policy import ContextPolicy
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.spatial_policy import SpatialPolicy
from meshwright.core.tensor_policy import TensorPolicy
from meshwright.plan.context_planner import choose_context, scale_sites_for_cp
from meshwright.plan.spatial_planner import choose_spatial

TensorGrid = tuple[TensorPolicy, TensorPolicy]


def choose_cp_policies(
    mesh: Mesh, dataflow: Dataflow | None, tensor_grid: TensorGrid, precision: str, grid: tuple[int, ...] = ()
) -> tuple[TensorGrid, ContextPolicy, SpatialPolicy]:  # fmt: skip
    """The policies of the cp axis: context parallelism if the model has attention; spatial parallelism if it has none, or if `grid` is given. The
    tensor policies are returned with their collectives scaled to a rank's positions."""
    if mesh.cp == 1:
        if grid:
            raise RequestError(f"spatial is the grid of the cp ranks, and mesh {mesh} has no cp axis: use --mesh cp={math.prod(grid)}")
        return tensor_grid, ContextPolicy(), SpatialPolicy()
    if dataflow is None:
        raise RequestError(f"mesh {mesh}: sharding positions needs the model's dataflow, and this model's loss is not known: pass loss_fn")
    if grid or not any(op.name == "attention" for op in dataflow.operations):
        return tensor_grid, ContextPolicy(), choose_spatial(dataflow, mesh.cp, grid)
    context = choose_context(dataflow, mesh.cp, tensor_grid[0], precision)
    return (scale_sites_for_cp(dataflow, tensor_grid[0], mesh.cp), scale_sites_for_cp(dataflow, tensor_grid[1], mesh.cp)), context, SpatialPolicy()
