"""From a schedule to a result: on ranks of our own, on ranks that mpirun, srun or torchrun started, or on no rank at all (simulated)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.errors import RequestError
from meshwright.core.schedule import Schedule
from meshwright.core.span import Span
from meshwright.core.units import show_bytes
from meshwright.execute.groups import make_ready
from meshwright.launch import Nursery, Place, Rendezvous, Workers, join, leave
from meshwright.proxies.runner import Runner, RunPolicy, buffer_bytes, run_steps
from meshwright.proxies.tally import RankTally, summary, tally
from meshwright.schedule.check import check_schedule
from meshwright.simulate import Disturbances, Network, simulate

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """Figures, and one step's spans by rank (by the first of those alike)."""

    result: dict[str, Any]
    spans: Mapping[str, Sequence[Span]]
    counted: tuple[tuple[Any, ...], ...] = ()  # by rank: what the communication layer counted over the timed steps


def simulated(schedule: Schedule, network: Network, *, jitter: float = 0.0, seed: int = 0) -> Outcome:
    """What the step would take."""
    found = simulate(schedule, network, Disturbances(jitter=jitter, seed=seed))
    tallies = [tally(found.fold.ranks(number), [spans]) for number, spans in enumerate(found.spans)]
    names = {_called(t.ranks): spans for t, spans in zip(tallies, found.spans, strict=True)}
    return Outcome(summary(tallies), names)


def _called(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} alike" if len(ranks) > 1 else "")


def launched(schedule: Schedule, policy: RunPolicy, environ: Mapping[str, str], say: Say) -> Outcome:
    """On workers of our own, one thread each."""
    check_schedule(schedule)
    nursery = Nursery(1, environ, ("meshwright.proxies.launch",))
    try:
        say(f"{schedule.world} ranks over {policy.backend}: {policy.warm} steps to warm up, {policy.runs} timed")
        with Workers(nursery, schedule.world) as workers:
            answers = workers.call("meshwright.proxies.launch:run_rank", {"schedule": schedule, "policy": policy})
    finally:
        nursery.close()
    return _outcome(answers)


def adopted_run(schedule: Schedule, policy: RunPolicy, place: Place, say: Say) -> Outcome | None:
    """This rank's part; rank 0 gets the outcome."""
    check_schedule(schedule)
    if place.rank == 0:
        say(f"{place.world} ranks from {place.launcher} over {policy.backend}: {policy.warm} steps to warm up, {policy.runs} timed")
    answer = run_rank(place.rank, place.world, place.meeting, schedule, policy, local_rank=place.local_rank, gather=True)
    return _outcome(answer) if place.rank == 0 else None


def run_rank(
    rank: int, world: int, meeting: str, schedule: Schedule, policy: RunPolicy, *, local_rank: int | None = None, gather: bool = False
) -> Any:
    """One rank: its tally, the last step's spans and what was counted; all ranks' of these on every rank with `gather`."""
    local = rank if local_rank is None else local_rank
    device = torch.device("cuda", local % max(torch.cuda.device_count(), 1)) if policy.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = dist.is_initialized()
    if not joined:
        make_ready(policy.backend, policy.timeout_s)
        join(Rendezvous(rank, world, meeting, policy.backend, policy.device, local, policy.timeout_s))
    try:
        runner = Runner(schedule, rank, device, policy)
        steps = run_steps(runner, policy, _told if rank == 0 else lambda _: None)
        mine = (tally([rank], steps), steps[-1], runner.ledger.take())
        if not gather:
            return mine
        every: list[Any] = [mine] * world
        if world > 1:
            dist.all_gather_object(every, mine)
        return every
    finally:
        if not joined:
            leave()


def _told(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)


def _outcome(answers: Sequence[tuple[RankTally, list[Span], tuple[Any, ...]]]) -> Outcome:
    tallies = [a[0] for a in answers]
    return Outcome(summary(tallies), {f"rank {t.ranks[0]}": a[1] for t, a in zip(tallies, answers, strict=True)}, tuple(a[2] for a in answers))


def check_memory(schedule: Schedule, available: int, ranks: int) -> None:
    """Refuse sizes beyond memory before anything is allocated. `ranks` of them share what is available."""
    programs = {schedule.ranks.get(str(rank), 0): rank for rank in range(schedule.world)}
    need = max(buffer_bytes(schedule, rank) for rank in programs.values()) * ranks
    if need > 0.9 * available:
        factor = -(-need // int(0.9 * available))
        raise RequestError(
            f"{schedule.name}: its buffers need {show_bytes(need)} for {ranks} ranks and {show_bytes(available)} are free: "
            f"use --scale-down {factor} or more, or --backend sim"
        )
