"""Loading MPI once: what can be wrong with it (absent, of another make than mpirun's, of mixed versions, a rank missing) is said in one line."""

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
_WORLD_SIZE_VARS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # how mpirun, mpiexec or srun say how many ranks they started
_RANK_VARS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")

_MALLOC_KEPT_BYTES = 1 << 28, 1 << 25  # bytes that the C library keeps; as many as older ones let
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # mallopt's names
_MALLOC_VARS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

timeout_s = 600.0  # longest wait for a rank; set by register()


@cache
def load() -> ModuleType:
    """mpi4py's MPI, initialised with threads."""
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
        raise RequestError(f"{short_version(MPI)} was started without threads: build it with MPI_THREAD_MULTIPLE, or {INSTALL_HINT}")
    check_world(MPI.COMM_WORLD.Get_size(), short_version(MPI), os.environ)
    _check_versions(MPI)
    return MPI


def tune_malloc(environ: Mapping[str, str]) -> bool:
    """MPI's calls take memory and give it back, and so do ours. By itself glibc hands it on to the kernel, which clears it page by page at the next
    call: most of a sum of 1 MB that is scattered (four ranks on two cores 1.9 ms instead of 0.6). Whoever has told it what to do is left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in environ for name in _MALLOC_VARS):
        return False
    return all(any(mallopt(option, size) for size in _MALLOC_KEPT_BYTES) for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def short_version(MPI: Any) -> str:
    """'Open MPI v5.0.11', without the rest of the line."""
    return " ".join(str(MPI.Get_library_version()).replace("\0", "").splitlines()[0].split(",")[0].split())


def check_launcher(library: str, environ: Mapping[str, str]) -> None:
    """MPICH and its like end a process that Open MPI's mpirun has started, before anything can be asked of them."""
    if "OMPI_COMM_WORLD_SIZE" in environ and any(make in library for make in ("MPICH", "Intel", "MVAPICH")):
        raise RequestError(
            f"Open MPI's mpirun has started this rank, but mpi4py loaded {library}: "
            "start with the mpirun of that library, or put Open MPI's library first in LD_LIBRARY_PATH"
        )


def check_world(world_size: int, library: str, environ: Mapping[str, str]) -> None:
    """Ranks started by one MPI and joined by another each see a world of one."""
    for name in _WORLD_SIZE_VARS:
        started = environ.get(name, "")
        if started.isdigit() and int(started) != world_size:
            raise RequestError(
                f"{started} ranks were started ({name}), but {library}, which mpi4py loaded, sees {world_size}: "
                "start with the mpirun of that library, or pip install the mpi4py that belongs to this mpirun"
            )


def _initialise(MPI: Any, environ: Mapping[str, str]) -> None:
    """MPI_Init_thread through ctypes, which lets other threads run meanwhile: one of them names who did not come.

    Every rank leaves a mark in a folder of the job before it goes in, so that ranks of one machine know of each other without MPI.
    """
    rank, world = (next((int(environ[n]) for n in names if environ.get(n, "").isdigit()), -1) for names in (_RANK_VARS, _WORLD_SIZE_VARS))
    done = threading.Event()
    job = environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID") or environ.get("SLURM_JOB_ID") or ""
    if job and rank >= 0:
        folder = Path(tempfile.gettempdir()) / f"meshwright-{os.getuid()}-{''.join(c if c.isalnum() else '-' for c in job)}"
        folder.mkdir(exist_ok=True)
        mark = folder / str(rank)
        mark.touch()
        threading.Thread(target=_report_missing_ranks, args=(done, folder, rank, world), daemon=True).start()
    provided = ctypes.c_int()
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
    done.set()
    if job and rank >= 0:
        mark.unlink(missing_ok=True)
        with suppress(OSError):  # others are still in it, or have removed it
            folder.rmdir()
    _finalize_at_exit(MPI)
    if code:
        raise RequestError(f"MPI_Init failed with code {code} in {short_version(MPI)}: run mpirun with a small program first")


def _finalize_at_exit(MPI: Any) -> None:
    """Finalise when Python ends. A rank that ends by an error does not: it would wait for the others, and mpirun ends them when it is gone."""
    failed = threading.Event()
    show = sys.excepthook

    def on_error(*error: Any) -> None:
        failed.set()
        show(*error)

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
    came = {int(path.name) for path in folder.iterdir()}
    missing = sorted(set(range(world)) - came)
    if rank == min(came):
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else "a rank of another machine"
        print(f"meshwright: {who} of {world} did not arrive at MPI's start within {timeout_s:.0f} s", file=sys.stderr, flush=True)
    os._exit(1)


def _check_versions(MPI: Any) -> None:
    """All ranks run the same torch, Python and mpi4py; the library's own version is MPI's affair."""
    import mpi4py

    own = {"torch": torch.__version__.split("+")[0], "Python": platform.python_version(), "mpi4py": mpi4py.__version__, "MPI": short_version(MPI)}
    compare_versions(MPI.COMM_WORLD.allgather(own))


def compare_versions(versions: list[dict[str, str]]) -> None:
    for what, first in versions[0].items():
        for rank, other in enumerate(versions):
            if other[what] != first:
                raise RequestError(f"rank 0 has {what} {first}, rank {rank} has {what} {other[what]}: use one environment on every rank")


@cache
def is_cuda_aware() -> bool:
    """Whether this MPI takes device memory: Open MPI and its like answer MPIX_Query_cuda_support, the others have no such name."""
    try:
        return bool(ctypes.CDLL(load().__file__).MPIX_Query_cuda_support())
    except AttributeError:
        return False
