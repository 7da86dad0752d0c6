"""Ranks started by another launcher: torchrun, srun and mpirun give a process its rank in environment variables, which are read only here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.core.backends import BACKENDS, backend_for
from meshwright.core.errors import RequestError
from meshwright.launch.fork_server import die_with_parent

SUPERVISOR_VARIABLE = "MESHWRIGHT_SUPERVISOR"  # the folder in which ranks leave what their supervisor needs to know
SNAPSHOT_VARIABLES = ("MESHWRIGHT_SNAPSHOTS", "MESHWRIGHT_SNAPSHOT_EVERY")


@dataclass(frozen=True)
class LaunchedRank:
    """This process's rank in a job, and the address of the rendezvous."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    init_method: str  # an init_method for torch.distributed
    launcher: str
    run: str = ""  # the run's folder, when Meshwright's own supervisor started this process
    plan: str = ""  # "auto" or a plan.json, in the same case
    supervisor: str = ""  # the supervisor's folder, when it started this process by mpirun
    snapshots: str = ""  # the folder in memory for snapshots, when the supervisor restarts ranks after a fault
    snapshot_every: str = ""  # as the run's configuration has it

    def die_with_launcher(self) -> None:
        """Have the kernel kill this rank when its mpirun dies. torchrun and srun end their ranks themselves."""
        if self.launcher == "mpirun":
            die_with_parent(os.getppid())


# launcher → variables for rank, world, local rank, local world
_LAUNCHER_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def detect_launched_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """This process's rank, if a launcher started it; None for a plain process. A batch script's own shell is not a rank (no step id)."""
    for launcher, names in _LAUNCHER_VARIABLES.items():
        rank_var, world_var = names[:2]
        given_rank, given_world = environ.get(rank_var), environ.get(world_var)
        if launcher == "srun" and ("SLURM_STEP_ID" not in environ or environ.get("PMI_SIZE", given_world) != given_world):
            continue  # the second case: MPICH's mpiexec, which uses srun to start its own helpers
        if given_rank is not None and given_world is not None:
            defaults = (given_rank, given_world) * 2
            rank, world, local_rank, local_world = (_int_variable(environ, *pair, launcher) for pair in zip(names, defaults, strict=True))
            if not 0 <= rank < world:
                raise RequestError(f"{rank_var}={given_rank} is outside {world_var}={given_world}: {launcher}'s variables disagree")
            given = (environ.get(name, "") for name in ("MESHWRIGHT_RUN", "MESHWRIGHT_PLAN", SUPERVISOR_VARIABLE, *SNAPSHOT_VARIABLES))
            return LaunchedRank(rank, world, local_rank, local_world, _init_method(environ, launcher), launcher, *given)
    return None


def default_backend(launched_rank: LaunchedRank | None, device: str) -> str:
    """The default for the device; on CPUs the launcher's own backend, where it has one whose package is installed (MPI under mpirun)."""
    default = backend_for(device)
    if device == "cuda" or launched_rank is None or launched_rank.world == 1:
        return default
    return next((name for name, traits in BACKENDS.items() if launched_rank.launcher in traits.launchers and traits.is_installed), default)


def _int_variable(environ: Mapping[str, str], name: str, default: str, launcher: str) -> int:
    text = environ.get(name, default)
    try:
        return int(text.partition("(")[0])  # Slurm writes 2(x4) for four nodes with 2 each
    except ValueError:
        raise RequestError(f"{name}={text}: {launcher}'s variable is not a number") from None


def _init_method(environ: Mapping[str, str], launcher: str) -> str:
    """The supervisor's file; MASTER_ADDR and MASTER_PORT when given; else a port derived from the job, the same on every rank of one machine."""
    if "MESHWRIGHT_INIT_METHOD" in environ:
        return environ["MESHWRIGHT_INIT_METHOD"]
    if "TORCHELASTIC_RUN_ID" in environ:
        return "env://"  # torchrun's agent holds the store at that address already
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return f"tcp://{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    job = environ.get("SLURM_JOB_ID") or environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_orte_hnp_uri") or environ.get("PMI_JOBID") or launcher
    port = 20000 + sum(ord(c) * (i + 1) for i, c in enumerate(job)) % 20000
    return f"tcp://127.0.0.1:{port}"
