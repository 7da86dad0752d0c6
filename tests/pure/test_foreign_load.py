"""A probe beside other processes: their use is counted, said, and widens the error; equal devices stay equal; a quiet machine is measured again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_inputs import blocks, calibration, card_rates, cluster, rates
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.calibration import AlphaBetaModel, Calibration, scale_rates
from meshwright.core.serialization import from_data, to_data
from meshwright.core.workload import Workload
from meshwright.cost.calibration_correction import correct_calibration
from meshwright.describe.foreign_load import (
    DISTURBING_LOAD,
    PROBE_ERROR,
    CpuUse,
    crowded_share,
    foreign_share,
    foreign_share_now,
    probe_error,
    read_cpu_use,
)
from meshwright.describe.speed_groups import rates_by_speed_group, suspect_unequal, without_doubtful_groups
from meshwright.orchestrate import Orchestrator, calibrate
from meshwright.orchestrate.bench_comm import with_measured_collectives
from meshwright.orchestrate.config import RunConfig
from meshwright.plan import explain, rank_plans
from meshwright.plan.search_space import Constraints

# -- what the kernel counts --


def kernel(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "proc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def process(pid: int, parent: int, *ticks: int) -> dict[str, str]:
    return {f"{pid}/stat": f"{pid} (a (strange) name) S {parent} 1 1 0 -1 0 0 0 0 0 {' '.join(map(str, ticks))} 20 0 1 0 99"}


def test_counters_are_of_usable_cores_and_of_the_whole_process_tree(tmp_path: Path) -> None:
    stat = "cpu  9 9 9 9\ncpu0 100 10 20 500 7 3 3 70 0 0\ncpu1 1 0 0 900 0 0 0 0 0 0\ncpu2 50 0 50 0 0 0 0 0\nintr 5\n"
    pressure = "some avg10=1.00 avg60=1.00 avg300=1.00 total=2500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    own = process(7, 1, 10, 5, 3, 2) | process(8, 7, 100, 0, 0, 0) | process(9, 8, 30, 0, 0, 0) | process(5, 1, 10**6, 0, 0, 0)
    root = kernel(tmp_path, {"stat": stat, "pressure/cpu": pressure, **own})
    found = read_cpu_use(root, 7, {0, 1, 64})
    assert found is not None
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert (found.cores, found.waited_s) == (2, 2.5)
    assert found.busy_s == pytest.approx(201 * tick)  # user, nice, system and steal
    assert found.own_s == pytest.approx(150 * tick)  # ended children count


def test_a_system_without_counters_has_no_foreign_load(tmp_path: Path) -> None:
    nothing = read_cpu_use(tmp_path)
    assert nothing is None and foreign_share(nothing, nothing, 1) == 0.0
    without_pressure = read_cpu_use(kernel(tmp_path, {"stat": "cpu0 1 1 1 1\n"}), 1, {0})
    assert without_pressure is not None and without_pressure.waited_s is None
    assert 0.0 <= foreign_share_now() <= 1.0  # of this machine, whatever it does


def between(busy: float, own: float, waited: float | None = None, *, threads: int = 2) -> float:
    """Ten seconds of two cores."""
    return foreign_share(CpuUse(5.0, 100.0, 50.0, 2, 0.0), CpuUse(15.0, 100.0 + busy, 50.0 + own, 2, waited), threads)


def test_what_others_used_is_what_was_busy_less_our_own() -> None:
    assert between(20.0, 10.4) == pytest.approx(0.48)
    assert between(10.0, 10.0) == 0.0 and between(9.9, 10.0) == 0.0  # counters are coarse
    assert between(20.0, 10.0, 9.0) == pytest.approx(0.5)  # our own two threads wait for two cores too
    assert between(2.0, 1.0, 6.0, threads=1) == pytest.approx(0.6)  # a counter that shows this container only: others made us wait
    assert crowded_share(2.0, 2, 2) == pytest.approx(0.5) and crowded_share(2.0, 4, 2) == 0.0 and crowded_share(1.0, 2, 8) == 0.0


# -- equal unless repeated --

LIKE = replace(card_rates(2, "", 1e10), oversubscription=1.0)


@given(st.lists(st.floats(0.2, 1.0), min_size=3, max_size=3), st.lists(st.floats(0.2, 1.0), min_size=3, max_size=3), st.floats(1.0, 8.0))
def test_equal_ranks_that_each_had_one_undisturbed_turn_are_equal(first: list[float], second: list[float], crowded: float) -> None:
    """However unequal they were at once, and in other turns."""
    at_once = [LIKE, replace(LIKE, oversubscription=crowded)]
    found = rates_by_speed_group(at_once, [[*first, 1.0], [0.7, *second]])
    assert [r.members for r in found] == [()]


@given(st.floats(0.05, 0.6), st.lists(st.floats(0.1, 1.0), min_size=4, max_size=4))
def test_a_rank_that_is_slow_in_every_turn_is_found(part: float, disturbed: list[float]) -> None:
    throttled = [part * share for share in disturbed]
    found = rates_by_speed_group([LIKE, LIKE], [[1.0, 0.95, 1.0, 0.3], throttled])
    assert [r.members for r in found] == [(), (0,), (1,)]
    assert found[2].compute["matmul/fp32"][0][1] == pytest.approx(1e10 * max(throttled))
    assert found[1].compute == LIKE.compute


def test_ranks_are_suspected_by_speed_and_by_what_they_got_of_their_cores() -> None:
    assert not suspect_unequal([LIKE, scale_rates(LIKE, 1.4)])
    assert suspect_unequal([LIKE, scale_rates(LIKE, 1.6)]) and suspect_unequal([LIKE, replace(LIKE, oversubscription=1.6)])


def test_a_difference_below_the_error_is_none() -> None:
    halves = rates_by_speed_group([LIKE, LIKE], [[1.0] * 4, [0.5] * 4])
    assert len(without_doubtful_groups(halves, PROBE_ERROR)) == 3
    assert without_doubtful_groups(halves, probe_error(0.6)) == halves[:1]


# -- probes --


class Machine:
    """Measures at once what it is told: the foreign load of each measurement, then of each look at the idle machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, measured: Sequence[float], now: Sequence[float] = ()) -> None:
        self.loads, self.now, self.calls = list(measured), list(now), 0
        self.said: list[str] = []
        monkeypatch.setattr(calibrate, "_measure_layout", self.measure)
        monkeypatch.setattr(calibrate, "foreign_share_now", lambda: self.now.pop(0))

    def measure(self, _: Any, __: Any, ranks: int, ___: Any) -> tuple[Any, Any, float]:
        self.calls += 1
        load = self.loads.pop(0)
        return [replace(rates(ranks), foreign_load=load)], {}, load

    def probe(self) -> Calibration:
        return calibrate.probe(cluster(2, kind="cpu"), None, log_progress=self.said.append)  # type: ignore[arg-type]


