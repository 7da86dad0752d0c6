"""The simulator on unlike devices: every rank at its own device's pace with its own part, as the closed form has it where both apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_inputs import blocks, calibration, plan, unlike
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline_time import piped, uneven

from meshwright import zoo
from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster, Link
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.plan import BalancePolicy, Plan
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.cost.priced_schedule import priced_rank_classes, priced_schedule
from meshwright.describe.cluster_file import parse_cluster
from meshwright.describe.cluster_resolver import resolve_cluster
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.orchestrate.simulation_target import SimulationTarget, target_from_datasheets
from meshwright.plan import rank_plans
from meshwright.plan.search_space import Constraints
from meshwright.simulate import AlphaBetaNetwork, Disturbances, OverlapBehavior, Simulation, simulate

MUCH = 2**36
MIX = """
name = "mix"
[[nodes]]
name = "new"
devices = ["4 x A100-40GB"]
cores = 64
memory = "512 GB"
inside = { kind = "wired", name = "NVLink 3", bandwidth = "100 GB/s", latency = "3 us" }
[[nodes]]
name = "old"
devices = ["4 x V100-SXM2-16GB"]
cores = 40
memory = "384 GB"
inside = { kind = "wired", name = "NVLink 2", bandwidth = "50 GB/s", latency = "3 us" }
[network]
kind = "flat"
name = "network"
bandwidth = "100 Gb/s"
latency = "5 us"
"""


def both(made: Plan, profile: ModelProfile, cluster: Cluster, known: Calibration) -> tuple[Simulation, float]:
    """Simulated on calls that hold their ranks, and by the closed form."""
    schedule = priced_schedule(made, profile, "adamw", cluster, known)
    network = AlphaBetaNetwork(cluster, known.rates_for(made.world), "nccl", overlap_by_rank=(OverlapBehavior(interference=1.0),))
    found, apart = simulate(schedule, network), simulate(schedule, network, merge_ranks=False)
    assert [found.end_times[kind] for kind in found.rank_partition.class_of] == pytest.approx(list(apart.end_times), rel=1e-12)
    return found, estimate(made, profile, Workload(made.global_batch), cluster, known).step_s


def card(made: Plan, **changes: Any) -> Plan:
    return replace(made, device="cuda", backend="nccl", **changes)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    ("mesh", "shares", "states"),
    [
        ({"dp": 4}, (), ()),
        ({"dp": 4}, (28, 4, 28, 4), ()),
        ({"dp": 2, "shard": 2, "zero": 2}, (20, 12, 20, 12), (0.4, 0.6)),
        ({"shard": 4, "zero": 1}, (24, 8, 24, 8), (0.2, 0.3, 0.2, 0.3)),
        ({"shard": 4, "zero": 3}, (24, 8, 24, 8), (0.1, 0.4, 0.1, 0.4)),
    ],
)
def test_one_rank_that_is_the_slowest_in_all_it_does_takes_what_the_closed_form_says(
    mesh: dict[str, int], shares: tuple[int, ...], states: tuple[float, ...], micro: int
) -> None:
    profile = blocks(4, ((256, 256), (256,)), flops=1e9)
    made = card(plan(profile, micro=micro, **mesh), balance=BalancePolicy(shares, states))
    found, closed = both(made, profile, *unlike((8, MUCH), (1, MUCH), (8, MUCH), (1, MUCH)))
    assert found.step_s == pytest.approx(closed, rel=1e-9)
    assert found.rank_partition.class_of == (0, 1, 0, 1)


@given(speeds=st.lists(st.floats(1.0, 4.0), min_size=2, max_size=4), data=st.data(), zero=st.sampled_from([0, 1, 3]))
@settings(max_examples=25)
def test_ranks_that_wait_for_each_other_in_turn_never_take_less_than_the_closed_form(speeds: list[float], data: Any, zero: int) -> None:
    """The closed form takes the slowest rank of the whole step, the simulation the slowest before every call."""
    profile, ways = blocks(3, ((64, 64),), flops=1e8), len(speeds)
    shares = tuple(data.draw(st.lists(st.integers(1, 9), min_size=ways, max_size=ways)))
    mesh = {"shard": ways, "zero": zero} if zero else {"dp": ways}
    made = card(replace(plan(profile, batch=ways, **mesh), global_batch=sum(shares), balance=BalancePolicy(shares)))
    found, closed = both(made, profile, *unlike(*((speed, MUCH) for speed in speeds)))
    assert closed * (1 - 1e-9) <= found.step_s <= closed * 1.35


@given(data=st.data(), schedule=st.sampled_from(["gpipe", "1f1b", "zero_bubble"]))
@settings(max_examples=12)
def test_stages_of_unlike_devices_take_what_the_closed_form_says(data: Any, schedule: str) -> None:
    ranks = data.draw(st.integers(2, 4))
    speeds = data.draw(st.lists(st.floats(0.5, 4.0), min_size=ranks, max_size=ranks))
    profile = uneven([1.0] * ranks * (2 if schedule == "zero_bubble" else 1))
    made = card(piped(profile, schedule, ranks, ranks + data.draw(st.integers(0, 6))), device_order=tuple(data.draw(st.permutations(range(ranks)))))
    cluster, known = unlike(*((speed, MUCH) for speed in speeds))
    known = replace(known, layouts=tuple(replace(r, overlap=1.0) for r in known.layouts))
    found = simulate(
        priced_schedule(made, profile, "adamw", cluster, known), AlphaBetaNetwork(cluster, known.rates_for(ranks), "nccl", contended=False)
    )
    closed = estimate(made, profile, Workload(made.global_batch), cluster, known).step_s
    assert found.step_s == pytest.approx(closed, rel=1e-4)


def test_like_devices_with_unlike_shares_are_told_apart_and_like_ones_are_not() -> None:
    profile, known = blocks(2), calibration(4)
    cluster = replace(unlike(*[(1, MUCH)] * 4)[0], link=Link("wire", 1e-5, 1e9))
    for shares, kinds in (((), 1), ((4, 4, 4, 4), 1), ((6, 6, 2, 2), 2)):
        made = card(plan(profile, batch=16, dp=4), balance=BalancePolicy(shares))
        assert len(priced_rank_classes(made, "adamw", cluster, known)) == kinds
        assert len(both(made, profile, cluster, known)[0].end_times) == kinds


# -- the catalog's --


def machine(name: str) -> tuple[SimulationTarget, str]:
    """And a precision that all its cards have."""
    return (
        (target_from_datasheets(parse_cluster(MIX, "mix.toml", "mix", None)), "fp16")
        if name == "mix"
        else (target_from_datasheets(resolve_cluster(name, {})), "bf16")
    )


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(shard=2), Mesh(pp=2)])
@pytest.mark.parametrize("where", ["workstation", "mix"])
def test_planned_parts_on_data_sheets_are_simulated_as_they_are_estimated(where: str, mesh: Mesh) -> None:
    of, precision = machine(where)
    mesh = replace(mesh, dp=4) if where == "mix" and mesh.pp > 1 else Mesh(mesh.pp, mesh.dp * (len(of.cluster.devices) // 2), mesh.shard)
    task = zoo.load("gpt-mini")
    profile, flow = trace_task(task, precision=precision, device="cuda"), trace_dataflow(task, precision)  # type: ignore[arg-type]
    constraints = Constraints(
        flow=flow, reorder=True, mesh=mesh, zero=1 if mesh.shard > 1 else None, compile="none", recompute="none", micro_batches=4
    )
    workload = Workload(512, precision=precision)  # type: ignore[arg-type]
    best = rank_plans(profile, of.cluster, workload, of.calibration, constraints).best
    schedule, network = priced_schedule(best.plan, profile, "adamw", of.cluster, of.calibration), of.make_network(best.plan)
    found = simulate(schedule, network)
    assert found.step_s == pytest.approx(best.estimate.step_s, rel=0.1)
    assert len(found.end_times) < 8 and found.step_s == pytest.approx(simulate(schedule, network, merge_ranks=False).step_s, rel=1e-3)
    slow = simulate(schedule, network, Disturbances(slow={"0": 3.0}))
    assert slow.step_s > found.step_s and simulate(schedule, network, Disturbances(fail={"1": 0.0})).lost is not None


def test_a_cluster_of_unlike_nodes_grows_by_all_of_them() -> None:
    of, _ = machine("mix")
    grown = of.with_ranks(24).cluster
    assert [node.name for node in grown.nodes] == ["new-0", "old-1", "new-2", "old-3", "new-4", "old-5"]
    assert len({device.name for device in grown.devices}) == 2
