"""Turns a schedule into a result: on ranks that it launches, on ranks started by mpirun, srun or torchrun, or by simulation."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.errors import RequestError
from meshwright.core.quantities import show_bytes
from meshwright.core.schedule import Schedule
from meshwright.core.span import Span
from meshwright.execute.process_groups import register_backend
from meshwright.launch import ForkServer, LaunchedRank, Rendezvous, WorkerPool, join_process_group, leave_process_group
from meshwright.launch.fork_server import RANK_DEFAULTS
from meshwright.launch.launch_environment import SUPERVISOR_VARIABLE
from meshwright.launch.mpi_launcher import mpirun_command, supervise
from meshwright.proxies.call_stats import RankStats, collect_stats, summarize
from meshwright.proxies.schedule_files import save_schedule
from meshwright.proxies.schedule_runner import LogCallback, RunPolicy, ScheduleRunner, buffer_bytes, run_steps
from meshwright.schedule.schedule_check import check_schedule
from meshwright.simulate import Disturbances, Network, simulate


@dataclass(frozen=True)
class ProxyOutcome:
    """The statistics of a run, and one step's spans by rank (by the first of ranks with the same times)."""

    result: dict[str, Any]
    spans: Mapping[str, Sequence[Span]]
    ledgers: tuple[tuple[Any, ...], ...] = ()  # by rank: the ledger entries of the timed steps


def simulate_schedule(schedule: Schedule, network: Network, *, jitter: float = 0.0, seed: int = 0) -> ProxyOutcome:
    """Simulate one step on a network model."""
    simulation = simulate(schedule, network, Disturbances(jitter=jitter, seed=seed))
    stats = [collect_stats(simulation.rank_partition.ranks_in(number), [spans]) for number, spans in enumerate(simulation.spans)]
    return ProxyOutcome(summarize(stats), {_rank_label(s.ranks): spans for s, spans in zip(stats, simulation.spans, strict=True)})


def _rank_label(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" + (f" and {len(ranks) - 1} alike" if len(ranks) > 1 else "")


def launch_and_run(schedule: Schedule, policy: RunPolicy, environ: Mapping[str, str], log_progress: LogCallback) -> ProxyOutcome:
    """Run the schedule on newly launched workers with one thread each."""
    check_schedule(schedule)
    fork_server = ForkServer(1, environ, ("meshwright.proxies.proxy_launch",))
    try:
        log_progress(f"{schedule.world} ranks over {policy.backend}: {policy.warm} steps to warm up, {policy.runs} timed")
        with WorkerPool(fork_server, schedule.world) as workers:
            results = workers.call("meshwright.proxies.proxy_launch:run_rank", {"schedule": schedule, "policy": policy})
    finally:
        fork_server.close()
    return _merge_ranks(results)


def launch_by_mpirun(schedule: Schedule, options: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the schedule on ranks that mpirun starts, with `options` of `meshwright proxy`; rank 0 prints the result. Returns the exit code."""
    check_schedule(schedule)
    with tempfile.TemporaryDirectory(prefix=".meshwright-") as folder:
        file = Path(folder) / "schedule.json"
        save_schedule(schedule, file)
        supervised = {"OMP_NUM_THREADS": "1", SUPERVISOR_VARIABLE: folder}
        command, env = mpirun_command(schedule.world, {**RANK_DEFAULTS, **environ, **supervised})
        return supervise([*command, sys.executable, "-m", "meshwright.cli.main", "proxy", str(file), *options], env, sys.stderr).require_reported()


def run_under_launcher(schedule: Schedule, policy: RunPolicy, here: LaunchedRank, log_progress: LogCallback) -> ProxyOutcome | None:
    """Run this rank's part of the schedule; return the outcome on rank 0, None on the others."""
    here.die_with_launcher()
    check_schedule(schedule)
    if here.rank == 0:
        log_progress(f"{here.world} ranks from {here.launcher} over {policy.backend}: {policy.warm} steps to warm up, {policy.runs} timed")
    results = run_rank(here.rank, here.world, here.init_method, schedule, policy, local_rank=here.local_rank, gather=True)
    return _merge_ranks(results) if here.rank == 0 else None


def run_rank(
    rank: int, world: int, init_method: str, schedule: Schedule, policy: RunPolicy, *, local_rank: int | None = None, gather: bool = False
) -> Any:
    """Run one rank; return its statistics, the last step's spans and its ledger entries. With `gather`, every rank returns those of all ranks."""
    local = rank if local_rank is None else local_rank
    device = torch.device("cuda", local % max(torch.cuda.device_count(), 1)) if policy.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = dist.is_initialized()
    if not joined:
        register_backend(policy.backend, policy.timeout_s)
        join_process_group(Rendezvous(rank, world, init_method, policy.backend, policy.device, local, policy.timeout_s))
    try:
        runner = ScheduleRunner(schedule, rank, device, policy)
        steps = run_steps(runner, policy, _print_progress if rank == 0 else lambda _: None)
        result = (collect_stats([rank], steps), steps[-1], runner.ledger.drain())
        if not gather:
            return result
        results: list[Any] = [result] * world
        if world > 1:
            dist.all_gather_object(results, result)
        return results
    finally:
        if not joined:
            leave_process_group()


def _print_progress(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)


def _merge_ranks(results: Sequence[tuple[RankStats, list[Span], tuple[Any, ...]]]) -> ProxyOutcome:
    stats, spans, ledgers = zip(*results, strict=True)
    return ProxyOutcome(summarize(stats), {f"rank {s.ranks[0]}": of_rank for s, of_rank in zip(stats, spans, strict=True)}, ledgers)


def check_memory(schedule: Schedule, available: int, ranks: int) -> None:
    """Raise RequestError if the buffers of `ranks` ranks exceed 90% of the `available` memory, before anything is allocated."""
    programs = {schedule.program_of_rank.get(str(rank), 0): rank for rank in range(schedule.world)}
    need = max(buffer_bytes(schedule, rank) for rank in programs.values()) * ranks
    if need > 0.9 * available:
        factor = -(-need // int(0.9 * available))
        need_and_free = f"its buffers need {show_bytes(need)} for {ranks} ranks and {show_bytes(available)} are free"
        raise RequestError(f"{schedule.name}: {need_and_free}: use --scale-down {factor} or more, or --backend sim")
