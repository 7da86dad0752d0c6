"""CUDA's rules of autocast on a machine without CUDA: a trace runs under those of the CPU, which differ in what they widen.

Products are low on both. What CUDA computes in single precision and a CPU does not saves a wider copy of its input (norms above all), and
pooling, which a CPU widens, stays low on CUDA: on GPT-2 that is 4% of a step's memory, on CosmoFlow 40%.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# By the names that torch's documentation of autocast lists; operators of tensors (**) have names of their own.
_FP32_OPS = frozenset((
    "acos", "asin", "cosh", "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "layer_norm", "log", "log10",
    "log1p", "log2", "logsumexp", "norm", "pow", "__pow__", "__rpow__", "prod", "reciprocal", "renorm", "rsqrt", "__rtruediv__", "sinh", "softplus",
    "tan", "cross_entropy", "nll_loss", "l1_loss", "smooth_l1_loss", "mse_loss", "huber_loss",
))  # fmt: skip
_FP32_OUTPUT_OPS = frozenset(("softmax", "log_softmax", "sum"))  # these widen as they read: no copy of what they are given
_NO_CAST_OPS = frozenset((
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "interpolate", "upsample", "grid_sample",
    "pad",
))  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Inside an autocast of the CPU: as CUDA's would do it."""

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
