"""Reads everything that a report shows about a run from its folder, tolerating missing or broken files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.event import Event, Fault
from meshwright.core.plan import Plan
from meshwright.observe.formatting import finite_or_none
from meshwright.observe.run_folder import Decision, RunFolder, collect_faults
from meshwright.observe.run_status import RunStatus
from meshwright.observe.step_columns import StepColumns

T = TypeVar("T")

DEFAULT_TOLERANCE = 0.15  # error by which a prediction is graded if it states none


@dataclass(frozen=True)
class RunSummary:
    """The contents of a run folder. `unreadable` lists the errors of files that exist but could not be read."""

    name: str
    status: RunStatus
    job: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    decision: Decision | None = None
    cluster: Cluster | None = None
    result: dict[str, Any] = field(default_factory=dict)
    steps: StepColumns = field(default_factory=StepColumns)
    events: tuple[Event, ...] = ()
    faults: tuple[Fault, ...] = ()
    has_trace: bool = False
    unreadable: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        return str(self.job.get("model") or (self.plan.model if self.plan else self.name))

    @property
    def estimate(self) -> Estimate | None:
        return self.decision.estimate if self.decision else None

    @property
    def tolerance(self) -> float:
        return (self.estimate.error if self.estimate else 0.0) or DEFAULT_TOLERANCE

    def measured_metric(self, key: str) -> float | None:
        """The metric from the result; without one, the median over the steps so far."""
        reported = finite_or_none(_dict_or_empty(self.result.get("measured")).get(key))
        values = self.steps.finite(key)
        return reported if reported is not None else float(np.median(values)) if len(values) else None

    def measured_memory(self) -> list[float | None]:
        """Peak memory by rank: from the result, or else from the ranks' "end" events and rank 0's metrics."""
        reported = _dict_or_empty(self.result.get("measured")).get("memory_bytes")
        if isinstance(reported, list):
            return [finite_or_none(v) for v in reported]
        peaks = {e.rank: finite_or_none(e.data.get("memory_bytes")) for e in self.events if e.kind == "end" and e.rank >= 0}
        if len(rank0 := self.steps.finite("memory_bytes")):
            peaks.setdefault(0, float(rank0.max()))
        return [peaks.get(rank) for rank in range(max(peaks, default=-1) + 1)]

    def predicted_memory(self) -> list[float | None]:
        return list(self.estimate.memory_bytes) if self.estimate else []

    def duration_s(self) -> float | None:
        """The run's duration: from the result, or else from its first to its last event or step."""
        times = [e.time for e in self.events] + ([float(v.min()), float(v.max())] if len(v := self.steps.finite("time")) else [])
        reported = finite_or_none(self.result.get("seconds"))
        return reported if reported is not None else max(times) - min(times) if times else None


def read_run_summary(folder: RunFolder) -> RunSummary:
    """Read every file of the run. The error of a broken file goes into `unreadable`; the others are still read."""
    errors: list[str] = []

    def attempt(read: Callable[[], T | None]) -> T | None:
        try:
            return read()
        except RequestError as error:
            errors.append(str(error))
            return None

    events = folder.events()
    job, result = attempt(folder.job) or {}, attempt(folder.result)
    return RunSummary(
        name=folder.name,
        job=job,
        plan=attempt(folder.plan),
        decision=attempt(folder.decision),
        cluster=attempt(folder.cluster),
        result=result or {},
        status=folder.status_from(events, result, job),
        steps=folder.step_columns(),
        events=tuple(events),
        faults=tuple(collect_faults(events, result)),
        has_trace=(folder.path / "trace.json").exists(),
        unreadable=tuple(errors),
    )


def _dict_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
