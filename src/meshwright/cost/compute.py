"""Computation: a roofline over measured rates. Each kernel takes the longer of its arithmetic and its memory traffic, plus a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.core.calibration import Rates, interpolate
from meshwright.core.model import DEAR_KINDS, Kernel, LayerProfile, ModelProfile
from meshwright.core.workload import OPTIMIZER_STATES

# What compilation leaves of the bandwidth-bound work and of the calls, by fusing element-wise chains into one pass.
# From GPT-2 124M on one H200 (docs/measured/training-speed.md): compiled against eager step time.
FUSED_BYTES = 0.35
FUSED_CALLS = 0.25
# What finding scales, converting to fp8 and turning operands over moves through memory, for each byte that the product would move in bf16;
# compiled, or not. From a 1.2B stack of blocks on one H200 (docs/measured/training-speed.md): fp8 against bf16 step time.
FP8_CASTS = {True: 2.2, False: 8.4}
_LIKE = {"conv2": "conv", "conv3": "conv", "batched": "matmul"}  # what each is, where it was not measured apart
_ADAM_MOVES = 7  # times that a parameter's bytes are read or written in AdamW's step


# A slot of PCIe 4, and an optimizer's pass over the memory of a host that several GPUs share, where neither was measured: bytes/s.
HOST_LINK, HOST_STEP = 2.2e10, 1.5e10


@dataclass(frozen=True)
class ComputeCost:
    """Prices layers of one profile at one set of rates."""

    rates: Rates
    precision: str
    compiled: bool = False
    units: frozenset[str] = frozenset()  # the layers whose products are in fp8, where that is the precision
    casts: float | None = None  # what FP8_CASTS says, where it was measured for these kernels

    def memo(self, profile: ModelProfile) -> dict[tuple[int, str, bool], float]:
        """The layers of a profile that were priced at these rates, whichever plan asked."""
        rates, how = self.rates, (self.rates.call_s, self.rates.queued, self.precision, self.compiled, self.units, self.casts)
        return profile.memo.once("priced", (rates.compute, rates.memory, rates.fixed), how, dict[tuple[int, str, bool], float])

    def layer(
        self, layer: LayerProfile, phase: str, memo: dict[tuple[int, str, bool], float], cheap: bool = False, alone: bool = False
    ) -> float:  # fmt: skip
        """Seconds of one layer's forward or backward, or of what is `cheap` in it; repeated layers share their kernels, so they are priced once.
        `alone`: the micro-batch is one sample."""
        key = (id(layer.kernels), phase, cheap)
        if key not in memo:
            precision = "bf16" if self.precision == "fp8" and layer.name not in self.units else self.precision
            kernels = [k for k in layer.kernels if k.phase == phase and not (cheap and k.kind in DEAR_KINDS)]
            memo[key] = max(sum(self._kernel(k, precision, alone, convolved(layer, k)) for k in kernels), self._host(kernels))
        return memo[key]

    def _host(self, kernels: list[Kernel]) -> float:
        """What the host takes to start these, where that is known to be slower than a device that has little to do in each."""
        each = self.rates.fixed.get("host", 0.0) * (FUSED_CALLS if self.compiled else 1.0)
        return each * sum(k.count for k in kernels) if each else 0.0

    def again(self, layer: LayerProfile, cheap: bool) -> float:
        """What computing a forward again adds to its operations, or to keeping those that are dear."""
        each = self.rates.fixed.get("selective" if cheap else "full", 0.0)
        return each * sum(k.count for k in layer.kernels if k.phase == "forward") if each else 0.0

    def parted(self, layer: LayerProfile) -> float:
        """What it adds to a backward that gradients of weights are made apart from those of inputs, module by module."""
        each = self.rates.fixed.get("parted", 0.0)
        return each * len({t.name.rpartition(".")[0] for t in layer.tensors if t.trainable}) if each else 0.0

    def _kernel(self, kernel: Kernel, precision: str, alone: bool = False, conv: Convolved | None = None) -> float:
        fused = self.compiled and kernel.kind in ("memory", "special")
        arithmetic = 0.0
        if kernel.flops:
            rate = self._rate(kernel, precision, alone, conv)
            set_up = self.rates.fixed.get(conv.name, 0.0) if conv and not alone else 0.0
            arithmetic = kernel.flops / rate + set_up if rate else 0.0
        bandwidth = interpolate(self.rates.memory, max(kernel.bytes, 1.0))
        traffic = kernel.bytes * (FUSED_BYTES if fused else 1.0) / bandwidth if bandwidth else 0.0
        if precision == "fp8" and kernel.kind == "matmul" and bandwidth:
            arithmetic += (FP8_CASTS[self.compiled] if self.casts is None else self.casts) * kernel.bytes / bandwidth
        call = self.rates.call_s * (FUSED_CALLS if fused else 1.0)
        return kernel.count * (max(arithmetic, traffic, call) if self.rates.queued else max(arithmetic, traffic) + call)

    def _rate(self, kernel: Kernel, precision: str, alone: bool, conv: Convolved | None) -> float:
        """FLOP/s of one call: of convolutions by the channels that they make, of many small products by what they compute for each byte, where
        that was measured so (see `convolutions` and `products` in the probe); of others by their size."""
        kind = _LIKE.get(kernel.kind, kernel.kind)
        if conv and (measured := self.rates.compute.get(f"{conv.name}-channels{'-alone' * alone}/{precision}")):
            return interpolate(measured, conv.channels)
        if kind != kernel.kind:
            names = [f"{kernel.kind}-{kernel.phase}-alone"] * alone + [f"{kernel.kind}-{kernel.phase}", kernel.kind]
            measured = next((found for name in names if (found := self.rates.compute.get(f"{name}/{precision}"))), None)
            if measured:
                return interpolate(measured, kernel.flops / max(kernel.bytes, 1.0))
        if kind == "causal":
            return 2 * self._rate(replace(kernel, kind="attention", flops=kernel.flops / 2), precision, alone, None)
        apart = kind == "special" or (kind == "attention" and kernel.phase == "backward")
        return self.rates.compute_rate(f"{kind}-{kernel.phase}" if apart else kind, precision, kernel.flops)

    def gradient(self, numel: int, itemsize: int, micro_batches: int, meets: bool) -> float:
        """What a parameter's gradient takes in each backward beyond being computed: it is added to those before, and where ranks are to meet,
        handed over and copied to where they do."""
        size = numel * itemsize
        bandwidth = interpolate(self.rates.memory, max(2.0 * size, 1.0))
        passes, calls = 3.0 * (1 - 1 / micro_batches) + (2.0 / micro_batches if meets else 0.0), 1 if meets else 1 - 1 / micro_batches
        bare = self.rates.fixed.get("hook", 0.0)
        return (passes * size / bandwidth if bandwidth else 0.0) + bare * (calls + meets)

    def optimizer(self, elements: float, name: str, itemsize: int, offload: bool = False, tensors: int = 1) -> float:
        """One fused pass: read parameter, gradient and states, write parameter and states. Where that was measured (AdamW's), by its rate. In
        host memory gradients go there first, and parameters come back."""
        moves = 3 + 2 * OPTIMIZER_STATES.get(name, 2)
        moved = elements * itemsize * moves
        if offload:
            link, step = (self.rates.host.get(key, usual) for key, usual in (("link", HOST_LINK), ("step", HOST_STEP)))
            return 2 * elements * itemsize / link + moved / step
        if rate := interpolate(self.rates.compute.get("optimizer/fp32", ()), max(elements / max(tensors, 1), 1.0)):
            fixed = self.rates.fixed.get("optimizer", 0.0) + tensors * self.rates.fixed.get("tensor", 0.0)
            return elements / rate * (moves / _ADAM_MOVES) * (itemsize / 4) + fixed
        bandwidth = interpolate(self.rates.memory, max(moved, 1.0))
        return moved / bandwidth if bandwidth else 0.0


class Convolved(NamedTuple):
    """A convolution: what is computed, and how many channels it makes."""

    name: str  # like conv2-forward, conv3-backward, or conv3-weights: gradients of weights alone
    channels: float


def convolved(layer: LayerProfile, kernel: Kernel) -> Convolved | None:
    """What a kernel of a rank's layer does if it is a convolution of known shape: with as many channels as the layer's make on average."""
    dims = {"conv2": 4, "conv3": 5}.get(kernel.kind)
    found = [t.shape[0] for t in layer.tensors if len(t.shape) == dims] if dims else []
    if not found:
        return None
    whole = max((k.flops for k in layer.kernels if k.kind == kernel.kind and k.phase == "forward"), default=0.0)
    part = "weights" if kernel.phase == "backward" and kernel.flops <= 1.01 * whole else kernel.phase
    return Convolved(f"{kernel.kind}-{part}", sum(found) / len(found))


def model_flops(profile: ModelProfile) -> float:
    """FLOPs that a step of one micro-batch needs; recomputation is not among them, so MFU does not reward it."""
    return profile.flops_forward + profile.flops_backward
