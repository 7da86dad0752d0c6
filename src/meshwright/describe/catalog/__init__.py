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
# Words of a name that identify vendors, not products.
_VENDOR_WORDS = frozenset({"nvidia", "amd", "intel", "tesla", "geforce", "instinct", "gpu", "r", "platinum"})
_MEMORY_TOLERANCE = 0.08  # '141 GB', '140 GiB' and what the driver leaves of either count as the same size


@dataclass(frozen=True)
class DeviceDatasheet:
    """One device. Rates are dense peaks (no sparsity), through the matrix units where these support the precision."""

    name: str
    match: tuple[str, ...]  # substrings of the driver's name for it
    peak_flops: Mapping[str, float]  # by precision; unsupported ones are absent
    memory_bytes: int  # as the driver reports it, ECC's share taken off, not the round figure on the box; 0 for a CPU, whose machine decides
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
    best: tuple[int, DeviceDatasheet] | None = None
    for known in datasheets().values():
        for pattern in known.match:
            if _matches(pattern, name) and (best is None or len(pattern) > best[0]):
                best = (len(pattern), known)
    return best[1] if best else None


def find_datasheet(text: str, memory_gb: float | None = None) -> DeviceDatasheet:
    """The device that a user or a table calls `text`: 'H100', 'A100-80GB', 'RTX A6000', a key, or a driver's name.

    Of several matches, the one with `memory_gb` (of a device, or of the card that holds several), else the first in the file, which is the one
    that the bare name commonly means."""
    if text in datasheets() and memory_gb is None:
        return datasheets()[text]
    words, said = _product_words(text)
    wanted = memory_gb or said
    alike = {key: known for key, known in datasheets().items() if words and words <= _product_words(f"{key} {known.name}")[0]}
    if not alike and (known := find_by_driver_name(text)) is not None:
        alike = {known.name: known}
    if not alike:
        raise unknown_name_error("device", text, datasheets())
    fitting = [known for known in alike.values() if wanted is None or _has_memory(known, wanted)]
    if not fitting:
        sizes = ", ".join(f"{key} {round(known.memory_bytes / 2**30)} GB" for key, known in alike.items())
        raise RequestError(f"device '{text}' with {wanted:g} GB is not known; there is {sizes}")
    return fitting[0]


def _product_words(text: str) -> tuple[frozenset[str], float | None]:
    """The words that identify a product, without vendors and socket generation; and the memory size among them."""
    rest, memory = text.lower(), None
    if found := re.search(r"(?<![0-9a-z.])(\d+(?:\.\d+)?) ?gi?b?(?![0-9a-z])", rest):
        memory, rest = float(found[1]), rest[: found.start()] + rest[found.end() :]
    parts = re.findall(r"[0-9a-z+]+", rest)
    return frozenset(re.sub(r"^(sxm)\d$", r"\1", part) for part in parts) - _VENDOR_WORDS, memory


def _has_memory(device: DeviceDatasheet, memory_gb: float) -> bool:
    """Whether that is its memory, in units of 1000³ or 1024³ bytes, for the device or for its card."""
    own = [device.memory_bytes * count / unit for count in {1, device.per_card} for unit in (1e9, 2**30)]
    return any(abs(memory_gb / size - 1) <= _MEMORY_TOLERANCE for size in own if size)


def _matches(pattern: str, name: str) -> bool:
    # Whole words, or 'NVIDIA L4' would claim an 'NVIDIA L40' and 'Tesla T4' a 'Tesla T40'.
    found = re.search(rf"(?<![0-9A-Za-z]){re.escape(pattern)}(?![0-9A-Za-z])", name, re.IGNORECASE)
    return found is not None and not _VARIANTS & set(name[found.end() :].split())
