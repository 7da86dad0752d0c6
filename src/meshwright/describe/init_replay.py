"""Runs the operations of a recording on real tensors: all random draws in the order in which the constructor made them, so that the values are
those of an ordinary construction, and of the other operations those that a tensor needs.

Each tensor is computed on its own (`Replay.compute`). Where its draws follow one another, they are made once. A draw that is needed again, or not
until others have been made, is made into a scratch tensor, and repeated from the generator's state before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.describe.init_recording import END, START, GeneratorRef, Operation, Recording, ShapeRef, TensorRef

_aten = torch.ops.aten
_COPIES: dict[Callable[..., Any], int] = {_aten.clone.default: 0, _aten._to_copy.default: 0, _aten.copy_.default: 1}  # where the source stands
_IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    getattr(getattr(_aten, name), kind): getattr(getattr(_aten, f"{name}_"), kind)
    for name in ("mul", "add", "sub", "div")
    for kind in ("Tensor", "Scalar")
}
Environment = dict[int, torch.UntypedStorage]


class Replay:
    """One pass through a recording. `repeatable`: states before all draws are kept, so that any storage can be computed again, as while recording;
    without it, `expect` says what will be computed."""

    def __init__(self, recording: Recording, repeatable: bool = False) -> None:
        self.peak = 0  # largest sum of the bytes of storages alive at once
        self._recording, self._repeatable = recording, repeatable
        self._made = 0  # draws made so far
        self._generators = {0: torch.default_generator}
        self._default_state = recording.first_state
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {START: recording.first_state}
        self._users: Counter[int] = Counter()
        restarts = [recording.end_restart, *(o.restart for o in recording.operations)]
        self._kept = {restart for restart in restarts if isinstance(restart, int)}
        if not repeatable:
            for index in recording.draws:
                if not recording.operations[index].closed:  # its inputs are computed when its turn comes
                    self.expect(self._draws_of(recording.needed_for(recording.inputs_of(index))))

    def expect(self, draws: Collection[int]) -> None:
        self._users.update(draws)

    def compute(self, needed: list[int], keep: Collection[int]) -> Environment:
        """The storages of `keep`, from the operations that they need."""
        with self._random_state():
            draws = self._draws_of(needed)
            if draws:
                self._advance(self._start_of_last_run(draws))
            self._users.subtract(draws)
            environment = self._run(needed, keep)
            self._forget(draws)
            return environment

    def finish(self) -> Tensor:
        """Make all draws that are left; the state of the default generator after the constructor."""
        recording = self._recording
        with self._random_state():
            self._advance(len(recording.draws))
            if recording.end_restart is not None:
                torch.default_generator.set_state(self._state(recording.end_restart))
        return self._default_state

    def tensor(self, ref: TensorRef, environment: Environment) -> Tensor:
        """A view on its storage, which is allocated if it is not there."""
        storage = environment.get(ref.storage)
        if storage is None:
            storage = environment[ref.storage] = torch.UntypedStorage(self._recording.sizes[ref.storage], device="cpu")
        found = torch.empty(0, dtype=ref.dtype, device="cpu").set_(storage, ref.offset, ref.size, ref.stride)  # type: ignore[call-overload]
        found = torch._conj(found) if ref.conj else found
        return torch._neg_view(found) if ref.neg else found

    @contextmanager
    def _random_state(self) -> Iterator[None]:
        """The default generator is the constructor's; the caller's own state comes back."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
            callers = torch.default_generator.get_state()
            dtype = torch.get_default_dtype()
            torch.default_generator.set_state(self._default_state)
            try:
                yield
            finally:
                self._default_state = torch.default_generator.get_state()
                torch.default_generator.set_state(callers)
                torch.set_default_dtype(dtype)

    def _draws_of(self, needed: list[int]) -> list[int]:
        return [i for i in needed if self._recording.operations[i].draws is not None]

    def _start_of_last_run(self, draws: list[int]) -> int:
        """How many draws come before those at the end of `draws` that follow one another: the latter are made once, in their turn."""
        places = [bisect_left(self._recording.draws, i) for i in draws]
        start = places[-1] + 1
        for place in reversed(places):
            if place != start - 1 or place < self._made:
                break
            start = place
        return start

    def _advance(self, count: int) -> None:
        """Make draws until `count` are made, into tensors that nobody keeps."""
        recording = self._recording
        while self._made < count:
            index = recording.draws[self._made]
            inputs = [] if recording.operations[index].closed else recording.needed_for(recording.inputs_of(index))
            draws = self._draws_of(inputs)
            self._users.subtract(draws)
            self._run([*inputs, index], ())
            self._forget(draws)

    def _forget(self, draws: list[int]) -> None:
        for index in draws:
            if self._users[index] <= 0 and not self._repeatable:
                self._before.pop(index, None)

    def _run(self, needed: list[int], keep: Collection[int]) -> Environment:
        operations = self._recording.operations
        last = {storage: index for index in needed for storage in operations[index].storages}
        environment: Environment = {}
        for index in needed:
            operation = operations[index]
            ending = {s for s in operation.storages if last[s] == index and s not in keep}
            if not self._rename(operation, ending, environment):
                self._execute(index, operation, ending, environment)
            self.peak = max(self.peak, sum(self._recording.sizes[s] for s in environment))
            for storage in ending:
                environment.pop(storage, None)
        return environment

    def _rename(self, operation: Operation, ending: set[int], environment: Environment) -> bool:
        """A copy of all of a tensor that nobody needs any more is that tensor."""
        place = _COPIES.get(operation.call)
        if place is None:
            return False
        source = operation.args[place]
        target = operation.args[0] if place else operation.outputs[0][1]
        if not isinstance(source, TensorRef) or source.storage not in ending or not self._same_layout(source, target):
            return False
        if place and not operation.writes[target.storage]:
            return False
        self.tensor(source, environment)
        environment[target.storage] = environment.pop(source.storage)
        return True

    def _same_layout(self, source: TensorRef, target: TensorRef) -> bool:
        same = (source.dtype, source.size, source.stride) == (target.dtype, target.size, target.stride)
        return same and source.storage != target.storage and self._recording.covers(source) and self._recording.covers(target)

    def _execute(self, index: int, operation: Operation, ending: set[int], environment: Environment) -> None:
        call = operation.call
        args = self._decode(operation.args, environment)
        kwargs = {name: self._decode(value, environment) for name, value in operation.kwargs.items()}
        if call in _IN_PLACE and not kwargs and self._can_be_in_place(operation, ending):
            call = _IN_PLACE[call]
        torch.set_default_dtype(operation.default_dtype)
        result = call(*args, **kwargs) if operation.draws is None else self._draw(index, operation.draws, lambda: call(*args, **kwargs))
        results = (result,) if isinstance(result, Tensor) else [t for r in result or () for t in (r if isinstance(r, (tuple, list)) else (r,))]
        for place, ref in operation.outputs:
            environment[ref.storage] = self._laid_out(results[place], ref)

    def _can_be_in_place(self, operation: Operation, ending: set[int]) -> bool:
        """Whether the first argument of an operation that gives a tensor of the same layout is needed by nobody else."""
        source = operation.args[0]
        others = [a.storage for a in operation.args[1:] if isinstance(a, TensorRef)]
        if not isinstance(source, TensorRef) or source.storage not in ending or source.storage in others:
            return False
        return self._same_layout(source, operation.outputs[0][1])

    def _laid_out(self, result: Tensor, ref: TensorRef) -> torch.UntypedStorage:
        """The result's storage, in the layout that the tensor without values had."""
        storage = result.untyped_storage()
        same = (tuple(result.size()), tuple(result.stride()), result.storage_offset()) == (ref.size, ref.stride, ref.offset)
        if same and storage.nbytes() == self._recording.sizes[ref.storage] and not result.is_conj() and not result.is_neg():
            return storage
        fresh: Environment = {}
        self.tensor(ref, fresh).copy_(result)
        return fresh[ref.storage]

    def _draw(self, index: int, key: int, call: Callable[[], Any]) -> Any:
        """Make a draw in its turn, or repeat one that was made."""
        generator = self._generators.setdefault(key, torch.Generator()) if key else torch.default_generator
        in_turn = self._made < len(self._recording.draws) and self._recording.draws[self._made] == index
        current = None if in_turn else generator.get_state()
        if current is not None:
            generator.set_state(self._before[index])
            result = call()
            generator.set_state(current)
            return result
        restart = self._recording.operations[index].restart
        if restart is not None:
            generator.set_state(self._state(restart))
        if self._repeatable or self._users[index] > 0:
            self._before[index] = generator.get_state()
        result = call()
        if self._repeatable or index in self._kept:
            self._after[index] = generator.get_state()
        self._made += 1
        return result

    def _state(self, restart: Tensor | int) -> Tensor:
        return self._after[restart] if isinstance(restart, int) else restart

    def _decode(self, value: Any, environment: Environment) -> Any:
        if isinstance(value, TensorRef):
            return self.tensor(value, environment)
        if isinstance(value, ShapeRef):
            like = value.like
            return torch.empty_strided(like.size, like.stride, dtype=like.dtype, device="meta")
        if isinstance(value, GeneratorRef):
            return self._generators.setdefault(value.key, torch.Generator()) if value.key else None
        if isinstance(value, (tuple, list)):
            return type(value)([self._decode(v, environment) for v in value])
        return value


def final_values(recording: Recording, storages: Collection[int]) -> list[int]:
    """The operations that the final values of storages need."""
    return recording.needed_for([(s, END) for s in storages])
