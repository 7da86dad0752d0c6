"""What a model costs, layer by layer, as numbers that no longer need the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from meshwright.core.memo import Memo

# "special" is element-wise work with exponentials (GELU, softmax), and pooling: slower than memory on CPUs. Its `flops` counts elements.
# "batched" is many small products in one call; "conv2" and "conv3" are convolutions over images and over volumes. "causal" is attention to what
# came before: its `flops` counts every pair of positions, as counters do, and half of them are computed.
KernelKind = Literal["matmul", "batched", "conv", "conv2", "conv3", "attention", "causal", "special", "memory"]
EXPENSIVE_KINDS = ("matmul", "batched", "conv", "conv2", "conv3", "attention", "causal")
Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Kernel:
    """`count` calls of one operation of one size: what it computes and what it moves through memory, a call."""

    kind: KernelKind
    phase: Phase
    flops: float
    bytes: float
    count: int = 1


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer: its name in the model, its shape, bytes an element in storage, and its place in the order of registration."""

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    registration_index: int = 0
    trainable: bool = True
    in_grad_norm: bool = True  # False on a pipeline rank whose copy of a shared parameter another rank counts
    pipeline_ranks: tuple[int, ...] = ()  # the pipeline ranks that share it
    dtype: str = "float32"  # in storage

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

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
    fusible_bytes: float = 0.0  # of those saved, what element-wise work made
    compiler_recomputed_bytes: float = 0.0  # of those saved, what a compiler makes again in backward instead (see describe/mincut_partitioner.py)
    transient_bytes: float = 0.0  # most that is alive while it works, in forward or backward, beyond what it and others have saved
    matmul_workspace_bytes: float = 0.0  # what one matrix product, convolution or attention touches that is not saved: what fusion leaves
    expensive_output_bytes: float = 0.0  # what these products give in forward: kept by selective recomputation
    has_inplace_ops: bool = False  # its code changes such a result in place, so it cannot be kept
    tensors: tuple[TensorSpec, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    block: str = ""  # name shared by repeated blocks of the same structure; "" when it stands alone
    # Where it was traced: `transient_bytes` as lines over the number of samples (bytes at none, bytes a sample), of which the highest holds.
    transient_lines: tuple[tuple[float, float], ...] = ()
    # Of what a sample saves, what is saved while each module works that has parameters of its own; by its name in the layer.
    saved_by: tuple[tuple[str, float], ...] = ()
    single_sample_bytes: float | None = None  # `transient_bytes` of a single sample, where that is on none of these lines


@dataclass(frozen=True)
class ModelProfile:
    """A traced model at `batch` samples; `per_sample_layers` is what one more sample adds, so that `at_batch` needs no second trace."""

    name: str
    layers: tuple[LayerProfile, ...]
    batch: int
    per_sample_layers: tuple[LayerProfile, ...]
    precision: str = "fp32"
    attention: str = "flash"
    tokens_per_sample: int | None = None
    tied_parameters: tuple[tuple[str, ...], ...] = ()  # the names of each parameter that several layers share; it is counted under the first
    counted_loss: bool = False  # the loss is a (sum, count), and both are reduced
    buffers: tuple[TensorSpec, ...] = ()  # what the model holds beside parameters: running statistics, tables
    sample_bytes: float = 0.0  # of a batch, for each of its samples

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
            more = batch - self.batch
            memo: dict[tuple[int, int], tuple[Kernel, ...]] = {}
            layers = tuple(_layer_at_batch(a, b, more, batch, memo) for a, b in zip(self.layers, self.per_sample_layers, strict=True))
            self._by_batch[batch] = replace(self, layers=layers, batch=batch)
        return self._by_batch[batch]

    @cached_property
    def memo(self) -> Memo:
        """What plans have worked out of it."""
        return Memo()

    @cached_property
    def _by_batch(self) -> dict[int, ModelProfile]:
        """The same at other batches, as they were asked for."""
        return {}


def _transient_bytes_at(layer: LayerProfile, batch: int) -> float:
    if batch == 1 and layer.single_sample_bytes is not None:
        return layer.single_sample_bytes
    return max([0.0, *(base + batch * each for base, each in layer.transient_lines)])


def _layer_at_batch(
    layer: LayerProfile, slope: LayerProfile, extra_samples: int, batch: int, kernel_cache: dict[tuple[int, int], tuple[Kernel, ...]]
) -> LayerProfile:
    key = (id(layer.kernels), id(slope.kernels))
    if key not in kernel_cache:
        kernel_cache[key] = tuple(
            replace(k, flops=max(k.flops + extra_samples * s.flops, 0.0), bytes=max(k.bytes + extra_samples * s.bytes, 0.0))
            for k, s in zip(layer.kernels, slope.kernels, strict=True)
        )

    def line(get: Callable[[LayerProfile], float]) -> float:
        return max(get(layer) + extra_samples * get(slope), 0.0)

    return replace(
        layer,
        flops_forward=line(lambda x: x.flops_forward),
        flops_backward=line(lambda x: x.flops_backward),
        activation_bytes=line(lambda x: x.activation_bytes),
        output_bytes=line(lambda x: x.output_bytes),
        fusible_bytes=line(lambda x: x.fusible_bytes),
        compiler_recomputed_bytes=line(lambda x: x.compiler_recomputed_bytes),
        transient_bytes=_transient_bytes_at(layer, batch) if layer.transient_lines else line(lambda x: x.transient_bytes),
        matmul_workspace_bytes=line(lambda x: x.matmul_workspace_bytes),
        expensive_output_bytes=line(lambda x: x.expensive_output_bytes),
        kernels=kernel_cache[key],
    )
