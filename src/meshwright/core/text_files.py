"""Reading and writing of whole text files: only regular files of a sane size are read; what is written appears at once or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from meshwright.core.errors import RequestError

MAX_BYTES = 256 * 2**20  # no plan, configuration, calibration, cluster or result is near it


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file. A folder, a pipe, a device, a binary or a very large file raises RequestError, since the user named the wrong one."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # before it is opened: opening a pipe waits for its writer
            raise RequestError(f"{path}: {'is a folder' if stat.S_ISDIR(found.st_mode) else 'not a regular file'}: name a file")
        if found.st_size > max_bytes:
            size, limit = (f"{count / 2**20:,.0f} MiB" for count in (found.st_size, max_bytes))
            raise RequestError(f"{path}: {size} is more than the {limit} that are read: name another file")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise RequestError(f"{path}: not a text file") from None
        raise RequestError(f"{path}: {getattr(error, 'strerror', None) or error}") from None  # ValueError: a null character in the name


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write atomically: a reader never sees half a file. A symbolic link at `path` is replaced, not followed. `private`: for its owner only."""
    if path.is_dir():
        raise RequestError(f"{path} is a folder: name a file in it")
    if path.exists() and not path.is_file():
        raise RequestError(f"{path} is a device or a pipe: name a file")  # /dev/null would be replaced by a file
    partial = path.with_name(f".meshwright-{secrets.token_hex(8)}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(partial, flags, 0o600 if private else 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # the name that the user knows
    try:
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
