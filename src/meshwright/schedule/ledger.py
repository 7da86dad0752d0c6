"""The communication ledger before a run: what a schedule's steady step and the start-up before it will send, call by call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import wire_factor
from meshwright.schedule.expand import expand

_RANDOM_BYTES = 5056  # the state of torch's generator on the host
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
    bound: bool = False  # the data decides how many bytes there are, and `bytes` is the most that it can be


def plan_ledger(plan: Plan, profile: ModelProfile, *, clip: bool = True, rank: int = 0) -> tuple[LedgerLine, ...]:
    """What one rank will do, under the names that the run counts by."""
    found: dict[tuple[str, str, str], list[int]] = {}
    bounds = set()
    for action in expand(plan, profile.at(plan.largest_micro_batch), clip=clip).of(rank):
        if (action.is_collective and plan.mesh.group_size(action.axis) > 1) or action.op == "send":
            key = (run_name(action.name), action.op, action.axis)
            bounds |= {key} if action.likely is not None else set()
            sums = found.setdefault(key, [0, 0, 0])
            for i, more in enumerate((1, action.bytes, action.padding)):
                sums[i] += more
    lines = []
    if plan.world > 1:
        whole = profile.parameter_bytes
        runs = max(-(-whole // _BROADCAST_BYTES), 1)
        lines.append(LedgerLine("start-up", "start/values", "broadcast", "world", plan.world, runs, whole, 0, whole * 1.0))
    if plan.mesh.degree("tp") > 1:
        ways = plan.mesh.degree("tp")
        lines.append(LedgerLine("start-up", "start/random", "broadcast", "tp", ways, 1, _RANDOM_BYTES, 0, _RANDOM_BYTES * 1.0))
    for (name, op, axis), (calls, size, padding) in found.items():
        group = 2 if op == "send" else plan.mesh.group_size(axis)
        lines.append(LedgerLine("step", name, op, axis, group, calls, size, padding, size * wire_factor(op, group), (name, op, axis) in bounds))
    return tuple(lines)


def run_name(name: str) -> str:
    """A schedule tells micro-batches and phases apart; the run counts them under one name."""
    return "/".join(name.split("/")[:2])


def plan_ledgers(plan: Plan, profile: ModelProfile, *, clip: bool = True) -> dict[str, list[LedgerLine]]:
    """The ledger of every rank; ranks that do the same are named together, like "0,1"."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.world):
        groups.setdefault(tuple(plan.mesh.coordinate(rank, axis) for axis in ("pp", "ep", "tp")), []).append(rank)
    return {",".join(map(str, ranks)): list(plan_ledger(plan, profile, clip=clip, rank=ranks[0])) for ranks in groups.values()}


def differences(expected: Iterable[LedgerLine], counted: Iterable[tuple[str, str, int, int, int]]) -> list[str]:
    """What a step did otherwise than the ledger says; `counted` is (name, operation, ranks, calls, bytes). Empty when they are equal, and
    where bytes are a bound, when it holds."""
    lines = [line for line in expected if line.phase == "step"]
    planned = {(line.name, line.op, line.group): (line.calls, line.bytes) for line in lines}
    bounds = {(line.name, line.op, line.group) for line in lines if line.bound}
    done = {(name, op, group): (calls, size) for name, op, group, calls, size in counted}
    found = []
    for key in dict.fromkeys([*planned, *done]):
        (calls, size), (did, sent) = planned.get(key, (0, 0)), done.get(key, (0, 0))
        if calls != did or (sent > size if key in bounds else sent != size):
            most = "at most " if key in bounds else ""
            found.append(f"{key[1]} {key[0]} over {key[2]} ranks: {calls} calls, {most}{size} bytes planned; {did} calls, {sent} bytes done")
    return found
