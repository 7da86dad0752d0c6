"""A work queue runs one operation at a time, in the order of the calls, whichever thread calls."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm.work_queue import WorkQueue


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["sync", "async", "async, waited for", "pause"]), max_size=30))
def test_calls_are_made_in_the_order_they_were_asked_for(asked: list[str]) -> None:
    queue = WorkQueue("one")
    made: list[int] = []
    works = []
    for number, how in enumerate(asked):
        if how == "sync":
            assert queue.submit("call", (), (), False, partial(made.append, number)) is None
            assert made[-1] == number, "a sync call is complete when it returns"
        elif how == "pause":
            time.sleep(1e-3)  # the queue's thread takes over
        else:
            work = queue.submit("call", (), (), True, partial(made.append, number))
            assert work is not None
            works.append(work)
            if how.endswith("waited for"):
                work.wait()
    queue.close()
    assert made == [number for number, how in enumerate(asked) if how != "pause"]
    assert queue.sequence_number == len(made) and not queue.current
    assert all(work.is_completed() for work in works)


def test_no_two_calls_at_once_though_threads_ask_for_them() -> None:
    queue = WorkQueue("one")
    inside: list[int] = []
    most: list[int] = []

    def call() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(1e-4)
        inside.pop()

    def ask(later: bool) -> None:
        for _ in range(50):
            if (work := queue.submit("call", (), (), later, call)) is not None:
                work.wait()

    threads = [threading.Thread(target=ask, args=(later,)) for later in (False, True, False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.close()
    assert len(most) == 200 and max(most) == 1


def test_a_call_that_fails_leaves_the_queue_to_the_next() -> None:
    queue = WorkQueue("one")

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        queue.submit("call", (), (), False, fail)
    with pytest.raises(ValueError, match="no"):
        queue.submit("call", (), (), True, fail).wait()  # type: ignore[union-attr]
    made: list[int] = []
    queue.submit("call", (), (), False, partial(made.append, 1))
    queue.close()
    assert made == [1] and not queue.current


def test_a_callback_of_a_future_may_wait_for_another_collective() -> None:
    """As torch's PowerSGD hook does it, whichever thread completes the future."""
    queue = WorkQueue("one")
    made: list[str] = []

    def inner(_: object) -> str:
        work = queue.submit("inner", (), (), True, partial(made.append, "inner"))
        assert work is not None
        work.get_future().wait()
        return "done"

    for waited in (False, True):
        outer = queue.submit("outer", (), (), True, partial(made.append, "outer"))
        assert outer is not None
        chained = outer.get_future().then(inner)
        if waited:
            outer.wait()
        assert chained.wait() == "done"
    queue.close()
    assert made == ["outer", "inner"] * 2


def test_a_wait_counts_its_seconds_in_total() -> None:
    """Ten operations of 0.2 s each, run by another thread: none takes the 0.5 s, all together do."""
    queue = WorkQueue("one")
    works = [queue.submit("call", (), (), True, partial(time.sleep, 0.2)) for _ in range(10)]
    runner = threading.Thread(target=works[-1].wait)  # type: ignore[union-attr]
    runner.start()
    with pytest.raises(TimeoutError, match=r"call of one was not done within 0\.5 s"):
        works[-1].wait(timedelta(seconds=0.5))  # type: ignore[union-attr]
    runner.join()
    queue.close()


@pytest.mark.parametrize("async_op", [False, True])
def test_the_profiler_sees_a_call_once_and_as_asynchronous(async_op: bool) -> None:
    queue = WorkQueue("one")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        work = queue.submit("all_reduce", (), (torch.zeros(2, 3),), async_op, partial(time.sleep, 0.01))
        if work is not None:
            time.sleep(0.02)  # the queue's own thread runs it
            work.wait()
    queue.close()
    (event,) = [e for e in profile.events() or [] if e.name.startswith("mpi:")]
    assert event.name == "mpi:all_reduce" and event.is_async and event.input_shapes == [[2, 3]] and event.cpu_time >= 10_000
