"""Activation checkpointing: a unit saves its input, or also the outputs of expensive ops (selective), and backward recomputes the rest.

[Note: collectives in a unit that saves its matmuls]
A tensor-parallel matmul's output is all-reduced in place, so what selective recomputation has saved of it is the reduced one. The collective's
result is saved with it (`RecomputeCache`): recomputing the unit repeats neither the matmul nor the communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.core.errors import RunError
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.describe.op_classification import is_compute_intensive
from meshwright.execute.memory_runtime import RandomKeys


class RecomputeCache:
    """Results of collectives in the running unit, if it recomputes selectively; empty otherwise."""

    def __init__(self) -> None:
        self._results: deque[tuple[Tensor, int]] | None = None
        self._replaying = False

    @property
    def is_active(self) -> bool:
        return self._results is not None

    def run_or_replay(self, collective: Callable[[], Tensor]) -> Tensor:
        """Run a collective and save its result, or return the saved result when the unit is recomputed."""
        if self._results is None:
            return collective()
        if not self._replaying:
            out = collective()
            self._results.append((out.detach(), out._version))
            return out
        out, version = self._results.popleft()
        if out._version != version:
            raise RunError("recompute=selective: the model's code changes a tensor-parallel layer's output in place: set recompute=full")
        return out

    @contextmanager
    def activate(self, results: deque[tuple[Tensor, int]], replaying: bool) -> Iterator[None]:
        before = self._results, self._replaying
        self._results, self._replaying = results, replaying
        try:
            yield
        finally:
            self._results, self._replaying = before


class _ContextStack(ExitStack):
    """Contexts around one run of a unit: entered in order, and anew for every run."""

    def __init__(self, *context_factories: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._context_factories = context_factories

    def __enter__(self) -> Self:
        for make_context in self._context_factories:
            self.enter_context(make_context())
        return self


@contextmanager
def _autocast_cache_disabled() -> Iterator[None]:
    """Disable autocast's weight cache: whether a weight is cached already would differ between forward and recompute."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _selective_policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the outputs of expensive ops. Attention with dropout is recomputed: if it drew no random numbers, ops after it would draw others."""
    draws = "_attention" in func.name() and _argument_value(func, "dropout_p", args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_compute_intensive(func) and not draws else CheckpointPolicy.PREFER_RECOMPUTE


def _argument_value(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The value of an op's argument: positional, keyword or default."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


_COMPILED_ARGS: dict[str, Any] = {"full": {}, "selective": {"context_fn": partial(create_selective_checkpoint_contexts, _selective_policy)}}


@contextmanager
def _running_statistics_kept(norms: Sequence[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Keep the running statistics of BatchNorm layers as they are: the forward has updated them."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def _checkpoint_contexts(mode: RecomputeMode, norms: Sequence[Any], random_keys: RandomKeys, cache: RecomputeCache) -> tuple[Any, Any]:
    """(context of the forward, context of the recompute). The recompute uses the forward's random key: in a pipeline other samples came between."""
    keyed, kept = partial(random_keys.using, random_keys.current), partial(_running_statistics_kept, norms)
    if mode == "full":
        return nullcontext(), _ContextStack(keyed, kept)
    save, replay = create_selective_checkpoint_contexts(_selective_policy)
    results: deque[tuple[Tensor, int]] = deque()
    forward = _ContextStack(_autocast_cache_disabled, lambda: cache.activate(results, replaying=False), lambda: save)
    return forward, _ContextStack(keyed, kept, _autocast_cache_disabled, lambda: cache.activate(results, replaying=True), lambda: replay)


def recompute_units(model: nn.Module, modes: Mapping[str, RecomputeMode], random_keys: RandomKeys, cache: RecomputeCache, *, eager: bool) -> None:
    """Wrap each unit in place. `eager`: compiled graphs break inside of units, so they cannot contain the checkpoint either."""
    for name, mode in modes.items():
        unit = model.get_submodule(name)
        forward = _checkpointed(unit, mode, random_keys, cache)
        unit.forward = torch.compiler.disable(forward, recursive=False) if eager else forward


def _checkpointed(unit: nn.Module, mode: RecomputeMode, random_keys: RandomKeys, cache: RecomputeCache) -> Callable[..., Any]:
    forward = unit.forward
    norms = [m for m in unit.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]

    def outer(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph takes its key as a tensor, and the compiler supports only torch's own contexts
            return checkpoint(forward, *args, use_reentrant=False, **_COMPILED_ARGS[mode], **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_checkpoint_contexts, mode, norms, random_keys, cache), **kwargs)

    return outer
