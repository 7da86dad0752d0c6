"""`quick.c` made into a module of this Python by the machine's C compiler: once, in a second, kept in the user's cache."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshwright.core.cache import cache_folder

_SOURCE = Path(__file__).with_name("quick.c")
_LONGEST_S = 60.0  # a compiler takes


def compiled(environ: Mapping[str, str], pointers: bool) -> Path | None:
    """The file; None where it cannot be made. `pointers` says what MPI's handles are: pointers, or whole numbers."""
    if environ.get("MESHWRIGHT_COMPILE") == "0" or sysconfig.get_config_var("Py_GIL_DISABLED"):  # it relies on Python's lock
        return None
    command = [*shlex.split(environ.get("CC", "cc")), "-O2", "-shared", "-fPIC", f"-DHANDLE={'void *' if pointers else 'int'}"]
    command += [f"-I{sysconfig.get_path('include')}", *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])]
    facts = f"{command}|{sys.version}|{sysconfig.get_platform()}".encode() + _SOURCE.read_bytes()
    made = cache_folder(environ) / f"quick-{hashlib.sha256(facts).hexdigest()[:12]}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if made.exists():
        return made
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            draft = Path(folder) / made.name
            done = subprocess.run([*command, str(_SOURCE), "-o", str(draft)], capture_output=True, timeout=_LONGEST_S, check=False)
            if done.returncode:
                return None
            draft.replace(made)  # whole: others may be looking for it
    except (OSError, subprocess.SubprocessError):
        return None
    return made
