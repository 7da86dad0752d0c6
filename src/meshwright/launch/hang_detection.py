"""Decides which rank hangs, and which is slow, from what ranks say in their progress pages. Pure: the clock and the pages are arguments.

[Note: what counts as no progress]
The time during which the supervisor has seen a rank's page unchanged, as far as the supervisor itself ran (a look that comes late counts nothing)
and the rank was not held by a debugger. Of the time in which the rank's main thread waited for a core, a quarter counts. So neither a supervisor that
was stopped nor a machine with other work makes a hang. Ranks wait for each other, so all pages stand still when one rank hangs. The one that hangs is
the one whose process is stopped, or else the one that is furthest behind: in steps, then in collectives. The others wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.core.progress_page import WARM_STEPS, Progress

MIN_HANG_S = 2.0
_STEPS_PER_HANG = 10.0  # that many times the 99th percentile of the last steps
_MIN_SHARE = 0.25  # of the time, that counts whatever the rank waited for: a loop without end waits for a core too
_LATE_S = 1.0  # a look that comes later than that after the one before counts nothing
_WATCHED = ("step", "data")
SLOW_FACTOR = 1.3
_SLOW_STEPS, _SLOW_OF = 16, 20


@dataclass(frozen=True)
class Look:
    """One rank at one moment."""

    progress: Progress
    state: str = "S"  # of its main thread: T is stopped, t is held by a debugger
    core_wait_s: float = 0.0  # how long its main thread has waited for a core, since it began


@dataclass(frozen=True)
class Hang:
    """The rank that hangs, for how long, and the others, which wait for it."""

    rank: int
    idle_s: float
    is_stopped: bool
    in_order: bool  # whether ranks call the same collectives, so that their numbers can be compared


class HangDetector:
    """Looks at all ranks again and again, about ten times a second. `limit_s` None: by the steps' own durations."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._last_now: float | None = None
        self._last: dict[int, Look] = {}
        self._idle_s: dict[int, float] = {}

    def look(self, now: float, looks: Mapping[int, Look], durations: Callable[[int], Sequence[float]]) -> Hang | None:
        """`durations` gives the last steps' seconds of a rank; it is asked only about a rank that may hang."""
        waited = now - self._last_now if self._last_now is not None else 0.0
        for rank, look in looks.items():
            before = self._last.get(rank)
            if before is None or before.progress.changed_ns != look.progress.changed_ns:
                self._idle_s[rank] = 0.0
            elif waited <= _LATE_S and look.state != "t":
                self._idle_s[rank] += max(waited - (look.core_wait_s - before.core_wait_s), _MIN_SHARE * waited)
        self._last_now, self._last = now, dict(looks)
        if not looks or max(self._idle_s[rank] for rank in looks) < min(self._limit_s or MIN_HANG_S, MIN_HANG_S):
            return None
        in_order = len({look.progress.calls_per_step for look in looks.values()}) == 1
        suspect = _furthest_behind(looks, in_order)
        progress = looks[suspect].progress
        if progress.phase not in _WATCHED or progress.steps_done < WARM_STEPS:
            return None
        idle = self._idle_s[suspect]
        if idle <= (self._limit_s if self._limit_s is not None else hang_limit(durations(suspect))):
            return None
        return Hang(suspect, idle, looks[suspect].state == "T", in_order)


def hang_limit(durations: Sequence[float]) -> float:
    """Seconds without progress that are a hang, from the durations of the last steps."""
    in_order = sorted(durations)
    return max(MIN_HANG_S, _STEPS_PER_HANG * in_order[int(0.99 * (len(in_order) - 1))]) if in_order else MIN_HANG_S


def _furthest_behind(looks: Mapping[int, Look], in_order: bool) -> int:
    def key(rank: int) -> tuple[bool, tuple[int, int], int]:
        progress = looks[rank].progress
        return looks[rank].state != "T", position(progress) if in_order else (0, 0), progress.changed_ns

    return min(looks, key=key)


def position(progress: Progress) -> tuple[int, int]:
    """How far a rank is: its step, and the collectives that it has begun in it."""
    return progress.step, progress.calls - progress.step_calls


def describe_hang(hang: Hang, pages: Mapping[int, Progress]) -> str:
    """What is known of it, in one line, without the rank."""
    own = pages[hang.rank]
    took = f" (steps take {_seconds(statistics.median(own.seconds))})" if own.seconds else ""
    where = f"in step {own.step}" if own.phase == "step" else f"while it waits for the batch of step {own.step + 1}"
    stopped = "its process is stopped (SIGSTOP); " if hang.is_stopped else ""
    return f"{stopped}no progress for {_seconds(hang.idle_s)}{took} {where}{_describe_waiting(hang, pages)}"


def _describe_waiting(hang: Hang, pages: Mapping[int, Progress]) -> str:
    """Which ranks wait for it, and in which collective."""
    own = pages[hang.rank]
    waiting = sorted(rank for rank, page in pages.items() if rank != hang.rank and page.phase == "step")
    if hang.in_order:
        waiting = [rank for rank in waiting if position(pages[rank]) > position(own)]
    if not waiting:
        return ""
    page = pages[waiting[0]]
    behind = position(own)[1] if page.step == own.step else 0
    number = min(page.step_calls + behind + 1, page.calls) if hang.in_order else page.calls
    operation, _, name = page.names.get(number, "").partition(" ")
    collective = f" in {operation} '{name}' (number {number})" if name else ""
    ranks = f"ranks {', '.join(map(str, waiting))} wait" if len(waiting) > 1 else f"rank {waiting[0]} waits"
    return f"; {ranks} for it{collective}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value:.2g} s"


# -- slow ranks --


@dataclass(frozen=True)
class SlowRank:
    rank: int
    factor: float  # its own time over the median of the others'
    own_s: float
    others_s: float


def find_slow_rank(own_seconds: Mapping[int, Mapping[int, float]]) -> SlowRank | None:
    """The rank whose own part of the step takes at least 1.3 times the median of the others', in 16 of the last 20 steps that all have done, and in
    16 of the 20 before them: noise alone may make 20 such steps in a long run. `own_seconds` is by rank, then by step."""
    if len(own_seconds) < 2:
        return None
    common = sorted(set.intersection(*(set(by_step) for by_step in own_seconds.values())))[-2 * _SLOW_OF :]
    if len(common) < 2 * _SLOW_OF:
        return None
    found = []
    for rank, own in own_seconds.items():
        others = {step: statistics.median(by_step[step] for other, by_step in own_seconds.items() if other != rank) for step in common}
        ratios = [own[step] / max(others[step], 1e-9) for step in common]
        if all(sum(ratio >= SLOW_FACTOR for ratio in part) >= _SLOW_STEPS for part in (ratios[:_SLOW_OF], ratios[_SLOW_OF:])):
            middle = statistics.median(own[step] for step in common)
            found.append(SlowRank(rank, statistics.median(ratios), middle, statistics.median(others.values())))
    return max(found, key=lambda slow: slow.factor, default=None)
