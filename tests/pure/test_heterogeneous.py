"""Unequal devices: shares of a batch, stages by speed and memory, device orders, and a planner that is never worse than the best equal split."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
from fake_inputs import card_rates, unlike
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import zoo
from meshwright.core.calibration import Calibration, scale_rates
from meshwright.core.cluster import Cluster, Device, Node
from meshwright.core.errors import RequestError
from meshwright.core.heterogeneous import device_labels, device_orders, homogeneous_average, with_measured_names
from meshwright.core.mesh import Mesh
from meshwright.core.plan import BalancePolicy, MemoryPolicy, Plan
from meshwright.core.serialization import from_data, to_data
from meshwright.core.shares import split_proportionally
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.cost.step_cost import HEADROOM
from meshwright.describe.cluster_resolver import resolve_cluster
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.describe.speed_groups import rates_by_speed_group
from meshwright.plan import Ranking, explain, rank_plans
from meshwright.plan.balance import capped_fractions, distribute_samples
from meshwright.plan.search_space import Constraints
from meshwright.plan.stage_cuts import best_stage_cuts

MUCH = 2**36


@cache
def traced(name: str = "gpt-tiny") -> tuple[Any, Any]:
    task = zoo.load(name)
    return trace_task(task), trace_dataflow(task)


def ranked(machine: tuple[Cluster, Calibration], batch: int = 24, objective: str = "time", **constraints: Any) -> Ranking:
    profile, flow = traced()
    workload = Workload(batch, objective=objective)  # type: ignore[arg-type]
    return rank_plans(profile, machine[0], workload, machine[1], Constraints(flow=flow, compile="none", reorder=True, **constraints))


# -- parts --


@given(total=st.integers(0, 500), parts=st.lists(st.floats(0, 5), min_size=1, max_size=6).filter(lambda p: sum(p) > 0.1), unit=st.integers(1, 8))
def test_parts_of_a_whole_add_up_and_are_off_by_a_unit_at_most(total: int, parts: list[float], unit: int) -> None:
    found = split_proportionally(total, parts, unit)
    assert sum(found) == total and min(found) >= 0
    assert all(abs(size - total * part / sum(parts)) <= 2 * unit for size, part in zip(found, parts, strict=True))


@given(data=st.data(), count=st.integers(1, 5))
def test_what_is_too_much_for_one_goes_to_the_others(data: st.DataObject, count: int) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 5), min_size=count, max_size=count))
    most = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    found = capped_fractions(weights, most)
    assert (found is None) == (sum(most) < 1.0)
    if found is not None:
        assert sum(found) == pytest.approx(1) and all(part <= room + 1e-6 for part, room in zip(found, most, strict=True))


def test_shares_stay_within_the_rooms() -> None:
    assert distribute_samples(10, [float, float], max_samples=[3, 9]) == (3, 7)
    assert distribute_samples(10, [float, float], max_samples=[3, 5]) is None
    assert distribute_samples(10, [float, float], max_samples=[0, 20]) is None


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], list[float], list[int]]:
    layers, stages = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    row = st.lists(st.floats(0.1, 4), min_size=layers, max_size=layers)
    places = draw(st.sets(st.integers(1, layers - 1)))
    rooms = draw(st.lists(st.floats(0.5, 12), min_size=stages, max_size=stages))
    return draw(st.lists(row, min_size=stages, max_size=stages)), draw(st.lists(row, min_size=stages, max_size=stages)), rooms, sorted(places)


@given(chain=chains())
def test_cuts_are_the_best_of_all_that_fit(chain: Any) -> None:
    seconds, sizes, rooms, places = chain

    def slowest(cuts: tuple[int, ...]) -> float:
        edges = [0, *cuts, len(seconds[0])]
        pieces = [slice(a, b) for a, b in pairwise(edges)]
        fits = all(sum(sizes[s][p]) <= rooms[s] + 1e-9 for s, p in enumerate(pieces))
        return max(sum(seconds[s][p]) for s, p in enumerate(pieces)) if fits else math.inf

    best = min(map(slowest, combinations(places, len(seconds) - 1)), default=math.inf)
    found = best_stage_cuts(seconds, sizes, rooms, places)
    assert (slowest(tuple(found)) if found is not None else math.inf) == pytest.approx(best)


def test_states_that_do_not_fit_the_plan_are_refused() -> None:
    for mesh, zero, states, reason in (
        (Mesh(dp=2), 0, (0.5, 0.5), "shards none"),
        (Mesh(shard=2), 1, (1.0,), "1 entries for shard=2"),
        (Mesh(shard=2), 1, (0.9, 0.9), "sum to 1.8"),
    ):
        with pytest.raises(RequestError, match=reason):
            Plan("m", 4, mesh, memory=MemoryPolicy(zero), balance=BalancePolicy((), states))  # type: ignore[arg-type]
    plan = Plan("m", 4, Mesh(shard=2), memory=MemoryPolicy(1), balance=BalancePolicy((3, 1), (0.25, 0.75)), device_order=(1, 0))
    assert from_data(Plan, to_data(plan), "plan") == plan


# -- devices --


def test_ranks_are_seated_by_kind() -> None:
    cluster, known = unlike((1, MUCH), (4, MUCH), (1, MUCH), (2, MUCH))
    orders = set(device_orders(cluster, known, "fp32"))
    assert len(orders) == 7 and () in orders and {(1, 3, 0, 2), (0, 2, 3, 1)} <= orders  # six orders of three kinds, and the given one
    assert [d.name for d in cluster.in_device_order((1, 3)).devices] == ["card 4", "card 2"]
    nodes = Cluster("two", (cluster.nodes[0], replace(cluster.nodes[0], name="other")))
    assert nodes.in_device_order((4, 5, 6, 7, 0)).nodes[0].name == "other"
    with pytest.raises(RequestError, match="keep the ranks of a node together"):
        nodes.in_device_order((0, 4, 1))
    mean, quick = homogeneous_average(cluster, known, "fp32")
    assert len({d.name for d in mean.devices}) == 1 and quick.rates_for(4).compute["matmul/fp32"][0][1] == pytest.approx(2e9)


def test_a_probe_tells_slow_ranks_apart() -> None:
    like = replace(card_rates(3, "", 1e10), oversubscription=1.0)
    throttled = replace(like, oversubscription=2.5)  # a rank that has two fifths of its core
    found = rates_by_speed_group([like, throttled, scale_rates(like, 1.1)], [[1.0, 1.0], [0.4, 0.38], [1.1, 0.9]])
    assert [r.members for r in found] == [(), (0, 2), (1,)] and len(rates_by_speed_group([like, throttled])) == 1
    assert found[2].oversubscription == 1.0 and found[2].compute["matmul/fp32"][0][1] == pytest.approx(4e9)
    known = Calibration("", "", "", tuple(found))
    cluster = with_measured_names(Cluster("c", (Node("n", tuple(Device("cpu", "core", i, MUCH) for i in range(3)), 4, MUCH),)), known)
    names = device_labels(cluster, known, 3)
    assert names[0] == names[2] != names[1] and names[1].startswith("at 36%")


# -- plans --


@given(speed=st.floats(1.0, 6.0), size=st.sampled_from([2**27, 2**30, MUCH]), batch=st.sampled_from([8, 24]))
@settings(max_examples=5, derandomize=True)
def test_never_worse_than_the_best_equal_split_and_every_device_holds_its_part(speed: float, size: int, batch: int) -> None:
    cluster, known = unlike((speed, size), (1, MUCH))
    found = ranked((cluster, known), batch)
    assert found.best_equal_split is not None
    best = found.best.estimate
    if found.best_equal_split.estimate.fits:
        assert best.fits and found.speedup_over_equal is not None
        assert best.step_s <= found.best_equal_split.estimate.step_s * 1.1  # as far as the planner prefers the plainer of two plans
    if best.fits:
        devices = cluster.in_device_order(found.best.plan.device_order).devices
        assert all(need <= HEADROOM * device.memory_bytes for need, device in zip(best.memory_bytes, devices, strict=False))


@pytest.mark.parametrize("constraints", [{"mesh": Mesh(dp=2)}, {"mesh": Mesh(shard=2), "zero": 1}, {"mesh": Mesh(pp=2), "micro_batches": 4}, {}])
def test_a_faster_device_never_makes_a_step_slower(constraints: dict[str, Any]) -> None:
    steps = [
        ranked(unlike((speed, MUCH), (1, MUCH)), **constraints).best.estimate.step_s
        for speed in ((1.0, 1.5, 3.0, 6.0) if constraints else (1.0, 4.0))
    ]
    assert all(b <= a * 1.001 for a, b in pairwise(steps)) and steps[-1] < 0.8 * steps[0]


def test_samples_go_by_speed_and_the_state_by_room() -> None:
    """The fast card is small: it computes most and holds least. Cut equally, its part of the state would not fit beside its samples."""
    profile, _ = traced()
    plan = Plan("m", 8, Mesh(shard=2), memory=MemoryPolicy(3, ("blocks.0", "blocks.1")), device="cuda", backend="nccl")
    need = estimate(plan, profile, Workload(8), *unlike((1, MUCH), (1, MUCH))).memory_bytes[0]
    found = ranked(unlike((4, int(need / HEADROOM * 1.2)), (1, MUCH)), 8, mesh=Mesh(shard=2), zero=3, micro_batches=1, recompute="none")
    best = found.best.plan.balance
    assert (
        found.best.estimate.fits
        and best.shares == (6, 2)
        and best.state_fractions[0] < 0.3
        and found.speedup_over_equal is not None
        and found.speedup_over_equal > 1.8
    )


def test_the_slow_device_has_the_shorter_stage_and_the_small_one_the_lighter() -> None:
    found = ranked(unlike((3, MUCH), (1, MUCH)), mesh=Mesh(pp=2), micro_batches=4, schedule="1f1b").best.plan
    fast = (found.device_order or (0, 1)).index(0)
    profile, _ = traced()
    flops = {layer.name: layer.flops_forward for layer in profile.layers}
    work = [sum(flops.get(name, 0.0) for name in stage.layers) for stage in found.stages]
    assert work[fast] > work[1 - fast]


def test_unlike_cards_of_the_catalog_are_told_what_the_best_equal_split_takes() -> None:
    cluster = resolve_cluster("workstation", {})
    task = zoo.load("gpt-mini")
    profile, flow = trace_task(task, precision="bf16", device="cuda"), trace_dataflow(task, "bf16")
    found = rank_plans(
        profile, cluster, Workload(512, precision="bf16"), datasheet_calibration(cluster), Constraints(flow=flow, reorder=True, mesh=Mesh(dp=2))
    )
    assert found.speedup_over_equal is not None and found.speedup_over_equal > 1.05
    assert "The best equal split" in explain(found) and "GeForce RTX 4090" in explain(found)
    alike = resolve_cluster("dgx-h100:1", {}, ranks=2)
    assert rank_plans(profile, alike, Workload(64, precision="bf16"), datasheet_calibration(alike), Constraints(flow=flow)).best_equal_split is None
