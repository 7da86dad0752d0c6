"""Tracks the progress of a live run from its folder, reading only what was appended since the last poll."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.event import Event
from meshwright.core.plan import Plan
from meshwright.observe.formatting import finite_or_none
from meshwright.observe.jsonl_tail import JsonlTail, JsonlTails, JsonRecord
from meshwright.observe.run_folder import RunFolder, parse_event
from meshwright.observe.run_status import RunStatus

RECENT_STEPS = 20  # window of the step-time median


@dataclass(frozen=True)
class ProgressSnapshot:
    """The state of a run at one time. `last_metrics` is the newest metrics record, empty before the first step."""

    name: str
    status: RunStatus
    taken_at: float
    job: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    estimate: Estimate | None = None
    cluster: Cluster | None = None
    steps_done: int = 0
    steps: int | None = None
    last_metrics: JsonRecord = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    validation: float | None = None
    step_s: float | None = None  # median of the recent steps
    remaining_s: float | None = None
    elapsed_s: float = 0.0
    events: tuple[Event, ...] = ()

    @property
    def model(self) -> str:
        return str(self.job.get("model") or (self.plan.model if self.plan else self.name))

    @property
    def fraction_done(self) -> float | None:
        return min(self.steps_done / self.steps, 1.0) if self.steps else None


class ProgressTracker:
    """Follows one run folder. `poll` reads what was appended; `snapshot` returns the resulting state."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._metrics = JsonlTail(folder.path / "metrics.jsonl")
        self._events = JsonlTails(folder.path, "events-*.jsonl")
        self._losses: dict[int, float] = {}
        self._recent: deque[JsonRecord] = deque(maxlen=RECENT_STEPS)
        self._validation: float | None = None
        self._known_events: list[Event] = []
        self._file_cache: dict[str, Any] = {}

    def poll(self) -> None:
        # Events first: if they include the end of the run, all its metrics were written before it and are read below.
        self._known_events += filter(None, map(parse_event, self._events.read()))
        self._known_events.sort(key=lambda e: (e.time, e.rank))
        for record in self._metrics.read():
            self._add_metrics(record)

    def snapshot(self) -> ProgressSnapshot:
        now, job = time.time(), self._read_once("job") or {}
        status = self._status(job)
        steps = job.get("steps") if isinstance(job.get("steps"), int) else None
        done = self._steps_done()
        return ProgressSnapshot(
            name=self._folder.name,
            status=status,
            taken_at=now,
            job=job,
            plan=self._read_once("plan"),
            estimate=self._read_once("estimate"),
            cluster=self._read_once("cluster"),
            steps_done=done,
            steps=steps,
            last_metrics=self._recent[-1] if self._recent else {},
            losses=tuple(self._losses.values()),
            validation=self._validation,
            step_s=_finite_median(r.get("step_s") for r in self._recent),
            remaining_s=self._remaining_seconds(steps - done) if steps is not None and not status.is_over else None,
            elapsed_s=self._elapsed_seconds(status, now),
            events=tuple(self._known_events),
        )

    def _add_metrics(self, record: JsonRecord) -> None:
        step = record.get("step")
        if "validation_loss" in record:
            self._validation = finite_or_none(record["validation_loss"])
        if not isinstance(step, int) or "loss" not in record:
            return
        if self._losses and step <= next(reversed(self._losses)):  # resumed from an earlier step: drop the steps after it
            self._losses = {s: loss for s, loss in self._losses.items() if s < step}
            self._recent.clear()
        loss = finite_or_none(record["loss"])
        self._losses[step] = float("nan") if loss is None else loss
        self._recent.append({**record, "loss": math.nan} if record["loss"] is None else record)  # JSON has null for NaN

    def _read_once(self, name: str) -> Any:
        """The contents of a file that is written once, cached as soon as it exists; None if it is missing or unreadable."""
        if self._file_cache.get(name) is None:
            try:
                self._file_cache[name] = getattr(self._folder, name)() or None
            except RequestError:
                return None
        return self._file_cache[name]

    def _status(self, job: dict[str, Any]) -> RunStatus:
        try:
            result = self._folder.result()
        except RequestError:
            result = None
        return self._folder.status_from(self._known_events, result, job)

    def _steps_done(self) -> int:
        # A run that counts its steps from 0 has done one more than the number of its last step.
        return next(reversed(self._losses)) + (0 in self._losses) if self._losses else 0

    def _remaining_seconds(self, steps: int) -> float | None:
        times = [t for r in self._recent if (t := finite_or_none(r.get("time"))) is not None]
        # Wall time includes validation and saving; but steps written in one batch share a timestamp, so the median step time is the lower bound.
        wall_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        estimate = self._read_once("estimate")
        step_s = _finite_median(r.get("step_s") for r in self._recent) or (estimate.step_s if estimate else None)
        return max(steps, 0) * max(step_s or 0.0, wall_s) if step_s or wall_s > 0 else None

    def _elapsed_seconds(self, status: RunStatus, now: float) -> float:
        last_step = finite_or_none(self._recent[-1].get("time")) if self._recent else None
        times = [e.time for e in self._known_events[-1:]] + ([last_step] if last_step is not None else [])
        end = max(times, default=now) if status.is_over else now
        return max(end - (status.started_at or min(times, default=now)), 0.0)


def sparkline(values: Sequence[float], width: int) -> str:
    """The curve as one line of block characters, left to right; × marks values that are not finite."""
    if not values or width < 1:
        return ""
    values = values[:: max(len(values) // (16 * width), 1)]  # a long history is sampled: this runs at every refresh
    cells = min(width, len(values))
    groups = [values[i * len(values) // cells : (i + 1) * len(values) // cells] for i in range(cells)]
    means = [statistics.fmean(group) if all(map(math.isfinite, group)) else None for group in groups]
    finite = [m for m in means if m is not None] or [0.0]
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join("×" if m is None else "▁▂▃▄▅▆▇█"[min(int((m - low) / span * 8), 7)] for m in means)


def _finite_median(values: Iterable[Any]) -> float | None:
    finite = [v for v in map(finite_or_none, values) if v is not None]
    return statistics.median(finite) if finite else None
