"""Norms over features that ranks share: each sums over its own piece, and the ranks meet over one or two numbers a row."""

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
    pieces = [strand.piece(rank, meeting.comm.size)[1] for rank in range(meeting.comm.size)]
    mode, inner = _Norms(pieces, meeting), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return inner(*args, **kwargs)

    module.forward = apart(forward)


class _Norms(TorchFunctionMode):
    def __init__(self, pieces: list[int], meeting: Meeting) -> None:
        super().__init__()
        self.whole, self.piece, self.meeting = sum(pieces), pieces[meeting.comm.rank], meeting
        self.shares = [n / self.whole for n in pieces]

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
        return _scaled(x, _Normalise.apply(_wide(x), eps, self.shares, self.meeting), weight, bias)

    def _rms_norm(self, x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
        smallest = torch.finfo(x.dtype).eps if eps is None else eps
        return _scaled(x, _wide(x) * torch.rsqrt(self._mean(_wide(x).square()) + smallest), weight, None)


class _Normalise(torch.autograd.Function):
    """(x − mean) / deviation. Ranks tell each other the mean and variance of their pieces in one call, and put them together: sums of
    squares would need one call only, too, and lose what the mean does not leave of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, shares: list[float], meeting: Meeting) -> torch.Tensor:
        comm, name, recall = meeting
        ctx.comm, ctx.name, ctx.share = comm, name, shares[comm.rank]
        own = x.mean(-1, keepdim=True)
        centred = x - own
        mine = torch.stack([own, centred.square().mean(-1, keepdim=True)])

        def make() -> torch.Tensor:
            every = mine.new_empty((comm.size, *mine.shape))
            comm.at_once.all_gather(every.view(-1), mine.view(-1), name).wait()
            return every

        means, variances = recall.meet(make).unbind(1)
        weights = x.new_tensor(shares).view(-1, *[1] * x.dim())
        mean = (weights * means).sum(0)
        inverse = torch.rsqrt((weights * (variances + (means - mean).square())).sum(0) + eps)
        out = torch.addcmul((own - mean) * inverse, centred, inverse)
        ctx.save_for_backward(out, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        out, inverse = ctx.saved_tensors
        sums = torch.stack([grad.mean(-1, keepdim=True), (grad * out).mean(-1, keepdim=True)]).mul_(ctx.share)
        ctx.comm.at_once.all_reduce(sums, ctx.name).wait()
        return (grad - sums[0]).addcmul_(out, sums[1], value=-1).mul_(inverse), None, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.element_size() < 4 else x


def _scaled(x: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """In the type that torch's own norms give: autocast on CUDA runs them in single precision."""
    if weight is not None and bias is not None and weight.dtype == bias.dtype == normed.dtype:
        normed = torch.addcmul(bias, normed, weight)
    else:
        normed = normed if weight is None else normed * weight
        normed = normed if bias is None else normed + bias
    return normed if x.is_cuda and torch.is_autocast_enabled("cuda") else normed.to(x.dtype)
