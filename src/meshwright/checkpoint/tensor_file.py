"""Files of tensors in the safetensors format: a header of JSON, then the bytes of each tensor, one after the other.

Written and read here rather than by the safetensors library, which reads through a memory map: a rank reads boxes of tensors and counts what it
reads, and hashes what it writes while it writes. Nothing in a header is believed before it agrees with the file's size.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from meshwright.core.box import Box, contiguous_runs
from meshwright.core.errors import RequestError

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8, "C128": 16,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
_MIN_RUN_BYTES = 256  # shorter runs are read together with what lies between them: a call takes as long as some hundred bytes


@dataclass(frozen=True)
class TensorSpec:
    """A tensor in a file: its key, the format's name of its dtype, and its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class WrittenFile:
    """What was written: bytes, the hash of the header with its length, and the hash of each tensor's bytes."""

    bytes: int
    header_hash: str
    tensor_hashes: tuple[str, ...]


def write_tensor_file(
    path: Path, specs: Sequence[TensorSpec], parts: Iterable[Iterable[Any]], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Write a new file, flushed to the disk. `parts` gives each tensor's bytes as buffers, in the order of `specs`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        header[spec.key] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.nbytes]}
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    hashes = []
    with path.open("xb", buffering=0) as file:
        _write_all(file, head)
        for spec, buffers in zip(specs, parts, strict=True):
            digest, written = xxhash.xxh3_64(), 0
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                _write_all(file, view)
                digest.update(view)
                written += len(view)
            assert written == spec.nbytes, f"{spec.key}: {written} bytes instead of {spec.nbytes}"
            hashes.append(digest.hexdigest())
        os.fsync(file.fileno())
    return WrittenFile(len(head) + offset, xxhash.xxh3_64_hexdigest(head), tuple(hashes))


def _write_all(file: Any, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the file
    nbytes: int


class TensorFile:
    """An open file of tensors. Raises RequestError for one that is not whole, or not what its header says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise RequestError(f"{path}: {(error.strerror or str(error)).lower()}") from None
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise RequestError(f"{path}: it is no regular file")
            self.size = status.st_size
            self.head = self._read_head()
            self.entries = self._parse(self.head[8:])
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _read_head(self) -> bytes:
        length = int.from_bytes(self._read(0, 8), "little") if self.size >= 8 else -1
        if not 2 <= length <= min(_MAX_HEADER_BYTES, self.size - 8):
            raise RequestError(f"{self.path}: it is cut short, or no file of tensors")
        return self._read(0, 8 + length)

    def _parse(self, text: bytes) -> dict[str, TensorEntry]:
        try:
            header = json.loads(text, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError):
            raise RequestError(f"{self.path}: its header is not what was written: {text[:40]!r}") from None
        if not isinstance(header, dict):
            raise RequestError(f"{self.path}: its header is no object")
        start = 8 + len(text)
        entries = {key: self._entry(key, data, start) for key, data in header.items() if key != "__metadata__"}
        end = start
        for entry in sorted(entries.values(), key=lambda e: (e.offset, e.nbytes)):
            if entry.offset != end:
                raise RequestError(f"{self.path}: its tensors overlap, or leave gaps")
            end += entry.nbytes
        if end != self.size:
            raise RequestError(f"{self.path}: it has {self.size} bytes, and its header says {end}: it is cut short, or was changed")
        return entries

    def _entry(self, key: str, data: Any, start: int) -> TensorEntry:
        try:
            dtype, shape, (begin, end) = data["dtype"], tuple(data["shape"]), data["data_offsets"]
            is_sane = dtype in DTYPE_BYTES and all(type(n) is int and 0 <= n < 2**62 for n in (*shape, begin, end))
            if is_sane and math.prod(shape) * DTYPE_BYTES[dtype] == end - begin and end <= self.size - start:
                return TensorEntry(dtype, shape, start + begin, end - begin)
        except (TypeError, ValueError, KeyError):
            pass
        raise RequestError(f"{self.path}: the header's entry of '{key[:80]}' has no dtype, shape and place that go together")

    def _read(self, offset: int, count: int) -> bytes:
        buffer = bytearray(count)
        self._read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        while buffer:
            count = os.preadv(self._fd, [buffer], offset)
            if not count:
                raise RequestError(f"{self.path}: it was cut short while it was read")
            self.bytes_read += count
            buffer, offset = buffer[count:], offset + count

    def read_box(self, entry: TensorEntry, box: Box, into: Any) -> None:
        """Read a box of a tensor into a buffer, in the order of its elements; only these bytes, unless its runs are short."""
        itemsize, target = DTYPE_BYTES[entry.dtype], memoryview(into).cast("B")
        if not box.numel:
            return
        starts, run = contiguous_runs(entry.shape, box)
        if len(starts) > 1 and run * itemsize < _MIN_RUN_BYTES:
            self._read_span(entry, starts, run, target)
            return
        for i, start in enumerate(starts):
            self._read_into(target[i * run * itemsize : (i + 1) * run * itemsize], entry.offset + start * itemsize)

    def _read_span(self, entry: TensorEntry, starts: list[int], run: int, target: memoryview) -> None:
        """Read short runs in spans of some megabytes, and take them out."""
        itemsize, done = DTYPE_BYTES[entry.dtype], 0
        while done < len(starts):
            last = done
            while last + 1 < len(starts) and (starts[last + 1] + run - starts[done]) * itemsize <= 2**22:
                last += 1
            span = memoryview(self._read(entry.offset + starts[done] * itemsize, (starts[last] + run - starts[done]) * itemsize))
            for i in range(done, last + 1):
                offset = (starts[i] - starts[done]) * itemsize
                target[i * run * itemsize : (i + 1) * run * itemsize] = span[offset : offset + run * itemsize]
            done = last + 1

    def hash_of(self, entry: TensorEntry, chunk_bytes: int = 2**23) -> str:
        """The hash of a tensor's bytes, read in chunks."""
        digest, buffer = xxhash.xxh3_64(), bytearray(min(chunk_bytes, entry.nbytes))
        for offset in range(0, entry.nbytes, chunk_bytes):
            view = memoryview(buffer)[: min(chunk_bytes, entry.nbytes - offset)]
            self._read_into(view, entry.offset + offset)
            digest.update(view)
        return digest.hexdigest()

    def header_hash(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.head)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)
