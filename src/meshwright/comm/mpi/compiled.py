"""`quick.c` made into a module of this Python by the machine's C compiler: once, in a second, kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from meshwright.core.cache import cache_folder

_SOURCE = Path(__file__).with_name("quick.c")
_LONGEST_S = 60.0  # a compiler takes


def compiled(environ: Mapping[str, str], pointers: bool) -> Path | None:
    """The file; None where it cannot be made. `pointers` says what MPI's handles are: pointers, or whole numbers."""
    if environ.get("MESHWRIGHT_COMPILE") == "0" or sysconfig.get_config_var("Py_GIL_DISABLED"):  # it relies on Python's lock
        return None
    try:
        return _made(environ, "void *" if pointers else "int")
    except (OSError, ValueError, subprocess.SubprocessError):  # no compiler, a cache that cannot be written, a CC that cannot be read
        return None


def _made(environ: Mapping[str, str], handle: str) -> Path | None:
    command = [*shlex.split(environ.get("CC") or "cc"), "-O2", "-shared", "-fPIC", f"-DHANDLE={handle}", f"-I{sysconfig.get_path('include')}"]
    command += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    facts = f"{command}|{sys.version}|{sysconfig.get_platform()}".encode() + _SOURCE.read_bytes()
    made = _own_folder(cache_folder(environ)) / f"quick-{hashlib.sha256(facts).hexdigest()[:12]}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if made.exists():
        return made
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        draft = Path(folder) / made.name
        done = subprocess.run([*command, str(_SOURCE), "-o", str(draft)], capture_output=True, timeout=_LONGEST_S, check=False)
        if done.returncode:
            return None
        with suppress(FileExistsError):  # another node was quicker, and has it in use: it is not replaced
            os.link(draft, made)
    return made


def _own_folder(cache: Path) -> Path:
    """Where only the user can write: what is found here is run."""
    folder = cache / "compiled"
    cache.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"others may write to {folder}")
    return folder
