"""Saving and going on in a user's own script: the session, its loaders' positions, schedules, scalers, and what the script adds."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.checkpoint_folder import saved_steps, steps_to_remove
from meshwright.core.errors import RequestError
from meshwright.core.versions import installed
from meshwright.execute.exchange import broadcast_data
from meshwright.execute.rank_loader import RankLoader
from meshwright.execute.save_state import CheckpointSaver
from meshwright.execute.session import Session
from meshwright.execute.session_state import describe_session, from_plain, restore_session

_savers: weakref.WeakSet[CheckpointSaver] = weakref.WeakSet()  # of this process


@dataclass(frozen=True)
class Resumed:
    """Where a script goes on: optimizer steps and passes over the first loader that are done, and what `save` was given as `extra`."""

    step: int
    epoch: int
    extra: Any


class ScriptState:
    """The state of one prepared script."""

    def __init__(self, session: Session, loaders: Sequence[RankLoader], schedulers: Sequence[Any], scalers: Sequence[Any]) -> None:
        self.session, self.loaders, self.schedulers, self.scalers = session, loaders, schedulers, scalers
        self._savers: dict[Path, CheckpointSaver] = {}
        self._steps = 0
        session.optimizer.register_step_post_hook(lambda *_: self._count_step())

    def _count_step(self) -> None:
        self._steps += 1

    @property
    def steps_done(self) -> int:
        """Optimizer steps, in `run.step` or in a loop of one's own."""
        return max(self._steps, self.session.steps_done)

    def save(self, folder: Path, extra: Any, keep: int, wait: bool) -> Path:
        """Save everything as `folder`/STEP. Collective. A save that fails is an error, unless it is not waited for."""
        saver = self._savers.get(folder)
        if saver is None:
            saver = self._savers[folder] = CheckpointSaver(self.session.applied, folder, installed(), lambda steps: steps_to_remove(steps, keep))
            _savers.add(saver)
        run = {
            "loaders": [loader.state_dict() for loader in self.loaders],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scalers": [scaler.state_dict() for scaler in self.scalers],
            "extra": extra,
        }
        step, applied = self.steps_done, self.session.applied
        saver.save(describe_session(self.session, run, step), wait=wait)
        errors = [report.error for report in saver.take_reports() if report.error]
        if wait:  # the first rank has made the whole visible, or knows why not
            errors = broadcast_data(applied.groups.world, errors, applied.plan.device, "state/saved")
        for error in errors:
            if wait:
                raise RequestError(error)
            if applied.groups.rank == 0:
                print(f"meshwright: {error}; training goes on", file=sys.stderr, flush=True)
        return folder / str(step)

    def resume(self, folder: Path) -> Resumed | None:
        """Load the newest whole checkpoint in `folder`; None if there is none. Collective."""
        applied = self.session.applied
        steps = broadcast_data(applied.groups.world, saved_steps(folder), applied.plan.device, "state/steps")
        if not steps:
            return None
        manifest, problems = restore_session(self.session, folder)
        state = {key: from_plain(manifest.state[key]) for key in ("loaders", "schedulers", "scalers", "extra")}
        for kind, things in (("loaders", self.loaders), ("schedulers", self.schedulers), ("scalers", self.scalers)):
            if len(state[kind]) != len(things):
                raise RequestError(f"{folder}: it was saved with {len(state[kind])} {kind}, and prepare was given {len(things)}")
            for thing, saved in zip(things, state[kind], strict=True):
                thing.load_state_dict(saved)
        self._steps = manifest.step
        for line in problems if applied.groups.rank == 0 else ():
            print(f"meshwright: {line}; the checkpoint of step {manifest.step} is used")
        return Resumed(manifest.step, self.loaders[0].passes_done if self.loaders else 0, state["extra"])


@atexit.register
def finish_saves() -> None:
    """Wait for saves that are being written: a script may end right after it has begun one."""
    for saver in list(_savers):
        saver.wait()
        for report in saver.take_reports():
            if report.error and saver.applied.groups.rank == 0:
                print(f"meshwright: {report.error}", file=sys.stderr, flush=True)


def as_mapping(state: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise RequestError(f"{what} takes a mapping of names to tensors, not a {type(state).__name__}")
    return state
