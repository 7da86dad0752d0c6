"""What the search proposes beside data, ZeRO, pipelines and lines of tensor-parallel ranks: shared positions, owners, grids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_inputs import calibration, cluster
from tests.procs.plan_cases import model_of, traced

from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data, to_data
from meshwright.core.workload import Workload
from meshwright.cost import step_cost
from meshwright.cost.depth_extrapolation import without_layers
from meshwright.plan import Constraints, Ranking, rank_plans, search
from meshwright.plan.bounds import LowerBounds
from meshwright.plan.mesh_proposals import MeshProposer
from meshwright.plan.planning_problem import PlanningProblem
from meshwright.plan.search_point import SearchPoint
from meshwright.plan.search_space import PartitionCache

SLOW: dict[str, float] = {"network": 1e12, "alpha": 1e-7, "flops": 1e9, "memory": 1e9}  # devices that take long to compute, so that more of them help


def ranked(model: dict[str, Any], devices: int, batch: int, memory: float = 80e9, constraints: Constraints | None = None, **speeds: float) -> Ranking:
    profile, flow = traced(model)
    wanted = replace(constraints or Constraints(), flow=flow)
    found = rank_plans(profile, cluster(devices, memory, kind="cpu"), Workload(batch), calibration(devices, **{**SLOW, **speeds}), wanted)
    for scored in found.scored:
        assert from_data(Plan, to_data(scored.plan), "plan") == scored.plan  # what is proposed is legal, and a file can hold it
    return found


@pytest.fixture(params=["every plan", "best first"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small clusters price all plans, large ones search by bounds; both propose the same."""
    if request.param == "best first":
        monkeypatch.setattr(search, "MAX_EXHAUSTIVE_DEVICES", 0)
    return str(request.param)


def axes_of(ranking: Ranking) -> set[str]:
    """The uncommon ones among all plans that were priced."""
    meshes = [s.plan.mesh for s in ranking.scored]
    found = {axis for m in meshes for axis in ("cp", "ep") if m.degree(axis) > 1}
    return found | ({"grid"} if any(len(m.tp) > 1 for m in meshes) else set())


# Positions


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_few_samples_share_their_positions(path: str, name: str) -> None:
    """One sample and four devices: replicas would have nothing to do."""
    best = ranked(model_of(name), 4, 1).best.plan
    assert best.world == 4 and (best.mesh.cp > 1 or best.tensor.is_sequence_parallel), best.summary()
    assert best.context.attention_sites or best.tensor.is_sequence_parallel


def test_images_share_theirs_in_blocks(path: str) -> None:
    best = ranked(model_of("cosmoflow-tiny"), 4, 2).best.plan
    assert best.mesh.cp == 2 and best.spatial.grid, best.summary()


@pytest.mark.parametrize("name", ["gpt-tiny", "cosmoflow-tiny"])
def test_samples_enough_need_no_sharing(path: str, name: str) -> None:
    """Replicas compute as much and never meet inside a layer, so positions are not even weighed."""
    assert "cp" not in axes_of(ranked(model_of(name), 4, 16))


def test_a_sample_that_does_not_fit_shares_its_positions() -> None:
    """Enough samples for all, each of them too long for a device."""
    model, constraints = model_of("gpt-tiny"), Constraints(recompute="none", sequence=False)
    held = max(ranked(model, 4, 4, constraints=constraints).best.estimate.memory_bytes)
    plenty, tight = (shapes(model, 4, 4, memory, constraints) for memory in (80e9, 0.4 * held / step_cost.HEADROOM))
    assert not any(mesh.cp > 1 for mesh in plenty) and any(mesh.cp > 1 for mesh in tight)


def test_sharing_is_not_for_those_who_ask_for_something_else() -> None:
    model = model_of("gpt-tiny")
    assert axes_of(ranked(model, 4, 1, constraints=Constraints(sequence=True))) == set()
    asked = ranked(model, 4, 4, constraints=Constraints(mesh=Mesh(dp=4)))
    assert {s.plan.mesh for s in asked.scored} == {Mesh(dp=4)}


# Owners


def test_experts_that_do_not_fit_get_owners(path: str) -> None:
    """Experts outweigh the rest: half of them a device fits, all of them do not, and tensor parallelism, ZeRO and stages are asked to stay out."""
    model = model_of("Mixtral", num_local_experts=32)
    constraints = Constraints(zero=0, recompute="none", micro_batches=1)
    whole = ranked(model, 4, 8, constraints=replace(constraints, mesh=Mesh(dp=4))).best
    tight = ranked(model, 4, 8, 0.6 * max(whole.estimate.memory_bytes), constraints, network=1e10)
    assert tight.best.estimate.fits and tight.best.plan.mesh.ep > 1, tight.best.plan.summary()
    assert max(tight.best.estimate.memory_bytes) < 0.6 * max(whole.estimate.memory_bytes)


def test_large_tables_get_owners(path: str) -> None:
    """Replicas would send every row's gradient; owners send the rows that are looked up."""
    best = ranked(model_of("dlrm-tiny"), 4, 64, network=1e8, flops=1e8).best.plan
    assert best.mesh.ep > 1 and best.expert.tables, best.summary()


def test_without_anything_to_own_no_owner_is_weighed(path: str) -> None:
    assert "ep" not in axes_of(ranked(model_of("gpt-tiny"), 4, 16))


# Grids


def shapes(model: dict[str, Any], devices: int, batch: int, memory: float = 80e9, wanted: Constraints | None = None, **speeds: float) -> list[Mesh]:
    profile, flow = traced(model)
    where, workload, machine = cluster(devices, memory, kind="cpu"), Workload(batch), calibration(devices, **{**SLOW, **speeds})
    constraints = replace(wanted or Constraints(), flow=flow)
    cutter = PartitionCache(profile, workload, constraints)
    return MeshProposer(where, workload, constraints, cutter, LowerBounds(PlanningProblem(profile, where, workload, machine, constraints))).meshes(
        devices
    )


