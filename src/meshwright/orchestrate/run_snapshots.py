"""Snapshots of a training run in memory, from which its ranks go on after a fault: as often as they cost at most 1% of the time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import meshwright.core.versions as versions
from meshwright.execute.exchange import broadcast_data
from meshwright.execute.save_state import CheckpointSaver, Staging
from meshwright.execute.session import Session
from meshwright.execute.session_state import describe_session, unaveraged
from meshwright.observe import Recorder
from meshwright.orchestrate.checkpoint_interval import parse_interval

_MAX_STALL_SHARE = 0.01  # of the time that training may wait for snapshots
# Of the time that threads may write them: on a CPU they take it from the ranks' own work; beside a GPU only memory bandwidth is shared.
_MAX_WRITE_SHARE = {"cpu": 0.05, "cuda": 0.25}
_FIRST_STALL_S = 0.005  # assumed until two were measured: the first also allocates the memory to copy to
_OFF = -1


class RunSnapshots:
    """The snapshots of one run, as one of its ranks sees them. `after_step` is collective. Only the newest is kept."""

    def __init__(
        self, session: Session, root: Path, every: str | int, *, staging: Staging | None = None, recorder: Recorder | None = None,
        steps_done: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        """`steps_done` counts the steps; the session does unless given."""
        self.session, self.recorder = session, recorder
        self._steps_done = steps_done or (lambda: session.steps_done)
        self._world = session.applied.groups.world
        self._every_steps, self._every_s = parse_interval(every, "snapshot_every")
        self._next_step: int | None = _OFF if self._every_steps == 0 else None
        self._clock = (time.monotonic(), self._steps_done())
        self._count, self._stall_s, self._write_s, self._all_stalls_s = 0, 0.0, 0.0, 0.0
        self.saver = CheckpointSaver(
            session.applied, root, versions.installed(), lambda steps: list(steps[:-1]), staging=staging, noun="snapshot in memory"
        )

    def after_step(self, *, is_warm: bool, is_saved: bool, settle: Callable[[], bool], run_state: Callable[[], Mapping[str, Any]]) -> None:
        """Take a snapshot if it is time to. `is_saved`: a checkpoint of this step was begun, so that a snapshot would be the same. `settle` waits for
        the step's loss, writes its metrics, and says whether the state is finite as far as is known."""
        done = self._steps_done()
        if self._next_step is None:
            if not is_warm and self._every_steps is None:
                return
            self._next_step = self._every_steps or done
        if self._next_step == _OFF or done < self._next_step:
            return
        self._next_step, is_writing = self._plan_next(done)
        if is_saved or self._next_step == _OFF or (is_writing and self._every_steps is None) or not settle():
            return
        with unaveraged(self.session, describe_session(self.session, run_state(), done)) as state:
            self.saver.save(state)

    def close(self) -> None:
        """Wait for the last snapshot, and record what all of them cost."""
        self.saver.wait()
        self._take_reports()
        if self._count and self.recorder is not None and self.recorder.rank == 0:
            self.recorder.event("snapshots", count=self._count, stalled_s=round(self._all_stalls_s, 4), write_s=round(self._write_s, 4))

    def _plan_next(self, done: int) -> tuple[int, bool]:
        """(the step of the next snapshot, or none after one that failed; whether one is being written now) as the first rank sees it."""
        is_failed, is_writing = self._take_reports(), self.saver.is_writing
        now = time.monotonic()
        step_s = max((now - self._clock[0]) / max(done - self._clock[1], 1), 1e-6)
        self._clock = (now, done)
        if self._every_steps:
            following = (done // self._every_steps + 1) * self._every_steps
        else:
            interval = self._every_s or self._best_interval()
            following = done + max(1, round((interval / 4 if is_writing else interval) / step_s))
        step, is_writing = broadcast_data(self._world, [_OFF if is_failed else following, is_writing], self.session.plan.device, "state/snapshot")
        return step, is_writing

    def _best_interval(self) -> float:
        """Seconds between snapshots that keep both shares of the time."""
        stall_s = self._stall_s if self._count > 1 else min(self._stall_s or _FIRST_STALL_S, _FIRST_STALL_S)
        return max(stall_s / _MAX_STALL_SHARE, self._write_s / _MAX_WRITE_SHARE[self.session.plan.device])

    def _take_reports(self) -> bool:
        """Note what the last snapshots cost; whether one failed, on the first rank."""
        failed = False
        for report in self.saver.take_reports():
            if report.error:
                failed = True
                if self.recorder is not None:
                    self.recorder.event("snapshot failed", report.step, message=report.error)
                if self._world.rank == 0:
                    print(f"meshwright: {report.error}; training goes on without snapshots", file=sys.stderr, flush=True)
                continue
            self._count, self._all_stalls_s = self._count + 1, self._all_stalls_s + report.stalled_s
            self._stall_s, self._write_s = report.stalled_s, max(report.seconds - report.stalled_s, 0.0)
        return failed
