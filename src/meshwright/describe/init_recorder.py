"""Records what a constructor does with tensors, without values: the two modes under which it runs.

The constructor's tensors are meta tensors, which say that they are on the CPU, so that it takes the same branches. Every operation on them that
writes a storage or draws a random number goes into a `Recording`. Where the constructor reads a value, or a shape depends on one, the operations that
the value needs are run for real.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.describe.init_appearance import CpuAppearance
from meshwright.describe.init_recording import END, START, DeferralError, GeneratorRef, Operation, Recording, ShapeRef, TensorRef
from meshwright.describe.init_replay import Replay
from meshwright.describe.operation_traits import (
    BACKEND_LAYOUT,
    SHAPE_ONLY,
    UNDEFINED,
    OperationTraits,
    argument_at,
    is_among,
    is_plain,
    map_tensors,
    placeholder_like,
    scratch_like,
    tensors_in,
    traits_of,
)

_aten = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")


class InitRecorder(TorchDispatchMode):
    """While active, tensors have no values and operations are recorded. `storages` keeps the storages alive: a free address would be used again."""

    def __init__(self, seed: int | None) -> None:
        """`seed` is the default generator's; None: it begins in its present state."""
        super().__init__()
        generator = torch.default_generator if seed is None else torch.Generator().manual_seed(seed)
        self.recording = Recording(generator.get_state())
        self.failure: DeferralError | None = None
        self.wants_meta = False  # the constructor itself asks for the meta device in the current call
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._reader: Replay | None = None
        self._generators: dict[int, torch.Generator] = {0: torch.default_generator}
        self._keys: dict[int, int] = {id(torch.default_generator): 0}
        self._first_states: dict[int, Tensor] = {}
        self._marks: dict[int, int] = {}  # seeds that stand for "after this operation"
        self._next_mark = secrets.randbits(61) | 1 << 61
        self._first_seed = self._mark(START) if seed is None else seed
        self._expected: dict[int, int] = {0: self._first_seed}  # the generators' seeds, where the constructor has not set them

    @contextmanager
    def recording_constructor(self) -> Iterator[None]:
        """The modes and patches under which the constructor runs. The caller's random state comes back."""
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._first_seed)
        trunc_normal = getattr(init, "_no_grad_trunc_normal_", None)
        if trunc_normal is not None:  # it draws until all values are within bounds: one operation here, rather than values to be read
            init._no_grad_trunc_normal_ = lambda *args, **kwargs: self._whole_call(trunc_normal, args, kwargs)
        try:
            with self, CpuAppearance(self):
                yield
            self.recording.end_restart = self._restart(0)
        finally:
            if trunc_normal is not None:
                init._no_grad_trunc_normal_ = trunc_normal
            torch.default_generator.set_state(state)
            for key, first in self._first_states.items():
                self._generators[key].set_state(first)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch wraps the dispatch of a mode to hide it from its compiler, which takes seconds to import and time in each call."""
        return False

    def is_deferred(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the constructor's without values. Others on meta are those that it asked for."""
        with torch._C.DisableTorchFunction():
            return tensor.is_meta and is_plain(tensor) and tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self.storages

    def values(self, *tensors: Tensor) -> list[Tensor]:
        """Their values at this point of the program."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            if self._reader is None:
                self._reader = Replay(self.recording, repeatable=True)
            refs = [self.ref(t) for t in tensors]
            keep = {ref.storage for ref in refs}
            environment = self._reader.compute(self.recording.needed_for([(s, END) for s in keep]), keep)
            return [self._reader.tensor(ref, environment) for ref in refs]

    def ref(self, tensor: Tensor) -> TensorRef:
        storage, offset = tensor.untyped_storage()._cdata, int(tensor.storage_offset())
        return TensorRef(storage, tensor.dtype, tuple(tensor.size()), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def refuse(self, reason: str) -> DeferralError:
        self.failure = self.failure or DeferralError(reason)
        return self.failure

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = traits_of(func)
        tensors = list(tensors_in((args, kwargs)))
        deferred = [t for t in tensors if self.is_deferred(t)]
        device = kwargs.get("device")
        if device is not None and device.type not in ("cpu", "meta"):
            raise self.refuse(f"{func} makes a tensor on {device}: only constructors on the CPU can be recorded")
        if func is _aten.lift_fresh.default and not args[0].is_meta:
            return self._constant(args[0])
        shape_only = traits.name in SHAPE_ONLY and (device is not None or not tensors[0].is_meta)  # `to_empty` of a module on meta
        if self.wants_meta or (tensors and not deferred and not shape_only and not (traits.random and not tensors[0].is_meta)):
            return func(*args, **kwargs)  # tensors with values of their own, or those that the constructor wants on meta
        foreign = [t for t in tensors if t.is_meta and not self.is_deferred(t)]
        if (foreign and not shape_only) or any(not t.is_meta and t.device.type != "cpu" for t in tensors):
            raise self.refuse(f"{func} mixes devices")
        for tensor in tensors:
            self._refuse_others(func, tensor)
        changed = [t for place in traits.written for t in tensors_in(argument_at(args, kwargs, place))]
        if any(not t.is_meta for t in changed):
            raise self.refuse(f"{func} changes a tensor that the constructor did not make")
        in_place = traits.overwriting and traits.written == (0,) and len(tensors) == 1  # it cannot fail, and changes no shape
        result = args[0] if in_place else self._without_values(func, traits, args, kwargs)
        self._append(func, traits, args, kwargs, changed, result)
        return result

    def _refuse_others(self, func: Any, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or not is_plain(tensor):
            raise self.refuse(f"{func} uses a sparse tensor, or one of a subclass with rules of its own")

    def _without_values(self, func: Any, traits: OperationTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation's result on meta. Where that needs values, they are computed."""
        on_meta = {**kwargs, "device": _META} if traits.has_device else kwargs
        try:
            if traits.name in BACKEND_LAYOUT:
                return map_tensors(func(*map_tensors(args, scratch_like), **map_tensors(kwargs, scratch_like)), placeholder_like)
            return func(*map_tensors(args, lambda t: t.to(_META)), **map_tensors(on_meta, lambda t: t.to(_META)))
        except (RuntimeError, NotImplementedError):  # no meta kernel, a value that is read, or an error of the constructor's own
            if traits.random:
                raise
        stand_ins = {id(t): real for t, real in self._with_values(list(tensors_in((args, kwargs))))}
        result = func(*map_tensors(args, lambda t: stand_ins[id(t)]), **map_tensors(kwargs, lambda t: stand_ins[id(t)]))
        originals = {id(real): t for t in tensors_in((args, kwargs)) for real in [stand_ins[id(t)]]}
        by_storage = {real.untyped_storage()._cdata: originals[key] for key, real in ((id(r), r) for r in stand_ins.values())}

        def placeholder(real: Tensor) -> Tensor:
            if id(real) in originals:
                return originals[id(real)]
            self._refuse_others(func, real)
            base = by_storage.get(real.untyped_storage()._cdata)
            if base is not None:
                return base.as_strided(real.size(), real.stride(), real.storage_offset())
            return placeholder_like(real)

        return map_tensors(result, placeholder)

    def _with_values(self, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        deferred = [t for t in tensors if t.is_meta]
        return [*zip(deferred, self.values(*deferred), strict=True), *((t, t) for t in tensors if not t.is_meta)]

    def _append(self, func: Any, traits: OperationTraits, args: tuple[Any, ...], kwargs: dict[str, Any], changed: list[Tensor], result: Any) -> None:
        """Add the operation to the record, unless it only makes views."""
        results = list(tensors_in(result))
        outputs = []
        for place, tensor in enumerate(results):
            self._refuse_others(func, tensor)
            storage = tensor.untyped_storage()
            if storage._cdata not in self.storages:
                self._register(storage)
                outputs.append((place, self.ref(tensor)))
        if traits.name in UNDEFINED or traits.reshaping:
            for tensor in changed:
                self._register(tensor.untyped_storage())
            return
        if not outputs and not changed and not (traits.random and results):
            return
        refs = {id(t): self.ref(t) for t in tensors_in((args, kwargs)) if t.is_meta or traits.name in SHAPE_ONLY}
        writes = {ref.storage: True for _, ref in outputs}
        for tensor in changed:
            ref = refs[id(tensor)] = self.ref(tensor)
            self.recording.sizes[ref.storage] = tensor.untyped_storage().nbytes()  # it may have been resized
            writes[ref.storage] = traits.overwriting and self.recording.covers(ref)
        reads = frozenset(ref.storage for t in tensors_in((args, kwargs)) if t.is_meta for ref in [refs[id(t)]] if not is_among(t, changed))
        encoded, encoded_kwargs = self._encode(args, refs), {name: self._encode(value, refs) for name, value in kwargs.items()}
        if traits.has_device:
            encoded_kwargs["device"] = _CPU
        if traits.name in SHAPE_ONLY:
            encoded, reads = (ShapeRef(encoded[0]), *encoded[1:]), frozenset()
        self._add(Operation(func, encoded, encoded_kwargs, reads, writes, tuple(outputs), torch.get_default_dtype()), traits.random, args, kwargs)

    def _add(self, operation: Operation, random: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if random:
            given = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), torch.default_generator)
            operation.draws = self._key(given)
            operation.restart = self._restart(operation.draws)
        index = self.recording.append(operation)
        if operation.draws is not None:
            generator = self._generators[operation.draws]
            self._expected[operation.draws] = mark = self._mark(index)
            generator.manual_seed(mark)

    def _mark(self, operation: int) -> int:
        """A seed that stands for the generator's state after an operation."""
        self._next_mark += 1
        self._marks[self._next_mark] = operation
        return self._next_mark

    def _restart(self, key: int) -> Tensor | int | None:
        """What the constructor has done with a generator since its last draw: nothing, set a state of its own, or one that it had saved.
        No draw advances the generator while recording: after each, it gets a seed that stands for its state then."""
        generator = self._generators[key]
        seed = generator.initial_seed()
        if seed == self._expected.get(key):
            return None
        return self._marks[seed] if seed in self._marks else generator.get_state()

    def _key(self, generator: torch.Generator) -> int:
        if id(generator) not in self._keys:
            if generator.device.type != "cpu":
                raise self.refuse(f"the constructor draws from a generator on {generator.device}")
            key = self._keys[id(generator)] = len(self._keys)
            self._generators[key] = generator
            self._first_states[key] = generator.get_state()
        return self._keys[id(generator)]

    def _whole_call(self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A function of a tensor that replaces it with draws, as one operation."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            tensor: Tensor = args[0]
            if not self.is_deferred(tensor):
                return function(*args, **kwargs)
            ref = self.ref(tensor)
            encoded = {name: self._encode(value, {}) for name, value in kwargs.items()}
            writes = {ref.storage: self.recording.covers(ref)}
            operation = Operation(function, (ref, *self._encode(args[1:], {})), encoded, frozenset(), writes, (), torch.get_default_dtype())
            self._add(operation, True, args, kwargs)
            return tensor

    def _constant(self, tensor: Tensor) -> Tensor:
        """A tensor of the constructor's own data."""
        self._refuse_others("the constructor", tensor)
        placeholder = placeholder_like(tensor)
        self._register(placeholder.untyped_storage())
        ref = self.ref(placeholder)
        data = tensor.clone()  # data from numpy may change
        self.recording.append(Operation(torch.clone, (data,), {}, frozenset(), {ref.storage: True}, ((0, ref),), torch.get_default_dtype()))
        return placeholder

    def _register(self, storage: torch.UntypedStorage) -> None:
        self.storages[storage._cdata] = storage
        self.recording.sizes[storage._cdata] = storage.nbytes()

    def _encode(self, value: Any, refs: dict[int, TensorRef]) -> Any:
        if isinstance(value, Tensor):
            return refs[id(value)] if id(value) in refs else value.clone()
        if isinstance(value, torch.Generator):
            return GeneratorRef(self._key(value))
        if isinstance(value, (tuple, list)):
            return type(value)([self._encode(v, refs) for v in value])
        return value
