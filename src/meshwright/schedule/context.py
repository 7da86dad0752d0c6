"""Context parallelism in a schedule: where ranks meet that hold some positions each, and what one of them computes and keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.core.context import LOSS, Attended
from meshwright.core.model import Kernel, LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action

_COUNT_BYTES = 8  # the number of targets that count, in float64


def add_meetings(plan: Plan, profile: ModelProfile, tp_rank: int, add: Callable[[str, str, Action, bool], None]) -> None:
    """Tell `add(module, phase, action, repeated by recomputation)` of every gather of keys and values, and of the way back."""
    for attended in plan.context.attends:
        name, size = f"context/{attended.module}", round(_bytes(plan, attended, tp_rank) * profile.batch)
        add(attended.module, "forward", Action(name, "all_gather", bytes=size, axis="cp"), True)
        if attended.trained:
            add(attended.module, "backward", Action(name, "reduce_scatter", bytes=size, axis="cp"), False)
    last = plan.stages[-1].layers[-1] if plan.mesh.pp > 1 else profile.layers[-1].name
    for module in plan.context.counts:
        name = f"counted/{'loss' if module == LOSS else module or 'model'}"
        add(last, "forward", Action(name, "all_reduce", bytes=_COUNT_BYTES, axis="cp"), False)


def _bytes(plan: Plan, attended: Attended, tp_rank: int) -> float:
    """Keys and values a sample; of a tensor-parallel rank those of its heads."""
    held, whole = plan.pieces[tp_rank].get(attended.strand, (1, 1))
    return attended.bytes / whole * held


def context_profile(plan: Plan, profile: ModelProfile) -> ModelProfile:
    """What a rank with some of the positions computes and keeps: its share, and at attention the keys and values of all."""
    share = 1 / plan.mesh.cp
    whole: dict[str, float] = {}
    for attended in plan.context.attends:
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
            dear_bytes=layer.dear_bytes * share + gathered * (1 - share),
            fusible_bytes=layer.fusible_bytes * share,
            remade_bytes=layer.remade_bytes * share,
            transient_bytes=layer.transient_bytes * share + gathered,
            product_bytes=layer.product_bytes * share + gathered,
            kernels=memo[id(layer.kernels)],
        )

    return replace(profile, layers=tuple(map(fewer, profile.layers)))
