"""Turns a loss that is a masked mean into (sum, count), without changes to the user's code (see [Note: samples that meet]).

While the loss runs, a torch function mode watches for means whose divisor depends on the data: `F.cross_entropy` and `F.nll_loss`, which leave out
ignored targets, and quotients of two tensors. If the loss returns one of these means, or a multiple of it, its sum and its count are returned
instead, which add up over ranks and micro-batches. Where every target is masked, the sum is 0 and the count is 0; the mean would be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily

from meshwright.core.errors import RequestError
from meshwright.core.model import LOSS_LAYER
from meshwright.core.plan import Plan, compiles_layer
from meshwright.core.sample_coupling import batch_parts, watches_loss
from meshwright.core.task import Batch, Loss

_DIVISIONS = frozenset(("div", "true_divide", "divide", "__truediv__", "__div__", "div_", "__itruediv__"))
_PRODUCTS = frozenset(("mul", "multiply", "__mul__", "__rmul__", "mul_", "__imul__"))
_SAME_NUMBER = frozenset(("to", "float", "double", "half", "bfloat16", "type", "clone", "contiguous", "squeeze", "view", "reshape", "mean", "sum"))
_GUARDED_COUNT = frozenset(("clamp", "clamp_", "clamp_min", "clamp_min_", "add", "__add__", "__radd__", "add_", "__iadd__"))
_ARGUMENTS = {
    F.cross_entropy: ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
    F.nll_loss: ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
}


def count_targets(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    """What a mean cross entropy divides by: the number of targets that are not ignored, or the sum of their classes' weights."""
    counted = target != ignore_index
    return counted.sum() if weight is None else weight[target.where(counted, 0)].where(counted, 0).sum()


def runs_same_code(first: Any, second: Any) -> bool:
    """Whether two losses are the same function; one that a loop makes anew for each batch is. Callable objects are the same if their classes are."""
    first, second = (loss.func if isinstance(loss, partial) else loss for loss in (first, second))
    codes = [getattr(loss, "__code__", type(loss)) for loss in (first, second)]
    return codes[0] is codes[1]


class LossCounter:
    """Wraps losses for one rank's plan. A loss of which nothing is known is watched once; if it is no masked mean, it runs as it is from then on."""

    def __init__(self, plan: Plan, planned_loss: Loss | None = None) -> None:
        """What the plan says about its loss holds for `planned_loss`, and for any loss if that is None."""
        self._plan, self._planned_loss = plan, planned_loss
        coupling, mesh = plan.samples, plan.mesh
        self._is_known, self._splits_batch = coupling.loss == "masked mean", batch_parts(plan) > 1
        self._may_count = self._is_known or watches_loss(plan)
        self._rechecks = mesh.pp > 1  # ranks without the last stage never see a loss, and must decide alike
        # Modes are a stack: one that begins inside the model's own forward must not do so within a mode of another mechanism, nor within a graph.
        is_outside, has_modes = coupling.loss_after == "", mesh.cp > 1 or mesh.degree("tp") > 1
        self._after = coupling.loss_after if self._is_known and (is_outside or not has_modes) else None
        self._in_graph = plan.compile == "model" or (is_outside and compiles_layer(plan, LOSS_LAYER))
        self._wrapped: dict[Loss, Loss] = {}

    def check(self, loss_fn: Loss) -> None:
        """Refuse another loss than the plan's where that is a sum: a mean, which counts by samples, would be added up over ranks."""
        if self._plan.samples.loss == "sum" and self._splits_batch and not self._is_planned(loss_fn):
            what = "the plan was made for a loss that is a sum over samples, and adds it up over ranks; this is another one"
            raise RequestError(f"{what}: call prepare with loss_fn=, the loss of the loop")

    def _is_planned(self, loss_fn: Loss) -> bool:
        return self._planned_loss is None or runs_same_code(loss_fn, self._planned_loss)

    def for_training(self, loss_fn: Loss) -> Loss:
        if not (self._may_count and self._splits_batch):
            return loss_fn
        if loss_fn not in self._wrapped:
            is_known = self._is_known and self._is_planned(loss_fn)
            self._wrapped[loss_fn] = self._count(loss_fn) if is_known or self._rechecks else self._try_to_count(loss_fn)
        return self._wrapped[loss_fn]

    def for_validation(self, loss_fn: Loss) -> Loss:
        """Validation adds up several batches, so a masked mean is counted on one device too."""
        return (lambda model, batch: run_counted(loss_fn, model, batch, self._after_of(loss_fn))) if self._may_count else loss_fn

    def _count(self, loss_fn: Loss) -> Loss:
        after = None if self._in_graph else self._after_of(loss_fn)
        return lambda model, batch: run_counted(loss_fn, model, batch, after)

    def _after_of(self, loss_fn: Loss) -> str | None:
        return self._after if self._is_planned(loss_fn) else None

    def _try_to_count(self, loss_fn: Loss) -> Loss:
        def run(model: nn.Module, batch: Batch) -> Any:
            value = run_counted(loss_fn, model, batch)
            if not isinstance(value, tuple):
                self._wrapped[loss_fn] = loss_fn
            return value

        return run


