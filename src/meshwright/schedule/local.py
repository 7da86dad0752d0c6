"""What one tensor-parallel rank holds and computes of a model: its pieces of the parameters, its part of the work."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.model import Kernel, LayerProfile, ModelProfile, TensorSpec
from meshwright.core.plan import Plan

_CUT_KINDS = ("matmul", "conv", "attention")


def local_profile(plan: Plan, profile: ModelProfile, tp_rank: int) -> ModelProfile:
    """The profile as `tp_rank` sees it. Parameters are exact; work and activations shrink with the layer's cut parameters."""
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
            transient_bytes=layer.transient_bytes * share,
            product_bytes=layer.product_bytes * share,
            kernels=_shrunk(layer.kernels, share),
        )

    memo: dict[int, tuple[Kernel, ...]] = {}

    def _shrunk(kernels: tuple[Kernel, ...], share: float) -> tuple[Kernel, ...]:
        if id(kernels) not in memo:
            memo[id(kernels)] = tuple(
                replace(k, flops=k.flops * share, bytes=k.bytes * share) if k.kind in _CUT_KINDS else replace(k, bytes=k.bytes * (1 + share) / 2)
                for k in kernels
            )
        return memo[id(kernels)]

    return replace(profile, layers=tuple(shrink(layer) for layer in profile.layers))
