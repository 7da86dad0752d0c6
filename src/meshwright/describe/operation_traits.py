"""What a recorder has to know of an aten operation whatever its arguments (`traits_of`), and the tensors among arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")
# In-place operations that do not look at what they replace.
_OVERWRITING = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"}
# Operations that take the shape of their first argument only.
SHAPE_ONLY = {f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
SHAPE_ONLY |= {f"new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full")}
UNDEFINED = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}  # results without values
# Operations whose result has the layout of the kernel that the CPU has for it, which meta does not know.
BACKEND_LAYOUT = {"convolution", "_linalg_svd", "linalg_eig", "_fft_r2c", "_fft_c2c", "_fft_c2r"}
_UNMARKED_WRITES = {"native_batch_norm": (3, 4)}  # running statistics, which the schema does not say


@dataclass(frozen=True)
class OperationTraits:
    """What is known of an operation whatever its arguments."""

    name: str
    written: tuple[int | str, ...]  # positions and names of the arguments that it changes
    random: bool
    has_device: bool
    overwriting: bool
    reshaping: bool  # changes which part of which storage a tensor is, and no values


@cache
def traits_of(func: Any) -> OperationTraits:
    schema = func._schema
    name = schema.name.partition("::")[2]
    changed = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    positions = [a.name for a in schema.arguments]
    written = tuple(a.name if a.kwarg_only else positions.index(a.name) for a in changed)
    takes_generator = any("Generator" in str(a.type) for a in schema.arguments)
    overwriting = (name in _OVERWRITING and func._overloadname != "Tensor_") or func is _aten.bernoulli_.float
    return OperationTraits(
        name,
        written + _UNMARKED_WRITES.get(name, ()),
        torch.Tag.nondeterministic_seeded in func.tags or takes_generator,
        "device" in positions,
        overwriting or (bool(changed) and all(a.kwarg_only for a in changed)),
        torch.Tag.inplace_view in func.tags,
    )


def placeholder_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def scratch_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_CPU).zero_()


def is_plain(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_among(tensor: Tensor, tensors: list[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def argument_at(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str) -> Any:
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([map_tensors(item, change) for item in value])
    if isinstance(value, dict):
        return {name: map_tensors(item, change) for name, item in value.items()}
    return value
