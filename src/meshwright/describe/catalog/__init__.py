"""Accelerators by name, with the figures of their data sheets, from devices.json beside this file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from meshwright.core.cluster import DeviceKind
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.serialization import from_data

# Words that make a name another product: a 'GeForce RTX 3090 Ti' is not a 'GeForce RTX 3090', and no figure is better than a wrong one.
_VARIANTS = frozenset({"Ti", "SUPER", "D", "Laptop", "Max-Q", "NVL", "MIG", "-WS", "-3e"})
_VENDOR_WORDS = frozenset({"nvidia", "amd", "intel", "tesla", "geforce", "instinct", "gpu", "r", "platinum"})  # they identify no product
_MEMORY_TOLERANCE = 0.08  # '141 GB', '140 GiB' and what the driver leaves of either count as the same size


@dataclass(frozen=True)
class DeviceDatasheet:
    """One device. Rates are dense peaks (no sparsity), through the matrix units where these support the precision."""

    name: str
    match: tuple[str, ...]  # substrings of the driver's name for it
    peak_flops: Mapping[str, float]  # by precision; unsupported ones are absent
    memory_bytes: int  # as the driver reports it, without ECC's share, not the round figure on the box; 0 for a CPU, whose machine decides
    memory_bandwidth: float  # bytes/s
    link: str  # interconnect to its peers
    link_bandwidth: float  # bytes/s, one way, all links together
    host_bandwidth: float  # bytes/s, one way, to the host's memory
    source: str  # title and year of the data sheet
    note: str = ""
    kind: DeviceKind = "cuda"
    per_card: int = 1  # devices that are sold as one: an MI250X appears as two


@cache
def datasheets() -> Mapping[str, DeviceDatasheet]:
    """All known devices by their short name: 'h200', 'a100-sxm-80gb'."""
    text = files(__name__).joinpath("devices.json").read_text(encoding="utf-8")
    return {key: from_data(DeviceDatasheet, data, f"devices.json: {key}") for key, data in json.loads(text).items()}


def datasheet(key: str) -> DeviceDatasheet:
    """The device with this short name; an unknown one is a RequestError that names the nearest."""
    if key not in datasheets():
        raise unknown_name_error("device", key, datasheets())
    return datasheets()[key]


def find_by_driver_name(name: str) -> DeviceDatasheet | None:
    """The device that a driver calls `name`; the longest match wins, and a match counts only as whole words."""
    matches = [(len(pattern), sheet) for sheet in datasheets().values() for pattern in sheet.match if _matches(pattern, name)]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def find_datasheet(text: str, memory_gb: float | None = None) -> DeviceDatasheet:
    """The device that a user or a table calls `text`: 'H100', 'A100-80GB', 'RTX A6000', a key, or a driver's name.

    Of several matches, the one with `memory_gb` (of a device, or of the card that holds several), else the first in the file, which is the one
    that the bare name commonly means."""
    if text in datasheets() and memory_gb is None:
        return datasheets()[text]
    words, named_gb = _product_words(text)
    memory_gb = memory_gb or named_gb
    candidates = {key: sheet for key, sheet in datasheets().items() if words and words <= _product_words(f"{key} {sheet.name}")[0]}
    if not candidates and (known := find_by_driver_name(text)) is not None:
        candidates = {known.name: known}
    if not candidates:
        raise unknown_name_error("device", text, datasheets())
    matches = [sheet for sheet in candidates.values() if memory_gb is None or _has_memory(sheet, memory_gb)]
    if not matches:
        sizes = ", ".join(f"{key} {round(sheet.memory_bytes / 2**30)} GB" for key, sheet in candidates.items())
        raise RequestError(f"device '{text}' with {memory_gb:g} GB is not known; there is {sizes}")
    return matches[0]


def _product_words(text: str) -> tuple[frozenset[str], float | None]:
    """The words that identify a product, without vendors and socket generation; and the memory size among them."""
    text, memory_gb = text.lower(), None
    if size := re.search(r"(?<![0-9a-z.])(\d+(?:\.\d+)?) ?gi?b?(?![0-9a-z])", text):
        memory_gb, text = float(size[1]), text[: size.start()] + text[size.end() :]
    words = re.findall(r"[0-9a-z+]+", text)
    return frozenset(re.sub(r"^(sxm)\d$", r"\1", word) for word in words) - _VENDOR_WORDS, memory_gb


def _has_memory(device: DeviceDatasheet, memory_gb: float) -> bool:
    """Whether that is its memory, in units of 1000³ or 1024³ bytes, for the device or for its card."""
    sizes = [device.memory_bytes * count / unit for count in {1, device.per_card} for unit in (1e9, 2**30)]
    return any(abs(memory_gb / size - 1) <= _MEMORY_TOLERANCE for size in sizes if size)


def _matches(pattern: str, name: str) -> bool:
    # Whole words, or 'NVIDIA L4' would claim an 'NVIDIA L40' and 'Tesla T4' a 'Tesla T40'.
    match = re.search(rf"(?<![0-9A-Za-z]){re.escape(pattern)}(?![0-9A-Za-z])", name, re.IGNORECASE)
    return match is not None and not _VARIANTS & set(name[match.end() :].split())
