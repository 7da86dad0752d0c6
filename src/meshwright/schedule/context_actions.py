"""Context parallelism in a schedule: the collectives of ranks that hold some positions each, and one rank's profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.core.context_policy import LOSS_MODULE
from meshwright.core.model import KernelCache, LayerProfile, ModelProfile, scale_layer
from meshwright.core.plan import Plan
from meshwright.core.sample_coupling import counts_targets
from meshwright.core.schedule import Action

_COUNT_BYTES = 8  # the number of counted targets, in float64


def add_context_collectives(plan: Plan, profile: ModelProfile, tp_rank: int, add: Callable[[str, str, Action, bool], None]) -> None:
    """Call `add(module, phase, action, repeated by recomputation)` for every all-gather of keys and values, its reduce-scatter in backward, and
    every sum of counted targets."""
    for site in plan.context.attention_sites:
        shard_length, dim_length = plan.logical_dim_shards[tp_rank].get(site.logical_dim, (1, 1))  # a tensor-parallel rank has its heads only
        name, size = f"context/{site.module}", round(site.bytes / dim_length * shard_length * profile.batch)
        add(site.module, "forward", Action(name, "all_gather", bytes=size, axis="cp"), True)
        if site.needs_grad:
            add(site.module, "backward", Action(name, "reduce_scatter", bytes=size, axis="cp"), False)
    last = plan.stages[-1].layers[-1] if plan.mesh.pp > 1 else profile.layers[-1].name
    for module in plan.context.mean_loss_modules if not counts_targets(plan) else ():
        name = f"num_targets/{'loss' if module == LOSS_MODULE else module or 'model'}"
        add(last, "forward", Action(name, "all_reduce", bytes=_COUNT_BYTES, axis="cp"), False)


def context_profile(plan: Plan, profile: ModelProfile) -> ModelProfile:
    """The profile of a rank with its fraction of the positions, and in attention layers the keys and values of all positions."""
    fraction = 1 / plan.mesh.cp
    kv_bytes: dict[str, float] = {}  # by layer
    for site in plan.context.attention_sites:
        layer = max((x.name for x in profile.layers if site.module == x.name or site.module.startswith(f"{x.name}.")), key=len, default="")
        kv_bytes[layer] = kv_bytes.get(layer, 0.0) + site.bytes * profile.batch
    cache: KernelCache = {}

    def local_layer(layer: LayerProfile) -> LayerProfile:
        gathered, layer = kv_bytes.get(layer.name, 0.0), scale_layer(layer, fraction, cache)
        return replace(
            layer,
            activation_bytes=layer.activation_bytes + gathered * (1 - fraction),
            expensive_output_bytes=layer.expensive_output_bytes + gathered * (1 - fraction),
            transient_bytes=layer.transient_bytes + gathered,
            matmul_workspace_bytes=layer.matmul_workspace_bytes + gathered,
        )

    return replace(profile, layers=tuple(map(local_layer, profile.layers)))
