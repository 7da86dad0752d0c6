"""Which rank hangs, and which is slow: decided on a fake clock from what ranks say."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from meshwright.core.progress_page import RING, PageReader, Progress, ProgressPage
from meshwright.launch.hang_detection import Hang, HangDetector, Look, describe_hang, find_slow_rank, hang_limit
from meshwright.launch.progress_watch import describe_stacks, main_stack, standing_line


@dataclass
class FakeRun:
    """Ranks that take steps of given durations, seen ten times a second."""

    limit_s: float | None = None
    world: int = 2
    durations: list[float] = field(default_factory=lambda: [0.1] * 20)
    now: float = 100.0
    looks: dict[int, Look] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.detector = HangDetector(self.limit_s)
        page = Progress(1, "step", step=9, changed_ns=0, steps_done=9, calls=90, step_calls=90, calls_per_step=10)
        self.looks = {rank: Look(page) for rank in range(self.world)}

    def set(self, rank: int, *, state: str = "S", core_wait_s: float = 0.0, **changes: object) -> None:
        page = replace(self.looks[rank].progress, changed_ns=round(self.now * 1e9), **changes)  # type: ignore[arg-type]
        self.looks[rank] = Look(page, state, core_wait_s)

    def look(self) -> Hang | None:
        return self.detector.look(self.now, self.looks, lambda rank: self.durations)

    def wait(self, seconds: float, interval: float = 0.1, each: Callable[[], None] = lambda: None) -> Hang | None:
        until = self.now + seconds - 1e-9
        while self.now < until:
            self.now += interval
            each()
            if (hang := self.look()) is not None:
                return hang
        return None


def test_a_rank_that_loops_is_named_and_not_the_one_that_waits() -> None:
    run = FakeRun(world=4)
    for rank in (0, 2, 3):
        run.set(rank, calls=94)
    run.set(1, calls=93, state="R")
    hang = run.wait(10)
    assert hang == Hang(1, pytest.approx(2.0, abs=0.2), False, True)
    assert run.now - 100.0 < 2.5


def test_a_stopped_rank_is_named_even_where_it_is_ahead() -> None:
    run = FakeRun()
    run.set(0, calls=91)
    run.set(1, calls=95, state="T")
    hang = run.wait(10)
    assert hang is not None
    assert (hang.rank, hang.is_stopped) == (1, True)


def test_a_rank_in_an_earlier_step_is_behind() -> None:
    run = FakeRun()
    run.set(0, step=10, step_calls=100, calls=101)
    run.set(1, step=9, phase="data", calls=100)
    hang = run.wait(10)
    assert hang is not None
    assert hang.rank == 1
    pages = {rank: look.progress for rank, look in run.looks.items()}
    assert describe_hang(hang, pages).endswith("while it waits for the batch of step 10; rank 0 waits for it")


def test_pipeline_ranks_with_unlike_collectives_are_told_apart_by_time() -> None:
    run = FakeRun()
    run.set(0, calls=100, calls_per_step=30)
    run.now += 0.5
    run.set(1, calls=92, calls_per_step=10)
    hang = run.wait(10)
    assert hang is not None
    assert (hang.rank, hang.in_order) == (0, False)


def test_the_limit_follows_the_steps() -> None:
    assert hang_limit([]) == 2.0
    assert hang_limit([0.01] * 100) == 2.0
    assert hang_limit([0.5] * 100) == pytest.approx(5.0)
    assert hang_limit([0.5] * 99 + [60.0]) == pytest.approx(5.0)  # one compile or one save is not how long steps take
    assert FakeRun(durations=[3.0] * 9).wait(29) is None
    assert FakeRun(durations=[3.0] * 9).wait(31) is not None


def test_the_limit_may_be_given() -> None:
    assert FakeRun(limit_s=0.5).wait(1.0) is not None
    assert FakeRun(limit_s=20.0).wait(19.5) is None
    assert FakeRun(limit_s=20.0).wait(20.5) is not None


@pytest.mark.parametrize("phase", ["build", "load", "compile", "validation", "save", "profile", "end"])
def test_other_phases_may_take_their_time(phase: str) -> None:
    """A save of 30 s, a compilation of 60 s on one rank: the others wait in a collective."""
    run = FakeRun()
    run.set(0, calls=95)
    run.set(1, phase=phase)
    assert run.wait(300) is None


def test_first_steps_may_take_their_time() -> None:
    run = FakeRun()
    for rank in range(2):
        run.set(rank, steps_done=2)
    assert run.wait(100) is None


def test_jitter_is_no_hang() -> None:
    """Steps that take up to five times as long as usual, of any length."""
    random.seed(0)
    for usual in (0.01, 0.3, 2.0, 20.0):
        run = FakeRun(durations=[usual] * RING)
        for step in range(10, 60):
            duration, began = usual * random.uniform(1, 5), run.now
            for rank in range(2):
                run.set(rank, step=step)
            assert run.wait(duration, interval=min(0.1, usual)) is None, (usual, step, run.now - began)


@pytest.mark.parametrize("late_s", [1.1, 30.0, 3600.0])
def test_a_supervisor_that_was_stopped_counts_nothing(late_s: float) -> None:
    run = FakeRun()
    assert run.wait(1.0) is None
    run.now += late_s
    assert run.look() is None
    assert run.wait(0.8) is None
    for _ in range(20):  # starved: every look comes late
        assert run.wait(1.2, interval=1.2) is None


def test_a_rank_that_waits_for_a_core_does_not_hang() -> None:
    run = FakeRun()
    run.set(0, calls=95)
    waited = 0.0

    def starve() -> None:
        nonlocal waited
        waited += 0.095
        run.looks[1] = Look(run.looks[1].progress, "R", waited)

    assert run.wait(7.5, each=starve) is None
    assert run.wait(1.0, each=starve) is not None  # no core for that long is as bad


def test_a_debugger_may_hold_a_rank() -> None:
    run = FakeRun()
    run.set(0, calls=95)
    run.set(1, state="t")
    assert run.wait(600) is None


def test_progress_begins_anew() -> None:
    run = FakeRun()
    for _ in range(10):
        assert run.wait(1.9) is None
        for rank in range(2):
            run.set(rank, calls=run.looks[rank].progress.calls + 1)


def test_ranks_that_have_answered_are_not_looked_at() -> None:
    run = FakeRun()
    run.looks = {}
    assert run.wait(10) is None


def test_the_words() -> None:
    names = {number: f"all_reduce grads/bucket{number - 115}" for number in range(116, 120)}
    page = Progress(1, "step", step=7, steps_done=7, calls=119, step_calls=115, calls_per_step=10, seconds=(0.03,) * 5, names=names)
    pages = dict.fromkeys((0, 2, 3), page) | {1: replace(page, calls=117)}
    assert describe_hang(Hang(1, 2.13, False, True), pages) == (
        "no progress for 2.1 s (steps take 0.03 s) in step 7; ranks 0, 2, 3 wait for it in all_reduce 'grads/bucket3' (number 118)"
    )
    alone = describe_hang(Hang(1, 2.13, True, True), {1: page})
    assert alone == "its process is stopped (SIGSTOP); no progress for 2.1 s (steps take 0.03 s) in step 7"


# -- pages --


def test_a_page_says_what_the_rank_wrote(tmp_path: Path) -> None:
    reader = PageReader(tmp_path / "page")
    assert reader.head().pid == 0
    page = ProgressPage(tmp_path / "page")
    assert reader.head().pid == os.getpid()
    assert page.enter("data") == "build"
    for step in range(RING + 10):
        page.begin_step(step)
        page.begin_collective("grads/bucket0", "all_reduce")
        page.begin_collective("norm", "all_reduce")
        page.end_step()
    page.begin_step(RING + 10)
    page.begin_collective("loss", "all_reduce")
    seen = reader.read()
    assert (seen.phase, seen.step, seen.steps_done) == ("step", RING + 10, RING + 10)
    assert (seen.calls, seen.step_calls, seen.calls_per_step) == (2 * RING + 21, 2 * RING + 20, 2)
    assert len(seen.seconds) == len(seen.own_seconds) == RING
    assert min(seen.own_seconds) == 10
    assert all(0 < own <= max(seen.seconds) for own in seen.own_seconds.values())
    assert seen.names[seen.calls] == "all_reduce loss"
    assert seen.names[seen.calls - 1] == "all_reduce norm"
    assert abs(seen.changed_ns - time.monotonic_ns()) < 10e9


def test_warm_up_and_compilation_are_not_how_long_steps_take(tmp_path: Path) -> None:
    reader, page = PageReader(tmp_path / "page"), ProgressPage(tmp_path / "page")
    for step in range(5):
        page.begin_step(step)
        time.sleep(0.2 if step < 3 else 0.0)
        before = page.enter("compile")
        time.sleep(0.05)
        assert page.enter(before) == "compile"
        page.end_step()
    assert len(reader.read().seconds) == 2
    assert max(reader.read().seconds) < 0.05


def test_a_page_without_a_file() -> None:
    page = ProgressPage()
    page.begin_step(0)
    page.end_step()
    assert page.last_own_seconds is not None


# -- stacks --

_DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f02 (most recent call first):
  File "/x/site-packages/torch/nn/functional.py", line 12 in linear
  File "/home/me/model.py", line 41 in forward
  File "/x/meshwright/orchestrate/rank_entrypoints.py", line 200 in _run_steps
  File "/x/meshwright/orchestrate/rank_entrypoints.py", line 100 in train_rank
  File "<string>", line 8 in <module>
"""


