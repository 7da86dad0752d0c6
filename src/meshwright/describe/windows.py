"""What slides over positions: the windows of convolutions and poolings, from the arguments with which they reach a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.core.strand import Window, WindowKind

_Numbers = tuple[int, ...]


def conv_window(kernel: _Numbers, args: Sequence[Any]) -> Window | None:
    """A transposed one has a window if its results do not overlap: else positions need what their neighbours add."""
    stride, padding, dilation, more = (tuple(args[i]) for i in (3, 4, 5, 7))
    if not args[6]:
        return Window("conv", kernel, stride, padding, dilation)
    apart = kernel == stride and not any(padding) and not any(more) and set(dilation) == {1}
    return Window("grow", kernel, stride, padding, dilation) if apart else None


def pool_window(named: Mapping[str, Any], kind: WindowKind, rank: int) -> Window:
    def numbers(key: str, default: Any) -> _Numbers:
        found = named.get(key) or default
        found = tuple(found) if isinstance(found, (list, tuple)) else (found,)
        return found * rank if len(found) == 1 else found

    kernel = numbers("kernel_size", 1)
    return Window(kind, kernel, numbers("stride", kernel), numbers("padding", 0), numbers("dilation", 1))


def mean_window(named: Mapping[str, Any], rank: int) -> Window | None:
    """At the border a mean may count what is there alone; only those that count the padding too are the same everywhere."""
    window = pool_window(named, "mean", rank)
    alike = not named.get("ceil_mode", False) and (named.get("count_include_pad", True) or not any(window.padding))
    return window if alike else None


def nearest_window(named: Mapping[str, Any], rank: int) -> Window | None:
    """By a whole factor that the code names every position becomes so many. Where it names a size instead, all positions are needed."""
    scales = [named.get(key) or 0.0 for key in ("scales_d", "scales_h", "scales_w")[-rank:]]
    if not all(scale >= 1 and float(scale).is_integer() for scale in scales):
        return None
    factors = tuple(int(scale) for scale in scales)
    return Window("grow", factors, factors, (0,) * rank, (1,) * rank)
