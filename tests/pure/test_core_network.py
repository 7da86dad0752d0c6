"""Calls as work for the cores of one machine: what was measured together and alone comes out again, and handing over is the rank's own time."""

from __future__ import annotations

import pytest

from meshwright.core.calibration import AlphaBetaModel
from meshwright.core.schedule import Schedule
from meshwright.proxies import PROXIES
from meshwright.proxies.proxy_program import ProgramBuilder, build_schedule
from meshwright.simulate import CallTiming, CoreNetwork, TimeCurve, simulate

SIZE, FASTEST = 2**20, 1e9
HAND, RESTED = AlphaBetaModel(1e-4, float("inf")), AlphaBetaModel(3e-4, float("inf"))
PAIRS = ((0, 1), (2, 3))


def machine(slower: float, blocking: float = 1.0, places: tuple[int, ...] = (0, 1, 0, 1)) -> CoreNetwork:
    """Two pairs at once take `slower` times as long as one; a call that a rank stands still for, `blocking` times as long as one beside it. Ranks are
    on two cores in turn."""

    def taken(factor: float) -> dict[str, CallTiming]:
        pair = CallTiming(
            AlphaBetaModel(factor * slower * 1e-3, FASTEST / slower / factor), AlphaBetaModel(factor * 1e-3, FASTEST / factor), HAND, RESTED, groups=2
        )
        whole = AlphaBetaModel(factor * 3e-3, FASTEST / 3 / factor)
        return {"all_reduce/2": pair, "send/2": pair, "all_reduce/4": CallTiming(whole, whole, HAND, RESTED)}

    return CoreNetwork(taken(1.0), taken(blocking), places)


