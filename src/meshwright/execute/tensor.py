"""Tensor parallelism, acting half: cut a model's parameters along dealt strands, in place, and make its ranks meet where they must.

The model's code stays as it is. A layer whose product sums over a cut strand completes its output over the ranks; a module that is
given a whole activation for a cut part sums that input's gradient in backward; sizes that the code spells out are rewritten on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.core.calls import sized_call
from meshwright.core.comm import Comm
from meshwright.core.errors import RequestError
from meshwright.core.tensor import Cut, Dealt, Rewrite, TensorPolicy

_Apart = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class TensorCuts:
    """What was cut: by parameter name, the strand and where it lies in the dim."""

    comm: Comm
    cuts: dict[str, tuple[Dealt, Cut]] = field(default_factory=dict)

    def local(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a whole tensor."""
        if name not in self.cuts:
            return whole
        strand, cut = self.cuts[name]
        first, count = strand.piece(self.comm.rank, self.comm.size)
        return _piece(whole, strand, cut, first, count)

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """The whole tensor again. Collective over the tensor-parallel ranks."""
        if name not in self.cuts:
            return piece
        strand, cut = self.cuts[name]
        pieces = gather_pieces(piece, self.comm, cut.dim, [strand.piece(r, self.comm.size)[1] * cut.outer * cut.inner for r in range(self.comm.size)])
        # Each rank's piece holds `outer` runs; the whole tensor has the runs of all ranks side by side.
        runs = [p.unflatten(cut.dim, (cut.outer, -1)) for p in pieces]
        return torch.cat(runs, cut.dim + 1).flatten(cut.dim, cut.dim + 1)


def _piece(whole: torch.Tensor, strand: Dealt, cut: Cut, first: int, count: int) -> torch.Tensor:
    runs = whole.unflatten(cut.dim, (cut.outer, strand.size * cut.inner))
    return runs.narrow(cut.dim + 1, first * cut.inner, count * cut.inner).flatten(cut.dim, cut.dim + 1).contiguous()


def cut_model(model: nn.Module, optimizer: torch.optim.Optimizer, policy: TensorPolicy, comm: Comm, compiled: bool = False) -> TensorCuts:
    """Cut `model` in place; `optimizer` steps the pieces from now on. Collective: every rank calls it with the same policy.

    If its blocks will be `compiled`, meetings are kept out of the graphs: a compiler would make a graph for every layer's own name.
    """
    apart: _Apart = torch.compiler.disable if compiled else lambda function: function
    found = TensorCuts(comm, {c.parameter: (s, c) for s in policy.strands for c in s.cuts})
    if optimizer.state:
        raise RequestError("tensor parallelism cuts the optimizer's state: apply the plan before the optimizer's first step")
    _share_randomness(comm, next(model.parameters()).device)
    _replace_tensors(model, optimizer, found)
    modules = dict(model.named_modules())
    for meet in policy.enters:
        _enter_at(modules[meet.module], meet.position, comm, f"enter/{meet.module}", apart)
    for meet in policy.sums:
        _complete(modules[meet.module], comm, f"sum/{meet.module}", apart)
    strands = {s.name: s for s in policy.strands}
    for meet in policy.lookups:
        _look_up(modules[meet.module], strands[meet.strand], comm, f"lookup/{meet.module}", apart)
    for meet in policy.gathers:
        _gather_output(modules[meet.module], strands[meet.strand], comm, f"gather/{meet.module}", apart)
    for name in policy.partial:
        _enter_parameter(modules[name.rpartition(".")[0]], name.rpartition(".")[2], comm, f"enter/{name}")
    tables: dict[str, list[Rewrite]] = {}
    for rewrite in policy.rewrites:
        tables.setdefault(rewrite.module, []).append(rewrite)
    for name, rewrites in tables.items():
        _rewrite_sizes(modules[name], rewrites, strands, comm)
    return found


def _share_randomness(comm: Comm, device: torch.device) -> None:
    """The ranks of one group go on from the first one's random state: dropout on what they all hold must be the same for all."""
    state = torch.get_rng_state().to(device)
    comm.broadcast(state, "start/random").wait()
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(device)
        comm.broadcast(state, "start/random").wait()
        torch.cuda.set_rng_state(state.cpu(), device)


# -- parameters --


