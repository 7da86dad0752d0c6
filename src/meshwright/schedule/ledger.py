"""The communication ledger before a run: what a schedule's steady step and the start-up before it will send, call by call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, wire_factor
from meshwright.schedule.buckets import start_runs
from meshwright.schedule.expand import expand

_RANDOM_BYTES = {"cpu": 5056, "cuda": 16}  # the states of torch's generators


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
    return _lines(plan.seen_by(rank), profile, expand(plan, profile.at(_samples(plan, rank)), clip=clip).of(rank))


def plan_ledgers(plan: Plan, profile: ModelProfile, *, clip: bool = True) -> dict[str, list[LedgerLine]]:
    """The ledger of every rank; ranks that do the same are named together, like "0,1"."""
    samples = [_samples(plan, rank) for rank in range(plan.world)]
    schedules = {count: expand(plan, profile.at(count), clip=clip) for count in set(samples)}
    groups: dict[tuple[int, int, str], list[int]] = {}
    for rank, count in enumerate(samples):
        groups.setdefault((count, schedules[count].ranks.get(str(rank), 0), plan.seen_by(rank).device), []).append(rank)
    every = ((ranks, schedules[count].of(ranks[0])) for (count, _, _), ranks in groups.items())
    return {",".join(map(str, ranks)): list(_lines(plan.seen_by(ranks[0]), profile, program)) for ranks, program in every}


def _samples(plan: Plan, rank: int) -> int:
    """Of its micro-batch; what owners are sent, and send back, is of the others' samples too."""
    return plan.micro_batch(rank) if plan.mesh.ep == 1 else plan.largest_micro_batch


def _lines(plan: Plan, profile: ModelProfile, program: Sequence[Action]) -> tuple[LedgerLine, ...]:
    found: dict[tuple[str, str, str, int], list[int]] = {}
    bounds = set()
    for action in program:
        if action.communicates and action.ranks(plan.mesh) > 1:
            key = (run_name(action.name), action.op, action.axis, action.ranks(plan.mesh))
            bounds |= {key} if action.likely is not None else set()
            sums = found.setdefault(key, [0, 0, 0])
            for i, more in enumerate((1, action.bytes, action.padding)):
                sums[i] += more
    steps = (
        LedgerLine("step", *key, calls, size, padding, size * wire_factor(key[1], key[3]), key in bounds)
        for key, (calls, size, padding) in found.items()
    )
    return (*_start_up(plan, profile), *steps)


def _start_up(plan: Plan, profile: ModelProfile) -> Iterator[LedgerLine]:
    """Rank 0's values go to everybody, and ranks that compute the same on the same samples share a random state. Left out are the few
    bytes with which a backend and torch's pipeline schedules greet their neighbours."""

    def line(name: str, axis: str, calls: int, size: int) -> LedgerLine:
        return LedgerLine("start-up", name, "broadcast", axis, plan.mesh.group_size(axis), calls, size, 0, size * 1.0)

    if plan.world > 1:
        held = [*sorted(profile.tensors, key=lambda t: t.order), *profile.buffers]
        runs = list(start_runs([t.bytes for t in held], [t.dtype for t in held]))
        yield line("start/values", "world", len(runs), sum(t.bytes for t in held))
    states = [_RANDOM_BYTES["cpu"]] + [_RANDOM_BYTES["cuda"]] * (plan.device == "cuda")
    if plan.mesh.degree("tp") > 1:
        yield line("start/random", "tp", len(states), sum(states))
    if plan.spatial.grid:
        yield line("start/random", "cp", len(states), sum(states))


def run_name(name: str) -> str:
    """A schedule tells micro-batches and phases apart; the run counts them under one name."""
    return "/".join(name.split("/")[:2])


def differences(expected: Iterable[LedgerLine], counted: Iterable[tuple[str, str, int, int, int]], phase: str = "step") -> list[str]:
    """What a step, or start-up, did otherwise than the ledger says; `counted` is (name, operation, ranks, calls, bytes). Empty when they
    are equal, and where bytes are a bound, when it holds."""
    lines = [line for line in expected if line.phase == phase]
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
