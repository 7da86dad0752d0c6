"""Loads and initialises MPI once, and reports in one line what is wrong: not installed, not mpirun's library, mixed versions, a missing rank."""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from meshwright.core.errors import RequestError

INSTALL_HINT = "pip install 'meshwright[mpi]' (mpi4py and Open MPI), or pip install mpi4py beside the cluster's own MPI"
_WORLD_SIZE_VARS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # where mpirun, mpiexec or srun give the number of ranks that they started
_RANK_VARS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")

_MALLOC_KEPT_BYTES = 1 << 28, 1 << 25  # bytes that malloc keeps; the second is the most that older versions of glibc accept
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # option numbers of mallopt
_MALLOC_VARS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

timeout_s = 600.0  # longest wait for a rank; set by register()


@cache
def load() -> ModuleType:
    """mpi4py's module MPI, initialised with MPI_THREAD_MULTIPLE."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise RequestError(f"backend mpi needs mpi4py, which is not installed: {INSTALL_HINT}") from None
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"mpi4py finds no MPI library that it can use ({reason}): {INSTALL_HINT}") from None
    check_launcher(short_version(MPI), os.environ)
    tune_malloc(os.environ)
    if not MPI.Is_initialized():
        _initialise(MPI, os.environ)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RequestError(f"{short_version(MPI)} does not allow calls from several threads: use an MPI with MPI_THREAD_MULTIPLE, or {INSTALL_HINT}")
    check_world(MPI.COMM_WORLD.Get_size(), short_version(MPI), os.environ)
    _check_versions(MPI)
    return MPI


def tune_malloc(environ: Mapping[str, str]) -> bool:
    """Make malloc keep the memory that collectives free. By default glibc returns it to the kernel, which clears it page by page at the next call:
    most of the time of a 1 MB reduce-scatter (four ranks on two cores: 1.9 ms instead of 0.6). Malloc options in the environment have priority."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in environ for name in _MALLOC_VARS):
        return False
    return all(any(mallopt(option, size) for size in _MALLOC_KEPT_BYTES) for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def short_version(MPI: Any) -> str:
    """The library's name and version, such as 'Open MPI v5.0.11'."""
    return " ".join(str(MPI.Get_library_version()).replace("\0", "").splitlines()[0].split(",")[0].split())


def check_launcher(library: str, environ: Mapping[str, str]) -> None:
    """Raise RequestError if Open MPI's mpirun started this rank with an MPICH-like library: that would end the process in MPI_Init."""
    if "OMPI_COMM_WORLD_SIZE" in environ and any(vendor in library for vendor in ("MPICH", "Intel", "MVAPICH")):
        raise RequestError(
            f"Open MPI's mpirun has started this rank, but mpi4py loaded {library}: "
            "start with the mpirun of that library, or put Open MPI's library first in LD_LIBRARY_PATH"
        )


def check_world(world_size: int, library: str, environ: Mapping[str, str]) -> None:
    """Raise RequestError if the world size is not the launcher's: ranks started by one MPI that load another each see a world of one."""
    for name in _WORLD_SIZE_VARS:
        count = environ.get(name, "")
        if count.isdigit() and int(count) != world_size:
            raise RequestError(
                f"{count} ranks were started ({name}), but {library}, which mpi4py loaded, sees {world_size}: "
                "start with the mpirun of that library, or pip install the mpi4py that belongs to this mpirun"
            )


def _initialise(MPI: Any, environ: Mapping[str, str]) -> None:
    """Call MPI_Init_thread through ctypes, which releases the GIL, so that a thread can report missing ranks after the timeout.

    Before the call every rank creates a file in a folder of the job, by which ranks of one machine know of each other without MPI.
    """
    rank, world = (next((int(environ[n]) for n in names if environ.get(n, "").isdigit()), -1) for names in (_RANK_VARS, _WORLD_SIZE_VARS))
    done = threading.Event()
    job = environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID") or environ.get("SLURM_JOB_ID") or ""
    if job and rank >= 0:
        folder = Path(tempfile.gettempdir()) / f"meshwright-{os.getuid()}-{''.join(c if c.isalnum() else '-' for c in job)}"
        folder.mkdir(exist_ok=True)
        marker = folder / str(rank)
        marker.touch()
        threading.Thread(target=_report_missing_ranks, args=(done, folder, rank, world), daemon=True).start()
    provided = ctypes.c_int()
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
    done.set()
    if job and rank >= 0:
        marker.unlink(missing_ok=True)
        with suppress(OSError):  # other ranks' files are still in it, or another rank has removed it
            folder.rmdir()
    _finalize_at_exit(MPI)
    if code:
        raise RequestError(f"MPI_Init failed with code {code} in {short_version(MPI)}: check that mpirun can start a small MPI program")


def _finalize_at_exit(MPI: Any) -> None:
    """Finalise MPI at exit. A rank that ends by an error exits without it: MPI_Finalize would wait for the other ranks, which mpirun then ends."""
    failed = threading.Event()
    default_hook = sys.excepthook

    def on_error(*error: Any) -> None:
        failed.set()
        default_hook(*error)

    def finalize() -> None:
        if failed.is_set():
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(1)
        if not MPI.Is_finalized():
            MPI.Finalize()

    sys.excepthook = on_error
    atexit.register(finalize)


def _report_missing_ranks(done: threading.Event, folder: Path, rank: int, world: int) -> None:
    if done.wait(timeout_s):
        return
    started = {int(path.name) for path in folder.iterdir()}
    missing = sorted(set(range(world)) - started)
    if rank == min(started):
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else "a rank on another machine"
        print(f"meshwright: {who} of {world} did not call MPI_Init within {timeout_s:.0f} s", file=sys.stderr, flush=True)
    os._exit(1)


def _check_versions(MPI: Any) -> None:
    """Raise RequestError if the ranks do not all have the same versions of torch, Python, mpi4py and MPI."""
    import mpi4py

    own = {"torch": torch.__version__.split("+")[0], "Python": platform.python_version(), "mpi4py": mpi4py.__version__, "MPI": short_version(MPI)}
    compare_versions(MPI.COMM_WORLD.allgather(own))


def compare_versions(versions: list[dict[str, str]]) -> None:
    for package, version in versions[0].items():
        for rank, other in enumerate(versions):
            if other[package] != version:
                raise RequestError(f"rank 0 has {package} {version}, rank {rank} has {package} {other[package]}: use one environment on every rank")


@cache
def is_cuda_aware() -> bool:
    """Whether this MPI takes device memory: Open MPI and its derivatives have MPIX_Query_cuda_support, other libraries do not."""
    try:
        return bool(ctypes.CDLL(load().__file__).MPIX_Query_cuda_support())
    except AttributeError:
        return False
