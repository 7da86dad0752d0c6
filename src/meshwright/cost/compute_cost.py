"""Compute time of layers by a roofline over measured rates: a kernel takes the longer of its arithmetic and its memory traffic, plus its launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.core.calibration import Rates, interpolate
from meshwright.core.model import EXPENSIVE_KINDS, Kernel, LayerProfile, ModelProfile
from meshwright.core.workload import OPTIMIZER_STATES

# Share of the memory-bound traffic and of the calls that remain after compilation, which fuses element-wise chains into one pass.
# From GPT-2 124M on one H200 (docs/measured/training-speed.md): compiled against eager step time.
_FUSED_TRAFFIC_SHARE = 0.35
_FUSED_CALL_SHARE = 0.25
# Memory traffic of computing scales, casting to fp8 and transposing operands, per byte that the matmul would move in bf16; by whether compiled.
# From a 1.2B stack of blocks on one H200 (docs/measured/training-speed.md): fp8 against bf16 step time.
_FP8_CAST_TRAFFIC = {True: 2.2, False: 8.4}
_FALLBACK_KINDS = {"conv2": "conv", "conv3": "conv", "batched": "matmul"}  # the kind whose rate is used where this one was not measured separately
_ADAM_MEMORY_PASSES = 7  # times that a parameter's bytes are read or written in AdamW's step
# Bytes/s assumed where unmeasured: a PCIe 4 slot, and an optimizer's pass over the memory of a host that several GPUs share.
_HOST_LINK_RATE, _HOST_STEP_RATE = 2.2e10, 1.5e10


@dataclass(frozen=True)
class ComputeCost:
    """Prices layers of one profile at one set of rates."""

    rates: Rates
    precision: str
    compiled: bool = False
    fp8_layers: frozenset[str] = frozenset()  # layers whose matmuls run in fp8, where that is the precision
    fp8_cast_traffic: float | None = None  # overrides _FP8_CAST_TRAFFIC, where it was measured for these kernels
    has_few_rows: bool = False  # matmuls of a few rows, as of next tokens: they stream the weights, whatever their FLOPs
    weight_bytes: float = 1.0  # of those that such a matmul reads, the part that is left of quantized weights

    def memo(self, profile: ModelProfile) -> dict[tuple[int, str, bool], float]:
        """The profile's cache of layer times at these rates, shared by all plans."""
        rates = self.rates
        fp8 = self.fp8_layers, self.fp8_cast_traffic
        settings = (rates.op_overhead_s, rates.async_dispatch, self.precision, self.compiled, *fp8, self.has_few_rows, self.weight_bytes)
        return profile.memo.get_or_compute("priced", (rates.compute, rates.memory, rates.fixed), settings, dict[tuple[int, str, bool], float])

    def layer_seconds(
        self, layer: LayerProfile, phase: str, memo: dict[tuple[int, str, bool], float], cheap_only: bool = False, single_sample: bool = False
    ) -> float:  # fmt: skip
        """Seconds of one layer's forward or backward, or only of its kernels that are not expensive (`cheap_only`); repeated layers share their
        kernels, so they are priced once. `single_sample`: the micro-batch is one sample."""
        key = (id(layer.kernels), phase, cheap_only)
        if key not in memo:
            precision = "bf16" if self.precision == "fp8" and layer.name not in self.fp8_layers else self.precision
            kernels = [k for k in layer.kernels if k.phase == phase and not (cheap_only and k.kind in EXPENSIVE_KINDS)]
            seconds = sum(self._kernel_seconds(k, precision, single_sample, conv_kernel_of(layer, k)) for k in kernels)
            memo[key] = max(seconds, self._host_launch_seconds(kernels))
        return memo[key]

    def _host_launch_seconds(self, kernels: list[Kernel]) -> float:
        """Seconds the host takes to launch these kernels, where that rate is known: it is the bound when each kernel is short."""
        each = self.rates.fixed.get("host", 0.0) * (_FUSED_CALL_SHARE if self.compiled else 1.0)
        return each * sum(k.count for k in kernels) if each else 0.0

    def recompute_overhead(self, layer: LayerProfile, cheap_only: bool) -> float:
        """Overhead of recomputing a layer's forward, per operation; with `cheap_only`, the overhead of selective checkpointing."""
        each = self.rates.fixed.get("selective" if cheap_only else "full", 0.0)
        return each * sum(k.count for k in layer.kernels if k.phase == "forward") if each else 0.0

    def split_backward_overhead(self, layer: LayerProfile) -> float:
        """Overhead of computing weight gradients separately from input gradients in backward, per module."""
        each = self.rates.fixed.get("split_backward", 0.0)
        return each * len({t.name.rpartition(".")[0] for t in layer.tensors if t.trainable}) if each else 0.0

    def _kernel_seconds(self, kernel: Kernel, precision: str, single_sample: bool = False, conv: ConvKernel | None = None) -> float:
        fused = self.compiled and kernel.kind in ("memory", "special")
        arithmetic, size = 0.0, kernel.bytes
        if self.has_few_rows and kernel.kind == "matmul":
            size *= self.weight_bytes
        if kernel.flops:
            few_rows = self.has_few_rows and kernel.kind == "matmul"
            rate = self._peak_rate(precision) if few_rows else self._kernel_rate(kernel, precision, single_sample, conv)
            set_up = self.rates.fixed.get(conv.name, 0.0) if conv and not single_sample else 0.0
            arithmetic = kernel.flops / rate + set_up if rate else 0.0
        bandwidth = interpolate(self.rates.memory, max(size, 1.0))
        traffic = size * (_FUSED_TRAFFIC_SHARE if fused else 1.0) / bandwidth if bandwidth else 0.0
        if precision == "fp8" and kernel.kind == "matmul" and bandwidth:
            arithmetic += (_FP8_CAST_TRAFFIC[self.compiled] if self.fp8_cast_traffic is None else self.fp8_cast_traffic) * size / bandwidth
        call = self.rates.op_overhead_s * (_FUSED_CALL_SHARE if fused else 1.0)
        return kernel.count * (max(arithmetic, traffic, call) if self.rates.async_dispatch else max(arithmetic, traffic) + call)

    def _peak_rate(self, precision: str) -> float:
        """The best FLOP/s of matmuls. Curves by FLOPs are of about square ones, where few FLOPs mean little to do at once."""
        return max((rate for _, rate in self.rates.compute.get(f"matmul/{precision}", ())), default=0.0)

    def _kernel_rate(self, kernel: Kernel, precision: str, single_sample: bool, conv: ConvKernel | None) -> float:
        """FLOP/s of one call: for convolutions by their output channels, for batched matmuls by their FLOPs per byte, where measured that way
        (`convolution_rates` and `batched_matmul_rates` in the probe); for others by their FLOPs."""
        kind = _FALLBACK_KINDS.get(kernel.kind, kernel.kind)
        if conv and (measured := self.rates.compute.get(f"{conv.name}-channels{'-alone' * single_sample}/{precision}")):
            return interpolate(measured, conv.channels)
        if kind != kernel.kind:
            names = [f"{kernel.kind}-{kernel.phase}-alone"] * single_sample + [f"{kernel.kind}-{kernel.phase}", kernel.kind]
            if measured := next((curve for name in names if (curve := self.rates.compute.get(f"{name}/{precision}"))), None):
                return interpolate(measured, kernel.flops / max(kernel.bytes, 1.0))
        if kind == "causal":
            return 2 * self._kernel_rate(replace(kernel, kind="attention", flops=kernel.flops / 2), precision, single_sample, None)
        by_phase = kind == "special" or (kind == "attention" and kernel.phase == "backward")
        return self.rates.compute_rate(f"{kind}-{kernel.phase}" if by_phase else kind, precision, kernel.flops)

    def gradient_seconds(self, numel: int, itemsize: int, micro_batches: int, synced: bool) -> float:
        """Seconds of a parameter's gradient per backward beyond computing it: accumulation over micro-batches and, where it is reduced across
        ranks, the hook and the copy into its bucket."""
        size = numel * itemsize
        bandwidth = interpolate(self.rates.memory, max(2.0 * size, 1.0))
        passes, calls = 3.0 * (1 - 1 / micro_batches) + (2.0 / micro_batches if synced else 0.0), 1 if synced else 1 - 1 / micro_batches
        return (passes * size / bandwidth if bandwidth else 0.0) + self.rates.fixed.get("hook", 0.0) * (calls + synced)

    def optimizer_seconds(self, elements: float, name: str, itemsize: int, offload: bool = False, tensors: int = 1) -> float:
        """Seconds of one fused pass: read parameter, gradient and states, write parameter and states; at the measured rate of AdamW where there is
        one. With offload, plus copying gradients to host memory and parameters back."""
        moves = 3 + 2 * OPTIMIZER_STATES.get(name, 2)
        moved = elements * itemsize * moves
        if offload:
            link, step = self.rates.host.get("link", _HOST_LINK_RATE), self.rates.host.get("step", _HOST_STEP_RATE)
            return 2 * elements * itemsize / link + moved / step
        if rate := interpolate(self.rates.compute.get("optimizer/fp32", ()), max(elements / max(tensors, 1), 1.0)):
            fixed = self.rates.fixed.get("optimizer", 0.0) + tensors * self.rates.fixed.get("tensor", 0.0)
            return elements / rate * (moves / _ADAM_MEMORY_PASSES) * (itemsize / 4) + fixed
        bandwidth = interpolate(self.rates.memory, max(moved, 1.0))
        return moved / bandwidth if bandwidth else 0.0


class ConvKernel(NamedTuple):
    """A convolution: which pass it computes, and its output channels."""

    name: str  # conv2-forward, conv3-backward, or conv3-weights (weight gradients alone)
    channels: float


def conv_kernel_of(layer: LayerProfile, kernel: Kernel) -> ConvKernel | None:
    """The `ConvKernel` of a kernel if it is a convolution of known shape, with the mean output channels of the layer's convolutions."""
    dims = {"conv2": 4, "conv3": 5}.get(kernel.kind)
    channels = [t.shape[0] for t in layer.tensors if len(t.shape) == dims] if dims else []
    if not channels:
        return None
    forward = max((k.flops for k in layer.kernels if k.kind == kernel.kind and k.phase == "forward"), default=0.0)
    gradient = "weights" if kernel.phase == "backward" and kernel.flops <= 1.01 * forward else kernel.phase
    return ConvKernel(f"{kernel.kind}-{gradient}", sum(channels) / len(channels))


def model_flops(profile: ModelProfile) -> float:
    """FLOPs of one micro-batch's forward and backward; recomputation is excluded, so MFU does not reward it."""
    return profile.flops_forward + profile.flops_backward
