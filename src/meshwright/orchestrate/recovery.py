"""What a run does when a rank fails: restart its ranks from the freshest state, or end. Pure decisions on frozen data, and the words for them.

[Note: what a restart can mend]
A process that is gone, is stopped or does not answer, a connection that broke, and a device that failed: the same step may well succeed in another
process. What the model's or a user's code raised would be raised again, so it ends the run at once, with its traceback; so does a limit on memory. A
fault that comes back at every restart is told from bad luck by progress: a run whose freshest state is newer at each fault may be restarted any
number of times, one that fails again before it has a newer one only `max_restarts` times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.core.event import Fault

_DELAYS_S = (0.0, 0.0, 1.0, 2.0, 4.0)  # before the first restart, and before each further one without progress
_NEVER = ("RequestError", "NonFiniteLossError", "OutOfMemoryError")
_UNANSWERED = ("stopped", "Timeout", "hang")
_DEVICE_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError", "AcceleratorError")
_DEVICE_WORDS = ("CUDA error", "NCCL error", "CUBLAS_STATUS", "CUDNN_STATUS")
_MISUSE = ("out of memory", "device-side assert", "ncclInvalidUsage", "ncclInvalidArgument")  # the same again in the next generation
_ASKED_TO_END = ("killed by SIGTERM", "killed by SIGINT", "exit 143", "exit 130")


@dataclass(frozen=True)
class SavedState:
    """A state that ranks can go on from: the checkpoint folder that has it, and how many steps it has done."""

    root: str
    step: int
    kind: Literal["snapshot", "checkpoint"]

    @property
    def name(self) -> str:
        return "a snapshot in memory" if self.kind == "snapshot" else "a checkpoint"


@dataclass(frozen=True)
class Generation:
    """What the ranks of one generation begin with: how often there was a restart, states to go on from (freshest first), where snapshots go."""

    number: int = 0
    states: tuple[SavedState, ...] = ()
    snapshots: str | None = None

    @property
    def first_step(self) -> int | None:
        """Where it goes on; None in the first generation, which may go on from what the request names."""
        return (self.states[0].step if self.states else 0) if self.number else None


FIRST_GENERATION = Generation()


@dataclass(frozen=True)
class Failure:
    """The end of one generation: its fault, how many steps were finished (None: unknown), and the freshest state then (None: the run's beginning)."""

    fault: Fault
    step: int | None
    state: SavedState | None


@dataclass(frozen=True)
class Verdict:
    """Whether to restart, after what delay, and a line that says it; of a run that ends, the fault with what is known of it."""

    restarts: bool
    delay_s: float
    line: str
    fault: Fault


def judge(failures: Sequence[Failure], max_restarts: int, logs: str = "logs") -> Verdict:
    """What follows from the last of the run's failures, given the earlier ones."""
    last = failures[-1]
    if not max_restarts or not is_restartable(last.fault):
        return Verdict(False, 0.0, "", last.fault)
    repeated = _without_progress(failures)
    if len(repeated) > max_restarts:
        return Verdict(False, 0.0, "", _diagnosis(repeated, logs))
    delay_s = _DELAYS_S[min(len(repeated), len(_DELAYS_S) - 1)]
    source = f"the run goes on from step {last.state.step} ({last.state.name})" if last.state else "the run begins again: it has no saved state"
    wait = f" in {delay_s:.0f} s" if delay_s else ""
    return Verdict(True, delay_s, f"{_describe(last.fault, last.step)}; {source}{wait}, restart {len(failures)}", last.fault)


def is_restartable(fault: Fault) -> bool:
    """Whether the same steps may succeed in new processes. See [Note: what a restart can mend]."""
    if fault.rollback:  # on_nan=rollback: what is not finite again is left out
        return True
    if fault.rank < 0 or fault.kind in _NEVER or fault.kind.startswith(_ASKED_TO_END):
        return False
    if fault.secondary or fault.kind in _UNANSWERED or fault.kind.startswith(("killed by ", "exit ")):
        return True
    is_device = fault.kind in _DEVICE_ERRORS or any(words in fault.message for words in _DEVICE_WORDS)
    return is_device and not any(words in fault.message for words in _MISUSE)


def _without_progress(failures: Sequence[Failure]) -> Sequence[Failure]:
    """The last failures, as many as had the same freshest state: each restart but the last was of no use."""
    steps = [failure.state.step if failure.state else -1 for failure in failures]
    first = len(failures) - 1
    while first > 0 and steps[first] <= steps[first - 1]:
        first -= 1
    return failures[first:]


def _describe(fault: Fault, step: int | None) -> str:
    rank, kind = f"rank {fault.rank}", fault.kind
    if kind == "hang":
        return f"{rank} hangs: {fault.message}"
    if fault.rollback:
        return fault.message.rpartition(": ")[0]
    if kind.startswith("killed by "):
        what = f"was {kind}"
    elif kind.startswith("exit "):
        what = f"ended ({kind})"
    else:
        what = {"stopped": "is stopped", "Timeout": "did not answer"}.get(kind, f"failed ({kind})")
    return f"{rank} {what}{f' at step {step}' if step is not None else ''}"


def _diagnosis(repeated: Sequence[Failure], logs: str) -> Fault:
    """The fault that ends a crash loop: how often, at which steps, and what to do about it."""
    fault, steps = repeated[-1].fault, list(dict.fromkeys(failure.step for failure in repeated if failure.step is not None))
    at = f" at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}" if steps else ""
    ranks = sorted({failure.fault.rank for failure in repeated})
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    says = f"{who} failed {len(repeated)} times{at}, and no restart came further"
    return replace(fault, message=f"{fault.message}; {says}: {_advice(fault, logs)}")


def _advice(fault: Fault, logs: str) -> str:
    if fault.kind == "killed by SIGKILL":
        return "if memory was short (`dmesg` says so), use a smaller --global-batch or --set recompute=full; else see what kills it"
    if fault.kind.startswith(("killed by ", "exit ")):
        return f"{logs}/rank-{fault.rank}.log may say why" if fault.rank else "its last lines are above"
    if fault.kind in _UNANSWERED:
        return "if its steps are only slow, raise --set timeout_s; else see what it waits for"
    return "check the devices and the network between them (`nvidia-smi`, `dmesg`); --devices leaves one out"
