"""Planning: what is ranked first and why, what a wish leaves open, and what to do when nothing fits."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_inputs import blocks, calibration, cluster, layer, model, rates
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster, Link
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.workload import Workload
from meshwright.plan import Constraints, Ranking, explain, rank_plans
from meshwright.plan.partition import choose_units


def rank(
    profile: ModelProfile, devices: int = 4, *, batch: int = 64, memory: float = 80e9, kind: str = "cuda", objective: str = "time",
    constraints: Constraints = Constraints(), **speeds: float,  # noqa: B008 - frozen
) -> Ranking:  # fmt: skip
    workload = Workload(batch, objective=objective)  # type: ignore[arg-type]
    return rank_plans(profile, cluster(devices, memory, kind=kind), workload, calibration(devices, **speeds), constraints)


def numbers(text: str, after: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text.rpartition(after)[2])]


BIG = blocks(8, ((1024, 1024),), flops=1e9, saved=1e6)  # 8.4 M parameters: 134 MB with Adam on one device
HEAVY = blocks(8, ((64, 64),), flops=1e9, saved=1e5)  # much arithmetic, little to send


# Ranking


@given(st.floats(2e7, 1e9), st.sampled_from(["time", "memory"]), st.integers(1, 4), st.sampled_from([8, 24, 64]))
@settings(max_examples=30)
def test_plans_that_fit_come_first_and_the_best_of_them_leads(memory: float, objective: str, devices: int, batch: int) -> None:
    found = rank(BIG, devices, batch=batch, memory=memory, objective=objective)
    fits = [s.estimate.fits for s in found.scored]
    assert fits == sorted(fits, reverse=True)

    def cost(scored: Any) -> float:
        return max(scored.estimate.memory_bytes) if objective == "memory" or not scored.estimate.fits else scored.estimate.step_s

    rivals = [s for s in found.scored if s.estimate.fits == fits[0]]
    assert cost(found.best) <= 1.05 * min(map(cost, rivals)), "simplicity may cost a few percent, no more"


def test_no_plan_is_listed_twice_and_all_are_for_this_machine() -> None:
    found = rank(BIG, 4)
    texts = [json.dumps([s.plan.summary(), str(s.plan.mesh), s.plan.memory.zero]) for s in found.scored]
    assert len(texts) == len(set(texts))
    assert {s.plan.world for s in found.scored} == {1, 2, 4}
    assert {s.plan.memory.zero for s in found.scored} == {0, 1, 2, 3}
    assert {s.plan.memory.recompute for s in found.scored} == {"none", "full"}
    assert {(s.plan.model, s.plan.global_batch, s.plan.device, s.plan.backend) for s in found.scored} == {("made-up", 64, "cuda", "nccl")}


@pytest.mark.parametrize(("devices", "worlds"), [(1, {1}), (3, {1, 2, 3}), (6, {1, 2, 4, 6}), (8, {1, 2, 4, 8})])
def test_powers_of_two_and_all_devices_are_tried(devices: int, worlds: set[int]) -> None:
    assert {s.plan.world for s in rank(blocks(2), devices, batch=24).scored} == worlds


def test_a_batch_that_only_some_worlds_divide_leaves_the_others() -> None:
    assert {s.plan.world for s in rank(blocks(2), 4, batch=6).scored} == {1, 2}


def test_the_network_decides_how_many_devices() -> None:
    assert rank(BIG, 2, network=1e3, alpha=1.0).best.plan.world == 1
    assert rank(BIG, 2, network=1e15, alpha=0.0, overlap=1.0).best.plan.world == 2
    assert rank(BIG, 4, network=1e15, alpha=0.0, overlap=1.0).best.plan.world == 4


def test_a_slow_network_is_slow_for_some_of_the_devices_too() -> None:
    assert rank(BIG, 4, network=1e3, alpha=1.0).best.plan.world == 1


def test_memory_decides_what_is_cut() -> None:
    """33.5 MB a copy of the parameters: 134 MB uncut, 84 MB with the optimizer cut in four, 34 MB and buffers with all cut."""
    profile = blocks(8, ((1024, 1024),), flops=1e9, saved=1e3)
    plenty, little = (rank(profile, 4, memory=m, batch=4).best for m in (1e9, 6e7))
    assert plenty.plan.memory.zero < 3
    assert little.plan.memory.zero == 3
    assert plenty.estimate.fits and little.estimate.fits


def test_the_objective_is_obeyed() -> None:
    fast, small = (rank(BIG, 4, objective=o, network=1e12, alpha=1e-6).best.estimate for o in ("time", "memory"))
    assert max(small.memory_bytes) < max(fast.memory_bytes)
    assert fast.step_s < small.step_s


def test_simplicity_breaks_a_tie() -> None:
    """Where nothing is gained by cutting or recomputing, neither is done."""
    best = rank(HEAVY, 2, network=1e15, alpha=0.0).best.plan
    assert (best.memory.zero, best.memory.recompute, best.micro_batches) == (0, "none", 1)


def test_cpu_ranks_share_the_cores() -> None:
    found = rank(blocks(2), 4, kind="cpu")
    assert {(s.plan.world, s.plan.threads) for s in found.scored} == {(1, 8), (2, 4), (4, 2)}
    assert {(s.plan.backend, s.plan.compile) for s in found.scored} == {("gloo", "none")}


def test_units_are_blocks_or_else_the_layers_that_matter() -> None:
    assert choose_units(blocks(3)) == ("blocks.0", "blocks.1", "blocks.2")
    flat = model([layer("big", ((100, 100),)), layer("small", ((2, 2),)), layer("also", ((80, 80),)), layer("(model)", ((90, 90),))])
    assert choose_units(flat) == ("big", "also")


def test_planning_takes_no_longer_for_more_micro_batches() -> None:
    begun = time.process_time()
    found = rank(blocks(8), 2, batch=2**13)
    explain(found)
    assert time.process_time() - begun < 30, "it was minutes when every micro-batch was run"
    assert max(s.plan.micro_batches for s in found.scored) == 2**13


# Wishes


@pytest.mark.parametrize(
    ("constraints", "get"),
    [
        (Constraints(world=2), lambda p: p.world == 2),
        (Constraints(world=3), lambda p: p.world == 3),
        (Constraints(mesh=Mesh(dp=2, shard=2)), lambda p: p.mesh == Mesh(dp=2, shard=2) and p.memory.zero > 0),
        (Constraints(mesh=Mesh(dp=4)), lambda p: p.mesh == Mesh(dp=4) and p.memory.zero == 0),
        (Constraints(zero=3), lambda p: p.memory.zero == 3),
        (Constraints(zero=0), lambda p: p.memory.zero == 0 and p.mesh.shard == 1),
        (Constraints(zero=2, world=4), lambda p: p.memory.zero == 2 and p.world == 4),
        (Constraints(recompute="full"), lambda p: p.memory.recompute == "full"),
        (Constraints(recompute="none"), lambda p: p.memory.recompute == "none"),
        (Constraints(compile="none"), lambda p: p.compile == "none"),
        (Constraints(compile="blocks"), lambda p: p.compile == "blocks"),
        (Constraints(micro_batches=3), lambda p: p.micro_batches == 3),
        (Constraints(backend="gloo"), lambda p: p.backend == "gloo"),
        (Constraints(bucket_bytes=12345), lambda p: p.sync.bucket_bytes == 12345),
        (Constraints(timeout_s=7.0), lambda p: p.sync.timeout_s == 7.0),
    ],
)
def test_a_wish_holds_in_every_plan(constraints: Constraints, get: Any) -> None:
    found = rank(blocks(3), 4, batch=72, constraints=constraints)
    assert found.scored
    assert all(get(s.plan) for s in found.scored)


@given(batch=st.integers(1, 300), world=st.integers(1, 6), micro=st.integers(1, 6))
@settings(max_examples=60)
def test_a_batch_that_cannot_be_cut_as_wished_names_one_that_can(batch: int, world: int, micro: int) -> None:
    constraints = Constraints(world=world, micro_batches=micro, zero=0, recompute="none")
    if batch % (world * micro) == 0:
        assert rank(blocks(1), 6, batch=batch, constraints=constraints).scored
        return
    with pytest.raises(RequestError, match="--global-batch") as error:
        rank(blocks(1), 6, batch=batch, constraints=constraints)
    for other in numbers(str(error.value), "change --global-batch to "):
        assert rank(blocks(1), 6, batch=other, constraints=constraints).scored


def test_a_mesh_larger_than_the_cluster_says_how_many_there_are() -> None:
    with pytest.raises(RequestError, match=r"mesh dp=8 needs 8 devices, this cluster has 4: use --nproc 4 or less"):
        rank(blocks(1), 4, constraints=Constraints(mesh=Mesh(dp=8)))
    assert rank(blocks(1), 4, constraints=Constraints(world=4)).scored


@pytest.mark.parametrize(("mesh", "zero"), [(Mesh(dp=2), 2), (Mesh(dp=4), 3), (Mesh(shard=4), 0)])
def test_a_stage_that_does_not_go_with_the_mesh_names_a_mesh_that_does(mesh: Mesh, zero: int) -> None:
    with pytest.raises(RequestError, match="--mesh") as error:
        rank(blocks(1), 4, constraints=Constraints(mesh=mesh, zero=zero))
    proposed = Mesh.parse(str(error.value).rpartition("--mesh ")[2])
    assert proposed.size == mesh.size
    assert rank(blocks(1), 4, constraints=Constraints(mesh=proposed, zero=zero)).scored


def test_owners_need_to_know_the_model() -> None:
    with pytest.raises(RequestError, match="loss_fn"):
        rank(blocks(2), 4, constraints=Constraints(mesh=Mesh(ep=2)))
    with pytest.raises(RequestError, match="neither experts nor embedding tables"):
        rank(blocks(2), 4, constraints=Constraints(mesh=Mesh(ep=2), flow=Dataflow(2, (), (), (), (), ())))


def test_tensor_parallelism_needs_to_know_the_model() -> None:
    with pytest.raises(RequestError, match="loss_fn"):
        rank(blocks(2), 4, constraints=Constraints(mesh=Mesh(tp=(2,))))
    with pytest.raises(RequestError, match="nothing in this model can be sharded"):
        rank(blocks(2), 4, constraints=Constraints(mesh=Mesh(tp=(2,)), flow=Dataflow(2, (), (), (), (), ())))


# Explaining


def test_the_explanation_names_winner_runner_up_what_binds_and_what_would_change_it() -> None:
    found = rank(BIG, 4, memory=1e9)
    text = explain(found)
    second = found.runner_up
    assert second is not None
    assert (second.plan.strategy, second.plan.world) != (found.best.plan.strategy, found.best.plan.world)
    lines = text.splitlines()
    assert lines[0].startswith(f"Chosen: {found.best.plan.summary()}: ")
    assert "samples/s" in lines[0]
    assert re.search(r"Bottleneck: (computation|communication among data ranks over link|the optimizer's update) \(\d+% of the step\)", text)
    assert "Why: on one device " in text
    assert "How sure: ± 15%, from a quick probe of this machine" in text
    assert f"Runner-up: {second.plan.summary()}: " in text
    assert "What would change the choice: " in text
    (where,) = (line for line in lines if line.startswith("Where the time goes: "))
    shares = [int(n) for n in re.findall(r"(\d+)%", where)]
    assert 95 <= sum(shares) <= 103, "where the time goes adds up"


def test_the_explanation_says_what_memory_rules_out() -> None:
    tight = rank(BIG, 2, batch=8, memory=1.3e8)
    out = sum(not s.estimate.fits for s in tight.scored)
    assert 0 < out < len(tight.scored)
    assert f"It rules out {out} of {len(tight.scored)} plans" in explain(tight)
    assert "It is no constraint: every legal plan fits" in explain(rank(BIG, 2, memory=1e12))


def test_what_would_change_the_choice_indeed_would() -> None:
    inputs = {"memory": 1e12, "alpha": 1e-7}
    for network in (1e8, 3e9, 1e10, 1e11):
        found = rank(BIG, 2, network=network, **inputs)
        slower = rank(BIG, 2, network=network / 4, memory=1e12, alpha=4e-7).best.plan
        changed = (slower.strategy, slower.world) != (found.best.plan.strategy, found.best.plan.world)
        assert (f"a network four times slower → {slower.summary()}" in explain(found)) == changed


def test_a_slower_network_is_tried_also_where_it_was_not_measured() -> None:
    machine = Calibration("m", "d", "now", (replace(rates(1), overlap=0.0),))

    def best(link: Link) -> Ranking:
        return rank_plans(BIG, cluster(2, link=link), Workload(64), machine, Constraints())

    fast = best(Link("link", 1e-7, 1e8))
    assert fast.best.plan.world == 2
    assert best(Link("link", 4e-7, 2.5e7)).best.plan.world == 1
    assert "a network four times slower → single" in explain(fast)


def test_rates_from_data_sheets_are_said_to_be() -> None:
    guessed = replace(calibration(2), source="data sheets")
    for name, says in (("here", "data sheets; `meshwright describe cluster --probe`"), ("elsewhere", "data sheets.")):
        text = explain(rank_plans(BIG, replace(cluster(2), name=name), Workload(64), guessed, Constraints()))
        assert f"± 15%, from {says}" in text
    assert "data sheets" not in explain(rank(BIG, 2))


# Nothing fits


def too_big(devices: int = 2, batch: int = 8, memory: float = 3e7, constraints: Constraints | None = None) -> tuple[Ranking, str]:
    profile = blocks(16, ((1024, 1024),), flops=1e9, saved=1e5)
    found = rank(profile, devices, batch=batch, memory=memory, constraints=constraints or Constraints())
    assert not found.best.estimate.fits
    return found, explain(found)


def test_nothing_fits_says_what_is_needed_and_what_there_is() -> None:
    found, text = too_big()
    assert text.startswith("No plan fits in memory: the smallest plan ")
    assert re.search(r"needs [\d.]+ MB a device, this one has 30\.0 MB", text)
    least = min(found.scored, key=lambda s: max(s.estimate.memory_bytes))
    kind, size = max(least.estimate.memory_kinds.items(), key=lambda item: item[1])
    assert f"(largest part: {kind}, {size / 1e6:.1f} MB a device)" in text


def test_recomputation_is_proposed_to_those_who_forbade_it() -> None:
    assert "--set recompute=" not in too_big()[1]
    assert "--set recompute=" in explain(rank(blocks(4, saved=1e7), 1, batch=1, memory=8e6, constraints=Constraints(recompute="none")))


# Plans as files


def test_a_plan_edited_by_hand_loads(tmp_path: Path) -> None:
    best = rank(BIG, 4, kind="cpu").best.plan
    best.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == best
    text = (tmp_path / "plan.json").read_text()
    data = json.loads(text)
    data["mesh"] = {"shard": 2}
    data["memory"]["zero"] = 3
    data["memory"]["units"] = data["memory"]["units"][:2]
    data["global_batch"] = 6
    data["balance"]["shares"] = [4, 2]
    data["sync"]["timeout_s"] = 5
    del data["stages"], data["placements"], data["version"], data["micro_batches"]
    (tmp_path / "edited.json").write_text(json.dumps(data))
    edited = Plan.load(tmp_path / "edited.json")
    assert (edited.mesh, edited.memory.zero, edited.balance.shares) == (Mesh(shard=2), 3, (4, 2))
    assert (edited.micro_batches, edited.stages, edited.sync.timeout_s) == (1, (), 5.0)
    data["globalbatch"] = data.pop("global_batch")
    (tmp_path / "edited.json").write_text(json.dumps(data))
    with pytest.raises(RequestError, match=r"edited\.json; did you mean 'global_batch'"):
        Plan.load(tmp_path / "edited.json")


def test_every_ranked_plan_survives_its_file(tmp_path: Path) -> None:
    for scored in rank(BIG, 4).scored:
        scored.plan.save(tmp_path / "p.json")
        assert Plan.load(tmp_path / "p.json") == scored.plan


def test_two_nodes_are_planned_through_the_slower_link() -> None:
    node = cluster(2).nodes[0]
    machine = Calibration("m", "d", "now", (rates(1),))

    def best(between: Link) -> Plan:
        both = Cluster("two", (node, replace(node, name="other")), between)
        return rank_plans(HEAVY, both, Workload(64), machine, Constraints()).best.plan

    assert best(Link("fast", 1e-7, 1e12)).world == 4
    assert best(Link("string", 1.0, 1e3)).world < 4
