"""Keeps what torch compiles, so that the next start of the same model does not compile it again."""

from __future__ import annotations

import os

from meshwright.core.cache import cache_folder

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it from the environment when it compiles


def keep_compiled_code() -> None:
    """From now on this process compiles into Meshwright's cache, unless the environment names another folder. torch's own is emptied at reboots."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = str(cache_folder(os.environ) / "compiled")
