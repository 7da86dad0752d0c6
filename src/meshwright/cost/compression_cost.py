"""What gradient compression costs a rank, in seconds and bytes: casts to bf16, or PowerSGD's matmuls and orthogonalisation."""

from __future__ import annotations

from meshwright.core.calibration import Rates, interpolate
from meshwright.core.compression_policy import low_rank_shape
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan

_CAST_TRAFFIC = 2 * 1.5  # bytes moved per gradient byte by the cast to bf16 and the cast back (bf16 is half as large)
_POWERSGD_PASSES = 9  # over a matrix in PowerSGD: error feedback added, three matmuls, subtracted, copied
_POWERSGD_CALLS = 12  # kernel launches per matrix


def compression_seconds(plan: Plan, profile: ModelProfile, rates: Rates) -> float:
    """Seconds of compression in one step; `profile` is one rank's part."""
    if plan.sync.compression == "none":
        return 0.0
    trained = [t for t in profile.tensors if t.trainable]
    if plan.sync.compression == "bf16":
        return _memory_seconds(rates, _CAST_TRAFFIC * sum(t.bytes for t in trained))
    seconds = 0.0
    for tensor in trained:
        if (shape := low_rank_shape(tensor.shape, plan.sync.compression_rank)) is not None:
            rows, columns, rank = shape
            flops = 2.0 * rows * columns * rank
            rate = rates.compute_rate("matmul", "fp32", flops)
            matmuls, orthogonal = (3 * flops / rate, 4.0 * rows * rank * rank / rate) if rate else (0.0, 0.0)
            passes = _memory_seconds(rates, float(_POWERSGD_PASSES * tensor.bytes))
            seconds += max(matmuls, passes) + orthogonal + _POWERSGD_CALLS * rates.op_overhead_s
    return seconds


def compression_bytes(plan: Plan, gradients: int) -> int:
    """Bytes held beside `gradients` bytes of gradients: their bf16 copies, or PowerSGD's error feedback."""
    return {"none": 0, "bf16": gradients // 2, "powersgd": gradients}[plan.sync.compression]


def _memory_seconds(rates: Rates, size: float) -> float:
    bandwidth = interpolate(rates.memory, max(size, 1.0))
    return size / bandwidth if bandwidth else 0.0
