"""Faults that a run is told to rehearse: what `--inject` says, parsed and checked. `execute.fault_injection` makes them happen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.errors import RequestError, unknown_name_error


@dataclass(frozen=True)
class FaultKind:
    """What a kind of fault needs to be told, and may be told, beside its rank."""

    what: str
    needs_step: bool = True
    numbers: tuple[str, ...] = ()  # further keys


FAULT_KINDS = {
    "kill": FaultKind("the rank kills itself (SIGKILL)"),
    "stop": FaultKind("the rank stops itself (SIGSTOP)"),
    "hang": FaultKind("the rank loops without end"),
    "exit": FaultKind("the rank's process exits", numbers=("code",)),
    "raise": FaultKind("the rank raises an exception"),
    "slow": FaultKind("the rank's own part of each step takes `factor` times as long", needs_step=False, numbers=("factor",)),
    "nan": FaultKind("one element of the rank's gradient becomes NaN before it is reduced"),
}
EXAMPLE = "kill:rank=1,step=7"


@dataclass(frozen=True)
class InjectedFault:
    """One fault of the rehearsal. Steps count from 0, as in metrics.jsonl and in events."""

    kind: str  # of FAULT_KINDS
    rank: int
    step: int = 0  # for `slow`, the first slow step
    code: int = 1  # of exit
    factor: float = 2.0  # of slow
    again: int = 0  # how many restarts of the run meet the fault once more

    def fires_in(self, generation: int) -> bool:
        """Whether it fires in this start of the run: 0 is the first, and each restart adds one. A slow rank stays slow."""
        return self.kind == "slow" or generation <= self.again

    def __str__(self) -> str:
        more = {"slow": f",factor={self.factor:g}", "exit": f",code={self.code}"}.get(self.kind, "")
        return f"{self.kind}:rank={self.rank},step={self.step}{more}"


def parse_injected_fault(text: str) -> InjectedFault:
    """'exit:rank=1,step=7,code=3' → the fault. Everything that is not understood is one line."""
    name, colon, rest = text.partition(":")
    if name not in FAULT_KINDS:
        raise unknown_name_error("fault", name, FAULT_KINDS, f"--inject {text}")
    kind = FAULT_KINDS[name]
    known = ("rank", "step", *kind.numbers, "again")
    values: dict[str, float] = {}
    for pair in rest.split(",") if colon and rest else ():
        key, equals, value = pair.partition("=")
        if key not in known:
            raise unknown_name_error("key", key, known, f"--inject {text}")
        if key in values:
            raise RequestError(f"--inject {text}: {key} is given twice")
        values[key] = _number(text, key, value if equals else "")
    for key in ("rank", *(["step"] if kind.needs_step else [])):
        if key not in values:
            raise RequestError(f"--inject {text}: {key}=… is missing: write it like {EXAMPLE}")
    return InjectedFault(name, **values)  # type: ignore[arg-type]


def _number(text: str, key: str, value: str) -> float:
    try:
        number: float = float(value) if key == "factor" else int(value)
    except ValueError:
        raise RequestError(f"--inject {text}: {key}={value} is no number") from None
    low, high = {"factor": (1.0, 1e6), "code": (0, 255)}.get(key, (0, math.inf))
    if not low <= number <= high:
        limits = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
        raise RequestError(f"--inject {text}: {key}={value} must be {limits}")
    return number


def parse_injected_faults(texts: Sequence[str], *, world: int | None = None, steps: int | None = None) -> tuple[InjectedFault, ...]:
    """Parse all, and compare them with the number of ranks and of steps, where those are known."""
    faults = tuple(map(parse_injected_fault, texts))
    for text, fault in zip(texts, faults, strict=True):
        if world is not None and fault.rank >= world:
            raise RequestError(f"--inject {text}: there is no rank {fault.rank}: the run has {world} rank{'s' * (world > 1)}, counted from 0")
        if steps is not None and fault.step >= steps:
            raise RequestError(f"--inject {text}: there is no step {fault.step}: the run has {steps} step{'s' * (steps > 1)}, counted from 0")
    return faults
