"""Creates, finds and reads a run's folder, the interface between a run and its live view, report and other readers."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.estimate import Estimate
from meshwright.core.event import Event, Fault
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data, read_json
from meshwright.observe.jsonl_tail import JsonRecord, read_records
from meshwright.observe.run_status import RunStatus, infer_status
from meshwright.observe.step_columns import StepColumns

T = TypeVar("T")

_RUN_FILES = ("job.json", "plan.json", "metrics.jsonl", "events-0.jsonl", "result.json", "estimate.json")


@dataclass(frozen=True)
class PlanCandidate:
    """A plan that was considered, with its estimate."""

    summary: str
    step_s: float | None
    memory_bytes: int
    fits: bool
    reason: str = ""
    penalty: float = 0.0  # what its mechanisms add to its cost, relative, when plans are ranked


@dataclass(frozen=True)
class Decision:
    """The contents of estimate.json: `write_json(path, Decision(...))` writes what `RunFolder.decision` reads."""

    estimate: Estimate
    why: str = ""
    ranking: tuple[PlanCandidate, ...] = ()


@dataclass(frozen=True)
class RunFolder:
    """Reads `runs/NAME/`. A missing file reads as None or empty: the run may be live, or have died."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def job(self) -> dict[str, Any]:
        return self._read("job.json", _require_object) or {}

    def plan(self) -> Plan | None:
        return self._read("plan.json", lambda data, where: from_data(Plan, data, where))

    def cluster(self) -> Cluster | None:
        return self._read("cluster.json", lambda data, where: from_data(Cluster, data, where))

    def decision(self) -> Decision | None:
        """The contents of estimate.json: the estimate, the reasons and the ranked alternatives."""
        return self._read("estimate.json", _parse_decision)

    def estimate(self) -> Estimate | None:
        decision = self.decision()
        return decision.estimate if decision else None

    def result(self) -> dict[str, Any] | None:
        return self._read("result.json", _require_object)

    def metrics(self) -> list[JsonRecord]:
        """Every record as written, steps and validations; a resumed run may have a step twice, of which the later is valid."""
        return list(read_records(self.path / "metrics.jsonl"))

    def step_columns(self) -> StepColumns:
        """The metrics by step, without a record in memory for each."""
        return StepColumns(read_records(self.path / "metrics.jsonl"))

    def events(self) -> list[Event]:
        """All ranks' events in order of time."""
        records = (record for path in self.path.glob("events-*.jsonl") for record in read_records(path))
        return sorted(filter(None, map(parse_event, records)), key=lambda e: (e.time, e.rank))

    def faults(self) -> list[Fault]:
        """Faults in order of time, from the events and from the result."""
        return collect_faults(self.events(), self.result())

    def status(self) -> RunStatus:
        return self.status_from(self.events(), self.result(), self.job())

    def status_from(self, events: list[Event], result: Mapping[str, Any] | None, job: Mapping[str, Any]) -> RunStatus:
        """The run's status, from files that were already read."""
        started = max((e.time for e in events if e.kind == "start"), default=0.0)
        # A resumed run keeps the earlier result.json until it ends: only a newer file belongs to this attempt.
        complete = result is not None and _modified_at(self.path / "result.json") >= started and _all_steps_done(result, job)
        return infer_status(events, collect_faults(events, result), complete, self.last_write(), time.time())

    def last_write(self) -> float:
        """The time of the run's last write (a report written later does not count)."""
        return max(map(_modified_at, [self.path / "metrics.jsonl", self.path / "job.json", *self.path.glob("events-*.jsonl")]))

    def _read(self, name: str, convert: Callable[[Any, str], T]) -> T | None:
        path = self.path / name
        return convert(read_json(path), str(path)) if path.exists() else None


def check_run_dir(root: Path) -> None:
    """Raise RequestError if no run folder can be made in `root`, before anything is measured for the run. Leaves nothing behind."""
    try:
        existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".meshwright-", dir=existing))
    except OSError as error:
        raise RequestError(f"cannot make a run folder in {root}: {error.strerror}; choose another with --run-dir") from None


