"""What a unit saves for backward: everything (none), outputs of expensive operations (selective) or its input (full); and checks of these modes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, get_args

from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.pipeline_schedules import schedule_traits

RecomputeMode = Literal["none", "selective", "full"]
RECOMPUTE_MODES: tuple[str, ...] = get_args(RecomputeMode)


def check_recompute_modes(default: str, layers: Mapping[str, str], units: tuple[str, ...]) -> None:
    """Check that every mode is one of the three, and that every layer with a mode of its own is a unit."""
    if default not in RECOMPUTE_MODES:
        raise RequestError(f"plan: memory.recompute={default} must be none, selective or full")
    for name, mode in layers.items():
        if not units:
            raise RequestError(f"plan: recompute.{name}: this model has no unit to recompute: leave it out")
        if name not in units:
            raise unknown_name_error("layer", name, units, "recompute")
        if mode not in RECOMPUTE_MODES:
            raise RequestError(f"plan: recompute.{name}={mode} must be none, selective or full")


def check_recompute(modes: Collection[str], tp_degree: int, compile_mode: str, schedule: str) -> None:
    """Check that a plan whose units have these modes can be run; `schedule` is a pipeline's."""
    if modes and schedule and schedule_traits(schedule).splits_backward:
        why = "defers weight gradients, and recompute would run each unit again for every one of them"
        raise RequestError(f"plan: schedule={schedule} {why}: set recompute=none or use interleaved")
    if "selective" in modes and compile_mode != "none" and tp_degree > 1:
        needs = f"recompute=selective with compile={compile_mode} needs each unit in one graph"
        raise RequestError(f"plan: {needs}, and tensor parallelism (tp={tp_degree}) breaks it: set compile=none or recompute=full")