def calls(number: int, pairs: int, *, blocks: bool = True, first_waits: float = 0.0) -> Schedule:
    """Pairs that all-reduce; the other ranks do nothing."""
    programs = [ProgramBuilder() for _ in range(3)]
    programs[0].compute("late", first_waits)
    for at, program in enumerate(programs[:2]):
        for call in range(number):
            program.collective(f"call/{at}/{call}", "all_reduce", "pair", SIZE, blocks=blocks)
    return build_schedule("calls", 4, {"pair": PAIRS}, programs, lambda rank: 2 if rank // 2 >= pairs else rank // 2)


@pytest.mark.parametrize("slower", [1.0, 1.4, 2.0, 2.6])
def test_pairs_take_together_what_they_took(slower: float) -> None:
    cores = machine(slower)
    assert simulate(calls(5, 2), cores).step_s == pytest.approx(5 * slower * (1e-3 + SIZE / FASTEST))
    if slower <= 2:  # beyond, taking turns costs something, which is in the price of one alone too
        assert simulate(calls(5, 1), cores).step_s == pytest.approx(5 * (1e-3 + SIZE / FASTEST))


def test_one_pair_speeds_up_when_the_other_is_done() -> None:
    """The first pair comes when the second has done half of its call alone: both go on at half the pace until the second is done."""
    alone = 1e-3 + SIZE / FASTEST
    found = simulate(calls(1, 2, first_waits=alone / 2), machine(2.0))
    assert found.spans_of(2)[-1].end_s == pytest.approx(1.5 * alone) and found.step_s == pytest.approx(2 * alone)


def test_handing_over_is_the_ranks_own_time() -> None:
    cores = machine(2.0)
    one_by_one, at_once = (calls(4, 1, blocks=blocks) for blocks in (True, False))
    work = 1e-3 + SIZE / FASTEST
    assert simulate(cores.with_launch_overhead(one_by_one), cores).step_s == pytest.approx(4 * (1e-4 + work))
    assert simulate(cores.with_launch_overhead(at_once), cores).step_s == pytest.approx(1e-4 + 4 * work)


def test_a_call_after_a_computation_is_handed_over_more_slowly() -> None:
    cores, work = machine(2.0), 1e-3 + SIZE / FASTEST
    assert simulate(cores.with_launch_overhead(calls(4, 1, first_waits=5e-3)), cores).step_s == pytest.approx(5e-3 + 3e-4 + 4 * 1e-4 + 4 * work)


def test_handing_over_beside_computation_takes_its_core_from_calls() -> None:
    """The second pair is at a call, on both cores, when the first comes from a computation; each gets a half."""
    cores, work, late = machine(2.0), 1e-3 + SIZE / FASTEST, 5e-4
    found = simulate(cores.with_launch_overhead(calls(1, 2, blocks=False, first_waits=late)), cores)
    ready = late + 1e-4 + 2 * 3e-4
    assert found.spans_of(0)[-1].start_s == pytest.approx(ready)
    done = ready + 2 * (work - (late + 3e-4))  # the second's; the first's has had its half meanwhile
    assert found.spans_of(2)[-1].end_s == pytest.approx(done) and found.step_s == pytest.approx(2 * work + 1e-4 + 3e-4)


def test_a_call_that_its_rank_stands_still_for_takes_its_own_time() -> None:
    cores, work = machine(2.0, blocking=0.5), 1e-3 + SIZE / FASTEST
    assert simulate(calls(4, 1), cores).step_s == pytest.approx(4 * work / 2)
    assert simulate(calls(4, 1, blocks=False), cores).step_s == pytest.approx(4 * work)


def test_calls_that_block_take_together_what_they_took() -> None:
    """However calls beside computation share the cores: one pair of those keeps half of them here, one of these all."""
    beside, work = machine(1.0), 1e-3 + SIZE / FASTEST
    cores = CoreNetwork(beside.async_timings, machine(2.0).blocking, beside.rank_cores)
    assert simulate(calls(3, 2), cores).step_s == pytest.approx(3 * 2 * work)
    assert simulate(calls(3, 2, blocks=False), cores).step_s == pytest.approx(3 * work)


@pytest.mark.parametrize(("places", "longer"), [((0, 1, 0, 1), 2), ((0, 0, 0, 1), 1), ((0, 1, 1, 0), 2), ((0, 0, 1, 0), 2)])
def test_a_message_beside_a_sum_takes_the_core_of_who_receives_it(places: tuple[int, ...], longer: int) -> None:
    """Ranks 0 and 1 sum, 2 sends to 3: both take longer where 3 shares a core with 0 or 1, wherever 2 is."""
    work = 1e-3 + SIZE / FASTEST
    programs = [ProgramBuilder() for _ in range(3)]
    programs[0].collective("sum", "all_reduce", "pair", SIZE)
    programs[1].send("message", "pair", 1, SIZE)
    programs[2].receive("message", "pair", 0, SIZE, blocks=True)
    schedule = build_schedule("both", 4, {"pair": PAIRS}, programs, lambda rank: max(rank - 1, 0))
    found = simulate(schedule, machine(2.0, places=places))
    assert found.spans_of(3)[-1].end_s == pytest.approx(longer * work) and found.spans_of(0)[-1].end_s == pytest.approx(longer * work)


def test_a_curve_goes_through_its_points() -> None:
    curve = TimeCurve(((1e3, 1e-4), (1e5, 3e-4), (1e6, 3e-3)))
    assert [curve.seconds(sent) for sent in (1e3, 1e5, 1e6)] == pytest.approx([1e-4, 3e-4, 3e-3])
    assert curve.seconds(10.0) == 1e-4 and curve.seconds(5.5e5) == pytest.approx(1.65e-3)
    assert curve.seconds(2e6) == pytest.approx(6e-3)  # on beyond the last


@pytest.mark.parametrize("name", ["gpt2", "gpt3", "resnet50"])
def test_ranks_alike_change_nothing(name: str) -> None:
    dims = {"gpt2": {"layers": 8, "stages": 2, "scale_down": 64}, "gpt3": {"stages": 2, "shards": 2, "scale_down": 64}, "resnet50": {}}[name]
    cores = machine(1.7)
    schedule = cores.with_launch_overhead(PROXIES[name].build(PROXIES[name].parse_config((), dims), 4))
    assert simulate(schedule, cores).step_s == pytest.approx(simulate(schedule, cores, merge_ranks=False).step_s, rel=1e-9)
