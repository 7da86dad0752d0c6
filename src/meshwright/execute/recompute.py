"""Recomputation, acting half: a unit keeps its input alone, or also what is dear to compute, and makes the rest again during backward.

[Note: meetings in a unit that keeps its products]
A tensor-parallel product is completed over the ranks in place, so what selective recomputation has kept of it is the complete one. The
meeting's result is kept with it (`Recall`): when the unit runs again, neither the product nor the communication is repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.core.errors import RunError
from meshwright.core.recompute import Recompute
from meshwright.describe.operations import is_dear
from meshwright.execute.memory import KeyRing


class Recall:
    """What ranks made of their meetings in the unit that is running, if it keeps such results; nothing otherwise."""

    def __init__(self) -> None:
        self._kept: deque[tuple[torch.Tensor, int]] | None = None
        self._again = False

    @property
    def keeps(self) -> bool:
        return self._kept is not None

    def meet(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a meeting: made now, or when the unit runs again, as it was."""
        if self._kept is None:
            return make()
        if not self._again:
            out = make()
            self._kept.append((out.detach(), out._version))
            return out
        kept, version = self._kept.popleft()
        if kept._version != version:
            raise RunError("recompute=selective: the model's code changes a tensor-parallel layer's output in place: set recompute=full")
        return kept

    @contextmanager
    def keeping(self, kept: deque[tuple[torch.Tensor, int]], again: bool) -> Iterator[None]:
        before = self._kept, self._again
        self._kept, self._again = kept, again
        try:
            yield
        finally:
            self._kept, self._again = before


class _Around:
    """Contexts around one run of a unit: entered in order, and as often as needed."""

    def __init__(self, *makers: Callable[[], AbstractContextManager[Any]]) -> None:
        self._makers = makers
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        for make in self._makers:
            stack.enter_context(make())
        self._stacks.append(stack)

    def __exit__(self, *raised: Any) -> None:
        self._stacks.pop().__exit__(*raised)


@contextmanager
def _no_casts_remembered() -> Iterator[None]:
    """Whether autocast had cast a weight already would differ between the first run and the second."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Dear results are kept. Not attention with dropout: it draws random numbers, and what comes after it would draw others if it did not."""
    draws = "_attention" in func.name() and _given(func, "dropout_p", args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_dear(func) and not draws else CheckpointPolicy.PREFER_RECOMPUTE


def _given(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The value of an operation's argument, however it was given."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


_IN_A_GRAPH: dict[str, Any] = {"full": {}, "selective": {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}}


def _contexts(mode: Recompute, keys: KeyRing, recall: Recall) -> tuple[Any, Any]:
    """(around the first run, around the second). The second has the key of the first: in a pipeline other samples came between."""
    keyed = partial(keys.at, keys.now)
    if mode == "full":
        return nullcontext(), _Around(keyed)
    keep, replay = create_selective_checkpoint_contexts(_policy)
    kept: deque[tuple[torch.Tensor, int]] = deque()
    first = _Around(_no_casts_remembered, lambda: recall.keeping(kept, again=False), lambda: keep)
    return first, _Around(keyed, _no_casts_remembered, lambda: recall.keeping(kept, again=True), lambda: replay)


def recompute_units(model: nn.Module, modes: Mapping[str, Recompute], keys: KeyRing, recall: Recall, *, apart: bool = False) -> None:
    """Wrap each unit in place. `apart`: compiled graphs are broken inside of units, so they cannot hold this either."""
    for name, mode in modes.items():
        unit = model.get_submodule(name)
        outer = _recomputed(unit.forward, mode, keys, recall)
        unit.forward = torch.compiler.disable(outer, recursive=False) if apart else outer


def _recomputed(inner: Callable[..., Any], mode: Recompute, keys: KeyRing, recall: Recall) -> Callable[..., Any]:
    def outer(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph takes its key in as a tensor, and its compiler knows torch's own contexts only
            return checkpoint(inner, *args, use_reentrant=False, **_IN_A_GRAPH[mode], **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, context_fn=partial(_contexts, mode, keys, recall), **kwargs)

    return outer