def create_run_folder(root: Path, name: str | None = None, prefix: str = "run") -> RunFolder:
    """A new folder in `root`: called `name`, or `prefix` and the time; a name that is taken gets -2, -3, …"""
    if name is not None and (name != slug(name) or not name):
        raise RequestError(f"'{name}' cannot name a run's folder: use letters, digits, '.', '_' and '-', like '{slug(name) or 'run'}'")
    base = name or f"{slug(prefix) or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = root / (base if number == 1 else f"{base}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)  # private: a run may hold data; fails if it exists, so that two runs started at once get two folders
                break
    except OSError as error:
        raise RequestError(f"cannot make a run folder in {root}: {error.strerror}; choose another with --run-dir") from None
    return RunFolder(path)


def find_run_folder(run_name: str, root: Path) -> RunFolder:
    """The run that a user means: a path, a name below `root`, or 'last' for the one that wrote last."""
    runs = {path.name: path for path in root.iterdir() if path.is_dir()} if root.is_dir() else {}
    if run_name in runs:
        return RunFolder(runs[run_name])
    runs = {name: path for name, path in runs.items() if _is_run(path)}
    if run_name == "last" and runs:
        return RunFolder(max(runs.values(), key=lambda path: (RunFolder(path).last_write(), path.name)))
    if run_name and _is_run(Path(run_name)):
        return RunFolder(Path(run_name))
    if not runs:
        raise RequestError(f"unknown run '{run_name}': there are no runs in {root}; start one with `meshwright train`, or give a run's path")
    raise unknown_name_error("run", run_name, [*runs, "last"], str(root))


def slug(text: str) -> str:
    """'hf:my/model' → 'hf-my-model': a name that is safe as one folder on any system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")


def parse_event(record: Mapping[str, Any]) -> Event | None:
    """The event in one record of an events file, or None if it is not an event."""
    when, kind, data = record.get("time"), record.get("kind"), record.get("data")
    if not isinstance(when, (int, float)) or not isinstance(kind, str):
        return None
    rank, step, generation = (_int_or_default(record.get(key), default) for key, default in (("rank", -1), ("step", -1), ("generation", 0)))
    return Event(float(when), rank, kind, step, data if isinstance(data, dict) else {}, generation)


def collect_faults(events: list[Event], result: Mapping[str, Any] | None) -> list[Fault]:
    """Faults of the events and the result, in order of time; a fault that is in both counts once."""
    recorded = [_parse_fault(e.data, e.time, e.rank) for e in events if e.kind == "fault"]
    faults = [_parse_fault(data, 0.0, -1) for data in (result or {}).get("faults") or [] if isinstance(data, dict)]
    known = {(f.rank, f.kind, f.message) for f in recorded}
    return sorted([*recorded, *(f for f in faults if (f.rank, f.kind, f.message) not in known)], key=lambda f: f.time)


def _all_steps_done(result: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    """Whether the result is of a run that completed all its steps; True if the number of steps is unknown."""
    losses, steps = result.get("losses"), job.get("steps")
    return not isinstance(losses, list) or not isinstance(steps, int) or _int_or_default(result.get("first_step"), 0) + len(losses) >= steps


def _parse_fault(data: Mapping[str, Any], event_time: float, rank: int) -> Fault:
    stamp = data.get("time")
    return Fault(
        time=float(stamp) if isinstance(stamp, (int, float)) else event_time,
        rank=_int_or_default(data.get("rank"), rank),
        kind=str(data.get("kind") or "fault"),
        message=str(data.get("message") or ""),
        traceback=str(data.get("traceback") or ""),
        secondary=bool(data.get("secondary")),
    )


def _parse_decision(data: Any, where: str) -> Decision:
    content = _require_object(data, where)
    fields = PlanCandidate.__dataclass_fields__  # other keys are ignored
    entries = [{k: v for k, v in entry.items() if k in fields} for entry in content.get("ranking") or []]
    ranking = tuple(from_data(PlanCandidate, entry, f"{where}: ranking[{i}]") for i, entry in enumerate(entries))
    return Decision(from_data(Estimate, content.get("estimate"), f"{where}: estimate"), str(content.get("why") or ""), ranking)


def _require_object(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise RequestError(f"{where}: expected a JSON object")
    return data


def _int_or_default(value: Any, default: int = -1) -> int:
    return value if isinstance(value, int) else default


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in _RUN_FILES)


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
