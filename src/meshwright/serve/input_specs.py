"""What a model takes, as data: the inputs of one sample, by name; how JSON becomes arrays, and what is wrong with it if it does not. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwright.core.errors import RequestError
from meshwright.serve.tensor_messages import Array

_MAX_LISTED = 12
_WHOLE = 2.0**53  # below it every integer is a float


@dataclass(frozen=True)
class InputSpec:
    """One input of one sample, without the dim that counts samples. `shape` None: any; a dim None: any length. `dtype` None: floats and integers are
    what they are written as. `high` bounds integers from above; 0: there is no bound."""

    name: str
    shape: tuple[int | None, ...] | None = None
    dtype: str | None = None
    high: int = 0
    required: bool = True

    @property
    def is_fixed(self) -> bool:
        """Whether any array that fits is one that the model takes."""
        is_bounded = self.dtype is not None and (not self.dtype.startswith(("int", "uint")) or self.high > 0)
        return self.shape is not None and None not in self.shape and is_bounded

    def schema(self) -> dict[str, Any]:
        """JSON Schema of this input."""
        if self.shape is None:
            return {"description": f"{self.dtype or 'numbers'}, in nested lists of any shape"}
        found = self._number_schema()
        for dim in reversed(self.shape):
            found = {"type": "array", "items": found, **({} if dim is None else {"minItems": dim, "maxItems": dim})}
        return found

    def _number_schema(self) -> dict[str, Any]:
        if self.dtype == "bool":
            return {"type": "boolean"}
        if self.dtype is None or self.dtype.startswith("float"):
            largest = float(np.finfo(self.dtype).max) if self.dtype in ("float16", "float32") else None
            return {"type": "number", **({} if largest is None else {"minimum": -largest, "maximum": largest})}
        return {"type": "integer", **({"minimum": 0, "maximum": self.high - 1} if self.high else {})}

    def __str__(self) -> str:
        dims = "of any shape" if self.shape is None else f"({', '.join('any' if d is None else str(d) for d in self.shape)})"
        return f"{self.name}: {self.dtype or 'numbers'} {dims}"


def specs_to_data(specs: Sequence[InputSpec]) -> list[dict[str, Any]]:
    return [asdict(spec) for spec in specs]


def specs_from_data(data: Sequence[Mapping[str, Any]]) -> tuple[InputSpec, ...]:
    return tuple(InputSpec(**{**entry, "shape": None if entry["shape"] is None else tuple(entry["shape"])}) for entry in data)


def instance_schema(specs: Sequence[InputSpec]) -> dict[str, Any]:
    """JSON Schema of one sample: an object, or the value alone where there is one input."""
    required = [spec.name for spec in specs if spec.required]
    whole = {
        "type": "object", "properties": {spec.name: spec.schema() for spec in specs}, "required": required, "additionalProperties": False
    }  # fmt: skip
    only = _only(specs)
    return whole if only is None else {"anyOf": [whole, only.schema()]}


def parse_instance(specs: Sequence[InputSpec], value: Any, where: str, *, has_booleans: bool = True) -> dict[str, Array]:
    """The arrays of one sample, from JSON. RequestError says what is wrong, and where. Without `has_booleans` none is looked for."""
    only = _only(specs)
    if not isinstance(value, dict):
        if only is None:
            raise RequestError(f"{where}: give an object with {_names(specs)}")
        value = {only.name: value}
    known = {spec.name: spec for spec in specs}
    for name in value:
        if name not in known:
            raise RequestError(f"{where}.{str(name)[:80]}: there is no such input: the model takes {_names(specs)}")
    found = {}
    for spec in specs:
        if spec.name in value:
            found[spec.name] = _parse_array(spec, value[spec.name], f"{where}.{spec.name}", has_booleans)
        elif spec.required:
            raise RequestError(f"{where}.{spec.name}: it is missing: the model takes {_names(specs)}")
    return found


def _only(specs: Sequence[InputSpec]) -> InputSpec | None:
    """The input that a sample may consist of alone."""
    required = [spec for spec in specs if spec.required]
    return required[0] if len(required) == 1 else None


def _names(specs: Sequence[InputSpec]) -> str:
    listed = [str(spec) for spec in specs[:_MAX_LISTED]]
    return " and ".join(listed) + (" and more" if len(specs) > _MAX_LISTED else "")


def _parse_array(spec: InputSpec, value: Any, where: str, has_booleans: bool) -> Array:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, RecursionError):
        raise RequestError(_ragged(spec, value, where)) from None
    dtype = spec.dtype or {"b": "bool", "i": "int64"}.get(array.dtype.kind, "float32")
    if array.size == 0 and array.dtype.kind == "f":  # numpy's type of an empty list
        array = array.astype(dtype)
    if array.dtype.kind == "f" and dtype.startswith(("int", "uint")) and (np.abs(array) < _WHOLE).all() and (array == np.rint(array)).all():
        array = array.astype(np.int64)  # 3.0 is an integer in JSON
    wanted = "b" if dtype == "bool" else "fiu" if dtype.startswith("float") else "i"
    if array.dtype.kind not in wanted or (dtype != "bool" and has_booleans and _first_other(value, (int, float))):
        raise RequestError(_wrong_number(spec, value, where))
    if spec.shape is not None and not _fits(array.shape, spec.shape):
        raise RequestError(f"{where}: its shape is {array.shape}, and the model takes {spec}")
    if spec.high and array.size and not (array.min() >= 0 and array.max() < spec.high):
        place = tuple(int(i) for i in np.argwhere((array < 0) | (array >= spec.high))[0])
        raise RequestError(f"{where}{_index(place)} is {array[place]}, and must be from 0 to {spec.high - 1}")
    with np.errstate(over="ignore"):
        result = array.astype(dtype, copy=False)
    if not (np.isfinite(result).all() if result.dtype.kind == "f" else result.dtype == array.dtype or np.array_equal(result, array)):
        raise RequestError(f"{where}: a number in it is too large for {dtype}")
    return result


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(w is None or w == size for size, w in zip(shape, wanted, strict=True))


def _ragged(spec: InputSpec, value: Any, where: str) -> str:
    return _wrong_number(spec, value, where) if _first_other(value, _kinds(spec)) else f"{where}: its lists differ in length: the model takes {spec}"


def _wrong_number(spec: InputSpec, value: Any, where: str) -> str:
    """Where the first value is that is no number of the right kind."""
    wanted = {"bool": "true or false is", "float": "a number is", None: "a number is"}.get(
        (spec.dtype or "float").rstrip("0123456789"), "an integer is"
    )
    other = _first_other(value, _kinds(spec))
    if other is None:
        return f"{where}: a number in it is too large: the model takes {spec}"
    place, found = other
    shown = type(found).__name__ if isinstance(found, (dict, list)) else repr(found)[:60]
    names = {"dict": "an object", "list": "a list", "None": "null", "True": "true", "False": "false"}
    return f"{where}{_index(place)}: {wanted} needed, and there is {names.get(shown, shown)}"


def _kinds(spec: InputSpec) -> tuple[type, ...]:
    if spec.dtype == "bool":
        return (bool,)
    return (int, float) if spec.dtype is None or spec.dtype.startswith("float") else (int,)


def _first_other(value: Any, kinds: tuple[type, ...]) -> tuple[tuple[int, ...], Any] | None:
    """The first value in nested lists that is none of these kinds, and where it is. A boolean is no number."""
    if isinstance(value, list):
        for i, entry in enumerate(value):
            if (found := _first_other(entry, kinds)) is not None:
                return (i, *found[0]), found[1]
        return None
    return None if type(value) in kinds else ((), value)


def _index(place: Sequence[int]) -> str:
    return "".join(f"[{i}]" for i in place)
