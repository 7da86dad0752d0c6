"""Context parallelism, acting half: this rank's positions of every sequence, and attention to those of all (see [Note: positions]).

The model's code stays as it is. While it runs, calls that make positions give this rank's, and attention gathers keys and values; all else
works on whatever length it is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.core.comm import Comm
from meshwright.core.context import LOSS, POSITIONS, ContextPolicy, Made
from meshwright.core.errors import RequestError, RunError
from meshwright.core.task import Batch, Loss
from meshwright.core.tensor import Cut, Dealt
from meshwright.execute.doors import at_door
from meshwright.execute.recompute import Recall
from meshwright.execute.tensor import rewrite_sizes


class ContextRun:
    """A model whose sequences this rank holds some positions of."""

    def __init__(self, model: nn.Module, policy: ContextPolicy, comm: Comm, recall: Recall) -> None:
        self.policy, self.comm, self.recall = policy, comm, recall
        self.pieces = policy.pieces(comm.rank, comm.size)
        self.size, self.mine = policy.positions, policy.positions // comm.size
        every = [p for r in range(comm.size) for first, count in policy.pieces(r, comm.size) for p in range(first, first + count)]
        self.sent = torch.tensor(every)  # positions in the order in which ranks hold them …
        self.order = self.sent.argsort()  # … and where each position is among them
        self.makes: dict[tuple[str, str], list[Made]] = {}
        for made in policy.makes:
            self.makes.setdefault((made.module, made.function), []).append(made)
        self.attends = {a.module for a in policy.attends}
        self._now = threading.local()  # backward recomputes in a thread of its own
        self._prepare(model)

    def _prepare(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        rewrite_sizes(modules, self.policy.rewrites, {POSITIONS: Dealt(POSITIONS, self.size, ())}, self.comm)
        for held in self.policy.held:
            self._cut_held(modules[held.parameter.rpartition(".")[0]], held)
        names = {m.module for m in self.policy.makes} | self.attends | set(self.policy.counts) | {""}
        for name in names - {LOSS}:
            self._mark(modules[name], name)
        for entered in self.policy.enters:
            at_door(modules[entered.module], entered.position, partial(self._pick, dim=entered.dim, outer=entered.outer, inner=entered.inner))

    # -- the batch and the loss --

    def local(self, batch: Batch) -> Batch:
        """This rank's positions of the fields that have positions. The others, and those that the loss takes apart itself, stay whole."""
        leaves, spec = pytree.tree_flatten(batch)
        for field in self.policy.fields:
            length = leaves[field.leaf].shape[field.dim]
            if length != self.size:
                raise RequestError(f"field '{field.name}' of the batch has {length} positions, the plan is for {self.size}: plan for {length}")
            leaves[field.leaf] = self._pick(leaves[field.leaf], field.dim)
        return pytree.tree_unflatten(leaves, spec)

    def around(self, loss_fn: Loss) -> Loss:
        """The loss of this rank's positions, from a whole batch."""

        def loss(model: nn.Module, batch: Batch) -> Any:
            with self._inside(LOSS):
                return loss_fn(model, self.local(batch))

        return loss

    @property
    def loss_takes_positions(self) -> bool:
        """Does the loss make positions itself, by slicing fields of the batch?"""
        return any(m.module == LOSS for m in self.policy.makes)

    # -- frames: whose code is running --

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        frames: list[str] = self._now.__dict__.setdefault("frames", [])
        frames.append(name)
        try:
            if len(frames) == 1:
                with _Calls(self, frames):
                    yield
            else:
                yield
        finally:
            frames.pop()

    def _mark(self, module: nn.Module, name: str) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._inside(name):
                return inner(*args, **kwargs)

        module.forward = forward

    # -- cutting --

    def _pick(self, tensor: torch.Tensor, dim: int, outer: int = 1, inner: int = 1) -> torch.Tensor:
        """This rank's positions of a dim that is outer × positions × inner long."""
        with torch._C.DisableTorchFunction():  # it is called from inside the model's code, whose sizes are being rewritten
            runs = tensor.unflatten(dim, (outer, self.size, inner))
            found = torch.cat([runs.narrow(dim + 1, first, count) for first, count in self.pieces], dim + 1)
            return found.flatten(dim, dim + 2)

    def _cut_held(self, module: nn.Module, cut: Cut) -> None:
        """What a module sees of a parameter or buffer during its forward are this rank's positions."""
        key, inner = cut.parameter.rpartition(".")[2], module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            whole = module._parameters.get(key)
            vars(module)[key] = self._pick(whole if whole is not None else module._buffers[key], cut.dim)  # type: ignore[arg-type]
            try:
                return inner(*args, **kwargs)
            finally:
                del vars(module)[key]

        module.forward = forward

    # -- calls that make positions --

    def arange(self, made: Made, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The range that a call is for; None if it is not the one that was meant."""
        names = ("start", "end", "step") if len(args) > 1 or "end" in kwargs else ("end",)
        given = {"start": 0, "step": 1, **dict(zip(names, args, strict=False)), **kwargs}
        start, end, step = (given.pop(k) for k in ("start", "end", "step"))
        runs = made.outer * made.inner
        if (start, step) != (made.start, made.step) or -(-(end - start) // step) not in (runs * self.size, runs * self.mine):
            return None
        whole = torch.arange(start, start + runs * self.size * step, step, **given)
        return self._pick(whole, 0, made.outer, made.inner) if made.cut else whole

    def taken(self, made: Made, table: torch.Tensor, dim: int, start: int, stop: int) -> tuple[torch.Tensor, slice] | None:
        """What to slice instead, and how; None if this slice is not the one that was meant."""
        if (table.shape[dim], start) != (made.of, made.start) or stop - start not in (self.size, self.mine):
            return None
        if not made.cut:
            return table, slice(start, start + self.size)
        return self._pick(table.narrow(dim, start, self.size), dim), slice(None)

    # -- attention --

    def attend(
        self, module: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of this rank's queries to the keys of all positions that they may see."""
        if attn_mask is not None:
            raise RunError(f"{module} gave attention a mask, which it did not when the plan was made: context parallelism has none")
        if query.shape[-2] != self.mine or key.shape[-2] != self.mine:
            raise RunError(f"{module} attends over {query.shape[-2]} positions of a rank, the plan has {self.mine}: plan for this length")
        device = query.device.type
        if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
            query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
        keys, values = _Gathered.apply(key, value, self, f"context/{module}")
        how: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if not is_causal:
            return F.scaled_dot_product_attention(query, keys, values, **how)
        parts, start = [], 0
        for first, count in self.pieces:
            seen = first + count
            mask = None if first == 0 else _last_rows(count, seen, query.device)
            part, before = query.narrow(-2, start, count), (keys.narrow(-2, 0, seen), values.narrow(-2, 0, seen))
            parts.append(F.scaled_dot_product_attention(part, *before, attn_mask=mask, is_causal=first == 0, **how))
            start += count
        return torch.cat(parts, -2) if len(parts) > 1 else parts[0]

    def gathered(self, mine: torch.Tensor, name: str) -> torch.Tensor:
        """Rows of all positions, in their order, from this rank's."""
        whole = mine.new_empty((self.size, *mine.shape[1:]))
        self.comm.at_once.all_gather(whole, mine, name).wait()
        return whole.index_select(0, self._there("order", mine.device))

    def scattered(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        """This rank's rows of the sum over ranks of rows for all positions."""
        out = whole.new_empty((self.mine, *whole.shape[1:]))
        self.comm.at_once.reduce_scatter(out, whole.index_select(0, self._there("sent", whole.device)), name).wait()
        return out

    def _there(self, name: str, device: torch.device) -> torch.Tensor:
        """An index where it is used: copied once, since a copy for each layer would make a GPU wait."""
        found: torch.Tensor = getattr(self, name)
        if found.device != device:
            found = found.to(device)
            setattr(self, name, found)
        return found

    # -- the mean over targets --

    def mean_loss(self, function: Callable[..., torch.Tensor], module: str, args: Any, kwargs: Any) -> torch.Tensor:
        """A cross entropy's mean is over the targets that count, which ranks have unequal numbers of: their sum by everybody's number, times
        the ranks, so that the mean over ranks is the mean over targets."""
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("reduction", "mean") != "mean" or given["target"].is_floating_point():
            return function(*args, **kwargs)
        target, weight = given["target"], given.get("weight")
        counted = target != given.get("ignore_index", -100)
        number = counted.sum() if weight is None else weight[target.where(counted, 0)].where(counted, 0).sum()
        total = number.to(torch.float64)
        self.comm.at_once.all_reduce(total, f"counted/{module}").wait()
        loss = function(**{**given, "reduction": "sum"})
        return loss * (self.comm.size / total).to(loss.dtype)


def _last_rows(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Causal attention for the last `rows` of `columns` positions. GPUs have kernels that need no mask for it."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # brings the compiler with it, seconds of import that only this needs

        return causal_lower_right(rows, columns)
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)


class _Gathered(torch.autograd.Function):
    """Keys and values of this rank's positions going in, of all positions coming out; gradients are summed over ranks on the way back."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, value: torch.Tensor, run: ContextRun, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.run, ctx.name = run, name
        ctx.shapes = [t.movedim(-2, 0).shape[1:] for t in (key, value)]
        keys, values = _unpacked(run.recall.meet(lambda: run.gathered(_packed(key, value), name)), ctx.shapes)
        return keys, values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *_unpacked(ctx.run.scattered(_packed(*grads), ctx.name), ctx.shapes), None, None


def _packed(*pair: torch.Tensor) -> torch.Tensor:
    """Keys and values side by side, a row for each position: one call moves both."""
    return torch.cat([t.movedim(-2, 0).flatten(1) for t in pair], 1)


def _unpacked(rows: torch.Tensor, shapes: list[torch.Size]) -> list[torch.Tensor]:
    parts = rows.split([s.numel() for s in shapes], 1)
    return [part.unflatten(1, shape).movedim(0, -2) for part, shape in zip(parts, shapes, strict=True)]


class _Calls(TorchFunctionMode):
    """Sees the calls of the model's code and of the loss."""

    def __init__(self, run: ContextRun, frames: list[str]) -> None:
        super().__init__()
        self.run, self.frames = run, frames

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, run, frame = kwargs or {}, self.run, self.frames[-1]
        if func is F.scaled_dot_product_attention and frame in run.attends:
            return run.attend(frame, *args, **kwargs)
        if func in (F.cross_entropy, F.nll_loss) and frame in run.policy.counts:
            return run.mean_loss(func, frame.strip("()") or "model", args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "arange":
            for made in run.makes.get((frame, "arange"), ()):
                if (found := run.arange(made, args, kwargs)) is not None:
                    return found
        elif name in ("__getitem__", "narrow"):
            for made in run.makes.get((frame, "slice"), ()):
                args, kwargs = _sliced(run, made, name, args, kwargs)
        return func(*args, **kwargs)


def _sliced(run: ContextRun, made: Made, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A call that slices, with what this rank is to see of it."""
    table = args[0]
    if name == "narrow":
        dim, start, length = (args[1 + i] if len(args) > 1 + i else kwargs[k] for i, k in enumerate(("dim", "start", "length")))
        found = run.taken(made, table, dim, start, start + length)
        return (args, kwargs) if found is None else ((found[0], dim, found[1].start or 0, run.mine if made.cut else run.size), {})
    index = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
    if any(torch.is_tensor(i) or isinstance(i, (list, bool)) for i in index):
        return args, kwargs
    for place, dim in _slices(index, table.dim()):
        start, stop, step = index[place].indices(table.shape[dim])
        found = run.taken(made, table, dim, start, stop) if step == 1 else None
        if found is not None:
            table, index[place] = found
            break
    return (table, tuple(index)), kwargs


def _slices(index: list[Any], rank: int) -> Iterator[tuple[int, int]]:
    """(place in an index, dim of the tensor) of each slice in it."""
    dim, used = 0, sum(i is not None and i is not Ellipsis for i in index)
    for place, item in enumerate(index):
        if item is Ellipsis:
            dim += rank - used
        elif item is not None:
            if isinstance(item, slice):
                yield place, dim
            dim += 1
