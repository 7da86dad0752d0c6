"""When a training run saves its state: every so many steps or minutes, as often as failures make worth it, when it is told to stop, at the end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import meshwright.core.versions as versions
from meshwright.checkpoint.checkpoint_folder import FOLDER_NAME, saved_steps, steps_to_remove
from meshwright.checkpoint.manifest import Manifest
from meshwright.execute.exchange import broadcast_data
from meshwright.execute.save_state import CheckpointSaver
from meshwright.execute.session import Session
from meshwright.execute.session_state import describe_session
from meshwright.observe import Recorder
from meshwright.orchestrate.checkpoint_interval import parse_interval
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.run_snapshots import RunSnapshots
from meshwright.simulate.goodput import FailureModel

_MAX_SHARE = 0.01  # of the time that training may wait for saves
_ASSUMED_COPY_RATE = 2e9  # bytes a second, until a save was measured
_STOP_POLL_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # Slurm warns with the one that is asked for: --signal=USR1@120


class StopFlag:
    """Whether this process was asked to stop, by SIGTERM, SIGINT or SIGUSR1, while `watching`."""

    def __init__(self) -> None:
        self.signal = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Only in a main thread; elsewhere signals stay as they are. SIGINT that is ignored stays so: a supervisor answers it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number


class RunCheckpoints:
    """The checkpoints of one training run, as one of its ranks sees them. Every method but `close` is collective."""

    def __init__(
        self, job: RunConfig, session: Session, recorder: Recorder, folder: Path, step_s: float, data_state: Callable[[], dict[str, Any]],
        settle: Callable[[], bool] = lambda: True, snapshots: str | None = None,
    ) -> None:  # fmt: skip
        """`settle` writes the metrics of all finished steps and says whether the state is finite, as far as is known; `snapshots` is their folder."""
        self.job, self.session, self.recorder, self.stop = job, session, recorder, StopFlag()
        self.root = folder / FOLDER_NAME
        self._data_state, self._world = data_state, session.applied.groups.world
        self._every_steps, self._every_s = parse_interval(job.checkpoint_every)
        self._next_step: int | None = None
        self._poll_interval = max(1, round(_STOP_POLL_S / max(step_s, 1e-4)))
        self._clock = (time.monotonic(), session.steps_done)
        self._stall_s = self._write_s = 0.0
        self.best: dict[str, float] | None = None  # step and validation loss
        self.saved_step = -1  # the last that was begun to be saved, on every rank the same
        self._lost_step = -1  # the last that could not be saved, as far as this rank knows
        self._saver = CheckpointSaver(session.applied, self.root, versions.installed(), self._steps_to_remove)
        self._settle, self.snapshots = settle, None
        if snapshots is not None:
            self.snapshots = RunSnapshots(session, Path(snapshots), job.snapshot_every, staging=self._saver.staging, recorder=recorder)

    @property
    def is_enabled(self) -> bool:
        return self._every_steps != 0

    def after_step(self, *, is_warm: bool, is_last: bool) -> bool:
        """Save if it is time to; returns whether the run is to stop, in which case it was saved."""
        if is_last:
            return False
        done = self.session.steps_done
        if done % self._poll_interval == 0 and self._is_stop_requested():
            self.save(wait=True)
            return True
        if self.is_enabled and is_warm:
            if self._next_step is None:
                self._plan_next()
            elif done >= self._next_step:
                self.save()
                self._plan_next()
        if self.snapshots is not None:
            self.snapshots.after_step(is_warm=is_warm, is_saved=self.saved_step == done, settle=self._settle, run_state=self._run_state)
        self._report()
        return False

    def save(self, *, wait: bool = False) -> None:
        if self.saved_step == self.session.steps_done:
            self._saver.wait()
            return
        if not self._settle():
            return
        if self.recorder.rank == 0:
            self.recorder.event("saving", self.session.steps_done)
        self._saver.save(describe_session(self.session, self._run_state()), wait=wait)
        self.saved_step = self.session.steps_done
        self._report()

    def after_validation(self, loss: float | None) -> None:
        """Keep the checkpoint with the smallest validation loss."""
        if self.is_enabled and loss is not None and (self.best is None or loss < self.best["loss"]):
            self.best = {"step": self.session.steps_done, "loss": loss}
            self.save()

    def at_end(self) -> None:
        """Save a last time, unless the run was left to decide and had no reason to: then its weights are enough."""
        if self.is_enabled and (self.saved_step >= 0 or self._every_steps is not None or self._every_s is not None):
            self.save()

    def resumed_from(self, manifest: Manifest, *, is_checkpoint: bool = True) -> None:
        """Go on where a saved state was; `is_checkpoint`: it is one on the disk, and no snapshot."""
        self.best = manifest.state["best"]
        older = [step for step in saved_steps(self.root) if step <= manifest.step]
        self.saved_step = manifest.step if is_checkpoint else max(older, default=-1)
        self._clock = (time.monotonic(), manifest.step)

    def newest(self) -> dict[str, Any] | None:
        """The newest checkpoint of the run."""
        steps = saved_steps(self.root)
        return {"step": steps[-1], "folder": str(self.root / str(steps[-1]))} if steps else None

    def close(self) -> None:
        """Wait for the last save."""
        self._saver.wait()
        self._report()
        if self.snapshots is not None:
            self.snapshots.close()

    def stopped(self) -> dict[str, Any] | None:
        """The signal that ended the run, the step, and the step of the newest checkpoint; None if it was not told to stop."""
        if not self.stop.signal:
            return None
        newest = self.newest()
        saved = self.saved_step if self.saved_step != self._lost_step else newest["step"] if newest else None
        return {"signal": self.stop.signal, "step": self.session.steps_done, "saved": saved}

    def _is_stop_requested(self) -> bool:
        flag = torch.tensor([self.stop.signal], device=self.session.plan.device)
        self._world.sync.all_reduce(flag, "state/stop", "max").wait()
        self.stop.signal = int(flag)
        return bool(self.stop.signal)

    def _steps_to_remove(self, steps: Sequence[int]) -> list[int]:
        best = [int(self.best["step"])] if self.best is not None else []
        return steps_to_remove(steps, self.job.keep_checkpoints, self.job.keep_every, best)

    def _run_state(self) -> dict[str, Any]:
        return {"data": self._data_state(), "config": self._settings(), "best": self.best}

    def _settings(self) -> dict[str, Any]:
        """What a run that goes on must agree with."""
        return {key: getattr(self.job, key) for key in ("model", "data", "seq", "seed", "global_batch", "steps", "optimizer")}

    # -- when --

    def _plan_next(self) -> None:
        """The step of the next save, the same on every rank: by the first rank's clock."""
        done = self.session.steps_done
        if self._every_steps:
            self._next_step = (done // self._every_steps + 1) * self._every_steps
            return
        now = time.monotonic()
        step_s = max((now - self._clock[0]) / max(done - self._clock[1], 1), 1e-6)
        interval = self._every_s or self._best_interval()
        self._clock = (now, done)
        self._next_step = done + broadcast_data(self._world, max(1, round(interval / step_s)), self.session.plan.device, "state/interval")

    def _best_interval(self) -> float:
        """Daly's interval for what a save costs and how often a job of this size fails; saves take at most 1% of the time."""
        held = sum(self.session.applied.memory_bytes()[kind] for kind in ("parameters", "optimizer"))
        stall = max(self._stall_s or held / _ASSUMED_COPY_RATE, 1e-3)
        failures = FailureModel(self.job.mtbf_h * 3600.0 / self.session.plan.world, stall, 0.0)
        return max(failures.daly_interval, stall / _MAX_SHARE, 2 * self._write_s)

    # -- what is said --

    def _report(self) -> None:
        for report in self._saver.take_reports():
            self._stall_s, self._write_s = report.stalled_s or self._stall_s, report.seconds
            self.recorder.event("checkpoint", report.step, **{k: v for k, v in vars(report).items() if k != "step"})
            if report.error:
                self._lost_step = report.step
            if report.error and self.recorder.rank == 0:
                print(f"meshwright: {report.error}; training goes on", file=sys.stderr, flush=True)
