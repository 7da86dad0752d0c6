"""The knobs of a plan: a table that maps fields of RunConfig to fields of the planner's Constraints.

To add a knob: a field of RunConfig, a field of Constraints with the planner code that obeys it, and one entry of KNOBS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.sample_coupling import batch_parts
from meshwright.core.spatial_policy import parse_grid
from meshwright.orchestrate.config import RunConfig, check_keys
from meshwright.orchestrate.tutorial_config import first_error
from meshwright.plan import Constraints


def _unless_auto(value: str) -> str | None:
    return value if value != "auto" else None


@dataclass(frozen=True)
class Knob:
    """A field of RunConfig that constrains the plan."""

    key: str  # the field of RunConfig, also its --set key
    field: str  # the field of Constraints that it sets
    parse: Callable[[Any], Any] = lambda value: value  # the configuration's value → the constraint's
    in_plan: Callable[[Plan], Any] | None = None  # its value in a plan, compared with a given plan.json; None: not compared


KNOBS = (
    Knob("nproc", "world", in_plan=lambda plan: plan.world),
    Knob("mesh", "mesh", Mesh.parse, in_plan=lambda plan: replace(plan.mesh, order=())),
    Knob("zero", "zero", in_plan=lambda plan: plan.memory.zero),
    Knob("recompute", "recompute", in_plan=lambda plan: plan.memory.recompute),
    Knob("micro_batches", "micro_batches", in_plan=lambda plan: plan.micro_batches),
    Knob("backend", "backend", _unless_auto, in_plan=lambda plan: plan.backend),
    Knob("compile", "compile", in_plan=lambda plan: plan.compile),
    Knob("schedule", "schedule", in_plan=lambda plan: plan.schedule),
    Knob("placements", "placements", in_plan=lambda plan: dict(plan.placements)),
    Knob("recompute_layers", "recompute_layers", in_plan=lambda plan: dict(plan.memory.layers)),
    Knob("sequence", "sequence", in_plan=lambda plan: plan.tensor.is_sequence_parallel),
    Knob("order", "order", lambda text: tuple(text.replace(" ", "").split(",")), in_plan=lambda plan: plan.mesh.order),
    Knob("offload", "offload", in_plan=lambda plan: plan.memory.offload),
    Knob("compression", "compression", _unless_auto, in_plan=lambda plan: plan.sync.compression),
    Knob("compression", "allow", lambda kind: ("bf16", "powersgd") if kind == "auto" else ()),
    Knob("compression_rank", "compression_rank", in_plan=lambda plan: plan.sync.compression_rank),
    Knob("bucket_mb", "bucket_bytes", lambda megabytes: int(megabytes * 2**20)),
    Knob("overlap", "overlap"),
    Knob("timeout_s", "timeout_s"),
    Knob("spatial", "spatial", parse_grid),
    Knob("samples", "samples", in_plan=lambda plan: "apart" if batch_parts(plan) > 1 else "together"),
    Knob("batchnorm", "batch_norm", in_plan=lambda plan: plan.batch_norm),
)

# The settings that apply to a user's own script: where to run it and how to plan it. The script itself decides the rest.
_LAUNCH_KEYS = {"plan", "nproc", "devices", "backend", "run_dir", "name", "max_restarts", "snapshot_every"}
_PLAN_KEYS = {knob.key for knob in KNOBS} - _LAUNCH_KEYS
_OTHER_KEYS = {"verify", "precision"}  # obeyed by `prepare`, whether it plans or is given a plan
CONSTRAINTS_VARIABLE = "MESHWRIGHT_CONSTRAINTS"  # environment variable that hands the constraints to a script's ranks


def constraints_from_config(config: RunConfig, dataflow: Dataflow | None = None) -> Constraints:
    """The constraints that a configuration sets; the planner chooses the knobs that it leaves out."""
    return Constraints(**{knob.field: knob.parse(value) for knob in KNOBS if (value := getattr(config, knob.key)) is not None}, flow=dataflow)


def check_given(plan: Plan, config: RunConfig) -> None:
    """Raise RequestError if a given plan.json contradicts another setting of the configuration."""
    constraints = constraints_from_config(config)
    for knob in KNOBS:
        requested = getattr(constraints, knob.field)
        if knob.in_plan is None or requested in (None, (), {}):
            continue
        planned = knob.in_plan(plan)
        if requested != planned:
            raise RequestError(f"{config.plan} has {knob.key} {_show(planned)}, the request {_show(requested)}: change one of them")


def _show(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def script_environment(config: RunConfig) -> dict[str, str]:
    """The environment variables that hand the configuration to a script's ranks; raises RequestError for a setting that a script cannot obey."""
    fields = RunConfig.model_fields
    keys = {key for key in config.model_fields_set if getattr(config, key) != fields[key].get_default(call_default_factory=True)}
    for key in sorted(keys - _PLAN_KEYS - _LAUNCH_KEYS - _OTHER_KEYS):
        raise RequestError(f"{key} has no effect on a script, which sets it itself: leave it out")
    if config.backend == "auto":
        raise RequestError("backend=auto needs a plan before the ranks start, and a script is planned after: use gloo or mpi")
    constraints = config.model_dump(mode="json", include=keys & _PLAN_KEYS)
    if constraints and config.plan != "auto":
        raise RequestError(f"--plan {config.plan} runs unchanged, and {', '.join(sorted(constraints))} would change it: leave one of them out")
    handed_on = config.model_dump(mode="json", include=keys & (_PLAN_KEYS | _OTHER_KEYS))
    return {"MESHWRIGHT_PLAN": config.plan, **({CONSTRAINTS_VARIABLE: json.dumps(handed_on)} if handed_on else {})}


def script_config(environ: Mapping[str, str], constraints: Mapping[str, Any]) -> RunConfig:
    """The configuration of a script's plan: what the script itself fixes, and then what the command that started it does."""
    known = sorted((_PLAN_KEYS | {"backend", "precision", "verify"}) - {"nproc"})
    check_keys(dict(constraints), "prepare", known)
    handed_on = json.loads(environ.get(CONSTRAINTS_VARIABLE, "{}"))
    try:
        return RunConfig(**{**constraints, **handed_on})
    except ValidationError as error:
        raise RequestError(f"prepare: {first_error(error)[1]}") from None
