"""Recomputation, acting half: a unit keeps its input alone, or also what is dear to compute, and makes the rest again during backward.

[Note: meetings in a unit that keeps its products]
A tensor-parallel product is completed over the ranks in place, so what selective recomputation has kept of it is the complete one. The
meeting's result is kept with it (`RecomputeCache`): when the unit runs again, neither the product nor the communication is repeated.
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
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.describe.op_classification import is_compute_intensive
from meshwright.execute.memory_runtime import RandomKeys


class RecomputeCache:
    """What ranks made of their meetings in the unit that is running, if it keeps such results; nothing otherwise."""

    def __init__(self) -> None:
        self._results: deque[tuple[torch.Tensor, int]] | None = None
        self._replaying = False

    @property
    def is_active(self) -> bool:
        return self._results is not None

    def run_or_replay(self, collective: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a meeting: made now, or when the unit runs again, as it was."""
        if self._results is None:
            return collective()
        if not self._replaying:
            out = collective()
            self._results.append((out.detach(), out._version))
            return out
        kept, version = self._results.popleft()
        if kept._version != version:
            raise RunError("recompute=selective: the model's code changes a tensor-parallel layer's output in place: set recompute=full")
        return kept

    @contextmanager
    def activate(self, results: deque[tuple[torch.Tensor, int]], replaying: bool) -> Iterator[None]:
        before = self._results, self._replaying
        self._results, self._replaying = results, replaying
        try:
            yield
        finally:
            self._results, self._replaying = before


class _ContextStack:
    """Contexts around one run of a unit: entered in order, and as often as needed."""

    def __init__(self, *context_factories: Callable[[], AbstractContextManager[Any]]) -> None:
        self._context_factories = context_factories
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        for make in self._context_factories:
            stack.enter_context(make())
        self._stacks.append(stack)

    def __exit__(self, *raised: Any) -> None:
        self._stacks.pop().__exit__(*raised)


@contextmanager
def _autocast_cache_disabled() -> Iterator[None]:
    """Whether autocast had cast a weight already would differ between the first run and the second."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _selective_policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Dear results are kept. Not attention with dropout: it draws random numbers, and what comes after it would draw others if it did not."""
    draws = "_attention" in func.name() and _argument_value(func, "dropout_p", args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_compute_intensive(func) and not draws else CheckpointPolicy.PREFER_RECOMPUTE


def _argument_value(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The value of an operation's argument, however it was given."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


_COMPILED_CHECKPOINT_ARGS: dict[str, Any] = {
    "full": {},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, _selective_policy)},
}


def _checkpoint_contexts(mode: RecomputeMode, random_keys: RandomKeys, recompute_cache: RecomputeCache) -> tuple[Any, Any]:
    """(around the first run, around the second). The second has the key of the first: in a pipeline other samples came between."""
    keyed = partial(random_keys.using, random_keys.current)
    if mode == "full":
        return nullcontext(), _ContextStack(keyed)
    keep, replay = create_selective_checkpoint_contexts(_selective_policy)
    kept: deque[tuple[torch.Tensor, int]] = deque()
    first = _ContextStack(_autocast_cache_disabled, lambda: recompute_cache.activate(kept, replaying=False), lambda: keep)
    return first, _ContextStack(keyed, _autocast_cache_disabled, lambda: recompute_cache.activate(kept, replaying=True), lambda: replay)


def recompute_units(
    model: nn.Module, modes: Mapping[str, RecomputeMode], random_keys: RandomKeys, recompute_cache: RecomputeCache, *, compiler_disabled: bool = False
) -> None:
    """Wrap each unit in place. `compiler_disabled`: compiled graphs are broken inside of units, so they cannot hold this either."""
    for name, mode in modes.items():
        unit = model.get_submodule(name)
        outer = _checkpointed(unit.forward, mode, random_keys, recompute_cache)
        unit.forward = torch.compiler.disable(outer, recursive=False) if compiler_disabled else outer


def _checkpointed(forward: Callable[..., Any], mode: RecomputeMode, random_keys: RandomKeys, recompute_cache: RecomputeCache) -> Callable[..., Any]:
    def outer(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph takes its key in as a tensor, and its compiler knows torch's own contexts only
            return checkpoint(forward, *args, use_reentrant=False, **_COMPILED_CHECKPOINT_ARGS[mode], **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_checkpoint_contexts, mode, random_keys, recompute_cache), **kwargs)

    return outer
