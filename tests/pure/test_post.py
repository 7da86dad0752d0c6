"""Messages that nobody waits for are looked after; the others wake nobody."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from meshwright.comm.mpi import post as module
from meshwright.comm.mpi.post import AFTER_S, SOON_S, Alarm, Followed, Post

LONG_S = 20.0


class Letter:
    """Over at the third look, unless something else is said."""

    def __init__(self, after: int = 3) -> None:
        self.looks, self.after = 0, after
        self.arrived = threading.Event()

    @property
    def done(self) -> bool:
        return self.looks >= self.after

    def look(self) -> bool:
        self.looks += 1
        if self.done:
            self.arrived.set()
        return self.done


@pytest.fixture(params=["timer", "no timer"])
def post(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Post]:
    """Where libc has timers that a thread can wait for, and where not."""
    if request.param == "no timer":
        monkeypatch.setattr(module, "_libc", lambda: None)
    made = Post()
    if request.param == "timer" and made.alarm.number < 0:
        pytest.skip("this system has no timerfd")
    yield made
    made.close()


def test_what_nobody_waits_for_moves_on_and_is_let_go(post: Post) -> None:
    letters = [Letter() for _ in range(3)]
    for letter in letters:
        post.follow(letter)
    assert all(letter.arrived.wait(LONG_S) for letter in letters)
    gone = [weakref.ref(letter) for letter in letters]
    del letters, letter
    until = time.monotonic() + LONG_S
    while any(ref() is not None for ref in gone) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert [ref() for ref in gone] == [None] * 3


def test_again_after_it_has_slept(post: Post) -> None:
    for _ in range(3):
        letter = Letter()
        post.follow(letter)
        assert letter.arrived.wait(LONG_S)
        time.sleep(2 * AFTER_S)


def test_what_is_waited_for_is_left_alone(post: Post) -> None:
    letter, other = Letter(), Letter()
    post.follow(letter)
    post.leave(letter)
    post.follow(other)
    assert other.arrived.wait(LONG_S)
    assert letter.looks == 0 and letter not in post.under_way


def test_nobody_looks_while_somebody_is_inside(post: Post) -> None:
    letter = Letter()
    post.helped = True
    post.follow(letter)
    time.sleep(10 * AFTER_S)
    assert letter.looks == 0
    post.helped = False
    assert letter.arrived.wait(LONG_S)


def test_it_naps_less_while_that_moves_something(post: Post) -> None:
    naps: list[float] = []
    stirs = {12}

    def stir(under_way: set[Followed], nap: float) -> bool:
        naps.append(nap)
        return len(naps) in stirs

    def deliver(helps: bool) -> list[float]:
        naps.clear()
        post.follow(letter := Letter(after=24))
        assert letter.arrived.wait(LONG_S)
        until = time.monotonic() + LONG_S
        while (post.under_way or len(naps) < 24 or post.helps is not helps) and time.monotonic() < until:
            time.sleep(1e-3)
        assert post.helps is helps
        return list(naps)

    post.stir = stir
    first = deliver(helps=True)
    assert max(first[:12]) > SOON_S >= max(first[12:]) and first[12] < first[11]
    stirs.clear()
    assert max(deliver(helps=False)) <= SOON_S
    assert max(deliver(helps=False)) > SOON_S


def test_an_end_while_something_is_under_way(post: Post) -> None:
    post.helped = True
    post.follow(Letter())
    post.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "mpi messages"]


def test_an_alarm_that_is_set_again_goes_off_once(post: Post) -> None:
    alarm, gone_off = Alarm(), []
    times = 2

    def hear() -> None:
        for _ in range(times):
            alarm.wait()
            gone_off.append(time.monotonic())

    thread = threading.Thread(target=hear)
    begun = time.monotonic()
    thread.start()
    for _ in range(5):
        alarm.set(0.2)
    alarm.set(0.4)
    while not gone_off:
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(gone_off) == 1 and gone_off[0] - begun >= 0.4
    alarm.set(0)
    thread.join(LONG_S)
    assert len(gone_off) == times
