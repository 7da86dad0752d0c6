"""Groups pipeline ranks that do the same work, so that only one of each group is priced: sixty-four stages cost as much as three."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import Plan, Stage


def equivalent_pipeline_ranks(plan: Plan, profile: ModelProfile, ranks: Sequence[int]) -> dict[int, list[int]]:
    """Pipeline ranks with equal layers and messages, by the first rank of each group."""
    if plan.mesh.pp <= 2 or not plan.stages or plan.placements:
        return {rank: [rank] for rank in ranks}
    layers = {layer.name: _layer_key(plan, layer) for layer in profile.layers}
    groups: dict[Hashable, list[int]] = {}
    for rank in ranks:
        key = tuple(_stage_key(plan, stage, layers) for stage in plan.stages_of_rank(rank))
        groups.setdefault(key, []).append(rank)
    return {group[0]: group for group in groups.values()}


def _layer_key(plan: Plan, layer: LayerProfile) -> Hashable:
    """The key of a layer: repeated blocks share their block name and their kernels."""
    return layer.block or layer.name, id(layer.kernels), layer.activation_bytes, plan.memory.recompute_mode(layer.name)


def _stage_key(plan: Plan, index: int, layers: dict[str, Hashable]) -> Hashable:
    stage, rank = plan.stages[index], plan.stage_rank(index)
    before, after = (plan.stages[i] if 0 <= i < len(plan.stages) and plan.stage_rank(i) != rank else None for i in (index - 1, index + 1))
    messages = (_boundary_key(stage) if before else None, _boundary_key(after) if after else None)
    return tuple(layers.get(name, name) for name in stage.layers), *messages, stage.tied_parameters


def _boundary_key(stage: Stage) -> Hashable:
    return tuple((a.bytes, a.is_batch_independent, a.needs_grad, bool(a.logical_dim)) for a in stage.boundary_activations)
