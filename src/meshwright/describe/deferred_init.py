"""Builds a model without memory, and later gives the values of its tensors one by one: those that an ordinary construction with the same seed gives.

In: `build`, a function that makes a module on the CPU, and a seed. Out: the module with meta parameters and buffers, and `replay()`, which computes
each tensor on its own and forgets it before the next, so that a process that keeps a piece of each never holds the whole model.

`build` runs once, as it is. torch's random numbers are drawn in the replay; those of `random` and numpy are drawn while it runs: seed them before.

Two things a constructor must not do, and nothing notices: change a numpy array after it has made a tensor of it, which the record has copied; and
keep a parameter or buffer in a cache of its own, which would hold the placeholder from then on. A generator from outside is left as it was.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from meshwright.describe.init_recorder import InitRecorder
from meshwright.describe.init_recording import DeferralError, Recording, TensorRef
from meshwright.describe.init_replay import Replay, final_values
from meshwright.describe.untraceable import describe_failure

__all__ = ["DeferralError", "DeferredModel", "defer_init"]

_MAX_STRAY_BYTES = 64 << 20  # tensors that the modules do not hold get their values at once


@dataclass
class InitialValues:
    """How to compute the initial values of a module's tensors. `peak` is the largest sum of bytes alive in the last replay, the tensor that it
    yielded included and a kernel's own workspace not; `rng_state` the default generator's state after the constructor, once a whole replay has ended.
    """

    recording: Recording
    named: dict[TensorRef, list[str]]  # the tensors of the modules, with all their names
    constants: dict[str, Tensor]  # tensors that the constructor found outside, with values
    peak: int = 0
    rng_state: Tensor | None = field(default=None, repr=False)

    def replay(self, wanted: Callable[[str], bool] | None = None) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Each parameter, buffer and tensor attribute: its names (`layer.0.weight`, several if it is tied) and its values, without gradient. Drop the
        tensor before asking for the next; tensors that are parts of one storage follow one another and share it. The caller's random state is its
        own throughout. `wanted` chooses by name; nothing is drawn after the last tensor that is wanted."""
        by_storage: dict[int, list[TensorRef]] = {}
        for ref, names in self.named.items():
            if wanted is None or any(map(wanted, names)):
                by_storage.setdefault(ref.storage, []).append(ref)
        operations = self.recording.operations
        work = []
        replay = Replay(self.recording)
        for storage in by_storage:
            needed = final_values(self.recording, [storage])
            draws = [i for i in needed if operations[i].draws is not None]
            replay.expect(draws)
            work.append((draws[-1] if draws else needed[-1] if needed else -1, storage, needed))
        for _, storage, needed in sorted(work, key=lambda item: item[0]):
            environment = replay.compute(needed, (storage,))
            for ref in by_storage[storage]:
                yield tuple(self.named[ref]), replay.tensor(ref, environment)
            self.peak = max(replay.peak, self.recording.sizes[storage])
        for name, constant in self.constants.items():
            if wanted is None or wanted(name):
                yield (name,), constant.detach().clone()
        if wanted is None:
            self.rng_state = replay.finish()
        self.peak = replay.peak

    def undefined(self) -> list[str]:
        """Names of tensors to which nothing gives values."""
        return [names[0] for ref, names in self.named.items() if not self.recording.is_written(ref.storage)]


@dataclass
class DeferredModel:
    """A module without values, and how to compute them."""

    model: nn.Module
    values: InitialValues


def defer_init(build: Callable[[], nn.Module], seed: int | None = None) -> DeferredModel:
    """The model of `build` without values. Its random numbers follow from `seed` or, without one, from the present state of torch's generator. Raises
    DeferralError, which says what cannot be recorded and where, if it has to be built whole."""
    recorder = InitRecorder(seed)
    try:
        with recorder.recording_constructor():
            model = build()
    except Exception as error:  # constructors raise anything
        raise DeferralError(f"the constructor cannot be recorded: {describe_failure(recorder.failure or error)}") from error
    if recorder.failure is not None:  # the constructor has caught it
        raise DeferralError(f"the constructor cannot be recorded: {describe_failure(recorder.failure)}")
    named: dict[TensorRef, list[str]] = {}
    constants: dict[str, Tensor] = {}
    placeholders: dict[int, Tensor] = {}
    for name, tensor, registry, key in _held_tensors(model):
        if recorder.is_deferred(tensor):
            named.setdefault(recorder.ref(tensor), []).append(name)
        elif not tensor.is_meta:
            constants[name] = tensor
            registry[key] = placeholders.setdefault(id(tensor), _on_meta(tensor))
    _give_values_to_strays(model, recorder, {ref.storage for ref in named})
    return DeferredModel(model, InitialValues(recorder.recording, named, constants))


def defer_reset(model: nn.Module) -> InitialValues:
    """The values that `reset_parameters`, which torch's own layers have, gives a module on meta: children first, as constructors call it."""

    def reset() -> nn.Module:
        model.to_empty(device="cpu")
        for module in _children_first(model):
            method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(method):
                method()
        return model

    return defer_init(reset).values


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, dict[str, Tensor], str]]:
    """Name, tensor, and the dict and key that hold it: parameters, buffers and attributes that are tensors, by all their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for registry in (module._parameters, module._buffers, vars(module)):
            for key, tensor in list(registry.items()):
                if isinstance(tensor, Tensor) and not is_lazy(tensor):
                    yield f"{prefix}.{key}" if prefix else key, tensor, registry, key  # type: ignore[misc]


def _on_meta(tensor: Tensor) -> Tensor:
    placeholder = torch.empty_like(tensor, device="meta")
    return nn.Parameter(placeholder, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else placeholder


def _give_values_to_strays(model: nn.Module, recorder: InitRecorder, held: set[int]) -> None:
    """Tensors in lists, caches and closures are in no module's registry, so nobody could fill them: they get their values now."""
    if not _strays(model, recorder):
        return
    gc.collect()  # most are garbage
    strays = _referenced(_strays(model, recorder))
    if sum(t.numel() * t.element_size() for t in strays) > _MAX_STRAY_BYTES:
        raise DeferralError("the constructor keeps large tensors that are neither parameters, buffers nor attributes of modules")
    for stray in strays:
        shape = tuple(stray.size())
        if recorder.ref(stray).storage in held:
            raise DeferralError(f"the constructor keeps a second tensor {shape} that is a part of a parameter or buffer, outside the modules")
        (real,) = recorder.values(stray)
        if stray.is_leaf:
            real.requires_grad_(stray.requires_grad)
        try:
            torch.utils.swap_tensors(stray, real)
        except RuntimeError as error:
            raise DeferralError(f"the constructor keeps a tensor {shape} outside the modules that cannot be filled: {error}") from error


def _strays(model: nn.Module, recorder: InitRecorder) -> list[Tensor]:
    held = {id(tensor) for _, tensor, _, _ in _held_tensors(model)}
    tensors = [o for o in gc.get_objects() if Tensor in type(o).__mro__ and id(o) not in held]  # isinstance would wake lazy objects
    return [t for t in tensors if not is_lazy(t) and recorder.is_deferred(t)]


def _referenced(tensors: list[Tensor]) -> list[Tensor]:
    """Those that Python holds: some are alive only because the graph of autograd has saved them."""
    here = {id(tensors), id(sys._getframe())}
    found = {id(t) for holder in gc.get_referrers(*tensors) if id(holder) not in here for t in gc.get_referents(holder)} if tensors else set()
    return [t for t in tensors if id(t) in found]
