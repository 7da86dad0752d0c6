"""Ranks that torchrun, srun or mpirun started: rank 0 decides, tells the others, and all of them train."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from meshwright.core.backends import backend_for, backend_traits
from meshwright.core.errors import MeshwrightError, RequestError
from meshwright.execute.groups import make_ready
from meshwright.launch import Place, Rendezvous, default_backend, join, leave
from meshwright.observe import RunFolder, create
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.orchestrator import Live, Orchestrator, Say, finish_run, write_run
from meshwright.orchestrate.selection import is_routed
from meshwright.orchestrate.worker import train_rank


def train_adopted(config: RunConfig, place: Place, environ: Mapping[str, str], console: Console, say: Say) -> dict[str, Any] | None:
    """This rank's part; rank 0 gets the result. A decision that fails on rank 0 fails everywhere with the same line."""
    if config.nproc not in (None, place.world):
        raise RequestError(f"--nproc {config.nproc}, but {place.launcher} started {place.world} ranks: leave --nproc out")
    config = config.model_copy(update={"nproc": place.world})
    orchestrator = Orchestrator(config, _alone(environ), say)
    orchestrator.starts = False
    device = orchestrator.cluster.devices[0].kind
    backend = _backend(config, place, device)
    orchestrator.config = config = config.model_copy(update={"backend": backend})
    backend = backend if backend != "auto" else backend_for("cpu")  # by which ranks meet; MPI beside it knows its ranks
    make_ready(backend, config.timeout_s)
    message: list[Any] = [None]
    prepared = None
    with orchestrator:
        if place.rank == 0:
            try:
                prepared = orchestrator.prepare()
                if not prepared.estimate.fits:
                    raise RequestError(prepared.why.replace("\n", " "))
                folder = create(Path(config.run_dir), config.name, prefix=prepared.task.name)
                write_run(folder.path, prepared)
                message = [str(folder.path.resolve())]
            except MeshwrightError as error:
                message = [error]
    join(Rendezvous(place.rank, place.world, place.meeting, backend, device, place.local_rank, config.timeout_s))
    try:
        if place.world > 1:
            dist.broadcast_object_list(message, src=0)
        if isinstance(message[0], MeshwrightError):
            if place.rank > 0:
                raise SystemExit(message[0].exit_code)  # rank 0 says it, once
            raise message[0]
        lines = config.log_interval if place.rank == 0 else 0
        with Live(RunFolder(Path(message[0])), console, lines) if lines else nullcontext():
            measured = train_rank(place.rank, place.world, place.meeting, message[0], place.local_rank)
        every: list[Any] = [measured]
        if place.world > 1:
            every = [None] * place.world
            dist.all_gather_object(every, measured)
    finally:
        leave()
    if prepared is None:
        return None
    result = finish_run(RunFolder(Path(message[0])), prepared, every)
    orchestrator.learn(prepared, result, len(every[0]["times"]))
    return result


def _backend(config: RunConfig, place: Place, device: str) -> str:
    """What was asked for, or the launcher's own; `auto` where gloo and MPI are both there to choose from."""
    usual = default_backend(place, device)
    own = backend_traits(usual).launchers
    if is_routed(config) and not own:
        raise RequestError(f"{config.plan} sends some calls over mpi, and {place.launcher} started the ranks: use mpirun, with mpi4py installed")
    if is_routed(config) or config.backend == "auto":
        return "auto" if own else usual
    return config.backend or usual


def _alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for our own probe workers, which must not think that they are ranks of the outer job."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return {k: v for k, v in environ.items() if k not in names and not k.startswith(("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_"))}
