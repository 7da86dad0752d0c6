"""Saving and going on in a user's own script: the session, its loaders' positions, schedules, scalers, and what the script adds."""

from __future__ import annotations

import atexit
import shutil
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.checkpoint_folder import saved_steps, step_folder, steps_to_remove
from meshwright.core.errors import RequestError
from meshwright.core.versions import installed
from meshwright.execute.exchange import broadcast_data
from meshwright.execute.rank_loader import RankLoader
from meshwright.execute.save_state import CheckpointSaver
from meshwright.execute.session import Session
from meshwright.execute.session_state import describe_session, from_plain, restore_first_whole
from meshwright.orchestrate.run_snapshots import RunSnapshots
from meshwright.orchestrate.snapshot_folder import lack_of_room

_WARMUP_STEPS = 3
_states: weakref.WeakSet[ScriptState] = weakref.WeakSet()  # of this process, like these:
_savers: weakref.WeakSet[CheckpointSaver] = weakref.WeakSet()  # of this process


@dataclass(frozen=True)
class Resumed:
    """Where a script goes on: optimizer steps and passes over the first loader that are done, and what `save` was given as `extra`."""

    step: int
    epoch: int
    extra: Any


class ScriptState:
    """The state of one prepared script."""

    def __init__(
        self, session: Session, loaders: Sequence[RankLoader], schedulers: Sequence[Any], scalers: Sequence[Any], snapshots: str = "",
        snapshot_every: str | int = "auto",
    ) -> None:  # fmt: skip
        """`snapshots` is the folder for snapshots in memory; without it there are none."""
        self.session, self.loaders, self.schedulers, self.scalers = session, loaders, schedulers, scalers
        self._snapshot_root, self._snapshot_every = Path(snapshots) if snapshots else None, snapshot_every
        self._snapshots: RunSnapshots | None = None
        for other in _states:  # a snapshot holds one model, and ranks that go on from it would have the other's state of another step
            other._end_snapshots()
        _states.add(self)
        self._extra: Any = None  # of the last save, which goes with snapshots after it
        self._savers: dict[Path, CheckpointSaver] = {}
        self._steps, self._first_step, self._last_step = 0, -1, -1
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
        self._extra = extra
        step, applied = self.steps_done, self.session.applied
        saver.save(describe_session(self.session, self._run_state(), step), wait=wait)
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
        """Load the newest whole checkpoint in `folder`, or after a fault a snapshot that is newer; None if there is none. Collective."""
        applied = self.session.applied
        found = sorted((step, str(root)) for root in (folder, self._snapshot_root) if root is not None for step in saved_steps(root))
        found = broadcast_data(applied.groups.world, found, applied.plan.device, "state/steps")
        self._begin_snapshots()
        if not found:
            return None
        _, manifest, problems = restore_first_whole(self.session, [step_folder(Path(root), step) for step, root in reversed(found)])
        if manifest is None:
            raise RequestError(f"{folder}: there is no whole checkpoint in it; {problems[0]}")
        state = {key: from_plain(manifest.state[key]) for key in ("loaders", "schedulers", "scalers", "extra")}
        for kind, things in (("loaders", self.loaders), ("schedulers", self.schedulers), ("scalers", self.scalers)):
            if len(state[kind]) != len(things):
                raise RequestError(f"{folder}: it was saved with {len(state[kind])} {kind}, and prepare was given {len(things)}")
            for thing, saved in zip(things, state[kind], strict=True):
                thing.load_state_dict(saved)
        self._steps, self._extra = manifest.step, state["extra"]
        for line in problems if applied.groups.rank == 0 else ():
            print(f"meshwright: {line}; the checkpoint of step {manifest.step} is used")
        return Resumed(manifest.step, self.loaders[0].passes_done if self.loaders else 0, state["extra"])

    def _run_state(self) -> dict[str, Any]:
        return {
            "loaders": [loader.state_dict() for loader in self.loaders],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scalers": [scaler.state_dict() for scaler in self.scalers],
            "extra": self._extra,
        }

    # -- snapshots of a script that goes on: it says so by calling `resume` --

    def _begin_snapshots(self) -> None:
        if self._snapshot_root is None or self._snapshots is not None or not self.loaders or len(_states) > 1:
            return
        groups, held = self.session.applied.groups, sum(self.session.applied.memory_bytes().values())
        reason = broadcast_data(groups.world, lack_of_room(held * groups.world.size, 0), self.session.applied.plan.device, "state/room")
        if reason:
            if groups.rank == 0:
                print(f"meshwright: no snapshots in memory: {reason}; a fault ends the script", file=sys.stderr, flush=True)
            return
        self._snapshots = RunSnapshots(self.session, self._snapshot_root, self._snapshot_every, steps_done=lambda: self.steps_done)
        _savers.add(self._snapshots.saver)
        self.loaders[0].batch_callbacks.append(self._after_batch)

    def _end_snapshots(self) -> None:
        if self._snapshots is not None and self._snapshot_root is not None:
            self._snapshots.close()
            self.loaders[0].batch_callbacks.remove(self._after_batch)
            if self.session.applied.groups.rank == 0:
                for path in self._snapshot_root.iterdir():
                    shutil.rmtree(path, ignore_errors=True)
        self._snapshots = self._snapshot_root = None

    def _after_batch(self) -> None:
        """Between two batches, unless no step was taken: then gradients are being accumulated, and no state holds them."""
        assert self._snapshots is not None
        done = self.steps_done
        if self._first_step < 0:
            self._first_step = done
        if done != self._last_step:
            is_warm = done >= self._first_step + _WARMUP_STEPS
            self._snapshots.after_step(is_warm=is_warm, is_saved=False, settle=lambda: True, run_state=self._run_state)
        self._last_step = done


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
