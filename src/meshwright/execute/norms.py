"""Norms over features that ranks share: each sums over its own piece, and the ranks meet over one number a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.core.comm import Comm
from meshwright.core.tensor import Dealt
from meshwright.execute.meet import Everywhere
from meshwright.execute.recompute import Recall


class Meeting(NamedTuple):
    """Over which ranks statistics are summed, under which name, and where results are kept that need not be made again."""

    comm: Comm
    name: str
    recall: Recall


def norm_over_pieces(module: nn.Module, strand: Dealt, meeting: Meeting, apart: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """While the module runs, norms and means over its last dim, a piece of `strand`, are those of the whole."""
    _, count = strand.piece(meeting.comm.rank, meeting.comm.size)
    mode, inner = _Norms(strand.size, count, meeting), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return inner(*args, **kwargs)

    module.forward = apart(forward)


class _Norms(TorchFunctionMode):
    def __init__(self, whole: int, piece: int, meeting: Meeting) -> None:
        super().__init__()
        self.whole, self.piece, self.meeting = whole, piece, meeting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "layer_norm":
            return self._layer_norm(*args, **kwargs)
        if name == "rms_norm":
            return self._rms_norm(*args, **kwargs)
        if name == "mean" and self._is_ours(*args, **kwargs):
            return self._mean(args[0], keepdim=bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))).to(args[0].dtype)
        return func(*args, **kwargs)

    def _is_ours(self, x: torch.Tensor, dim: Any = None, *_: Any, **__: Any) -> bool:
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        return x.shape[-1] == self.piece and [d % x.dim() for d in dims] == [x.dim() - 1]

    def _mean(self, x: torch.Tensor, keepdim: bool = True) -> torch.Tensor:
        """Over all ranks' pieces, in single precision at least."""
        total: torch.Tensor = Everywhere.apply(_wide(x).sum(-1, keepdim=keepdim), *self.meeting)
        return total / self.whole

    def _layer_norm(
        self, x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5, *_: Any
    ) -> torch.Tensor:
        centred = _wide(x) - self._mean(x)
        return _scaled(x, centred * torch.rsqrt(self._mean(centred.square()) + eps), weight, bias)

    def _rms_norm(self, x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
        smallest = torch.finfo(x.dtype).eps if eps is None else eps
        return _scaled(x, _wide(x) * torch.rsqrt(self._mean(_wide(x).square()) + smallest), weight, None)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.element_size() < 4 else x


def _scaled(x: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """In the type that torch's own norms give: autocast on CUDA runs them in single precision."""
    if weight is not None:
        normed = normed * weight
    if bias is not None:
        normed = normed + bias
    return normed if x.is_cuda and torch.is_autocast_enabled("cuda") else normed.to(x.dtype)
