"""Accelerators by name: what their data sheets promise, from devices.json beside this file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from meshwright.core.errors import unknown
from meshwright.core.serial import from_data

# Words that make another product of a name: a 'GeForce RTX 3090 Ti' is not a 'GeForce RTX 3090', and no figure is better than a wrong one.
_VARIANTS = frozenset({"Ti", "SUPER", "D", "Laptop", "Max-Q", "NVL", "MIG"})


@dataclass(frozen=True)
class DeviceSheet:
    """One accelerator. Rates are dense peaks (no sparsity), through the matrix units where these take the precision."""

    name: str
    match: tuple[str, ...]  # parts of the name as the driver reports it
    peak_flops: Mapping[str, float]  # by precision; one that the device lacks is absent
    memory_bytes: int  # as the driver reports it, ECC's share taken off: what a program can see, not the round figure on the box
    memory_bandwidth: float  # bytes/s
    link: str  # what joins it to its peers
    link_bandwidth: float  # bytes/s, one way, all links together
    host_bandwidth: float  # bytes/s, one way, to the host's memory
    source: str  # title and year of the data sheet
    note: str = ""


@cache
def sheets() -> Mapping[str, DeviceSheet]:
    """All known devices by their short name: 'h200', 'a100-sxm-80gb'."""
    text = files(__name__).joinpath("devices.json").read_text(encoding="utf-8")
    return {key: from_data(DeviceSheet, data, f"devices.json: {key}") for key, data in json.loads(text).items()}


def sheet(key: str) -> DeviceSheet:
    """The device with this short name; an unknown one is a RequestError that names the nearest."""
    if key not in sheets():
        raise unknown("device", key, sheets())
    return sheets()[key]


def lookup(name: str) -> DeviceSheet | None:
    """The device that a driver calls `name`; the longest match wins, and a match counts only as whole words."""
    best: tuple[int, DeviceSheet] | None = None
    for known in sheets().values():
        for pattern in known.match:
            if _matches(pattern, name) and (best is None or len(pattern) > best[0]):
                best = (len(pattern), known)
    return best[1] if best else None


def _matches(pattern: str, name: str) -> bool:
    # Whole words, or 'NVIDIA L4' would claim an 'NVIDIA L40' and 'Tesla T4' a 'Tesla T40'.
    found = re.search(rf"(?<![0-9A-Za-z]){re.escape(pattern)}(?![0-9A-Za-z])", name, re.IGNORECASE)
    return found is not None and not _VARIANTS & set(name[found.end() :].split())
