"""A work queue runs one operation at a time, in the order of the calls, whichever thread calls."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
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
            assert queue.submit("call", (), None, False, partial(made.append, number)) is None
            assert made[-1] == number, "a sync call is complete when it returns"
        elif how == "pause":
            time.sleep(1e-3)  # the queue's thread takes over
        else:
            work = queue.submit("call", (), None, True, partial(made.append, number))
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
            if (work := queue.submit("call", (), None, later, call)) is not None:
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
        queue.submit("call", (), None, False, fail)
    with pytest.raises(ValueError, match="no"):
        queue.submit("call", (), None, True, fail).wait()  # type: ignore[union-attr]
    made: list[int] = []
    queue.submit("call", (), None, False, partial(made.append, 1))
    queue.close()
    assert made == [1] and not queue.current


def test_a_callback_of_a_future_may_wait_for_another_collective() -> None:
    """As torch's PowerSGD hook does it, whichever thread completes the future."""
    queue = WorkQueue("one")
    made: list[str] = []

    def inner(_: object) -> str:
        work = queue.submit("inner", (), None, True, partial(made.append, "inner"))
        assert work is not None
        work.get_future().wait()
        return "done"

    for waited in (False, True):
        outer = queue.submit("outer", (), None, True, partial(made.append, "outer"))
        assert outer is not None
        chained = outer.get_future().then(inner)
        if waited:
            outer.wait()
        assert chained.wait() == "done"
    queue.close()
    assert made == ["outer", "inner"] * 2
