"""Which axes are neighbours: what an order means, what it costs, and when the search chooses another than the usual one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from fake_inputs import blocks, calibration, cluster, rates
from hypothesis import given
from hypothesis import strategies as st
from tests.procs.plan_cases import model_of, spread, traced

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster, Link
from meshwright.core.errors import RequestError
from meshwright.core.mesh import AXES, GROUP_AXES, Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data, to_data
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.cost.collective_cost import group_ranks
from meshwright.plan import Constraints, Ranking, best_precision, explain, rank_plans, search
from meshwright.plan.axis_order import alternative_axis_orders
from meshwright.plan.precision_planner import available_precisions
from meshwright.schedule.lower import lower

DEGREES = st.integers(1, 3)
MESHES = st.builds(
    Mesh, pp=DEGREES, dp=DEGREES, shard=DEGREES, cp=DEGREES, ep=DEGREES, tp=st.sampled_from([(1,), (2,), (2, 2)]),
    order=st.permutations(AXES).flatmap(lambda axes: st.integers(0, len(AXES)).map(lambda n: tuple(axes[:n]))),
)  # fmt: skip


def nodes(count: int, each: int, memory: float = 80e9, inside: float = 1e11, network: float = 1e8, kind: str = "cpu") -> Cluster:
    """Nodes with quick links inside and a slow network between them."""
    one = cluster(each, memory, kind=kind, link=Link("inside", 1e-6, inside)).nodes[0]
    return Cluster("made-up", (one,) * count, Link("network", 1e-5, network))


def machine(flops: float = 1e12) -> Calibration:
    """Nothing measured of the network: links are what is priced."""
    return Calibration("made-up", "made-up", "2026-01-01T00:00:00+00:00", (rates(1, flops=flops),))


# What an order means


@given(MESHES)
def test_coordinates_and_groups_agree_in_any_order(mesh: Mesh) -> None:
    places = {tuple(mesh.coordinate(rank, axis) for axis in AXES) for rank in range(mesh.size)}
    assert len(places) == mesh.size
    for name, axes in GROUP_AXES.items():
        groups = mesh.groups(*axes)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
        assert all(group == sorted(group) for group in groups), "torch sorts the ranks of a group"
        assert list(group_ranks(name, 0, mesh)) == next(g for g in groups if 0 in g)
        for group in groups:
            for axis in (a for a in AXES if a not in axes and not (a == "tp" and axes[0] in ("tpx", "tpy"))):
                assert len({mesh.coordinate(rank, axis) for rank in group}) == 1
            if len(axes) == 1 and axes[0] in AXES:
                assert [mesh.coordinate(rank, axes[0]) for rank in group] == list(range(mesh.degree(axes[0])))
    assert sorted({mesh.data_rank(rank) for rank in range(mesh.size)}) == list(range(mesh.data_parallel_size))


def test_the_usual_order_is_as_ever_and_some_axes_may_change_places() -> None:
    assert Mesh(pp=2, dp=2, tp=(2,)).groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    moved = Mesh(pp=2, dp=2, tp=(2,), order=("dp", "pp"))
    assert moved.groups("pp") == [[0, 2], [1, 3], [4, 6], [5, 7]] and moved.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Mesh(dp=2, tp=(2,), order=("tp", "dp")).groups("dp") == [[0, 1], [2, 3]]
    assert str(moved) == "pp=2,dp=2,tp=2 in the order dp,pp,tp" and str(Mesh(pp=2, dp=2, order=("pp", "dp"))) == "pp=2,dp=2"
    assert "order dp,pp" in Plan("m", 4, moved, 2).summary()


def test_a_file_holds_the_order_and_an_old_one_need_not() -> None:
    plan = Plan("m", 4, Mesh(dp=2, shard=2, order=("shard", "dp")), memory=replace(Plan("m", 1).memory, zero=1))
    data = to_data(plan)
    assert from_data(Plan, data, "plan") == plan
    del data["mesh"]["order"]
    assert from_data(Plan, data, "plan").mesh == Mesh(dp=2, shard=2)


@pytest.mark.parametrize("order", [("dp", "db"), ("dp", "dp")])
def test_a_wrong_order_is_refused(order: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match=r"db|twice"):
        Mesh(dp=2, tp=(2,), order=order)


def test_an_order_that_is_asked_for_is_kept_and_one_without_use_is_refused() -> None:
    profile, flow = traced(model_of("gpt-tiny"))
    inputs = (profile, cluster(4, kind="cpu"), Workload(8), calibration(4))
    for mesh in (None, Mesh(dp=2, tp=(2,))):
        found = rank_plans(*inputs, Constraints(mesh=mesh, order=("tp", "dp"), flow=flow))
        assert {s.plan.mesh.order for s in found.scored} == {("tp", "dp")}
    with pytest.raises(RequestError, match="fewer than two"):
        rank_plans(*inputs, Constraints(mesh=Mesh(dp=4), order=("tp", "dp"), flow=flow))


# What it costs


def test_only_orders_that_change_who_shares_a_node_are_weighed() -> None:
    two = nodes(2, 4)
    assert list(alternative_axis_orders(Mesh(dp=8), two)) == [] and list(alternative_axis_orders(Mesh(pp=2, dp=4), nodes(1, 8))) == []
    assert [m.nondefault_order for m in alternative_axis_orders(Mesh(pp=2, dp=4), two)] == ["dp,pp"]
    assert [m.nondefault_order for m in alternative_axis_orders(Mesh(dp=2, tp=(4,)), two)] == ["tp,dp"]
    assert list(alternative_axis_orders(Mesh(pp=8, dp=8), nodes(64, 1))) == []


def test_heavy_traffic_belongs_inside_nodes() -> None:
    """Eight stages send little activations, four replicas large gradients, or the other way round."""
    profile, flow = traced(model_of("gpt-tiny"))
    two, found = nodes(2, 2), {}
    for mesh in (Mesh(pp=2, dp=2), Mesh(pp=2, dp=2, order=("dp", "pp"))):
        for name, batch in (("gradients", 4), ("activations", 512)):
            plan = rank_plans(
                profile, two, Workload(batch), machine(), Constraints(mesh=mesh, flow=flow, micro_batches=2, recompute="none")
            ).best.plan
            assert plan.mesh == mesh
            found[name, mesh.nondefault_order] = estimate(plan, profile, Workload(batch), two, machine()).step_s
    assert found["gradients", ""] < found["gradients", "dp,pp"]
    assert found["activations", "dp,pp"] < found["activations", ""]


def ranked(batch: int, constraints: Constraints) -> Ranking:
    profile, flow = traced(model_of("gpt-tiny"))
    return rank_plans(profile, nodes(2, 2), Workload(batch), machine(1e10), replace(constraints, flow=flow))


@pytest.mark.parametrize("exhaustive", [8, 0], ids=["every plan", "best first"])
def test_the_search_chooses_another_order_where_the_usual_one_is_bad(exhaustive: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline is asked for; with many samples its activations outweigh its gradients, and the usual order sends them over the network."""
    monkeypatch.setattr(search, "MAX_EXHAUSTIVE_DEVICES", exhaustive)
    constraints = Constraints(schedule="1f1b", zero=0, world=4, micro_batches=4, recompute="none")
    found = ranked(512, constraints)
    best = found.best
    usual = ranked(512, replace(constraints, mesh=replace(best.plan.mesh, order=()), order=AXES))
    assert best.plan.mesh.nondefault_order and best.estimate.step_s < usual.best.estimate.step_s, best.plan.summary()


