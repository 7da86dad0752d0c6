"""A pipeline's time: the same as the discrete-event simulation of the same turns, and what is known of it in closed form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_inputs import calibration, cluster, layer, model
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.calibration import AlphaBetaModel, Calibration
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.pipeline_schedules import schedule_traits
from meshwright.core.plan import BoundaryActivation, MemoryPolicy, ModuleInput, Plan, Stage
from meshwright.core.workload import Workload
from meshwright.cost import estimate, pipeline_cost
from meshwright.cost.action_cost import ActionCost
from meshwright.cost.memory_cost import peak_live_memory
from meshwright.cost.pipeline_cost import PipelineSpec, finish_times, in_flight_by_stage, lower_bound_seconds
from meshwright.cost.step_cost import in_flight_by_layer
from meshwright.orchestrate.p2p_overhead_probe import make_chain_task, make_pipeline_plans
from meshwright.schedule.lower import lower
from meshwright.schedule.pipeline_actions import pipeline_schedule
from meshwright.simulate import AlphaBetaNetwork, simulate

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
SECONDS = st.floats(0.1, 2.0)


def uneven(costs: list[float]) -> ModelProfile:
    """One layer a stage, each as dear as is said."""
    return model([layer(f"blocks.{i}", ((8, 8),), flops=1e9 * cost, moved=0.0, block="blocks.0") for i, cost in enumerate(costs)])


def piped(profile: ModelProfile, schedule: str, ranks: int, micro: int, sent: float = 0.0, **axes: int) -> Plan:
    count = ranks * schedule_traits(schedule).stages_per_rank
    carry = BoundaryActivation("", 0, (ModuleInput("", 0),), sent)
    each = len(profile.layers) // count
    names = [profile.layer_names[i * each : (i + 1) * each] for i in range(count)]
    stages = tuple(Stage(tuple(n), n[0] if i else "", (carry,) if i else ()) for i, n in enumerate(names))
    units = tuple(profile.layer_names)
    return Plan("made-up", micro * max(axes.get("dp", 1), 1), Mesh(pp=ranks, **axes), micro, stages, schedule, MemoryPolicy(units=units))  # type: ignore[arg-type]


def machine(ranks: int, alpha: float) -> Calibration:
    """Calls that take nothing from computation, as in the simulation."""
    found = calibration(ranks, alpha=alpha, overlap=1.0)
    layouts = tuple(replace(r, collectives={**r.collectives, "gloo/send": AlphaBetaModel(alpha, 1e10)}) for r in found.layouts)
    return replace(found, layouts=layouts)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(st.data())
@settings(max_examples=12, deadline=None)
def test_a_step_takes_what_the_simulation_of_its_turns_does(schedule: str, data: Any) -> None:
    ranks, alpha, sent = data.draw(st.integers(2, 5)), data.draw(st.sampled_from([0.0, 1e-4, 3e-3])), data.draw(st.sampled_from([0.0, 1e6, 3e7]))
    micro = ranks * data.draw(st.integers(1, 5)) if schedule == "interleaved" else ranks + data.draw(st.integers(0, 25))
    profile = uneven(data.draw(st.lists(SECONDS, min_size=(n := ranks * schedule_traits(schedule).stages_per_rank), max_size=n)))
    plan, known = piped(profile, schedule, ranks, micro, sent), machine(ranks, alpha)
    where, speeds = cluster(ranks), known.rates_for(ranks)
    price = ActionCost(plan, "adamw", speeds)
    network = AlphaBetaNetwork(where, speeds, "gloo", contended=False)
    whole = simulate(lower(plan, profile, price), network).step_s
    found = estimate(plan, profile, Workload(plan.global_batch), where, known)
    loss = network.call_cost("all_reduce", 4, tuple(range(ranks))).busy_s  # the simulation has it at the end; an estimate beside computation
    assert found.step_s * (1 - 1e-6) <= whole <= (found.step_s + loss) * (1 + 1e-6)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_s)


def ordered(draw: Any, schedule: str) -> PipelineSpec:
    ranks = draw(st.integers(2, 6))
    chunks = draw(st.integers(2, 3)) if schedule == "interleaved" else schedule_traits(schedule).stages_per_rank
    micro = ranks * draw(st.integers(1, 20)) if schedule == "interleaved" else ranks + draw(st.integers(0, 90))
    return PipelineSpec(schedule, ranks, micro, chunks)


def drawn(draw: Any, order: PipelineSpec, message: float) -> list[pipeline_cost.StageTime]:
    weights = SECONDS if order.schedule == "zero_bubble" else st.just(0.0)
    count = order.ranks * order.chunks
    return [pipeline_cost.StageTime(draw(SECONDS), draw(SECONDS), draw(weights), (message, message)) for _ in range(count)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_many_micro_batches_take_what_running_them_all_would(schedule: str, data: Any) -> None:
    order = ordered(data.draw, schedule)
    stages = drawn(data.draw, order, data.draw(st.sampled_from([0.0, 0.05, 1.0])))
    graph = pipeline_cost._build_graph(order, pipeline_cost._repeat_period(order))
    whole = graph.finish_times(graph.end_times(stages))
    found = finish_times(order, stages)
    assert max(found) == pytest.approx(max(whole), rel=1e-6)
    work = max(order.micro_batches * sum(sum(stages[s][:3]) for s in order.stages(rank)) for rank in range(order.ranks))
    assert work * (1 - 1e-9) <= lower_bound_seconds(order, stages)[0] <= max(found) * (1 + 1e-9)
    more = order._replace(micro_batches=order.micro_batches + order.ranks)
    assert max(finish_times(more, stages)) >= max(found) * (1 - 1e-9), "more micro-batches never take less"


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_more_micro_batches_need_no_more_memory_once_the_pipeline_is_full(schedule: str) -> None:
    """A receive buffer is allocated when its message is expected and freed when it has been used."""
    profile = uneven([1.0] * 8)
    few, many = (
        estimate(piped(profile, schedule, 4, micro, 1e6), profile, Workload(micro), cluster(4), machine(4, 1e-5)).memory_kinds for micro in (16, 256)
    )
    assert {**many, "batch": 0} == {**few, "batch": 0}
    assert 0 < few["communication"] <= 4 * 1e6 * schedule_traits(schedule).stages_per_rank


@given(st.integers(2, 16), st.integers(0, 2000), SECONDS, SECONDS)
def test_equal_stages_by_hand(ranks: int, more: int, forward: float, backward: float) -> None:
    micro, stages = ranks + more, [pipeline_cost.StageTime(forward, backward)] * ranks
    for schedule in ("gpipe", "1f1b"):
        assert max(finish_times(PipelineSpec(schedule, ranks, micro), stages)) == pytest.approx((micro + ranks - 1) * (forward + backward))
    rounds = PipelineSpec("interleaved", ranks, micro // ranks * ranks, 2)
    assert max(finish_times(rounds, stages * 2)) == pytest.approx((2 * rounds.micro_batches + ranks - 1) * (forward + backward))


@given(st.integers(2, 8), st.integers(0, 60), SECONDS)
@settings(max_examples=30, deadline=None)
def test_zero_bubble_is_no_slower_than_1f1b(ranks: int, more: int, work: float) -> None:
    """Each rank's stage cut into two halves, whose backward is cut into two once more."""
    micro = 2 * ranks + more
    whole = max(finish_times(PipelineSpec("1f1b", ranks, micro), [pipeline_cost.StageTime(2 * work, 4 * work)] * ranks))
    cut = max(finish_times(PipelineSpec("zero_bubble", ranks, micro, 2), [pipeline_cost.StageTime(work, work, work)] * 2 * ranks))
    assert cut <= whole * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_what_is_held_is_what_went_forward_and_not_yet_back(schedule: str, ranks: int) -> None:
    chunks, micro = schedule_traits(schedule).stages_per_rank, 6 * ranks
    order = PipelineSpec(schedule, ranks, micro, chunks)
    for rank in range(ranks):
        taken = pipeline_schedule(schedule, ranks, rank, micro, chunks)
        counts, every = [0] * chunks, []
        for turn in taken:
            done = turn.phase == ("weights" if schedule == "zero_bubble" else "backward")
            counts[turn.chunk] += 1 if turn.phase == "forward" else -done
            every.append(tuple(counts))
        for sizes in ((1.0,) * chunks, (3.0, 1.0)[:chunks], (1.0, 3.0)[:chunks]):
            most = max(sum(n * s for n, s in zip(c, sizes, strict=True)) for c in every)
            assert max(sum(n * s for n, s in zip(c, sizes, strict=True)) for c in in_flight_by_stage(order, rank)) == most
    if schedule == "1f1b":
        assert [in_flight_by_stage(order, rank) for rank in range(ranks)] == [((ranks - rank,),) for rank in range(ranks)]


