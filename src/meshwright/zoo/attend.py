"""The attention that inference gives a model in place of its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, query, key, value), each (heads, tokens, width), to (tokens, heads, width)
