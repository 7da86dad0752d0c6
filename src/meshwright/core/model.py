"""A model's cost, layer by layer, as plain numbers: using a profile needs neither the model nor torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from meshwright.core.memo import Memo

# "special" is element-wise work with exponentials (GELU, softmax), and pooling: slower than memory on CPUs. Its `flops` counts elements.
# "batched" is a batched matmul of many small matrices; "conv2" and "conv3" are 2-D and 3-D convolutions. "causal" is causal attention: its
# `flops` counts every pair of positions, as FLOP counters do, although only half of them are computed.
KernelKind = Literal["matmul", "batched", "conv", "conv2", "conv3", "attention", "causal", "special", "memory"]
LOSS_LAYER = "(model)"  # the layer of what runs outside of all others: the loss, and the model's own forward
EXPENSIVE_KINDS = ("matmul", "batched", "conv", "conv2", "conv3", "attention", "causal")
Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Kernel:
    """`count` calls of one operation at one size; `flops` and `bytes` (memory traffic) are per call."""

    kind: KernelKind
    phase: Phase
    flops: float
    bytes: float
    count: int = 1


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer: its name in the model, its shape, bytes per element in storage, and its index in registration order."""

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    registration_index: int = 0
    trainable: bool = True
    in_grad_norm: bool = True  # False on a pipeline rank whose copy of a shared parameter is counted by another rank
    pipeline_ranks: tuple[int, ...] = ()  # the pipeline ranks that share it
    dtype: str = "float32"  # in storage

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class LayerProfile:
    """One layer in execution order. Byte counts are for the profile's batch."""

    name: str
    kind: str  # class name
    parameters: int
    flops_forward: float
    flops_backward: float
    activation_bytes: float  # saved for backward
    output_bytes: float
    fusible_bytes: float = 0.0  # of `activation_bytes`, outputs of element-wise operations
    compiler_recomputed_bytes: float = 0.0  # of `activation_bytes`, what a compiler recomputes in backward (see describe/mincut_partitioner.py)
    transient_bytes: float = 0.0  # peak of live bytes during its forward or backward, beyond all saved activations
    matmul_workspace_bytes: float = 0.0  # unsaved bytes that one matmul, convolution or attention touches: fusion cannot remove them
    expensive_output_bytes: float = 0.0  # outputs of these operations in forward: selective recomputation keeps them
    has_inplace_ops: bool = False  # its code modifies such an output in place, so it cannot be kept
    is_entered: bool = False  # the model's code calls a module inside it outside of its own call
    tensors: tuple[TensorSpec, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    block: str = ""  # name shared by repeated blocks of the same structure; "" for a layer in none
    # Where it was traced: `transient_bytes` is the maximum of these lines over the number of samples: (bytes at 0 samples, bytes per sample).
    transient_lines: tuple[tuple[float, float], ...] = ()
    # By the name (in the layer) of each module with parameters of its own: its fraction of the activation bytes that a sample saves.
    saved_by: tuple[tuple[str, float], ...] = ()
    single_sample_bytes: float | None = None  # `transient_bytes` at one sample, where the lines do not give it


@dataclass(frozen=True)
class ModelProfile:
    """A traced model at `batch` samples; `per_sample_layers` is the increment per sample, so that `at_batch` needs no second trace."""

    name: str
    layers: tuple[LayerProfile, ...]
    batch: int
    per_sample_layers: tuple[LayerProfile, ...]
    precision: str = "fp32"
    attention: str = "flash"
    tokens_per_sample: int | None = None
    tied_parameters: tuple[tuple[str, ...], ...] = ()  # the names of each parameter that several layers share; it is counted under the first
    counted_loss: bool = False  # the loss is (sum, count), and both are reduced over ranks
    buffers: tuple[TensorSpec, ...] = ()  # the model's buffers: running statistics, tables
    sample_bytes: float = 0.0  # bytes of one sample of a batch
    batch_norms: tuple[tuple[str, int], ...] = ()  # BatchNorm layers that are training, and their channels
    untraceable: str = ""  # why the model was run instead of traced; its units may run on some ranks and not on others

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        return sum(t.bytes for t in self.tensors)

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(t for layer in self.layers for t in layer.tensors)

    @property
    def largest_tensor_bytes(self) -> int:
        return max((t.bytes for layer in self.layers for t in layer.tensors), default=0)

    @property
    def flops_forward(self) -> float:
        return sum(layer.flops_forward for layer in self.layers)

    @property
    def flops_backward(self) -> float:
        return sum(layer.flops_backward for layer in self.layers)

    @property
    def activation_bytes(self) -> float:
        return sum(layer.activation_bytes for layer in self.layers)

    def at_batch(self, batch: int) -> ModelProfile:
        """The same model at another batch size: costs are affine in the number of samples."""
        if batch == self.batch:
            return self
        if batch not in self._by_batch:
            extra, cache = batch - self.batch, dict[tuple[int, int], tuple[Kernel, ...]]()
            layers = tuple(_layer_at_batch(a, b, extra, batch, cache) for a, b in zip(self.layers, self.per_sample_layers, strict=True))
            self._by_batch[batch] = replace(self, layers=layers, batch=batch)
        return self._by_batch[batch]

    @cached_property
    def memo(self) -> Memo:
        """Results that planning has derived from this profile."""
        return Memo()

    @cached_property
    def _by_batch(self) -> dict[int, ModelProfile]:
        """Profiles at other batch sizes, filled by `at_batch`."""
        return {}


# The fields of a layer that scale with its work and its batch; its kernels do too.
_SCALED_FIELDS = (
    *("flops_forward", "flops_backward", "activation_bytes", "output_bytes", "fusible_bytes", "compiler_recomputed_bytes"),
    *("transient_bytes", "matmul_workspace_bytes", "expensive_output_bytes"),
)
KernelCache = dict[tuple[int, float], tuple[Kernel, ...]]  # by the id of a layer's kernels, which equal blocks share, and a factor


def scale_layer(layer: LayerProfile, factor: float, cache: KernelCache) -> LayerProfile:
    """The layer with `factor` of its work and activations."""
    key = (id(layer.kernels), factor)
    if key not in cache:
        cache[key] = tuple(replace(k, flops=k.flops * factor, bytes=k.bytes * factor) for k in layer.kernels)
    scaled: dict[str, Any] = {name: getattr(layer, name) * factor for name in _SCALED_FIELDS}
    return replace(layer, **scaled, kernels=cache[key])


def _layer_at_batch(
    layer: LayerProfile, slope: LayerProfile, extra: int, batch: int, cache: dict[tuple[int, int], tuple[Kernel, ...]]
) -> LayerProfile:
    """A layer at `batch` samples, which are `extra` more than those it was traced with; `slope` is its increment per sample."""
    key = (id(layer.kernels), id(slope.kernels))
    if key not in cache:
        cache[key] = tuple(
            replace(k, flops=max(k.flops + extra * s.flops, 0.0), bytes=max(k.bytes + extra * s.bytes, 0.0))
            for k, s in zip(layer.kernels, slope.kernels, strict=True)
        )
    values: dict[str, Any] = {name: max(getattr(layer, name) + extra * getattr(slope, name), 0.0) for name in _SCALED_FIELDS}
    if layer.transient_lines:
        lines = [0.0, *(base + batch * per_sample for base, per_sample in layer.transient_lines)]
        values["transient_bytes"] = layer.single_sample_bytes if batch == 1 and layer.single_sample_bytes is not None else max(lines)
    return replace(layer, **values, kernels=cache[key])