@pytest.mark.parametrize("devices", [16, 1024])
def test_slow_links_make_grids_worth_weighing(devices: int) -> None:
    """A grid's collectives have fewer ranks, and shards: with many ranks that is less to send."""
    model = {"sizes": [64, 256, 64, 256, 64, 256, 64], "activation": "relu", "norm": False, "masked": False}
    quick, slow = (shapes(model, devices, 4 * devices, network=network, alpha=1e-9) for network in (1e15, 1e6))
    assert not any(len(mesh.tp) > 1 for mesh in quick)
    grids = [mesh for mesh in slow if len(mesh.tp) > 1]
    assert grids and all(mesh.degree("tp") >= 4 for mesh in grids)


def test_of_many_devices_some_share_positions_only_if_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cut of positions takes a while to reason out; grids and owners are proposed however many devices there are."""
    profile, flow = traced(model_of("gpt-tiny"))
    where, workload, constraints = cluster(8, kind="cpu"), Workload(2), Constraints(flow=flow)
    bounds, cutter = (
        LowerBounds(PlanningProblem(profile, where, workload, calibration(8), constraints)),
        PartitionCache(profile, workload, constraints),
    )
    few = MeshProposer(where, workload, constraints, cutter, bounds)
    monkeypatch.setattr("meshwright.plan.mesh_proposals._MANY_DEVICES", 4)
    many = MeshProposer(where, workload, constraints, cutter, bounds)
    for axes in (few, many):
        assert any(mesh.cp > 1 for mesh in axes.meshes_1d_tensor(8, 8, 8))
    assert any(mesh.cp > 1 for mesh in few.meshes_1d_tensor(4, 8, 8)) and not any(mesh.cp > 1 for mesh in many.meshes_1d_tensor(4, 8, 8))
    assert any(mesh.ep > 1 for mesh in shapes(model_of("Mixtral"), 8, 16))


# Prices


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (model_of("gpt-tiny"), Mesh(cp=2)),
        (model_of("Mixtral"), Mesh(ep=2)),
        (model_of("gpt-tiny"), Mesh(tp=(2, 2))),
        (model_of("Mixtral"), Mesh(dp=2, ep=4)),
    ],
    ids=str,
)
def test_bounds_stay_below_what_an_estimate_says(model: dict[str, Any], mesh: Mesh) -> None:
    profile, flow = traced(model)
    for network, alpha in ((1e6, 1e-6), (1e9, 1e-3), (1e12, 1e-9)):
        where, workload, machine = cluster(8, kind="cpu"), Workload(16), calibration(8, network=network, alpha=alpha, overlap=0.5)
        constraints = Constraints(mesh=mesh, flow=flow)
        bounds, cutter = LowerBounds(PlanningProblem(profile, where, workload, machine, constraints)), PartitionCache(profile, workload, constraints)
        for scored in rank_plans(profile, where, workload, machine, constraints).scored:
            plan = replace(scored.plan, sync=replace(scored.plan.sync, bucket_bytes=25 * 2**20, first_bucket_bytes=2**20))
            point = search_point(plan)
            found = step_cost.estimate(plan, profile, workload, where, machine)
            assert bounds.seconds(point, cutter.sharding(mesh, False), plan.compile) <= found.step_s * (1 + 1e-9)
            assert bounds.memory.bytes(point, cutter.sharding(mesh, False), plan.compile) <= max(found.memory_bytes) * (1 + 1e-6)  # whole bytes


def search_point(plan: Plan) -> SearchPoint:
    return SearchPoint(plan.mesh, plan.memory.zero, plan.micro_batches, plan.memory.recompute, plan.tensor.is_sequence_parallel, plan.schedule)


@pytest.mark.parametrize(("axis", "mesh"), [("cp", Mesh(cp=4)), ("ep", Mesh(ep=4)), ("tp", Mesh(tp=(4,)))])
def test_what_meets_inside_layers_holds_them_up(axis: str, mesh: Mesh) -> None:
    """However much a machine hides of gradients: the layer after a collective needs its result."""
    model = model_of("Mixtral" if axis == "ep" else "gpt-tiny")
    profile, flow = traced(model)
    hidden, shown = (
        rank_plans(
            profile, cluster(4, kind="cpu"), Workload(4), calibration(4, network=1e7, overlap=overlap), Constraints(mesh=mesh, flow=flow, zero=0)
        )
        for overlap in (1.0, 0.0)
    )
    sent = shown.best.estimate.traffic_bytes
    assert sent > 0
    for found in (hidden, shown):
        parts = found.best.estimate.breakdown
        assert found.best.estimate.step_s >= parts["forward"] + parts["backward"] + 0.5 * parts["communication"]
    assert hidden.best.estimate.breakdown["communication"] > 0.3 * shown.best.estimate.breakdown["communication"]


def test_a_plan_says_nothing_of_layers_that_are_left_out() -> None:
    for model, mesh in ((model_of("gpt-tiny"), Mesh(cp=2)), (model_of("Mixtral"), Mesh(ep=2))):
        profile, flow = traced(model)
        plan = rank_plans(profile, cluster(2, kind="cpu"), Workload(4), calibration(2), Constraints(mesh=mesh, flow=flow)).best.plan
        gone = plan.memory.units[0]
        less = without_layers(plan, profile, {gone})
        every = (*plan.context.attention_sites, *plan.expert.moe_layers)
        assert [p.module for p in (*less.context.attention_sites, *less.expert.moe_layers)] == [
            p.module for p in every if not p.module.startswith(gone)
        ]
