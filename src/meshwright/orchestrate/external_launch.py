"""Training on ranks that torchrun, srun or mpirun started: rank 0 plans and broadcasts the run folder, then every rank trains from it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from meshwright.core.backends import backend_for, backend_traits
from meshwright.core.errors import MeshwrightError, RequestError
from meshwright.core.plan import Plan
from meshwright.execute.process_groups import register_backend
from meshwright.launch import LaunchedRank, RankFailure, Rendezvous, connect_store, default_backend, join_process_group, leave_process_group
from meshwright.launch.worker_process import describe_fault
from meshwright.observe import Recorder, RunFolder, check_run_dir
from meshwright.orchestrate.backend_selection import has_several_backends
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.mpirun import announce_run_folder, last_step
from meshwright.orchestrate.orchestrator import LiveMonitor, Orchestrator, ProgressCallback, finish_run, say_stopped
from meshwright.orchestrate.plan_verification import choose_verified
from meshwright.orchestrate.planning_wait import announce_plan, await_plan, waiting_lines
from meshwright.orchestrate.rank_entrypoints import make_rank_check, train_rank
from meshwright.orchestrate.run_inputs import require_fit, run_folder
from meshwright.orchestrate.verified_run import with_verified_plan

_PLANNING_TIMEOUT_S = 1e9  # MPI_Init waits for rank 0 while it plans: mpirun ends every rank if it dies


def train_on_launched_ranks(
    config: RunConfig, launched: LaunchedRank, environ: Mapping[str, str], console: Console, log_progress: ProgressCallback
) -> dict[str, Any] | None:
    """Run this rank; returns the result on rank 0, None elsewhere. If planning fails on rank 0, every rank exits with its exit code."""
    launched.die_with_launcher()
    if config.nproc not in (None, launched.world):
        raise RequestError(f"--nproc {config.nproc}, but {launched.launcher} started {launched.world} ranks: leave --nproc out")
    config = config.model_copy(update={"nproc": launched.world})
    orchestrator = Orchestrator(config, _without_launcher_env(environ), log_progress)
    orchestrator.launches_ranks = False
    device = orchestrator.cluster.devices[0].kind
    backend = _resolve_backend(config, launched, device)
    orchestrator.config = config = config.model_copy(update={"backend": backend})
    backend = backend if backend != "auto" else backend_for("cpu")  # backend of the process group; MPI beside it needs no rendezvous
    rank, world = launched.rank, launched.world
    rendezvous = Rendezvous(rank, world, launched.init_method, backend, device, launched.local_rank, config.timeout_s)
    message: list[Any] = [None]
    prepared = None
    register_backend(backend, config.timeout_s if rank == 0 else _PLANNING_TIMEOUT_S)
    store = connect_store(rendezvous)
    with orchestrator:
        if rank == 0:
            try:
                check_run_dir(Path(config.run_dir))
                prepared = orchestrator.prepare()
                require_fit(prepared)
                message = [(prepared.config, prepared.alternatives)]
            except MeshwrightError as error:
                message = [error]
            announce_plan(store)
    with waiting_lines(stderr_line) if rank == 1 else nullcontext():
        if rank > 0:
            await_plan(store)
        join_process_group(rendezvous, store)
    register_backend(backend, config.timeout_s)
    job, plans = _from_rank_zero(message, launched)
    with ExitStack() as inputs:
        try:
            chosen, lines = _choose_verified(job, plans, launched, log_progress)
            if prepared is not None:
                prepared = with_verified_plan(prepared, chosen, lines)
                message = [str(inputs.enter_context(run_folder(prepared, log_progress)).path.resolve())]
        except MeshwrightError as error:
            message = [error]
        folder = RunFolder(Path(_from_rank_zero(message, launched)))
        rank_results = _train(folder, launched, console, config.log_interval)
    if (stopped := rank_results[0]["stopped"]) is not None:
        if prepared is not None:
            say_stopped(folder, stopped, log_progress)
        raise SystemExit(128 + (signal.SIGINT if stopped["signal"] == signal.SIGINT else signal.SIGTERM))
    if prepared is None:
        return None
    result = finish_run(folder, prepared, rank_results, orchestrator.phases)
    orchestrator.learn_from_run(prepared, result, len(rank_results[0]["times"]))
    return result


def _from_rank_zero(message: list[Any], launched: LaunchedRank) -> Any:
    """What rank 0 has put into `message`. If that is an error, every rank ends, and rank 0 alone raises it."""
    if launched.world > 1:
        dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], MeshwrightError):
        leave_process_group()
        if launched.rank > 0:
            raise SystemExit(message[0].exit_code)
        raise message[0]
    return message[0]


def _choose_verified(job: RunConfig, plans: list[Plan], launched: LaunchedRank, log_progress: ProgressCallback) -> tuple[Plan, list[str]]:
    """The first plan that computes what one device does, and what was found; on all ranks together."""
    if launched.world == 1 or not job.verify:
        return plans[0], []
    try:
        return choose_verified(plans, make_rank_check(job, plans[0], launched.local_rank), log_progress)
    except MeshwrightError:
        raise
    except Exception:
        exit_without_finalizing(1)
        raise


def _train(folder: RunFolder, launched: LaunchedRank, console: Console, log_interval: int) -> list[dict[str, Any]]:
    """Train as this rank; returns what every rank measured. A failure is recorded in the run folder and raised as RankFailure."""
    rank, world = launched.rank, launched.world
    if rank == 0:
        announce_run_folder(launched.supervisor, folder.path)
    lines = log_interval if rank == 0 else 0
    try:
        with LiveMonitor(folder, console, lines) if lines else nullcontext():
            measured = train_rank(rank, world, launched.init_method, str(folder.path), launched.local_rank)
        rank_results: list[Any] = [measured] * world
        if world > 1:
            dist.all_gather_object(rank_results, measured)
    except KeyboardInterrupt:
        exit_without_finalizing(130)
        raise
    except Exception as error:
        fault = describe_fault(error, rank)
        with Recorder(folder.path, rank) as recorder:
            recorder.fault(fault, last_step(folder))
        if world > 1:
            exit_without_finalizing(RankFailure(fault).exit_code)
        raise RankFailure(fault) from error
    leave_process_group()
    return rank_results


def exit_without_finalizing(code: int) -> None:
    """Have this process exit before what was registered for its exit so far: MPI_Finalize would wait for the other ranks, which wait for this one.
    The launcher ends them when this rank has exited."""

    def exit_now() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(exit_now)


def stderr_line(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)


def _resolve_backend(config: RunConfig, launched: LaunchedRank, device: str) -> str:
    """The requested backend, or the launcher's own; `auto` if both gloo and MPI can be chosen from."""
    default = default_backend(launched, device)
    is_mpi = bool(backend_traits(default).launchers)
    if has_several_backends(config) and not is_mpi:
        raise RequestError(f"{config.plan} sends some calls over mpi, and {launched.launcher} started the ranks: use mpirun, with mpi4py installed")
    if has_several_backends(config) or config.backend == "auto":
        return "auto" if is_mpi else default
    return config.backend or default


def _without_launcher_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for Meshwright's own probe workers, without the variables that would make them ranks of the outer job."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return {k: v for k, v in environ.items() if k not in names and not k.startswith(("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_"))}
