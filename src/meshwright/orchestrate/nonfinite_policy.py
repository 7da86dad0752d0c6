"""What a run does about a loss or a gradient that is NaN or infinite, by `on_nan`: stop, skip the step, roll back, or go on.

Every rank sees the same losses and gradient norms, and reads them after the same steps; so all ranks decide alike, and may exchange what each knows.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.core.errors import NonFiniteLossError
from meshwright.execute.exchange import broadcast_data, gather_data
from meshwright.execute.session import Session
from meshwright.observe import Recorder, RunFolder
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.step_log import StepRecord

MAX_SKIPPED_IN_A_ROW = 10
_MAX_LINES = 10  # about skipped steps; after them, every tenth is said
_ADVICE = {
    "stop": "lower learning_rate, raise warmup_steps or use another precision; --set on_nan=continue goes on, on_nan=skip leaves such steps out",
    "skip": "lower learning_rate, raise warmup_steps or use another precision",
    "rollback": "the run goes on from its last good state",
    "continue": "the run goes on, as on_nan=continue asks",
}


class _Own(NamedTuple):
    """What one rank knows of its own part."""

    rank: int
    loss: float
    parameter: str  # the first whose gradient was not finite

    @property
    def is_culprit(self) -> bool:
        return not math.isfinite(self.loss) or bool(self.parameter)

    def __str__(self) -> str:
        loss = f", whose own part is {self.loss}" if not math.isfinite(self.loss) else ""
        return f"; it comes from rank {self.rank}{loss}{f', and first from its gradient of {self.parameter}' if self.parameter else ''}"


class NonFinitePolicy:
    """Obeys `on_nan` in one rank's training loop. Collective where a value is not finite; otherwise it only looks at numbers that are read anyway."""

    def __init__(self, job: RunConfig, session: Session, recorder: Recorder, folder: Path) -> None:
        self._on_nan, self._session, self._recorder = job.on_nan, session, recorder
        self._world, self._device = session.applied.groups.world, session.plan.device
        if job.on_nan != "continue":
            session.guard_steps(needs_norm=job.on_nan in ("skip", "rollback"))
        self._met_before: set[int] = set()
        if job.on_nan == "rollback":
            known = sorted({e.step for e in RunFolder(folder).events() if e.kind == "nan"}) if recorder.rank == 0 else []
            self._met_before = set(broadcast_data(self._world, known, self._device, "state/nan"))
        self._error: NonFiniteLossError | None = None
        self.skipped: list[int] = []  # steps that were left out
        self._was_met = self._refused_save = False

    def look(self, record: StepRecord) -> None:
        """Take notice of a finished step. What must end the run is raised by `check`: all ranks end after the same step."""
        judges_norm = record.grad_norm is not None and self._session.loss_scaler is None  # fp16's scaler leaves out what overflows
        is_loss = not math.isfinite(record.loss)
        if self._error is not None or not (is_loss or (judges_norm and not math.isfinite(record.grad_norm or 0.0))):
            return
        if self._on_nan == "continue" and self._was_met:
            return
        norm = "unknown" if record.grad_norm is None else f"{record.grad_norm:.4g}"
        facts = f"at step {record.step} (learning rate {record.learning_rate:.4g}, gradient norm {norm})"
        culprit = self._find_culprit(record)
        what = f"the loss is {record.loss} {facts}" if is_loss else f"the loss is {record.loss:.4g} and the gradient is not finite {facts}"
        self._take(record.step, f"{what}{culprit or ''}", culprit, learning_rate=record.learning_rate, grad_norm=record.grad_norm)

    def look_at_validation(self, step: int, loss: float) -> None:
        if not math.isfinite(loss) and self._error is None and not self._was_met:
            what = f"the validation loss is {loss} after step {step}"
            self._was_met = True
            self._recorder.event("nan", step, message=what)
            if self._on_nan == "stop":
                self._error = NonFiniteLossError(f"{what}: {_ADVICE['stop']}", secondary=self._recorder.rank != 0)
            else:
                self._say(f"{what}; the run goes on")

    def check(self) -> None:
        """End the run, if it must."""
        if self._error is not None:
            raise self._error

    def is_savable(self) -> bool:
        """Whether the state is finite, as far as is known. Collective once a value was not."""
        if self._on_nan != "continue" or not self._was_met:
            return True  # what was not finite was left out
        finite = all(bool(torch.isfinite(p).all()) for p in self._session.applied.optimizer_parameters())
        savable = all(gather_data(self._world, finite, self._device, "state/finite"))
        if not savable and not self._refused_save:
            self._refused_save = True
            self._recorder.event("unsaved", self._session.steps_done, message="the parameters are not finite")
            self._say("the parameters are not finite, so they are not saved")
        return savable

    def _find_culprit(self, record: StepRecord) -> _Own | None:
        """The first rank whose own loss or gradients were not finite, before they were reduced."""
        parameter = record.culprit.parameter() if record.culprit is not None else ""
        mine = (self._recorder.rank, record.own_loss, parameter)
        every = [_Own(*own) for own in gather_data(self._world, mine, self._device, "state/nan")]
        return next((own for own in sorted(every) if own.is_culprit), None)

    def _take(self, step: int, what: str, culprit: _Own | None, **facts: float | None) -> None:
        self._was_met = True
        self._recorder.event("nan", step, message=what, **facts)
        secondary = self._recorder.rank != (culprit.rank if culprit is not None else 0)
        if self._on_nan == "continue":
            self._say(f"{what}; {_ADVICE['continue']}")
        elif self._on_nan == "skip" or step in self._met_before:
            self._skip(step, what, secondary)
        else:
            rollback = self._on_nan == "rollback"
            self._error = NonFiniteLossError(f"{what}: {_ADVICE[self._on_nan]}", secondary=secondary, rollback=rollback)

    def _skip(self, step: int, what: str, secondary: bool) -> None:
        self.skipped.append(step)
        last = self.skipped[-MAX_SKIPPED_IN_A_ROW:]
        if len(last) == MAX_SKIPPED_IN_A_ROW and last[-1] - last[0] == MAX_SKIPPED_IN_A_ROW - 1:
            line = f"{what}; {MAX_SKIPPED_IN_A_ROW} steps in a row were skipped"
            self._error = NonFiniteLossError(f"{line}: {_ADVICE['skip']}", secondary=secondary)
            return
        self._recorder.event("skipped", step, skipped=len(self.skipped))
        if len(self.skipped) <= _MAX_LINES or len(self.skipped) % _MAX_LINES == 0:
            self._say(f"{what}; the step is skipped ({len(self.skipped)} so far)")

    def _say(self, line: str) -> None:
        if self._recorder.rank == 0:
            print(f"meshwright: {line}", file=sys.stderr, flush=True)
