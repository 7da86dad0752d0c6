"""Applies CUDA's autocast rules to a trace on a machine without CUDA, which runs under the CPU's rules; the two differ in which operations run in
fp32.

Matmuls run in low precision on both. Operations that CUDA runs in fp32 and a CPU does not (norms above all) save a wider copy of their input, and
pooling, which a CPU runs in fp32, stays low on CUDA: on GPT-2 that is 4% of a step's memory, on CosmoFlow 40%.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# Names as in torch's autocast documentation; tensor operators (**) have names of their own.
_FP32_OPS = frozenset((
    "acos", "asin", "cosh", "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "layer_norm", "log", "log10",
    "log1p", "log2", "logsumexp", "norm", "pow", "__pow__", "__rpow__", "prod", "reciprocal", "renorm", "rsqrt", "__rtruediv__", "sinh", "softplus",
    "tan", "cross_entropy", "nll_loss", "l1_loss", "smooth_l1_loss", "mse_loss", "huber_loss",
))  # fmt: skip
_FP32_OUTPUT_OPS = frozenset(("softmax", "log_softmax", "sum"))  # these cast while reading: no copy of the input
_NO_CAST_OPS = frozenset((
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "interpolate", "upsample", "grid_sample",
    "pad",
))  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Within a CPU autocast context, casts as CUDA's autocast would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        if name in _FP32_OPS:
            args, kwargs = pytree.tree_map(_to_fp32, (args, kwargs))
        elif name in _FP32_OUTPUT_OPS and kwargs.get("dtype") is None and any(_is_low_precision(x) for x in args):
            kwargs = {**kwargs, "dtype": torch.float32}
        elif name in _NO_CAST_OPS:
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_low_precision(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point() and value.element_size() < 4


def _to_fp32(value: Any) -> Any:
    return value.float() if _is_low_precision(value) else value
