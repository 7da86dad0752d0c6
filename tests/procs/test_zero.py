"""ZeRO, measured: bytes held by each rank follow the formulas, and the traffic is 1×, 1× and 1.5× of data parallelism's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright import zoo
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, SyncPolicy
from meshwright.core.serialization import to_data
from meshwright.cost.memory_cost import model_state_bytes
from meshwright.describe.profile_tracer import trace_task
from meshwright.schedule import build_schedule

MODEL = "gpt-tiny"  # every dimension divides by 4
UNITS = ("blocks.0", "blocks.1")


def run(
    pool: Any, world: int, zero: int, model: str = MODEL, units: tuple[str, ...] = UNITS, micro: int = 1, offload: str = "none"
) -> list[dict[str, Any]]:
    plan = make(world, zero, units, micro)
    plan = replace(plan, memory=replace(plan.memory, offload=offload))
    return pool.run("procs.jobs:train_curve", world=world, plan=to_data(plan), model={"zoo": model}, steps=2, dtype="float32")


def make(world: int, zero: int, units: tuple[str, ...] = UNITS, micro: int = 1, batch: int = 16) -> Plan:
    mesh = Mesh(shard=world) if zero and world > 1 else Mesh(dp=world)
    sync = SyncPolicy(bucket_bytes=50_000, first_bucket_bytes=5_000)
    return Plan(MODEL, batch, mesh, micro, memory=MemoryPolicy(zero, units), sync=sync)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_held_follow_the_formula(pool: Any, world: int, zero: int) -> None:
    """fp32 storage and Adam: 4Ψ + 4Ψ + 8Ψ, of which stage 1 cuts the last by N, stage 2 the last two, stage 3 all three."""
    size = 4 * sum(p.numel() for p in zoo.load(MODEL).build().parameters())
    cut = [1, 1, 1]
    for kind in range(3 - zero, 3):
        cut[kind] = world
    for rank in run(pool, world, zero):
        held = rank["held"]
        assert held["parameters"] == size / cut[0]
        assert held["gradients"] == size / cut[1]
        assert held["optimizer"] == 2 * size / cut[2]
        predicted = model_state_bytes(make(world, zero), trace_task(zoo.load(MODEL)), "adamw")
        assert held == predicted


@pytest.mark.parametrize(("world", "zero"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_states_in_host_memory_train_the_same_and_leave_the_device(pool: Any, world: int, zero: int) -> None:
    """To the bit: it is the same optimizer on the same slices. CPU ranks make the copies all the same."""
    here, there = (run(pool, world, zero, offload=offload) for offload in ("none", "optimizer"))
    for a, b in zip(here, there, strict=True):
        assert (a["losses"], a["digest"]) == (b["losses"], b["digest"])
        assert b["held"] == {**a["held"], "optimizer": 0}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sizes_that_do_not_divide_cost_only_the_padding_listed(pool: Any, zero: int) -> None:
    profile = trace_task(zoo.load("vae"))
    plan = make(3, zero, ("encoder.1",), batch=18)
    ranks = pool.run("procs.jobs:train_curve", world=3, plan=to_data(plan), model={"zoo": "vae"}, steps=1, dtype="float32")
    predicted = model_state_bytes(plan, profile, "adamw")
    assert ranks[0]["held"] == predicted
    padding = sum(a.padding for a in build_schedule(plan, profile).program_for(0) if a.op == "reduce_scatter")
    whole = profile.parameter_bytes
    assert 0 < padding < 0.05 * whole
    assert 3 * ranks[0]["held"]["optimizer"] <= 2 * (whole + padding)


def sent(ledger: list[dict[str, Any]]) -> float:
    """Bytes on the wire in one step, without the loss's own few."""
    return sum(line["sent"] for line in ledger if line["name"] not in ("loss", "norm"))


@pytest.mark.parametrize("world", [2, 4])
def test_traffic_is_1_1_and_1_5_times_data_parallel(pool: Any, world: int) -> None:
    traffic = [sent(run(pool, world, zero)[0]["ledger"]) for zero in (0, 1, 2, 3)]
    size = 4 * sum(p.numel() for p in zoo.load(MODEL).build().parameters())
    assert traffic[0] == pytest.approx(2 * (world - 1) / world * size)
    assert [t / traffic[0] for t in traffic] == pytest.approx([1, 1, 1, 1.5])


@pytest.mark.parametrize(("world", "zero", "micro"), [(2, 0, 1), (2, 1, 2), (2, 2, 2), (4, 3, 1), (2, 3, 2)])
def test_the_schedule_lists_what_the_run_does(pool: Any, world: int, zero: int, micro: int) -> None:
    """The ledger before the run equals the ledger of the run: operations, bytes and calls, by name."""
    plan = make(world, zero, micro=micro)
    counted = {(line["name"], line["op"]): (line["calls"], line["bytes"]) for line in run(pool, world, zero, micro=micro)[0]["ledger"]}
    listed: dict[tuple[str, str], tuple[int, int]] = {}
    for action in build_schedule(plan, trace_task(zoo.load(MODEL))).program_for(0):
        if action.is_collective:
            key = ("/".join(action.name.split("/")[:2]), action.op)
            calls, size = listed.get(key, (0, 0))
            listed[key] = (calls + 1, size + action.bytes)
    assert listed == counted


def test_units_of_trained_and_other_parameters_under_two_optimizer_groups(pool: Any) -> None:
    alone = pool.run("procs.jobs:mixed_units", world=1, zero=0)[0]
    for mine in pool.run("procs.jobs:mixed_units", world=4, zero=3):
        assert mine == pytest.approx(alone, rel=1e-9)