def test_one_micro_batch_is_brought_back_however_many_are_under_way() -> None:
    profile = model([layer(f"blocks.{i}", saved=1e5, block="blocks.0") for i in range(4)])
    plan = piped(profile, "1f1b", 2, 8)
    again = replace(plan, memory=replace(plan.memory, recompute="full"))
    (under_way,) = in_flight_by_layer(again, 0, [0])
    assert under_way == {"blocks.0": 2, "blocks.1": 2}
    first = replace(profile, layers=profile.layers[:2])
    assert peak_live_memory(again, first, under_way).activations == 2 * 2 * 1e4 + 1e5


def test_what_data_ranks_do_is_after_the_turns() -> None:
    """Gradients of the last micro-batch and the optimizer: nobody waits for them but the step."""
    profile = uneven([1.0] * 4)
    alone, several = piped(profile, "1f1b", 4, 16), piped(profile, "1f1b", 4, 16, dp=2)
    found = [estimate(p, profile, Workload(p.global_batch), cluster(p.world), calibration(p.world, overlap=1.0)) for p in (alone, several)]
    assert found[1].step_s > found[0].step_s
    assert found[1].step_s == pytest.approx(found[0].step_s, rel=0.02)


def test_handing_over_costs_processor_time_however_well_messages_hide() -> None:
    """As measured for each message, whatever the link; a GPU's rank queues its work ahead."""
    profile, where = uneven([1.0, 1.0]), cluster(2, kind="cpu")
    plan = piped(profile, "1f1b", 2, 8, sent=1e3)
    known = calibration(2, overlap=1.0)

    def took(**more: Any) -> float:
        layouts = tuple(replace(r, **more) for r in known.layouts)
        return estimate(plan, profile, Workload(8), where, replace(known, layouts=layouts)).step_s

    assert took(fixed={"p2p": 1e-3}) == pytest.approx(took() + plan.micro_batches * 1e-3, rel=0.05)
    assert took(fixed={"p2p": 1e-3}, async_dispatch=True) == took(async_dispatch=True)


@pytest.mark.parametrize("ranks", [2, 3, 8, 20])
def test_handing_over_can_be_measured_on_any_number_of_ranks(ranks: int) -> None:
    few, many = make_pipeline_plans(make_chain_task(ranks), ranks, "gloo")
    assert len(few.stages) == few.world == many.world == ranks and many.micro_batches > few.micro_batches
