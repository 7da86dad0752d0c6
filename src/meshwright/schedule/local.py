"""What one tensor-parallel rank holds and computes of a model: its pieces of the parameters, its part of the work."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.model import DEAR_KINDS, Kernel, LayerProfile, ModelProfile, TensorSpec
from meshwright.core.plan import Plan


def local_profile(plan: Plan, profile: ModelProfile, tp_rank: int, pp_rank: int = 0) -> ModelProfile:
    """The profile as one rank sees it. Parameters are exact; work and activations shrink with the layer's cut parameters."""
    if plan.mesh.pp > 1 and len(plan.stages) > 1:
        profile = _stage_profile(plan, profile, pp_rank)
    ways = plan.mesh.degree("tp")
    if ways == 1:
        return profile
    cuts = {c.parameter: (s, c) for s in plan.tensor.strands for c in s.cuts}

    def piece(tensor: TensorSpec) -> TensorSpec:
        if tensor.name not in cuts:
            return tensor
        strand, cut = cuts[tensor.name]
        shape = list(tensor.shape)
        shape[cut.dim] = cut.outer * strand.piece(tp_rank, ways)[1] * cut.inner
        return replace(tensor, shape=tuple(shape))

    def shrink(layer: LayerProfile) -> LayerProfile:
        tensors = tuple(piece(t) for t in layer.tensors)
        held = sum(t.numel for t in tensors)
        share = held / layer.parameters if layer.parameters else 1.0
        return replace(
            layer,
            parameters=held,
            tensors=tensors,
            flops_forward=layer.flops_forward * share,
            flops_backward=layer.flops_backward * share,
            activation_bytes=layer.activation_bytes * (1 + share) / 2,  # about half lies between whole activations
            dear_bytes=layer.dear_bytes * (1 + share) / 2,
            transient_bytes=layer.transient_bytes * share,
            product_bytes=layer.product_bytes * share,
            kernels=_shrunk(layer.kernels, share),
        )

    memo: dict[int, tuple[Kernel, ...]] = {}

    def _shrunk(kernels: tuple[Kernel, ...], share: float) -> tuple[Kernel, ...]:
        if id(kernels) not in memo:
            memo[id(kernels)] = tuple(
                replace(k, flops=k.flops * share, bytes=k.bytes * share) if k.kind in DEAR_KINDS else replace(k, bytes=k.bytes * (1 + share) / 2)
                for k in kernels
            )
        return memo[id(kernels)]

    return replace(profile, layers=tuple(shrink(layer) for layer in profile.layers))


def _stage_profile(plan: Plan, profile: ModelProfile, pp_rank: int) -> ModelProfile:
    """The layers of one pipeline rank, and the parameters of other ranks' layers that it uses too."""
    mine = {name for i, stage in enumerate(plan.stages) if plan.stage_rank(i) == pp_rank for name in stage.layers}
    holders = {t.name: [plan.stage_rank(s) for s in plan.holders(t.name)] for t in profile.tensors}

    def held(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(
            replace(t, counted=holders[t.name][0] == pp_rank, stage_ranks=tuple(sorted(set(holders[t.name]))))
            for t in tensors
            if pp_rank in holders[t.name]
        )

    kept = [i for i, layer in enumerate(profile.layers) if layer.name in mine]
    layers = [replace(profile.layers[i], tensors=held(profile.layers[i].tensors)) for i in kept]
    users = {b.parameter: b.layer for i, stage in enumerate(plan.stages) if plan.stage_rank(i) == pp_rank for b in stage.also}
    for tensor in (t for layer in profile.layers if layer.name not in mine for t in held(layer.tensors)):
        at = next((i for i, layer in enumerate(layers) if layer.name == users.get(tensor.name)), 0)
        layers[at] = replace(layers[at], tensors=(*layers[at].tensors, tensor))
    return replace(profile, layers=tuple(layers), slopes=tuple(profile.slopes[i] for i in kept))
