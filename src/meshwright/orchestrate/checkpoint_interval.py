"""How often a run saves, as a user writes it."""

from __future__ import annotations

import re

from meshwright.core.errors import RequestError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_interval(text: str | int, setting: str = "checkpoint_every") -> tuple[int | None, float | None]:
    """(steps, seconds) between saves of a `checkpoint_every` or `snapshot_every`: 500, 10m, auto (neither) or none (0 steps)."""
    if text == "auto":
        return None, None
    if text == "none" or text == 0:
        return 0, None
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(text)):
        return None, float(match[1]) * _UNITS[match[2]]
    if re.fullmatch(r"\d{1,12}", str(text)):
        return int(text), None
    raise RequestError(f"{setting}={text}: give steps, like 500, or a time, like 10m or 1h, or auto, or none")
