"""Frozen dataclasses to JSON and back, strictly: a key that is not a field is an error that names the nearest field."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.format_version_1 import VERSION_1_KEYS
from meshwright.core.text_files import MAX_BYTES, read_text, write_text

T = TypeVar("T")
_SCALARS = frozenset((str, int, float, bool, type(None)))


def to_data(value: Any) -> Any:
    """A dataclass (nested, with tuples and mappings) as plain JSON data. Fields at their default are written too."""
    if type(value) in _SCALARS:  # most values are: an estimate has a number for each rank
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_data(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [v if type(v) in _SCALARS else to_data(v) for v in value]
    return value


def from_data(kind: type[T], data: Any, where: str) -> T:
    """Build `kind` from JSON data; `where` names the file or field for the error line."""
    return typing.cast(T, _convert(kind, data, where))


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """The JSON in `path`; a missing or broken file is the user's to fix, so it raises RequestError."""
    text = read_text(path, max_bytes)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise RequestError(f"{path}: its lists and objects are nested too deeply") from None
    except ValueError:  # Python converts no more than some thousand digits
        raise RequestError(f"{path}: a number in it has too many digits") from None


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write atomically, as `write_text` does; numbers that are not finite become null, because JSON has none."""
    write_text(path, dump_json(to_data(value), indent=2) + "\n", private=private)


def dump_json(data: Any, **options: Any) -> str:
    """JSON text of plain data. NaN and infinities become null: a file with NaN in it is no JSON."""
    try:
        return json.dumps(data, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_null_nonfinite(data), allow_nan=False, **options)


def _null_nonfinite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _null_nonfinite(value) for key, value in data.items()}
    return [_null_nonfinite(value) for value in data] if isinstance(data, (list, tuple)) else data


def show_json(data: Any, length: int = 60) -> str:
    """A value of a user's file for an error line: its first characters."""
    try:
        return json.dumps(data, default=str)[:length]
    except (RecursionError, ValueError):
        return f"a {type(data).__name__} that is nested too deeply" if isinstance(data, (list, dict)) else f"a {type(data).__name__}"


def _convert(kind: Any, data: Any, where: str) -> Any:
    if type(data) is kind and (kind is str or kind is bool or (kind is int and abs(data) < 2**63)):  # most values
        return data
    origin = get_origin(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        options = [a for a in get_args(kind) if a is not type(None)]
        return None if data is None and len(options) < len(get_args(kind)) else _convert(_select_variant(options, data, where), data, where)
    if origin is typing.Literal:
        if not any(type(data) is type(choice) and data == choice for choice in get_args(kind)):
            raise unknown_name_error(f"value for {where}:", data if isinstance(data, str) else show_json(data), map(str, get_args(kind)))
        return data
    if origin is tuple:
        return _convert_tuple(get_args(kind), data, where)
    if origin in (dict, Mapping):
        _expect(isinstance(data, dict), "an object", data, where)
        return {k: _convert(get_args(kind)[1], v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, data, where)
    if kind is float:
        _expect(isinstance(data, (int, float)) and not isinstance(data, bool), "a number", data, where)
        _expect(abs(data) <= sys.float_info.max, "a finite number", data, where)
        return float(data)
    if kind in (int, str, bool):
        _expect(isinstance(data, kind) and not (kind is int and isinstance(data, bool)), kind.__name__, data, where)
        _expect(kind is not int or abs(data) < 2**63, "an integer of at most 64 bits", data, where)
        return data
    raise AssertionError(f"no JSON form for {kind} at {where}")


def _select_variant(options: list[Any], data: Any, where: str) -> Any:
    """Of several dataclasses, the one whose `kind` the data names; otherwise the first."""
    variants = [option for option in options if dataclasses.is_dataclass(option)]
    kinds = {field.default: variant for variant in variants for field in dataclasses.fields(variant) if field.name == "kind"}
    if len(kinds) < 2:
        return options[0]
    _expect(isinstance(data, dict) and "kind" in data, f"an object with a kind ({', '.join(map(str, kinds))})", data, where)
    if not isinstance(data["kind"], str) or data["kind"] not in kinds:
        raise unknown_name_error("kind", show_json(data["kind"]).strip('"'), map(str, kinds), where)
    return kinds[data["kind"]]


def _convert_tuple(items: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(data, list), "a list", data, where)
    if len(items) == 2 and items[1] is Ellipsis:
        if items[0] is int and all(type(v) is int and abs(v) < 2**63 for v in data):  # shapes
            return tuple(data)
        return tuple(_convert(items[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    _expect(len(data) == len(items), f"{len(items)} items", data, where)
    return tuple(_convert(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(items, data, strict=True)))


def _convert_dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), "an object", data, where)
    fields, hints = _fields_of(kind)
    data = _with_current_keys(kind.__name__, data, where)
    for key in data:
        if key not in fields:
            raise unknown_name_error("key", key, fields, where)
    for name, field in fields.items():
        if name not in data and field.default is field.default_factory is dataclasses.MISSING:
            raise RequestError(f"{where}: the key '{name}' is missing")
    return kind(**{k: _convert(hints[k], _with_current_keys(f"{kind.__name__}.{k}", v, where), f"{where}.{k}") for k, v in data.items()})


@cache
def _fields_of(kind: Any) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """The fields of a dataclass and their types, by name. A checkpoint's manifest has one for each of many thousand pieces."""
    return {f.name: f for f in dataclasses.fields(kind)}, typing.get_type_hints(kind)


def _with_current_keys(kind: str, data: Any, where: str) -> Any:
    """The data with keys of format version 1 replaced by today's."""
    renamed = VERSION_1_KEYS.get(kind)
    if renamed is None or not isinstance(data, dict):
        return data
    for old, new in renamed.items():
        if old in data and new in data:
            raise RequestError(f"{where}: '{old}' is the old name of '{new}', and both are given: leave '{old}' out")
    return {renamed.get(key, key): value for key, value in data.items()}


def _expect(condition: bool, expected: str, data: Any, where: str) -> None:
    if not condition:
        raise RequestError(f"{where}: expected {expected}, found {show_json(data)}")
