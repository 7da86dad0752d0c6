"""What a unit keeps for backward: everything, what is dear to compute, or its input alone. The words, and which of them go together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, get_args

from meshwright.core.errors import RequestError, unknown
from meshwright.core.pipeline_schedules import schedule_traits

Recompute = Literal["none", "selective", "full"]
MODES: tuple[str, ...] = get_args(Recompute)


def check_modes(default: str, layers: Mapping[str, str], units: tuple[str, ...]) -> None:
    """Every mode is one of the three, and every layer that has its own is a unit."""
    if default not in MODES:
        raise RequestError(f"plan: memory.recompute={default} must be none, selective or full")
    for name, mode in layers.items():
        if name not in units:
            if not units:
                raise RequestError(f"plan: recompute.{name}: this model has no unit to recompute: leave it out")
            raise unknown("layer", name, units, "recompute")
        if mode not in MODES:
            raise RequestError(f"plan: recompute.{name}={mode} must be none, selective or full")


def check_recomputing(modes: Collection[str], ways: int, compiled: str, schedule: str) -> None:
    """What cannot go together, for a plan whose units have these modes; `schedule` is a pipeline's."""
    if modes and schedule and schedule_traits(schedule).splits_backward:
        raise RequestError(
            f"plan: {schedule} takes each weight's gradient apart, and each would compute its unit again: set recompute=none or use interleaved"
        )
    if "selective" in modes and compiled != "none" and ways > 1:
        raise RequestError(
            f"plan: recompute=selective with compile={compiled} needs each unit in one graph, and tensor parallelism (tp={ways}) breaks it: "
            "set compile=none or recompute=full"
        )
