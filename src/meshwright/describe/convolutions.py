"""What a convolution on a CPU takes beside its operands and results: memory that torch's library (oneDNN) has while it works.

It multiplies by matrices: of one sample at a time it lays the columns out that a kernel sees. A result is made in a layout of the library's own
and copied. For a weight's gradient it has room for four, in which partial sums meet.
"""

from __future__ import annotations

import math
from typing import Any

_SUMS = 4  # weights' gradients in the making


def convolution_scratch(func: Any, args: Any, out: Any) -> float:
    """Bytes, of one call on one thread."""
    backward = "backward" in func.name()
    given, weight = args[1 if backward else 0], args[2 if backward else 1]
    made = args[0] if backward else out
    kernel = math.prod(weight.shape[2:])
    columns = kernel * given.shape[1] * math.prod(made.shape[2:]) * given.element_size()
    if backward:
        return float(columns + _SUMS * weight.numel() * weight.element_size())
    return float(max(columns, made.numel() * made.element_size()))
