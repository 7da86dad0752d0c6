"""Where the time of a run goes: all of it is assigned to phases."""

from __future__ import annotations

import time

import pytest

from meshwright.core import phases
from meshwright.core.phases import PhaseClock, process_start


def test_all_time_since_the_start_is_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((13.0, 15.0, 18.0))
    monkeypatch.setattr(phases.time, "time", lambda: next(now))
    clock = PhaseClock(start=10.0)
    for name in ("import", "steps", "import"):
        clock.mark(name)
    assert clock.seconds == {"import": 6.0, "steps": 2.0}


def test_this_process_was_started_before_now() -> None:
    start = process_start()
    assert 0.0 <= time.time() - start < 86400.0
    assert process_start() == pytest.approx(start, abs=0.5)
