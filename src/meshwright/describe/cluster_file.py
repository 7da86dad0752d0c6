"""Cluster files: a few lines of TOML that describe machines and how they are connected. The catalog's machines are such files too.

Every error is reported in one line: the line of the file, what was found, and what was expected."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from pydantic import BaseModel, ValidationError

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.serialization import show_json
from meshwright.core.text_files import read_text
from meshwright.describe import cluster_spec as specs

_KeyPath = tuple[str | int, ...]
_SPECS_BY_KIND: dict[str, dict[str, type[BaseModel]]] = {
    "inside": {"flat": specs.FlatNodeSpec, "switched": specs.SwitchedNodeSpec, "wired": specs.FullyConnectedNodeSpec, "pcie": specs.PcieNodeSpec},
    "network": {
        "flat": specs.FlatNetwork, "fat-tree": specs.FatTreeNetwork, "dragonfly": specs.DragonflyNetwork, "torus": specs.TorusNetwork,
        "hammingmesh": specs.HammingMeshNetwork,
    },
}  # fmt: skip
_SPECS_BY_KEY: dict[str, type[BaseModel]] = {
    "nodes": specs.NodeSpec, "devices": specs.DeviceSpec, "local": specs.LinkSpec, "between": specs.LinkSpec, "bridge": specs.LinkSpec,
}  # fmt: skip


def load_cluster(path: Path, nodes: int | None = None) -> Cluster:
    """The cluster that a TOML file describes; `nodes` overrides the number of nodes."""
    return parse_cluster(read_text(path), str(path), path.stem, nodes)


def parse_cluster(text: str, where: str, name: str, nodes: int | None = None) -> Cluster:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        position = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        location, reason = (f"{where}:{position[1]}", str(error)[: position.start()]) if position else (where, str(error))
        raise RequestError(f"{location}: not TOML: {reason}") from None
    except RecursionError:
        raise RequestError(f"{where}: its lists and tables are nested too deeply") from None
    except ValueError:  # Python converts no more than some thousand digits
        raise RequestError(f"{where}: a number in it has too many digits, or a date is no date") from None
    try:
        spec = specs.ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise _first_error(error, text, where) from None
    return spec.cluster(name, nodes)


def key_lines(text: str) -> dict[_KeyPath, int]:
    """The line in which each table and key of a TOML file begins; anything inside a value belongs to its key's line."""
    lines: dict[_KeyPath, int] = {(): 1}
    counts: dict[str, int] = {}
    table: _KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[\[\s*([\w-]+)\s*\]\]", line):
            counts[match[1]] = counts.get(match[1], -1) + 1
            table = (match[1], counts[match[1]])
            lines.setdefault((match[1],), number)
            lines[table] = number
        elif match := re.match(r"\s*\[\s*([\w.-]+)\s*\]\s*(#|$)", line):
            first, *rest = match[1].split(".")
            table = ((first, counts[first]) if first in counts else (first,)) + tuple(rest)  # in an array of tables, the latest entry
            lines[table] = number
        elif match := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(table + tuple(match[1].split(".")), number)
    return lines


def _first_error(error: ValidationError, text: str, where: str) -> RequestError:
    """The first error. Pydantic's location interleaves the attempted kinds with the keys of the file."""
    first = error.errors(include_url=False)[0]
    kinds = {kind for by_kind in _SPECS_BY_KIND.values() for kind in by_kind}
    loc = [key for key in first["loc"] if key not in kinds]
    lines = key_lines(text)
    line = next(lines[tuple(loc[:end])] for end in range(len(loc), -1, -1) if tuple(loc[:end]) in lines)
    keys = loc[:-1] if first["type"] in ("missing", "extra_forbidden") else loc
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
    location = f"{where}:{line}: {path}: " if path else f"{where}:{line}: "
    if first["type"] == "extra_forbidden":
        return RequestError(f"{location}{unknown_name_error('key', str(loc[-1]), _known_keys(first['loc']))}")
    if first["type"] == "missing":
        return RequestError(f"{location}the key '{loc[-1]}' is missing")
    if first["type"] == "value_error":
        return RequestError(f"{location}{first['ctx']['error']}")
    return RequestError(f"{location}found {show_json(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}")


def _known_keys(loc: tuple[str | int, ...]) -> list[str]:
    """The keys that are valid where an unknown one was found."""
    model: type[BaseModel] = specs.ClusterSpec
    for parent, key in zip(("", *loc), loc[:-1], strict=False):
        model = _SPECS_BY_KIND.get(str(parent), {}).get(str(key)) or _SPECS_BY_KEY.get(str(key)) or model
    return list(model.model_fields)
