"""A lane: one call after the other, whoever makes them and whenever."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm.lane import Lane


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["now", "later", "later, waited for", "rest"]), max_size=30))
def test_calls_are_made_in_the_order_they_were_asked_for(asked: list[str]) -> None:
    lane = Lane("one")
    made: list[int] = []
    works = []
    for number, how in enumerate(asked):
        if how == "now":
            assert lane.put("call", (), None, False, made.append, number) is None
            assert made[-1] == number, "what is not put off is over"
        elif how == "rest":
            time.sleep(1e-3)  # the lane's thread comes in between
        else:
            work = lane.put("call", (), None, True, made.append, number)
            assert work is not None
            works.append(work)
            if how.endswith("waited for"):
                work.wait()
    lane.close()
    assert made == [number for number, how in enumerate(asked) if how != "rest"]
    assert lane.number == len(made) and not lane.current
    assert all(work.is_completed() for work in works)


def test_no_two_calls_at_once_though_threads_ask_for_them() -> None:
    lane = Lane("one")
    inside: list[int] = []
    most: list[int] = []

    def call() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(1e-4)
        inside.pop()

    def ask(later: bool) -> None:
        for _ in range(50):
            work = lane.put("call", (), None, later, call)
            if work is not None:
                work.wait()

    threads = [threading.Thread(target=ask, args=(later,)) for later in (False, True, False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lane.close()
    assert len(most) == 200 and max(most) == 1


def test_a_call_that_fails_leaves_the_lane_to_the_next() -> None:
    lane = Lane("one")

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        lane.put("call", (), None, False, fail)
    with pytest.raises(ValueError, match="no"):
        lane.later("call", (), None, fail).wait()
    made: list[int] = []
    lane.put("call", (), None, False, made.append, 1)
    lane.close()
    assert made == [1] and not lane.current
