"""Context parallelism in a schedule: the collectives of ranks that hold some positions each, and what one of them computes and keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.core.context_policy import LOSS_MODULE, AttentionSite
from meshwright.core.model import Kernel, LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action

_COUNT_BYTES = 8  # the number of counted targets, in float64


def add_context_collectives(plan: Plan, profile: ModelProfile, tp_rank: int, add: Callable[[str, str, Action, bool], None]) -> None:
    """Call `add(module, phase, action, repeated by recomputation)` for every all-gather of keys and values, its reduce-scatter in backward, and
    every sum of counted targets."""
    for attended in plan.context.attention_sites:
        name, size = f"context/{attended.module}", round(_kv_bytes(plan, attended, tp_rank) * profile.batch)
        add(attended.module, "forward", Action(name, "all_gather", bytes=size, axis="cp"), True)
        if attended.needs_grad:
            add(attended.module, "backward", Action(name, "reduce_scatter", bytes=size, axis="cp"), False)
    last = plan.stages[-1].layers[-1] if plan.mesh.pp > 1 else profile.layers[-1].name
    for module in plan.context.mean_loss_modules:
        name = f"num_targets/{'loss' if module == LOSS_MODULE else module or 'model'}"
        add(last, "forward", Action(name, "all_reduce", bytes=_COUNT_BYTES, axis="cp"), False)


def _kv_bytes(plan: Plan, attention_site: AttentionSite, tp_rank: int) -> float:
    """Bytes of keys and values per sample; on a tensor-parallel rank, those of its heads."""
    held, whole = plan.logical_dim_shards[tp_rank].get(attention_site.logical_dim, (1, 1))
    return attention_site.bytes / whole * held


def context_profile(plan: Plan, profile: ModelProfile) -> ModelProfile:
    """The profile of a rank with its share of the positions, and in attention layers the keys and values of all positions."""
    share = 1 / plan.mesh.cp
    whole: dict[str, float] = {}
    for attended in plan.context.attention_sites:
        owner = max((x.name for x in profile.layers if attended.module == x.name or attended.module.startswith(f"{x.name}.")), key=len, default="")
        whole[owner] = whole.get(owner, 0.0) + attended.bytes * profile.batch
    memo: dict[int, tuple[Kernel, ...]] = {}

    def fewer(layer: LayerProfile) -> LayerProfile:
        gathered = whole.get(layer.name, 0.0)
        if id(layer.kernels) not in memo:
            memo[id(layer.kernels)] = tuple(replace(k, flops=k.flops * share, bytes=k.bytes * share) for k in layer.kernels)
        return replace(
            layer,
            flops_forward=layer.flops_forward * share,
            flops_backward=layer.flops_backward * share,
            activation_bytes=layer.activation_bytes * share + gathered * (1 - share),
            output_bytes=layer.output_bytes * share,
            expensive_output_bytes=layer.expensive_output_bytes * share + gathered * (1 - share),
            fusible_bytes=layer.fusible_bytes * share,
            compiler_recomputed_bytes=layer.compiler_recomputed_bytes * share,
            transient_bytes=layer.transient_bytes * share + gathered,
            matmul_workspace_bytes=layer.matmul_workspace_bytes * share + gathered,
            kernels=memo[id(layer.kernels)],
        )

    return replace(profile, layers=tuple(map(fewer, profile.layers)))
