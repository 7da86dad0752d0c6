"""The communication ledger before a run: what a schedule's steady step and the start-up before it will send, call by call."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import wire_factor
from meshwright.schedule.expand import expand

_BROADCAST_BYTES = 2**28  # start-up sends the values of rank 0 in runs of about this size


@dataclass(frozen=True)
class LedgerLine:
    """All calls of one name in one step. `bytes` is the whole tensor, summed over calls; `sent` is what a rank must put on the wire."""

    phase: str  # start-up or step
    name: str
    op: str
    axis: str
    group: int
    calls: int
    bytes: int
    padding: int
    sent: float


def plan_ledger(plan: Plan, profile: ModelProfile, *, clip: bool = True, rank: int = 0) -> tuple[LedgerLine, ...]:
    """What one rank will do, under the names that the run counts by."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for action in expand(plan, profile.at(plan.largest_micro_batch), clip=clip).of(rank):
        if action.is_collective and plan.mesh.group_size(action.axis) > 1:
            sums = found.setdefault((run_name(action.name), action.op, action.axis), [0, 0, 0])
            for i, more in enumerate((1, action.bytes, action.padding)):
                sums[i] += more
    lines = []
    if plan.world > 1:
        whole = profile.parameter_bytes
        runs = max(-(-whole // _BROADCAST_BYTES), 1)
        lines.append(LedgerLine("start-up", "start/values", "broadcast", "world", plan.world, runs, whole, 0, whole * 1.0))
    for (name, op, axis), (calls, size, padding) in found.items():
        group = plan.mesh.group_size(axis)
        lines.append(LedgerLine("step", name, op, axis, group, calls, size, padding, size * wire_factor(op, group)))
    return tuple(lines)


def run_name(name: str) -> str:
    """A schedule tells micro-batches and phases apart; the run counts them under one name."""
    return "/".join(name.split("/")[:2])