def _replace_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, found: TensorCuts) -> None:
    """Every parameter and buffer that carries a dealt strand becomes this rank's piece of it, wherever it is registered."""
    known = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in list(held.items()):
                if tensor is None or known.get(id(tensor)) not in found.cuts:
                    continue
                if id(tensor) not in made:
                    piece = found.local(known[id(tensor)], tensor.detach())
                    made[id(tensor)] = nn.Parameter(piece, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else piece
                held[key] = made[id(tensor)]  # type: ignore[assignment]
    for group in optimizer.param_groups:
        group["params"] = [made.get(id(p), p) for p in group["params"]]


# -- meetings --


class _Enter(torch.autograd.Function):
    """Whole going in; the gradients of the ranks' parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, name: str) -> torch.Tensor:
        ctx.comm, ctx.name = comm, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        ctx.comm.all_reduce(grad, ctx.name).wait()
        return grad, None, None


class _Sum(torch.autograd.Function):
    """Partial sums going in; the sum comes out, and its gradient is everybody's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, name: str) -> torch.Tensor:
        out = x.contiguous()
        comm.all_reduce(out, name).wait()
        ctx.mark_dirty(x) if out is x else None
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None, None


class _Gather(torch.autograd.Function):
    """Pieces of the last dim going in; the whole comes out. Every rank has the same gradient of it and keeps its piece."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Comm, sizes: list[int], name: str) -> torch.Tensor:
        ctx.first, ctx.count = sum(sizes[: comm.rank]), sizes[comm.rank]
        return torch.cat(gather_pieces(x, comm, x.dim() - 1, sizes, name), -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.narrow(-1, ctx.first, ctx.count).contiguous(), None, None, None


def gather_pieces(piece: torch.Tensor, comm: Comm, dim: int, sizes: list[int], name: str = "whole") -> list[torch.Tensor]:
    """All ranks' pieces. Backends gather equal sizes only, so shorter ones travel padded."""
    most = max(sizes)
    front = piece.detach().movedim(dim, 0)
    if front.shape[0] < most:
        front = torch.cat([front, front.new_zeros((most - front.shape[0], *front.shape[1:]))])
    out = front.new_empty((comm.size * most, *front.shape[1:]))
    comm.all_gather(out, front.contiguous(), name).wait()
    return [out[r * most : r * most + n].movedim(0, dim) for r, n in enumerate(sizes)]


def _enter_at(module: nn.Module, position: int, comm: Comm, name: str, apart: _Apart) -> None:
    """Among the tensors that a module is given, the one at `position` enters, wherever else it is given too."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)]
        given = leaves[places[position]]
        if given.requires_grad:
            entered = _Enter.apply(given, comm, name)
            leaves = [entered if leaf is given else leaf for leaf in leaves]
        return pytree.tree_unflatten(leaves, spec)

    module.register_forward_pre_hook(apart(before), with_kwargs=True)


def _complete(layer: nn.Module, comm: Comm, name: str, apart: _Apart) -> None:
    """A layer that sums over a cut strand: its product is completed over the ranks, and its bias is added once, afterwards."""
    product = _product_of(layer)
    if product is None:
        layer.register_forward_hook(apart(lambda _m, _a, out: _Sum.apply(out, comm, name)))
        return

    def forward(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Sum.apply(product(x), comm, name)
        bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]
        if bias is None:
            return out
        if isinstance(layer, nn.modules.conv._ConvNd):
            bias = bias.view(-1, *[1] * len(layer.kernel_size))
        return out + bias.to(out.dtype)

    layer.forward = apart(forward)


def _product_of(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The layer without its bias; None for a module that only passes partial sums on."""
    if isinstance(layer, nn.Linear):
        return lambda x: F.linear(x, layer.weight)
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        plain = layer.forward

        def transposed(x: torch.Tensor) -> torch.Tensor:
            kept, layer._parameters["bias"] = layer._parameters["bias"], None
            try:
                return plain(x)
            finally:
                layer._parameters["bias"] = kept

        return transposed
    if isinstance(layer, nn.modules.conv._ConvNd):
        return lambda x: layer._conv_forward(x, layer.weight, None)  # type: ignore[operator,no-any-return]
    if hasattr(layer, "nf"):  # transformers' Conv1D: a linear layer with its matrix the other way round
        return lambda x: x @ layer.weight  # type: ignore[operator,no-any-return]
    return None


def _look_up(layer: nn.Module, strand: Dealt, comm: Comm, name: str, apart: _Apart) -> None:
    """A table whose rows are dealt out: each rank looks up the rows it holds and adds nothing for the others."""
    first, count = strand.piece(comm.rank, comm.size)
    padding = getattr(layer, "padding_idx", None)
    padding = padding - first if padding is not None and first <= padding < first + count else None

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        mine = (tokens >= first) & (tokens < first + count)
        rows = F.embedding(torch.where(mine, tokens - first, 0), layer.weight, padding)  # type: ignore[arg-type]
        return _Sum.apply(rows * mine.unsqueeze(-1).to(rows.dtype), comm, name)  # type: ignore[no-any-return]

    layer.forward = apart(forward)


def _gather_output(layer: nn.Module, strand: Dealt, comm: Comm, name: str, apart: _Apart) -> None:
    sizes = [strand.piece(r, comm.size)[1] for r in range(comm.size)]
    layer.register_forward_hook(apart(lambda _m, _a, out: _Gather.apply(out, comm, sizes, name)))


def _enter_parameter(module: nn.Module, key: str, comm: Comm, name: str) -> None:
    """A whole parameter inside a cut part: what a module sees of it during its forward sums its gradient over the ranks."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        vars(module)[key] = _Enter.apply(module._parameters[key], comm, name)
        try:
            return inner(*args, **kwargs)
        finally:
            del vars(module)[key]

    module.forward = forward


# -- sizes in the model's code --


class _Sizes(TorchFunctionMode):
    """While a module runs, sizes that count a dealt strand count this rank's piece of it. A slice is rewritten on tensors of the length
    that its dim has on this rank alone: code that takes its numbers from a tensor's shape has the right ones already."""

    def __init__(self, table: Mapping[tuple[str, int, int, int, int], int]) -> None:
        super().__init__()
        self.table = table
        self.functions = {key[0] for key in table}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        call = sized_call(name, args, kwargs) if name in self.functions else None
        if call is not None:
            lengths = [args[0].shape[d] for d in call.dims] or [0] * len(call.sizes)
            now = [self.table.get((name, len(call.sizes), i, n, lengths[i]), n) for i, n in enumerate(call.sizes)]
            args, kwargs = call.put(now)
        return func(*args, **kwargs)


def _rewrite_sizes(module: nn.Module, rewrites: list[Rewrite], strands: Mapping[str, Dealt], comm: Comm) -> None:
    table = {}
    for r in rewrites:
        size, mine = strands[r.strand].size, strands[r.strand].piece(comm.rank, comm.size)[1]
        table[r.function, r.rank, r.position, r.number, r.length // size * mine] = r.number // size * mine
    mode, inner = _Sizes(table), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return inner(*args, **kwargs)

    module.forward = forward
