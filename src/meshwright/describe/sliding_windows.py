"""The sliding windows of convolutions and poolings, from the arguments with which they reach a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.core.dataflow import SlidingWindow, WindowKind

_IntTuple = tuple[int, ...]


def conv_window(kernel: _IntTuple, args: Sequence[Any]) -> SlidingWindow | None:
    """The window of a convolution. A transposed one has a window only if its outputs do not overlap; otherwise positions need their neighbours'
    contributions."""
    stride, padding, dilation, output_padding = (tuple(args[i]) for i in (3, 4, 5, 7))
    if not args[6]:
        return SlidingWindow("conv", kernel, stride, padding, dilation)
    disjoint = kernel == stride and not any(padding) and not any(output_padding) and set(dilation) == {1}
    return SlidingWindow("grow", kernel, stride, padding, dilation) if disjoint else None


def pool_window(arguments: Mapping[str, Any], kind: WindowKind, rank: int) -> SlidingWindow:
    def int_tuple(key: str, default: Any) -> _IntTuple:
        value = arguments.get(key) or default
        sizes = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        return sizes * rank if len(sizes) == 1 else sizes

    kernel = int_tuple("kernel_size", 1)
    return SlidingWindow(kind, kernel, int_tuple("stride", kernel), int_tuple("padding", 0), int_tuple("dilation", 1))


def avg_pool_window(arguments: Mapping[str, Any], rank: int) -> SlidingWindow | None:
    """The window of an average pooling, or None if border windows differ: the mean must count the padding, or there must be none."""
    window = pool_window(arguments, "mean", rank)
    equal_borders = not arguments.get("ceil_mode", False) and (arguments.get("count_include_pad", True) or not any(window.padding))
    return window if equal_borders else None


def upsample_window(arguments: Mapping[str, Any], rank: int) -> SlidingWindow | None:
    """The window of nearest upsampling by integer factors; None where the code gives a size instead, which needs all positions."""
    scales = [arguments.get(key) or 0.0 for key in ("scales_d", "scales_h", "scales_w")[-rank:]]
    if not all(scale >= 1 and float(scale).is_integer() for scale in scales):
        return None
    factors = tuple(int(scale) for scale in scales)
    return SlidingWindow("grow", factors, factors, (0,) * rank, (1,) * rank)
