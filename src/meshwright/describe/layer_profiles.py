"""Builds layer profiles from the traces of two steps with different batch sizes, assuming every figure is linear in the batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.core.model import LOSS_LAYER, Kernel, KernelKind, LayerProfile, Phase, TensorSpec
from meshwright.describe.layers import Layer, module_signature
from meshwright.describe.storage_lifetimes import AffineBytes, upper_envelope

PROBED_BATCHES = (2, 3)  # a single sample takes special code paths in some kernels


@dataclass
class LayerTrace:
    """What one layer did in one traced step."""

    kernels: list[tuple[KernelKind, Phase, float, float]] = field(default_factory=list)
    saved_bytes: float = 0.0
    saved_by: Counter[str] = field(default_factory=Counter)  # those bytes by the running module that has parameters of its own
    fusible_bytes: float = 0.0
    rematerialized_bytes: float = 0.0
    output_bytes: float = 0.0
    live_bytes: list[float] = field(default_factory=list)  # at each operation: live bytes that no other layer has saved
    single_sample_extra: dict[int, float] = field(default_factory=dict)  # by operation: live bytes of one sample beyond the line of several
    matmul_workspace_bytes: float = 0.0
    expensive_output_bytes: float = 0.0
    has_inplace_ops: bool = False
    is_entered: bool = False


def layer_profiles(
    model: nn.Module, layers: list[Layer], first: dict[str, LayerTrace], second: dict[str, LayerTrace], *, slope: bool = False, fp64: bool = False
) -> tuple[LayerProfile, ...]:
    """Layer profiles at the first probed batch, or (slope) the increase per sample."""
    parameters = _parameters_by_layer(model, layers)
    parameter_order = {id(p): i for i, p in enumerate(model.parameters())}
    # Traces are in execution order; layers that never ran follow in registration order.
    executed = {name: i for i, name in enumerate(first)}
    entries = sorted(layers, key=lambda layer: executed.get(layer.name, len(executed)))
    if "" in first and first[""].kernels and all(layer.name for layer in layers):
        entries.append(Layer("", model, own_parameters_only=True))  # operations in the model's own forward, such as the loss
    signatures = {layer.name: module_signature(layer.module) for layer in entries}
    repeated = {s for s in signatures.values() if list(signatures.values()).count(s) > 1} if len(signatures) < 2000 else set()
    representative: dict[str, str] = {}
    shared_kernels: dict[tuple[Kernel, ...], tuple[Kernel, ...]] = {}

    def figure(low: float, high: float) -> float:
        return high - low if slope else low

    profiles = []
    for layer in entries:
        a, b = first.get(layer.name, LayerTrace()), second.get(layer.name, LayerTrace())
        tensors = tuple(_tensor_spec(n, p, parameter_order[id(p)], fp64) for n, p in parameters.get(layer.name, []))
        kernels = _merge_kernels(a, b, slope)
        kernels = shared_kernels.setdefault(kernels, kernels)
        signature = signatures[layer.name]
        block = representative.setdefault(signature, layer.name) if signature in repeated and list(layer.module.children()) else ""
        profiles.append(
            LayerProfile(
                name=layer.name or LOSS_LAYER,
                kind=type(layer.module).__name__,
                parameters=sum(t.numel for t in tensors),
                flops_forward=_flops(kernels, "forward"),
                flops_backward=_flops(kernels, "backward"),
                activation_bytes=figure(a.saved_bytes, b.saved_bytes),
                output_bytes=figure(a.output_bytes, b.output_bytes),
                fusible_bytes=figure(a.fusible_bytes, b.fusible_bytes),
                compiler_recomputed_bytes=figure(a.rematerialized_bytes, b.rematerialized_bytes),
                transient_bytes=figure(*(max(max(t.live_bytes, default=0.0) - t.saved_bytes, 0.0) for t in (a, b))),
                matmul_workspace_bytes=figure(a.matmul_workspace_bytes, b.matmul_workspace_bytes),
                expensive_output_bytes=figure(a.expensive_output_bytes, b.expensive_output_bytes),
                has_inplace_ops=a.has_inplace_ops,
                is_entered=a.is_entered,
                tensors=tensors,
                kernels=kernels,
                block=block,
                transient_lines=_workspace_lines(a, b),
                single_sample_bytes=_single_sample_workspace(a, b),
                saved_by=_saved_share_by_module(a, b),
            )
        )
    return tuple(profiles)


def buffer_specs(model: nn.Module, fp64: bool = False) -> tuple[TensorSpec, ...]:
    return tuple(_tensor_spec(name, buffer, index, fp64) for index, (name, buffer) in enumerate(model.named_buffers()))


def _tensor_spec(name: str, tensor: torch.Tensor, order: int, fp64: bool) -> TensorSpec:
    """The tensor as it will be stored: in fp64 runs, every floating-point tensor is fp64."""
    dtype = torch.float64 if fp64 and tensor.is_floating_point() else tensor.dtype
    return TensorSpec(name, tuple(tensor.shape), dtype.itemsize, order, tensor.requires_grad, dtype=str(dtype).removeprefix("torch."))


def _flops(kernels: tuple[Kernel, ...], phase: Phase) -> float:
    return sum(k.flops * k.count for k in kernels if k.phase == phase and k.kind != "special")


def _merge_kernels(a: LayerTrace, b: LayerTrace, slope: bool) -> tuple[Kernel, ...]:
    """Merge equal calls into one entry with a count. If the two traces do not run the same operations in the same order, costs are scaled in
    proportion."""
    same = len(a.kernels) == len(b.kernels) and all(x[:2] == y[:2] for x, y in zip(a.kernels, b.kernels, strict=True))
    low = PROBED_BATCHES[0]
    pairs = zip(a.kernels, b.kernels, strict=True) if same else ((k, (*k[:2], k[2] * (low + 1) / low, k[3] * (low + 1) / low)) for k in a.kernels)
    counts = Counter((kind, phase, flops, moved, flops_b - flops, moved_b - moved) for (kind, phase, flops, moved), (_, _, flops_b, moved_b) in pairs)
    return tuple(Kernel(k[0], k[1], k[4] if slope else k[2], k[5] if slope else k[3], n) for k, n in counts.items())


def _saved_share_by_module(a: LayerTrace, b: LayerTrace) -> tuple[tuple[str, float], ...]:
    """Each module's share of the bytes saved per sample."""
    total = b.saved_bytes - a.saved_bytes
    saved = sorted(b.saved_by.items()) if total > 0 else ()
    return tuple((name, (size - a.saved_by[name]) / total) for name, size in saved if size > a.saved_by[name])


