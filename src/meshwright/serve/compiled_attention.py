"""Attention over pages as an operator that a compiler sees, and does not look into: a compiled model has no graph break at it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshwright.serve.packed_attention import AttentionOptions

Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionOptions], Tensor]
_sites: WeakValueDictionary[int, AttentionSite] = WeakValueDictionary()
_numbers = itertools.count()


class AttentionSite:
    """One decoder's attention. `number`, a tensor, tells it from others' in a graph."""

    def __init__(self, attend: Attend) -> None:
        self.run = attend
        key = next(_numbers)
        self.number = torch.tensor(key)
        _sites[key] = self

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
        found: Tensor = torch.ops.meshwright.packed_attention(query, key, value, self.number, layer, scale, options.window, options.softcap)
        return found


@torch.library.custom_op("meshwright::packed_attention", mutates_args=())
def _packed_attention(
    query: Tensor, key: Tensor, value: Tensor, site: Tensor, layer: int, scale: float, window: int, softcap: float
) -> Tensor:  # fmt: skip
    """It also writes keys and values into the pages, which belong to no graph. Every call's output is used, so none is left out or merged."""
    return _sites[int(site)].run(layer, query, key, value, AttentionOptions(scale, window, softcap)).contiguous()


@_packed_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, site: Tensor, layer: int, scale: float, window: int, softcap: float) -> Tensor:
    return query.new_empty((query.shape[1], query.shape[0], value.shape[2]))
