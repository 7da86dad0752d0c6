"""Plans over every axis for small models, and the check that all of them must pass: equal to one device, and counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from meshwright.core.expert_policy import ExpertPolicy
from meshwright.core.mesh import Mesh
from meshwright.core.pipeline_schedules import schedule_traits
from meshwright.core.plan import BalancePolicy, MemoryPolicy, Plan, SyncPolicy
from meshwright.core.serialization import from_data, to_data
from meshwright.core.spatial_policy import SpatialPolicy
from meshwright.core.tensor_policy import TensorPolicy
from meshwright.core.tied_parameters import check_tied_parameters
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.describe.profile_tracer import trace_module
from meshwright.plan import choose_cp_policies, choose_expert_parallel
from meshwright.plan.partition import choose_units, single_stage
from meshwright.plan.pipeline_planner import cut_stages
from meshwright.plan.sample_analysis import find_sample_coupling
from meshwright.plan.tensor_planner import choose_tensor_grid
from meshwright.schedule import ledger_differences, plan_ledger
from tests.procs.jobs import build, global_batch

# Their norms (Mixtral: its router too) go through float32 whatever the model's type, so another order of a sum shows, and grows with the steps.
IN_FLOAT32 = ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "T5")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
ZOO = ("gpt-tiny", "llama-tiny", "vae", "vae-conv", "cnn", "cosmoflow-tiny", "dlrm-tiny")
FAMILIES = ("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Bert", "T5", "ViT", "Encoder", "Decoder")


def model_of(name: str, **changes: Any) -> dict[str, Any]:
    return {"zoo": name} if name in ZOO else {"family": name, "changes": changes}


@cache
def _traced(model: str, precision: str) -> tuple[Any, Any]:
    described = json.loads(model)
    kind = DTYPES[precision]
    network, loss = build(described, kind, 0)
    example = global_batch(described, 2, 0, kind)
    return trace_module(network, loss, example, name="test", precision=precision), trace_module_dataflow(network, loss, example, precision)


def traced(model: dict[str, Any], precision: str = "fp64") -> tuple[Any, Any]:
    """(profile, flow) of a model."""
    return _traced(json.dumps(model, sort_keys=True), precision)


def spread(
    model: dict[str, Any], mesh: Mesh, batch: int = 4, *, zero: int = 0, micro: int = 1, recompute: str = "none", schedule: str = "1f1b",
    precision: str = "fp64", grid: tuple[int, ...] = (), sequence: bool = False, each: int = 0,
) -> tuple[Plan, Any]:  # fmt: skip
    """A plan with the cuts that the planner finds, as a file would hold it, and the profile to expand it with."""
    profile, flow = traced(model, precision)
    memory = MemoryPolicy(zero, choose_units(profile), recompute, precision)  # type: ignore[arg-type]
    tensor, across = (
        choose_tensor_grid(flow, mesh.tp, layers=profile.layer_names if mesh.pp > 1 else (), sequence_parallel=sequence)
        if mesh.degree("tp") > 1
        else (TensorPolicy(), TensorPolicy())
    )
    (tensor, across), context, spatial = choose_cp_policies(mesh, flow, (tensor, across), precision, grid)
    owners = choose_expert_parallel(flow, mesh.ep) if mesh.ep > 1 else ExpertPolicy()
    count = mesh.pp * (each or schedule_traits(schedule).stages_per_rank)
    stages = cut_stages(flow, profile, count, tensor, across, mesh.cp) if mesh.pp > 1 else single_stage(profile)
    shared = {"tensor": tensor, "tensor_y": across, "context": context, "spatial": spatial, "expert": owners, "samples": find_sample_coupling(flow)}
    plan = Plan("test", batch, mesh, micro, stages, schedule, memory=memory, **shared)  # type: ignore[arg-type]
    check_tied_parameters(plan, profile.tied_parameters)
    return from_data(Plan, to_data(plan), "plan"), profile


def check(pool: Any, model: dict[str, Any], plan: Plan, profile: Any, steps: int = 3) -> list[Any]:
    """The same losses, gradient norms and final state as one device; and the ledger before the run is what the run counted."""
    precision = plan.memory.precision
    if precision == "fp64" and model.get("family") in IN_FLOAT32:
        steps = min(steps, 5)  # rounding grows from step to step under Adam, to 0.5% of a norm in 18, whoever adds up in another order
    kwargs = {"model": model, "steps": steps, "clip": 0.5, "dtype": str(DTYPES[precision]).removeprefix("torch.")}
    if precision == "fp32":
        kwargs["optimizer"] = "sgd"  # Adam divides rounding by rounding: one device's T5 in four micro-batches is 8e-4 off itself in 5 steps
    exact = {"fp64": 1e-9, "fp32": 1e-4}[precision]
    if model.get("family") in IN_FLOAT32 or model.get("loss") == "own":
        exact = max(exact, 1e-4 if steps > 3 else 1e-6)
    ranks = pool.run("procs.jobs:train_curve", world=plan.world, plan=to_data(plan), **kwargs)
    memory = MemoryPolicy(precision=precision)
    alone = replace(plan, mesh=Mesh(), micro_batches=1, stages=(), spatial=SpatialPolicy(), memory=memory, balance=BalancePolicy(), sync=SyncPolicy())
    single = pool.run("procs.jobs:train_curve", world=1, plan=to_data(alone), **kwargs)[0]
    for mine in ranks:
        assert mine["losses"] == pytest.approx(single["losses"], rel=exact)
        assert mine["norms"] == pytest.approx(single["norms"], rel=exact)
    if precision == "fp64":
        assert ranks[0]["state"] == pytest.approx(single["state"], rel=1000 * exact, abs=10 * exact)
    assert ranks[0]["digest"] == ranks[-1]["digest"]
    for rank, mine in enumerate(ranks):
        expected = plan_ledger(plan, profile, clip=True, rank=rank)
        for phase, ledger in (("start-up", mine["started"]), ("step", mine["ledger"])):
            lines = [tuple(line[what] for what in ("name", "op", "group", "calls", "bytes")) for line in ledger]
            assert ledger_differences(expected, lines, phase) == []
    return ranks  # type: ignore[no-any-return]


def counted(ledger: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    """What a run did at start-up or in one step: calls and bytes by name, operation and size of the group."""
    found: Counter[tuple[Any, ...]] = Counter()
    for line in ledger:
        for what in ("calls", "bytes"):
            found[line["name"], line["op"], line["group"], what] += line[what]
    return found


def listed(plan: Plan, profile: Any, rank: int, phase: str, clip: bool = True) -> Counter[tuple[Any, ...]]:
    """The same from the plan alone."""
    found: Counter[tuple[Any, ...]] = Counter()
    for line in plan_ledger(plan, profile, clip=clip, rank=rank):
        if line.phase == phase:
            found[line.name, line.op, line.group, "calls"] += line.calls
            found[line.name, line.op, line.group, "bytes"] += line.bytes
    return found