def _workspace_lines(a: LayerTrace, b: LayerTrace) -> tuple[AffineBytes, ...]:
    """Live bytes at each operation beyond what its layer saves by the end, as lines over the number of samples."""
    same, low = len(a.live_bytes) == len(b.live_bytes), PROBED_BATCHES[0]
    pairs = zip(a.live_bytes, b.live_bytes, strict=True) if same else [(max(a.live_bytes, default=0.0), max(b.live_bytes, default=0.0))]
    unsaved = [(x - a.saved_bytes, y - b.saved_bytes) for x, y in pairs]
    return upper_envelope([(x - low * (y - x), y - x) for x, y in unsaved])


def _single_sample_workspace(a: LayerTrace, b: LayerTrace) -> float | None:
    """Workspace of a single sample, where some operation treats it differently from several."""
    if not a.single_sample_extra or len(a.live_bytes) != len(b.live_bytes):
        return None
    extra_samples, live = PROBED_BATCHES[0] - 1, zip(a.live_bytes, b.live_bytes, strict=True)
    live_bytes = [x - extra_samples * (y - x) + a.single_sample_extra.get(op, 0.0) for op, (x, y) in enumerate(live)]
    return max(max(live_bytes) - (a.saved_bytes - extra_samples * (b.saved_bytes - a.saved_bytes)), 0.0)


def _parameters_by_layer(model: nn.Module, layers: list[Layer]) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Each parameter under the one layer it is counted in; a tied one under the first layer that registers it."""
    by_layer: dict[str, list[tuple[str, nn.Parameter]]] = {}
    counted: set[int] = set()
    for layer in layers:
        for name, param in layer.module.named_parameters(recurse=not layer.own_parameters_only):
            if id(param) not in counted:
                counted.add(id(param))
                by_layer.setdefault(layer.name, []).append((f"{layer.name}.{name}" if layer.name else name, param))
    return by_layer
