"""Incremental reading of JSONL files that another process is still writing: each call returns the new complete lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

_CHUNK = 500
JsonRecord = dict[str, Any]


def _parse_lines(lines: Iterable[bytes]) -> Iterator[JsonRecord]:
    """The JSON objects among complete lines. A line truncated by a killed writer is skipped: the others are still valid."""
    remaining = iter(lines)
    while chunk := list(islice(remaining, _CHUNK)):
        yield from _parse_chunk(chunk)


def _parse_chunk(lines: list[bytes]) -> Iterator[JsonRecord]:
    """The records of some lines: of all at once, which is several times as fast, or one by one where a line is no JSON."""
    with suppress(ValueError, RecursionError):
        records = json.loads(b"[" + b",".join(lines) + b"]")
        if len(records) == len(lines) and all(type(record) is dict for record in records):
            yield from records
            return
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            continue
        if isinstance(record, dict):
            yield record


class JsonlTail:
    """Reads one growing file. A partial last line stays unread until its newline is written."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[JsonRecord]:
        """Records written since the last call; empty if the file does not exist yet."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0  # the file was replaced by a shorter one: read it from its beginning
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        return list(_parse_lines(data[:complete].splitlines()))


class JsonlTails:
    """Reads all files of a folder that match a pattern, including files that appear later."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._tails: dict[Path, JsonlTail] = {}

    def read(self) -> list[JsonRecord]:
        """The new records of all files, each file's in order."""
        for path in sorted(self._folder.glob(self._pattern)):
            self._tails.setdefault(path, JsonlTail(path))
        return [record for tail in self._tails.values() for record in tail.read()]


def read_records(path: Path) -> Iterator[JsonRecord]:
    """Every complete record of a file, one at a time, including a last line without newline if it is complete JSON."""
    if not path.is_file():  # opening a pipe would wait for its writer
        return
    try:
        with path.open("rb") as file:
            yield from _parse_lines(file)
    except OSError:
        return
