"""The steps of a run as columns of numbers, read line by line: eight bytes a value, drawn from a few hundred points."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

ChartPoint = tuple[float, float]
Floats = NDArray[np.float64]
_CHUNK = 1000
COLUMNS = ("time", "loss", "step_s", "samples_per_s", "tokens_per_s", "mfu", "memory_bytes", "grad_norm", "learning_rate")


class StepColumns:
    """Metrics by step, in order. Of a step done twice (a resumed run) the later record counts, and the steps after it are dropped."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._steps = array("d")
        self._columns = {key: array("d") for key in COLUMNS}
        self.validation: dict[int, float] = {}  # loss by step
        remaining = iter(records)
        while chunk := list(islice(remaining, _CHUNK)):
            self._add_chunk(chunk)

    def _add_chunk(self, records: list[Mapping[str, Any]]) -> None:
        """Add many records at once where they are consecutive steps with a number in every column, which nearly all are; else one by one."""
        try:
            steps = array("d", [record["step"] for record in records])
            columns = {key: array("d", [record[key] for record in records]) for key in COLUMNS}
        except (KeyError, TypeError, OverflowError):
            steps = array("d")
        ascending = len(steps) > 0 and bool((np.diff(steps, prepend=self._steps[-1] if self._steps else -np.inf) > 0).all())
        if not ascending or any("validation_loss" in record for record in records):
            for record in records:
                self._add(record)
            return
        self._steps.extend(steps)
        for key, column in columns.items():
            self._columns[key].extend(column)

    def _add(self, record: Mapping[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int) or abs(step) > 2**53:
            return
        if "validation_loss" in record:
            self.validation[step] = _to_float(record["validation_loss"])
        if "loss" not in record:
            return
        if self._steps and step <= self._steps[-1]:
            self._drop_from(step)
        self._steps.append(step)
        for key, column in self._columns.items():
            column.append(_to_float(record.get(key)))

    def _drop_from(self, step: int) -> None:
        kept = bisect_left(self._steps, step)
        for column in (self._steps, *self._columns.values()):
            del column[kept:]
        self.validation = {at: loss for at, loss in self.validation.items() if at < step}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last_step(self) -> int:
        return int(self._steps[-1])

    def finite(self, key: str) -> Floats:
        """The values of a metric that are numbers."""
        values = np.frombuffer(self._columns[key], dtype=np.float64)
        return values[np.isfinite(values)]

    def points(self, key: str, max_points: int) -> list[ChartPoint]:
        """(step, value) of a metric, at most `max_points`, with NaN where it was not finite; empty for a metric that the run does not have."""
        values = np.frombuffer(self._columns[key], dtype=np.float64)
        if key != "loss" and not np.isfinite(values).any():
            return []
        return downsample_columns(np.frombuffer(self._steps, dtype=np.float64), values, max_points)

    def validation_points(self) -> list[ChartPoint]:
        return [(float(step), self.validation[step]) for step in sorted(self.validation)]


def downsample_columns(steps: Floats, values: Floats, max_points: int) -> list[ChartPoint]:
    """At most `max_points` points: the first, the last, and the lowest and highest of each interval, so that no spike is lost."""
    if len(steps) <= max_points:
        return list(zip(steps.tolist(), values.tolist(), strict=True))
    kept = {0, len(steps) - 1}
    edges = np.linspace(0, len(steps), max((max_points - 2) // 2, 1) + 1).astype(int).tolist()
    for start, end in pairwise(edges):
        interval = values[start:end]
        is_finite = np.isfinite(interval)
        if is_finite.any():
            kept.add(start + int(np.where(is_finite, interval, np.inf).argmin()))
            kept.add(start + int(np.where(is_finite, interval, -np.inf).argmax()))
        else:
            kept.add(start)
    chosen = sorted(kept)
    return list(zip(steps[chosen].tolist(), values[chosen].tolist(), strict=True))


def _to_float(value: Any) -> float:
    """NaN for null, which stands for it in JSON, and for what is no number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    return math.nan
