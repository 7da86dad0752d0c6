"""Saves and loads schedules, so that the communication of a job can be shared without the job; and scales schedules down."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from meshwright.core.schedule import Action, Schedule
from meshwright.core.serialization import from_data, read_json, to_data, write_json
from meshwright.proxies.proxy_program import FLOAT_BYTES
from meshwright.schedule.schedule_check import check_schedule

_DEFAULTS = {f.name: f.default for f in fields(Action) if f.default is not MISSING}


def save_schedule(schedule: Schedule, path: Path) -> None:
    """Write a schedule as JSON. Fields with default values are omitted, so that a long schedule stays readable."""
    programs = [[_without_defaults(action) for action in program] for program in schedule.programs]
    write_json(path, {**to_data(replace(schedule, programs=())), "programs": programs})


def load_schedule(path: Path) -> Schedule:
    """Read and check a schedule; an error says what is wrong with the file."""
    schedule = from_data(Schedule, read_json(path), str(path))
    check_schedule(schedule, str(path))
    return schedule


def scale_down(schedule: Schedule, factor: float) -> Schedule:
    """The schedule with sizes and times divided by `factor`. Tensors that are split over a group stay divisible by its size."""
    if factor == 1:
        return schedule
    ranks = {axis: max(map(len, groups)) for axis, groups in schedule.groups.items()}

    def scale_action(action: Action) -> Action:
        unit = FLOAT_BYTES * (ranks[action.axis] if action.op in ("all_gather", "reduce_scatter", "all_to_all") else 1)
        size = max(1, round(action.bytes / factor / unit)) * unit if action.bytes else 0
        expected = None if action.expected_bytes is None else min(round(action.expected_bytes / factor), size)
        return replace(action, bytes=size, expected_bytes=expected, padding=0, seconds=action.seconds / factor, flops=action.flops / factor)

    return replace(schedule, programs=tuple(tuple(scale_action(a) for a in program) for program in schedule.programs))


def _without_defaults(action: Action) -> dict[str, Any]:
    return {key: to_data(value) for key, value in vars(action).items() if key not in _DEFAULTS or value != _DEFAULTS[key]}
