"""The communication ledger predicted before a run: what a schedule's steady step and start-up will send, call by call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, wire_factor
from meshwright.schedule.buckets import init_broadcast_groups
from meshwright.schedule.step_actions import build_schedule

_RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}  # sizes of torch's RNG states


@dataclass(frozen=True)
class LedgerLine:
    """All calls of one name in one step. `bytes` is the full tensor, summed over calls; `sent` is what a rank must put on the wire."""

    phase: str  # start-up or step
    name: str
    op: str
    axis: str
    group: int
    calls: int
    bytes: int
    padding: int
    sent: float
    bound: bool = False  # the data decides how many bytes there are, and `bytes` is an upper bound


def plan_ledger(plan: Plan, profile: ModelProfile, *, clip: bool = True, rank: int = 0) -> tuple[LedgerLine, ...]:
    """One rank's predicted ledger, under the names that the run records."""
    return _ledger_lines(
        plan.for_rank(rank), profile, build_schedule(plan, profile.at_batch(_micro_batch_samples(plan, rank)), clip=clip).program_for(rank)
    )


def plan_ledgers(plan: Plan, profile: ModelProfile, *, clip: bool = True) -> dict[str, list[LedgerLine]]:
    """The ledger of every rank; ranks with the same ledger share a key, like "0,1"."""
    samples = [_micro_batch_samples(plan, rank) for rank in range(plan.world)]
    schedules = {count: build_schedule(plan, profile.at_batch(count), clip=clip) for count in set(samples)}
    groups: dict[tuple[int, int, str], list[int]] = {}
    for rank, count in enumerate(samples):
        groups.setdefault((count, schedules[count].program_of_rank.get(str(rank), 0), plan.for_rank(rank).device), []).append(rank)
    every = ((ranks, schedules[count].program_for(ranks[0])) for (count, _, _), ranks in groups.items())
    return {",".join(map(str, ranks)): list(_ledger_lines(plan.for_rank(ranks[0]), profile, program)) for ranks, program in every}


def _micro_batch_samples(plan: Plan, rank: int) -> int:
    """Samples of the rank's micro-batch; under expert parallelism the largest micro-batch's, since a rank also gets other ranks' samples."""
    return plan.micro_batch_size(rank) if plan.mesh.ep == 1 else plan.max_micro_batch_size


def _ledger_lines(plan: Plan, profile: ModelProfile, program: Sequence[Action]) -> tuple[LedgerLine, ...]:
    found: dict[tuple[str, str, str, int], list[int]] = {}
    bounds = set()
    for action in program:
        if action.is_communication and action.num_ranks(plan.mesh) > 1:
            key = (ledger_name(action.name), action.op, action.axis, action.num_ranks(plan.mesh))
            bounds |= {key} if action.expected_bytes is not None else set()
            sums = found.setdefault(key, [0, 0, 0])
            for i, more in enumerate((1, action.bytes, action.padding)):
                sums[i] += more
    steps = (
        LedgerLine("step", *key, calls, size, padding, size * wire_factor(key[1], key[3]), key in bounds)
        for key, (calls, size, padding) in found.items()
    )
    return (*_startup_lines(plan, profile), *steps)


def _startup_lines(plan: Plan, profile: ModelProfile) -> Iterator[LedgerLine]:
    """Rank 0's values are broadcast to all ranks, and ranks that compute the same on the same samples share an RNG state. Left out are the few
    bytes of the first messages between neighbours, from backends and torch's pipeline schedules."""

    def line(name: str, axis: str, calls: int, size: int) -> LedgerLine:
        return LedgerLine("start-up", name, "broadcast", axis, plan.mesh.group_size(axis), calls, size, 0, size * 1.0)

    if plan.world > 1:
        held = [*sorted(profile.tensors, key=lambda t: t.registration_index), *profile.buffers]
        runs = list(init_broadcast_groups([t.bytes for t in held], [t.dtype for t in held]))
        yield line("init/params", "world", len(runs), sum(t.bytes for t in held))
    states = [_RNG_STATE_BYTES["cpu"]] + [_RNG_STATE_BYTES["cuda"]] * (plan.device == "cuda")
    if plan.mesh.degree("tp") > 1:
        yield line("init/rng", "tp", len(states), sum(states))
    if plan.spatial.grid:
        yield line("init/rng", "cp", len(states), sum(states))


def ledger_name(name: str) -> str:
    """The run's name for an action: a schedule also names micro-batches and phases, the run does not."""
    return "/".join(name.split("/")[:2])


def ledger_differences(expected: Iterable[LedgerLine], measured: Iterable[tuple[str, str, int, int, int]], phase: str = "step") -> list[str]:
    """How a step, or start-up, differs from the ledger; `measured` is (name, operation, ranks, calls, bytes). Empty if they are equal or, where
    bytes are a bound, within it."""
    lines = [line for line in expected if line.phase == phase]
    planned = {(line.name, line.op, line.group): (line.calls, line.bytes) for line in lines}
    bounds = {(line.name, line.op, line.group) for line in lines if line.bound}
    done = {(name, op, group): (calls, size) for name, op, group, calls, size in measured}
    found = []
    for key in dict.fromkeys([*planned, *done]):
        (calls, size), (did, sent) = planned.get(key, (0, 0)), done.get(key, (0, 0))
        if calls != did or (sent > size if key in bounds else sent != size):
            most = "at most " if key in bounds else ""
            found.append(f"{key[1]} {key[0]} over {key[2]} ranks: {calls} calls, {most}{size} bytes planned; {did} calls, {sent} bytes done")
    return found