def test_so_it_does_among_many_devices() -> None:
    profile, flow = traced(model_of("gpt-tiny"))
    constraints = Constraints(schedule="1f1b", zero=0, world=1024, micro_batches=4, recompute="none", flow=flow)
    best = rank_plans(profile, nodes(512, 2), Workload(2**17), machine(1e10), constraints).best.plan
    assert best.mesh == Mesh(pp=2, dp=512, order=("dp", "pp")), best.summary()


def test_a_simulation_knows_the_order() -> None:
    plan, profile = spread(model_of("gpt-tiny"), Mesh(pp=2, dp=2, order=("dp", "pp")), micro=2)

    class Price:
        def seconds(self, profile: ModelProfile, action: Any) -> float:
            return 1.0

        def flops(self, profile: ModelProfile, action: Any) -> float:
            return 1.0

    made = lower(plan, profile, Price())
    assert made.groups["pp"] == ((0, 1), (2, 3))
    assert [made.program_of_rank[str(rank)] for rank in range(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])


# Precision


def priced(compute: Mapping[str, float], fp8: bool = False, kind: str = "cuda") -> Ranking:
    """Four devices that multiply at so many FLOP/s."""
    where = cluster(4, kind=kind)
    devices = tuple(replace(d, fp8=fp8) for d in where.nodes[0].devices)
    where = replace(where, nodes=(replace(where.nodes[0], devices=devices),))
    measured = tuple(
        replace(r, compute={f"matmul/{name}": ((1.0, rate),) for name, rate in compute.items()}) for r in calibration(4, alpha=1e-6).layouts
    )
    profile = blocks(4, flops=1e10)
    ranking = rank_plans(profile, where, Workload(64), replace(calibration(4), layouts=measured), Constraints())
    return best_precision(ranking, lambda precision: (profile, None))


def test_the_quickest_precision_is_chosen_and_the_others_are_said() -> None:
    """A CPU that emulates bf16 keeps fp32; a GPU with tensor cores does not; fp8 where the device has it, and it gains."""
    slow, quick = priced({"fp32": 1e12, "bf16": 1e10}, kind="cpu"), priced({"fp32": 1e12, "bf16": 1e13})
    assert (slow.best.plan.memory.precision, quick.best.plan.memory.precision) == ("fp32", "bf16")
    for found in (slow, quick):
        assert "Precision: " in explain(found) and "fp32 " in explain(found) and "bf16 " in explain(found)
    eight = {"fp32": 1e12, "bf16": 1e13, "fp8": 1e15}
    assert priced(eight).best.plan.memory.precision == "bf16"
    assert priced(eight, fp8=True).workload.precision in ("bf16", "fp8")


def test_of_what_was_never_measured_nothing_is_chosen() -> None:
    where = cluster(2)
    assert available_precisions(where, calibration(2)) == ("fp32",)
    assert priced({"fp32": 1e12}).best.plan.memory.precision == "fp32"
