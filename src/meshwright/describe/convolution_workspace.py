"""Workspace bytes of a convolution on a CPU: memory that torch's libraries allocate besides operands and results.

Most convolutions run in oneDNN as matmuls: it unfolds (im2col) one sample at a time. A result is made in a layout of oneDNN's own and copied. For a
weight gradient it allocates four buffers of partial sums. torch's own convolutions, used for a single small sample and for fp64, unfold all samples
and allocate nothing else.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

_WEIGHT_GRAD_BUFFERS = 4  # partial weight gradients
ConvWorkspace = tuple[float, float]  # bytes of a call, and the extra bytes of a single sample over the line through several


def convolution_workspace(func: Any, args: Any, out: Any) -> ConvWorkspace:
    """Workspace of one call on one thread."""
    workspace = partial(_workspace_bytes, func, args, out)
    samples = args[1 if "backward" in func.name() else 0].shape[0]
    return workspace(samples), workspace(1) - (2 * workspace(2) - workspace(3))


def _workspace_bytes(func: Any, args: Any, out: Any, samples: int) -> float:
    backward = "backward" in func.name()
    x, weight = args[1 if backward else 0], args[2 if backward else 1]
    output = args[0] if backward else out
    kernel, itemsize = math.prod(weight.shape[2:]), x.element_size()
    columns = float(kernel * x.shape[1] * math.prod(output.shape[2:]) * itemsize)
    if not _uses_onednn(x, weight, args[4:10] if backward else args[3:9], samples):
        return columns * samples if kernel > 1 else 0.0
    if backward:
        return columns + _WEIGHT_GRAD_BUFFERS * weight.numel() * itemsize
    return max(columns, float(samples * math.prod(output.shape[1:]) * itemsize))


def _uses_onednn(x: torch.Tensor, weight: torch.Tensor, conv_args: Any, samples: int) -> bool:
    if x.dim() != weight.dim():  # unbatched input
        return True
    backend = torch._C._select_conv_backend(x.new_empty((samples, *x.shape[1:])), weight, None, *conv_args, None)  # type: ignore[attr-defined]
    return "Mkldnn" in str(backend)