def run_counted(loss_fn: Loss, model: nn.Module, batch: Batch, after: str | None = None) -> Any:
    """The loss, or (sum, count) if it is a masked mean. What runs before the module `after` has returned is not watched, and costs nothing."""
    mode = _MeanRecorder()
    if after is None:
        with mode:
            value = loss_fn(model, batch)
        return mode.sum_and_count(value)
    with ExitStack() as stack:

        def begin(*_: Any) -> None:
            if not mode.is_active:
                stack.enter_context(mode)

        stack.enter_context(model.get_submodule(after).register_forward_hook(begin))
        value = loss_fn(model, batch)
    return mode.sum_and_count(value)


def without_recorder(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward that the recorder around a compiled loss does not watch."""

    def run(*args: Any, **kwargs: Any) -> Any:
        modes = _get_current_function_mode_stack()
        with _pop_mode_temporarily() if modes and isinstance(modes[-1], _MeanRecorder) else nullcontext():
            return forward(*args, **kwargs)

    return run


class _Mean(NamedTuple):
    """A tensor that is a mean, and what it is the quotient of."""

    value: Tensor
    total: Callable[[], Tensor]
    divisor: Tensor


class _MeanRecorder(TorchFunctionMode):
    """Records the means that a loss computes, by identity of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._means: list[_Mean] = []
        self._counts: list[tuple[Tensor, Tensor]] = []  # a divisor kept from being zero, and the count that it is made from
        self.is_active = False

    def __enter__(self) -> Any:
        self.is_active = True
        return super().__enter__()

    def sum_and_count(self, value: Any) -> Any:
        """(sum, count) if the value is a recorded mean; otherwise the value."""
        mean = self._find(value)
        return value if mean is None else (mean.total(), mean.divisor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ARGUMENTS:
            return self._cross_entropy(func, args, kwargs)
        out = func(*args, **kwargs)
        if torch.is_tensor(out) and args and torch.is_tensor(args[0]):
            self._record(getattr(func, "__name__", ""), args, out, kwargs)
        return out

    def _find(self, value: Any) -> _Mean | None:
        return next((mean for mean in reversed(self._means) if mean.value is value), None)

    def _cross_entropy(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        given = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
        legacy = given.get("size_average") is not None or given.get("reduce") is not None
        if legacy or given.get("reduction", "mean") != "mean" or given["target"].is_floating_point():
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        count = count_targets(given["target"], given.get("ignore_index", -100), given.get("weight"))
        total = func(**{**given, "reduction": "sum"})
        out = total / count
        self._means.append(_Mean(out, lambda: total, count))
        return out  # type: ignore[no-any-return]

    def _record(self, name: str, args: Any, out: Tensor, kwargs: Any) -> None:
        first, other = args[0], args[1] if len(args) > 1 else kwargs.get("other")
        if out.dim():
            return
        if name in _DIVISIONS and torch.is_tensor(other):
            if not first.dim() and not other.dim() and not other.requires_grad and self._find(first) is None:
                count = next((count for guarded, count in self._counts if guarded is other), other)
                self._means.append(_Mean(out, lambda: first, count))
        elif name in _GUARDED_COUNT and not first.dim() and not first.requires_grad and not torch.is_tensor(other):
            self._counts.append((out, first))
        elif name == "mean" and first.dim():
            count = torch.tensor(first.numel(), device=first.device)
            self._means.append(_Mean(out, first.sum, count))
        elif (mean := self._find(first)) is not None:
            self._follow(name, mean, other, out)

    def _follow(self, name: str, mean: _Mean, other: Any, out: Tensor) -> None:
        """Record a multiple of a mean, or another dtype of it."""
        if isinstance(other, (int, float)) and name in _PRODUCTS:
            self._means.append(_Mean(out, lambda: mean.total() * other, mean.divisor))
        elif isinstance(other, (int, float)) and name in _DIVISIONS:
            self._means.append(_Mean(out, lambda: mean.total() / other, mean.divisor))
        elif name in _SAME_NUMBER:
            self._means.append(_Mean(out, lambda: mean.total().to(out.dtype), mean.divisor))
        elif name in ("neg", "__neg__"):
            self._means.append(_Mean(out, lambda: -mean.total(), mean.divisor))