def test_a_quiet_probe_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [0.0, 0.05])
    found = machine.probe()
    assert (found.error, found.basis, machine.said) == (PROBE_ERROR, "", ["measuring 1 rank", "measuring 2 ranks"])


def test_a_disturbed_measurement_is_repeated_when_the_others_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [0.0, 0.48, 0.02], now=[0.0])
    found = machine.probe()
    assert machine.said == ["measuring 1 rank", "measuring 2 ranks", "measuring 2 ranks again: other processes used 48% of the cores"]
    assert (found.error, found.basis, found.foreign_load) == (PROBE_ERROR, "", 0.02)


def test_repeats_are_bounded_and_the_least_disturbed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [0.6, 0.4, 0.5, 0.3], now=[0.0] * 9)
    found = machine.probe()
    assert machine.calls == 4 and [r.foreign_load for r in found.layouts] == [0.4, 0.3]


def test_a_plan_from_a_disturbed_probe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on, so nothing is repeated: the error is wider, and every text that gives it says why."""
    machine = Machine(monkeypatch, [0.5, 0.48], now=[0.5, 0.5])
    found = machine.probe()
    assert machine.calls == 2 and found.error == pytest.approx(0.559, abs=1e-3)
    assert "other processes used 50% of the cores meanwhile: predictions are ± 56% until a quieter machine is measured" in machine.said
    again = from_data(Calibration, to_data(found), "calibration")
    assert again == found
    ranking = rank_plans(blocks(2), cluster(2, kind="cpu"), Workload(8), again, Constraints())
    told = "± 56%, from a quick probe of this machine, measured while other processes used 50% of the cores"
    assert told in explain(ranking)
    assert correct_calibration(again, "m", "k", "fp32").basis == again.basis


def test_a_disturbed_calibration_serves_until_the_machine_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    run = Orchestrator(RunConfig(nproc=2), environ, lambda _: None)
    quiet = calibration(2)
    for load, now, kept in ((0.02, 0.0, True), (0.48, 0.4, True), (0.48, DISTURBING_LOAD / 2, False)):
        stored = replace(quiet, layouts=tuple(replace(r, foreign_load=load) for r in quiet.layouts))
        assert calibrate.save_to_cache(stored, run.cluster, environ)
        monkeypatch.setattr(calibrate, "foreign_share_now", lambda now=now: now)
        assert (run._cached_calibration() == stored) == kept
    lines = {"mpi/all_reduce": AlphaBetaModel(1e-5, 1e9)}  # what `bench comm` has measured is not lost
    assert calibrate.save_to_cache(with_measured_collectives(stored, 2, lines), run.cluster, environ)
    found = run._cached_calibration()
    assert found is not None and "mpi/all_reduce" in found.rates_for(2).collectives
