"""NVIDIA GPUs as the driver's management library (NVML) reports them, through ctypes.

A process that calls this can still fork workers that use CUDA: see [Note: NVML in a process of its own]."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# [Note: NVML in a process of its own]
# NVML makes no CUDA context, but nvmlInit starts a thread that nvmlShutdown does not end (seen on an H200, driver for CUDA 13). Forking a process
# with threads can deadlock the child, and Python 3.12 warns of it. So this file runs itself as a script; a driver that hangs then costs a time-out
# and does not block the caller. It must therefore import nothing but the standard library.
_TIMEOUT_S = 30.0
_MAX_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS, unchanged from Hopper to Blackwell
_STRING_BUFFER_SIZE = 96  # longest name or UUID that NVML writes (NVML_DEVICE_NAME_V2_BUFFER_SIZE)


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` is NVML's, in PCI bus order, regardless of CUDA_VISIBLE_DEVICES."""

    index: int
    name: str
    uuid: str
    memory_total: int  # bytes; 0 when the driver does not report it (memory shared with the host)
    memory_free: int
    compute_capability: tuple[int, int]
    nvlinks_active: int


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def list_gpus(visible: str | None = None, library: Any = None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA will show, in its order; `visible` is the value of CUDA_VISIBLE_DEVICES, None when it is not set.

    Empty without a driver. `library` replaces libnvidia-ml in tests."""
    gpus = _read_in_subprocess() if library is None else _read_all(library)
    return tuple(gpus[i] for i in select_visible(visible, [gpu.uuid for gpu in gpus]))


def select_visible(visible: str | None, uuids: Sequence[str]) -> list[int]:
    """Positions in `uuids` that CUDA_VISIBLE_DEVICES=`visible` selects, in its order, by CUDA's own rules.

    The first entry that names no GPU ends the list, and a repeated one empties it. A MIG slice is not a GPU here."""
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in visible.split(","):
        position = _visible_index(entry.strip(), uuids)
        if position is None:
            break
        if position in chosen:
            return []
        chosen.append(position)
    return chosen


def _visible_index(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.startswith("GPU-"):
        matches = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    # CUDA parses a number like strtoul: "1gpu" is 1, "NoDevFiles" (Slurm's word for none) is not a number.
    digits = re.match(r"\+?(\d+)", entry)
    index = int(digits[1]) if digits else -1
    return index if 0 <= index < len(uuids) else None


def _load_library() -> Any:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


def _read_in_subprocess() -> list[Gpu]:
    """All GPUs, read by a child process; loading the library here is harmless and avoids the child where there is no driver."""
    if _load_library() is None:
        return []
    try:
        answer = subprocess.run([sys.executable, "-I", __file__], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [Gpu(**{**data, "compute_capability": tuple(data["compute_capability"])}) for data in json.loads(answer.stdout)]


def _read_all(library: Any) -> list[Gpu]:
    if library is None or library.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint(0)
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [gpu for index in range(count.value) if (gpu := _read_gpu(library, index)) is not None]
    finally:
        library.nvmlShutdown()


def _read_gpu(library: Any, index: int) -> Gpu | None:
    """One GPU, or None when its handle is unavailable: it fell off the bus, or this user may not see it."""
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    # A call that fails leaves its structure at zero: a field that the driver does not support is no reason to drop the GPU.
    memory = _NvmlMemory()
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    name, uuid = (_query_string(query, handle) for query in (library.nvmlDeviceGetName, library.nvmlDeviceGetUUID))
    nvlinks_active = sum(_link_active(library, handle, link) for link in range(_MAX_NVLINKS))
    return Gpu(index, name, uuid, memory.total, memory.free, (major.value, minor.value), nvlinks_active)


def _query_string(call: Any, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_STRING_BUFFER_SIZE)
    call(handle, buffer, ctypes.c_uint(_STRING_BUFFER_SIZE))
    return buffer.value.decode(errors="replace")


def _link_active(library: Any, handle: ctypes.c_void_p, link: int) -> bool:
    state = ctypes.c_uint(0)
    return library.nvmlDeviceGetNvLinkState(handle, ctypes.c_uint(link), ctypes.byref(state)) == 0 and state.value == 1


if __name__ == "__main__":
    print(json.dumps([asdict(gpu) for gpu in _read_all(_load_library())]))
