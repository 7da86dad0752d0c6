"""Versions of the software that writes a file."""

from __future__ import annotations

import importlib.metadata
import platform


def installed() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("meshwright", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
