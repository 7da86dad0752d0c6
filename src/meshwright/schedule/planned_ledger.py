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


def plan_ledger(plan: Plan, profile: ModelProfile, *, clip: bool = True, rank: int = 0, broadcasts: bool = True) -> tuple[LedgerLine, ...]:
    """One rank's predicted ledger, under the names that the run records. `broadcasts`: the first rank's initial values are sent to all, as in
    scripts; otherwise every rank makes its own."""
    schedule = build_schedule(plan, profile.at_batch(_micro_batch_samples(plan, rank)), clip=clip)
    return _ledger_lines(plan.for_rank(rank), profile, schedule.program_for(rank), broadcasts)


def plan_ledgers(plan: Plan, profile: ModelProfile, *, clip: bool = True, broadcasts: bool = True) -> dict[str, list[LedgerLine]]:
    """The ledger of every rank; ranks with the same ledger share a key, like "0,1"."""
    samples = [_micro_batch_samples(plan, rank) for rank in range(plan.world)]
    schedules = {count: build_schedule(plan, profile.at_batch(count), clip=clip) for count in set(samples)}
    groups: dict[tuple[int, int, str], list[int]] = {}
    for rank, count in enumerate(samples):
        groups.setdefault((count, schedules[count].program_of_rank.get(str(rank), 0), plan.for_rank(rank).device), []).append(rank)
    return {
        ",".join(map(str, ranks)): list(_ledger_lines(plan.for_rank(ranks[0]), profile, schedules[count].program_for(ranks[0]), broadcasts))
        for (count, _, _), ranks in groups.items()
    }


def _micro_batch_samples(plan: Plan, rank: int) -> int:
    """Samples of the rank's micro-batch; under expert parallelism the largest micro-batch's, since a rank also gets other ranks' samples."""
    return plan.micro_batch_size(rank) if plan.mesh.ep == 1 else plan.max_micro_batch_size


def _ledger_lines(plan: Plan, profile: ModelProfile, program: Sequence[Action], broadcasts: bool) -> tuple[LedgerLine, ...]:
    calls: dict[tuple[str, str, str, int], list[Action]] = {}
    for action in program:
        if action.is_communication and (num_ranks := action.num_ranks(plan.mesh)) > 1:
            calls.setdefault((ledger_name(action.name), action.op, action.axis, num_ranks), []).append(action)
    lines = list(_startup_lines(plan, profile, broadcasts))
    for key, actions in calls.items():
        size, padding = sum(a.bytes for a in actions), sum(a.padding for a in actions)
        bound = any(a.expected_bytes is not None for a in actions)
        lines.append(LedgerLine("step", *key, len(actions), size, padding, size * wire_factor(key[1], key[3]), bound))
    return tuple(lines)


def _startup_lines(plan: Plan, profile: ModelProfile, broadcasts: bool) -> Iterator[LedgerLine]:
    """Rank 0's values may be broadcast to all ranks, and ranks that compute the same on the same samples share an RNG state. Left out are the few
    bytes of the first messages between neighbours, from backends and torch's pipeline schedules."""

    def line(name: str, axis: str, calls: int, size: int) -> LedgerLine:
        return LedgerLine("start-up", name, "broadcast", axis, plan.mesh.group_size(axis), calls, size, 0, size * 1.0)

    if plan.world > 1 and broadcasts:
        tensors = [*sorted(profile.tensors, key=lambda t: t.registration_index), *profile.buffers]
        groups = list(init_broadcast_groups([t.bytes for t in tensors], [t.dtype for t in tensors]))
        yield line("init/params", "world", len(groups), sum(t.bytes for t in tensors))
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
    planned = {(line.name, line.op, line.group): (line.calls, line.bytes, line.bound) for line in expected if line.phase == phase}
    recorded = {(name, op, group): (calls, size) for name, op, group, calls, size in measured}
    differences = []
    for name, op, group in dict.fromkeys([*planned, *recorded]):
        (calls, size, bound), (did, sent) = planned.get((name, op, group), (0, 0, False)), recorded.get((name, op, group), (0, 0))
        if calls != did or (sent > size if bound else sent != size):
            limit = "at most " if bound else ""
            differences.append(f"{op} {name} over {group} ranks: {calls} calls, {limit}{size} bytes planned; {did} calls, {sent} bytes done")
    return differences
