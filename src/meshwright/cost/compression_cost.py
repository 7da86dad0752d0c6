"""What compressing gradients costs a rank, in seconds and in bytes that it holds: casts, or the products and orthogonal factors of powersgd."""

from __future__ import annotations

from meshwright.core.calibration import Rates, interpolate
from meshwright.core.compression_policy import low_rank_shape
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan

_CAST_TRAFFIC = 2 * 1.5  # there and back: bytes moved for each byte of a gradient, of which bf16 has half
_POWERSGD_PASSES = 9  # over a matrix, in powersgd: added to what was left out, multiplied three times, subtracted, copied
_POWERSGD_CALLS = 12  # for one matrix


def compression_seconds(plan: Plan, profile: ModelProfile, rates: Rates) -> float:
    """In one step; `profile` is one rank's part."""
    if plan.sync.compression == "none":
        return 0.0
    trained = [t for t in profile.tensors if t.trainable]
    if plan.sync.compression == "bf16":
        return _memory_seconds(rates, _CAST_TRAFFIC * sum(t.bytes for t in trained))
    seconds = 0.0
    for tensor in trained:
        if (shape := low_rank_shape(tensor.shape, plan.sync.compression_rank)) is not None:
            rows, columns, kept = shape
            flops = 2.0 * rows * columns * kept
            rate = rates.compute_rate("matmul", "fp32", flops)
            orthogonal = 4.0 * rows * kept * kept / rate if rate else 0.0
            seconds += (
                max(3 * flops / rate if rate else 0.0, _memory_seconds(rates, float(_POWERSGD_PASSES * tensor.bytes)))
                + orthogonal
                + _POWERSGD_CALLS * rates.op_overhead_s
            )
    return seconds


def compression_bytes(plan: Plan, gradients: int) -> int:
    """Beside as many bytes of gradients: their rounded copies, or what was left out of them."""
    return {"none": 0, "bf16": gradients // 2, "powersgd": gradients}[plan.sync.compression]


def _memory_seconds(rates: Rates, size: float) -> float:
    bandwidth = interpolate(rates.memory, max(size, 1.0))
    return size / bandwidth if bandwidth else 0.0
