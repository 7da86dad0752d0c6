"""Goodput under failures: the best interval is the best, formulas are near it where they should be, drawn failures confirm the exact value."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import RequestError
from meshwright.simulate.goodput import FailureModel, sample_goodput, study_intervals

some = st.builds(FailureModel, st.floats(10.0, 1e7), st.floats(0.01, 1e4), st.floats(0.0, 1e4))


@given(some, st.floats(0.01, 100.0))
def test_no_interval_is_better_than_the_best(failures: FailureModel, times: float) -> None:
    best = failures.goodput(failures.best_interval)
    assert 0 <= best < 1 and failures.goodput(failures.best_interval * times) <= best * (1 + 1e-9)


@given(some)
def test_the_best_interval_solves_its_equation(failures: FailureModel) -> None:
    x, save = failures.best_interval / failures.mtbf_s, failures.checkpoint_s / failures.mtbf_s
    assert 0 < x <= 1 and x == pytest.approx(-math.expm1(-x - save), rel=1e-9)


@given(st.floats(1e3, 1e7), st.floats(1e-6, 1e-3))
def test_young_and_daly_are_near_where_checkpoints_are_short(every: float, share: float) -> None:
    failures = FailureModel(every, share * every, 0.0)
    assert failures.young_interval == pytest.approx(failures.best_interval, rel=2 * math.sqrt(share))
    assert failures.daly_interval == pytest.approx(failures.best_interval, rel=share)
    assert abs(failures.daly_interval - failures.best_interval) <= abs(failures.young_interval - failures.best_interval)


@given(some, st.floats(1.1, 10.0))
def test_fewer_failures_are_never_worse(failures: FailureModel, times: float) -> None:
    better = FailureModel(failures.mtbf_s * times, failures.checkpoint_s, failures.restart)
    assert better.goodput(better.best_interval) >= failures.goodput(failures.best_interval)


@given(st.floats(0.02, 2.0), st.floats(0.005, 0.5), st.floats(0.0, 0.5), st.integers(0, 9))
@settings(max_examples=12)
def test_drawn_failures_confirm_the_exact_goodput(work: float, save: float, restart: float, seed: int) -> None:
    failures = FailureModel(1000.0, 1000 * save, 1000 * restart)
    found = sample_goodput(failures, 1000 * work, seed)
    assert found.goodput == pytest.approx(failures.goodput(1000 * work), abs=5 * found.error)
    assert found == sample_goodput(failures, 1000 * work, seed)


def test_a_study_has_its_best_at_the_best() -> None:
    found = study_intervals(FailureModel(3600.0, 20.0, 60.0), 1)
    best = found["goodput"]["best"]  # type: ignore[index]
    assert all(share <= best for _, share in found["curve"]) and found == study_intervals(FailureModel(3600.0, 20.0, 60.0), 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("numbers", [(0.0, 1.0, 1.0), (-1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, -1.0), (math.nan, 1.0, 1.0)])
def test_times_that_are_none_are_refused(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(RequestError, match="give"):
        FailureModel(*numbers)