def test_where_a_rank_stands() -> None:
    stack = main_stack(_DUMP)
    assert stack.count("File") == 3
    assert standing_line(stack) == "model.py:41 in forward"
    assert standing_line(main_stack("")) == ""
    assert standing_line(main_stack(_DUMP.replace("/home/me/model.py", "/x/site-packages/a.py").replace("/x/mesh", "/site-packages/"))) == (
        "functional.py:12 in linear"
    )
    assert describe_stacks({0: stack, 1: ""}).splitlines()[0] == "rank 0 stands at model.py:41 in forward; innermost call first:"


# -- slow ranks --


def steps_of(world: int, own: Callable[[int, int], float], count: int = 60) -> dict[int, dict[int, float]]:
    return {rank: {step: own(rank, step) for step in range(count)} for rank in range(world)}


def test_a_slow_rank_is_found() -> None:
    slow = find_slow_rank(steps_of(4, lambda rank, step: 0.15 if rank == 2 else 0.1))
    assert slow is not None
    assert (slow.rank, slow.factor) == (2, pytest.approx(1.5))
    assert find_slow_rank(steps_of(2, lambda rank, step: 0.15 if rank == 1 else 0.1)) is not None


def test_a_rank_that_was_slow_now_and_then_is_not() -> None:
    assert find_slow_rank(steps_of(4, lambda rank, step: 0.5 if rank == 2 and step % 2 else 0.1)) is None
    assert find_slow_rank(steps_of(4, lambda rank, step: 0.12 if rank == 2 else 0.1)) is None
    assert find_slow_rank(steps_of(4, lambda rank, step: 0.2 if rank == 2 else 0.1, count=39)) is None
    assert find_slow_rank(steps_of(1, lambda rank, step: 0.2)) is None


@pytest.mark.parametrize("world", [2, 4, 8])
def test_noise_names_nobody(world: int) -> None:
    random.seed(world)
    noise: Sequence[float] = [random.lognormvariate(0, 0.7) for _ in range(100_000)]
    for trial in range(200):
        assert find_slow_rank(steps_of(world, lambda rank, step: noise[random.randrange(len(noise))], count=40)) is None, trial
