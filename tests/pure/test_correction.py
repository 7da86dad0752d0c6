"""Self-correction: runs draw predictions towards what was measured, and a bad one does not wreck them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_inputs import blocks, calibration, cluster, plan
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.calibration import Calibration, CalibrationRecord
from meshwright.core.serialization import from_data, to_data
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.cost.calibration_correction import MAX_RECORDS, add_record, correct_calibration, measured_over_predicted

PROFILE = blocks(8, ((256, 256),), flops=1e9, saved=1e6)


def ran(
    compute: float, network: float | None = None, *, model: str = "made-up", kind: str = "k", precision: str = "fp32", memory: float = 1.0
) -> CalibrationRecord:
    return CalibrationRecord("now", model, kind, precision, "data parallel", 2, compute, compute, network, memory)


def taught(*records: CalibrationRecord) -> Calibration:
    return replace(calibration(2), records=records)


def seconds(found: Calibration) -> float:
    return estimate(plan(PROFILE, dp=2), PROFILE, Workload(64), cluster(2), found).step_s


def asked(found: Calibration) -> Calibration:
    return correct_calibration(found, "made-up", "k", "fp32")


@given(st.floats(0.4, 2.5), st.integers(1, 6))
def test_more_runs_come_nearer_to_what_was_measured(ratio: float, runs: int) -> None:
    raw = seconds(calibration(2))
    off = [abs(seconds(asked(taught(*[ran(ratio, ratio)] * n))) / raw - ratio) for n in (1, runs)]
    assert off[0] <= abs(1 - ratio) + 1e-9
    assert off[1] <= off[0] + 1e-9


def test_one_run_on_a_busy_machine_among_several_moves_nothing() -> None:
    quiet = seconds(asked(taught(*[ran(1.1)] * 4)))
    assert seconds(asked(taught(*[ran(1.1)] * 4, ran(3.0)))) == pytest.approx(quiet, rel=0.02)


def test_a_correction_has_bounds() -> None:
    raw = seconds(calibration(2))
    assert seconds(asked(taught(*[ran(50.0, 50.0)] * 9))) <= 3.0 * raw + 1e-9
    assert seconds(asked(taught(*[ran(0.001, 0.001)] * 9))) >= raw / 3.0 - 1e-9


def test_like_models_count_more_and_other_precisions_not_at_all() -> None:
    same, like, other = (seconds(asked(taught(ran(2.0, model=m, kind=k)))) for m, k in (("made-up", "k"), ("x", "k"), ("x", "y")))
    assert same > like > other > seconds(calibration(2))
    assert asked(taught(ran(2.0, precision="bf16"))).layouts == calibration(2).layouts


def test_never_corrected_twice() -> None:
    """What is kept is uncorrected: a correction of a corrected calibration would be another."""
    found = taught(ran(1.5), ran(1.5))
    again = asked(found)
    assert again.records == found.records
    assert found.layouts == calibration(2).layouts
    assert seconds(asked(from_data(Calibration, to_data(found), "file"))) == seconds(again)


def test_the_error_shrinks_with_runs_that_agree_and_not_with_runs_that_do_not() -> None:
    before = calibration(2).error
    agree = asked(taught(*[ran(1.2)] * 6)).error
    differ = asked(taught(*[ran(r) for r in (0.5, 0.8, 1.2, 1.7, 2.4, 0.6)])).error
    assert agree < before < differ
    assert asked(taught(ran(1.2))).error < before


def test_it_says_what_it_is_based_on() -> None:
    found = asked(taught(*[ran(1 / 0.88)] * 3))
    assert "corrected by 3 runs of made-up: predicted steps of this kind were 12% low" in found.basis
    guess = estimate(plan(PROFILE, dp=2), PROFILE, Workload(64), cluster(2), found)
    assert guess.notes == (found.basis,)
    assert guess.error == found.error


def test_memory_is_corrected_where_it_is_not_exact() -> None:
    def kinds(found: Calibration) -> dict[str, int]:
        return dict(estimate(plan(PROFILE, dp=2), PROFILE, Workload(64), cluster(2), found).memory_kinds)

    before, after = kinds(calibration(2)), kinds(asked(taught(*[ran(1.0, memory=1.5)] * 5)))
    assert after["parameters"] == before["parameters"]
    assert 1.3 * before["activations"] < after["activations"] < 1.5 * before["activations"]


def test_computation_and_network_are_told_apart_where_a_run_did() -> None:
    assert measured_over_predicted((10.0, 2.0), (13.0, 5.0)) == (pytest.approx(1.0), pytest.approx(2.5))
    assert measured_over_predicted((10.0, 0.1), (12.0, 0.1)) == (pytest.approx(11.9 / 9.9), None)
    assert measured_over_predicted((10.0, 2.0), (18.0, None)) == (pytest.approx(2.0), None)


def test_old_records_go() -> None:
    found = taught()
    for _ in range(MAX_RECORDS + 5):
        found = add_record(found, ran(1.0))
    assert len(found.records) == MAX_RECORDS
