"""Where a live run stands, kept up to date from its folder by reading only what is new."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.event import Event
from meshwright.core.plan import Plan
from meshwright.observe.figures import finite
from meshwright.observe.folder import RunFolder, event_from
from meshwright.observe.status import Status
from meshwright.observe.tail import Record, Tail, Tails

RECENT = 20  # steps over which the present speed is taken


@dataclass(frozen=True)
class Snapshot:
    """One look at a run. `last` is the newest metrics record, empty before the first step."""

    name: str
    status: Status
    now: float
    job: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    estimate: Estimate | None = None
    cluster: Cluster | None = None
    done: int = 0
    steps: int | None = None
    last: Record = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    validation: float | None = None
    step_s: float | None = None  # median of the recent steps
    left_s: float | None = None
    spent_s: float = 0.0
    events: tuple[Event, ...] = ()

    @property
    def model(self) -> str:
        return str(self.job.get("model") or (self.plan.model if self.plan else self.name))

    @property
    def share(self) -> float | None:
        return min(self.done / self.steps, 1.0) if self.steps else None


class Progress:
    """Follows one folder. `poll` reads what was appended; `snapshot` says what it amounts to."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._metrics = Tail(folder.path / "metrics.jsonl")
        self._events = Tails(folder.path, "events-*.jsonl")
        self._losses: dict[int, float] = {}
        self._recent: deque[Record] = deque(maxlen=RECENT)
        self._validation: float | None = None
        self._seen: list[Event] = []
        self._fixed: dict[str, Any] = {}

    def poll(self) -> None:
        # Events first: when the end of the run is among them, all of its metrics were written before and are read now.
        new = [event for record in self._events.read() if (event := event_from(record))]
        if new:
            self._seen = sorted([*self._seen, *new], key=lambda e: (e.time, e.rank))
        for record in self._metrics.read():
            self._take(record)

    def snapshot(self) -> Snapshot:
        now, job = time.time(), self._once("job") or {}
        status = self._status(job)
        steps = job.get("steps") if isinstance(job.get("steps"), int) else None
        done = self._done()
        return Snapshot(
            name=self._folder.name,
            status=status,
            now=now,
            job=job,
            plan=self._once("plan"),
            estimate=self._once("estimate"),
            cluster=self._once("cluster"),
            done=done,
            steps=steps,
            last=self._recent[-1] if self._recent else {},
            losses=tuple(self._losses.values()),
            validation=self._validation,
            step_s=_median([r.get("step_s") for r in self._recent]),
            left_s=self._left(steps - done) if steps is not None and not status.over else None,
            spent_s=self._spent(status, now),
            events=tuple(self._seen),
        )

    def _take(self, record: Record) -> None:
        step = record.get("step")
        if "validation_loss" in record:
            self._validation = finite(record["validation_loss"])
        if not isinstance(step, int) or "loss" not in record:
            return
        if self._losses and step <= next(reversed(self._losses)):  # resumed from an earlier step: what came after it no longer counts
            self._losses = {s: loss for s, loss in self._losses.items() if s < step}
            self._recent.clear()
        loss = finite(record["loss"])
        self._losses[step] = float("nan") if loss is None else loss
        self._recent.append(record)

    def _once(self, name: str) -> Any:
        """These files are written once, each whole: read until there, then remembered. A broken one is as good as none here."""
        if self._fixed.get(name) is None:
            try:
                self._fixed[name] = getattr(self._folder, name)() or None
            except RequestError:
                return None
        return self._fixed[name]

    def _status(self, job: dict[str, Any]) -> Status:
        try:
            result = self._folder.result()
        except RequestError:
            result = None
        return self._folder.judged(self._seen, result, job)

    def _done(self) -> int:
        if not self._losses:
            return 0
        # A run that counts its steps from 0 has done one more than its last step's number.
        return next(reversed(self._losses)) + (1 if 0 in self._losses else 0)

    def _left(self, remaining: int) -> float | None:
        times = [t for r in self._recent if (t := finite(r.get("time"))) is not None]
        # By the clock, since validation and saving take time too; but steps that are written several at once bear one time.
        clock = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        estimate = self._once("estimate")
        each = _median([r.get("step_s") for r in self._recent]) or (estimate.step_s if estimate else None)
        return max(remaining, 0) * max(each or 0.0, clock) if each or clock > 0 else None

    def _spent(self, status: Status, now: float) -> float:
        last = self._recent[-1].get("time") if self._recent else None
        ends = [e.time for e in self._seen[-1:]] + [t for t in [finite(last)] if t is not None]
        began = status.began or min(ends, default=now)
        return max((max(ends, default=now) if status.over else now) - began, 0.0)


def sparkline(values: Sequence[float], width: int) -> str:
    """The curve in one line of text, left to right; × where values were not finite."""
    if not values or width < 1:
        return ""
    values = values[:: max(len(values) // (16 * width), 1)]  # a long history is sampled: this runs at every look
    cells = min(width, len(values))
    groups = [values[i * len(values) // cells : (i + 1) * len(values) // cells] for i in range(cells)]
    means = [_mean(group) for group in groups]
    known = [m for m in means if m is not None]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    return "".join("×" if m is None else "▁▂▃▄▅▆▇█"[min(int((m - low) / span * 8), 7)] for m in means)


def _mean(values: Sequence[float]) -> float | None:
    good = [v for v in map(finite, values) if v is not None]
    return statistics.fmean(good) if len(good) == len(values) else None


def _median(values: Sequence[Any]) -> float | None:
    good = [v for v in map(finite, values) if v is not None]
    return statistics.median(good) if good else None
