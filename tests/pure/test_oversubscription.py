"""Ranks that share cores: a waiting rank leaves its core to others, so a bubble is hidden until the cores themselves are the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.calibration import AlphaBetaModel, Rates
from meshwright.cost.oversubscription import oversubscribed_ends
from meshwright.cost.pipeline_cost import PipelineSpec, StageTime, finish_times

ORDERS = [
    PipelineSpec("gpipe", 3, 5),
    PipelineSpec("1f1b", 4, 6),
    PipelineSpec("interleaved", 2, 4, 2),
    PipelineSpec("zero_bubble", 3, 6, 2),
    PipelineSpec("1f1b", 3, 40),
    PipelineSpec("interleaved", 8, 54, 2),
]


@st.composite
def pipelines(draw: st.DrawFn, messages: float = 0.0) -> tuple[PipelineSpec, list[StageTime]]:
    order = draw(st.sampled_from(ORDERS))
    seconds = st.floats(0.1, 3.0)
    last, stages = order.ranks * order.chunks - 1, []
    for index in range(last + 1):
        takes = (messages * (index > 0), messages * (index < last))
        weights = draw(seconds) if order.schedule == "zero_bubble" else 0.0
        stages.append(StageTime(draw(seconds), draw(seconds), weights, takes))
    return order, stages


def work(order: PipelineSpec, stages: list[StageTime]) -> float:
    return order.micro_batches * sum(sum(stage[:3]) for stage in stages)


@given(pipelines(messages=0.3))
def test_with_a_core_for_each_rank_nothing_is_shared(case: tuple[PipelineSpec, list[StageTime]]) -> None:
    order, stages = case
    few = order._replace(micro_batches=min(order.micro_batches, 8))
    if order.schedule != "gpipe":  # whose closed form adds the slowest forward and backward
        assert max(oversubscribed_ends(few, stages, float(order.ranks))) == pytest.approx(max(finish_times(few, stages)))


@given(pipelines(messages=0.3), st.floats(1.0, 3.0))
def test_never_quicker_than_alone_nor_than_the_cores(case: tuple[PipelineSpec, list[StageTime]], cores: float) -> None:
    order, stages = case
    few = order._replace(micro_batches=min(order.micro_batches, 8))
    took = max(oversubscribed_ends(few, stages, cores))
    assert took >= max(oversubscribed_ends(few, stages, float(order.ranks))) * (1 - 1e-9)
    assert took >= work(few, stages) / cores * (1 - 1e-9)


@given(pipelines())
def test_one_core_is_never_idle(case: tuple[PipelineSpec, list[StageTime]]) -> None:
    order, stages = case
    assert max(oversubscribed_ends(order, stages, 1.0)) == pytest.approx(work(order, stages))


def test_ranks_crowd_at_one_time_and_wait_at_another() -> None:
    """Two stages of equal turns on a core and a half: four turns find nobody else at work, six come in pairs, at three quarters of the pace."""
    stages = [StageTime(1.0, 1.0), StageTime(1.0, 1.0)]
    assert max(oversubscribed_ends(PipelineSpec("gpipe", 2, 4), stages, 1.5)) == pytest.approx(4 + 6 / 0.75)


def test_what_a_call_takes_alone_goes_by_what_it_keeps_of_a_core() -> None:
    line = AlphaBetaModel(2e-3, 1e8)
    points = tuple((sent, line.seconds(sent)) for sent in (1e3, 1e7))
    rates = Rates(4, 1, {}, ((1e6, 1e10),), 1e-6, {"gloo/send": line}, curves={"gloo/send": points}, oversubscription=2.0)
    assert rates.without_oversubscription.measured_seconds("gloo/send", 1e3) == pytest.approx(line.seconds(1e3) / 2)  # not known: all of it
    wire = replace(rates, core_busy_curves={"gloo/send": ((1e3, 1e-4), (1e7, 1e-4))}).without_oversubscription
    assert wire.oversubscription == 1.0
    assert [wire.measured_seconds("gloo/send", sent) for sent in (1e3, 1e7)] == pytest.approx([line.seconds(sent) - 1e-4 for sent in (1e3, 1e7)])
    assert wire.collectives["gloo/send"].seconds(1e6) == pytest.approx(line.seconds(1e6) - 1e-4)
    assert wire.without_oversubscription is wire
