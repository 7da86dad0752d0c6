"""The private folder in memory (tmpfs) that holds a run's snapshots: made by the supervisor, removed whatever dies.

[Note: whose folder it is]
Its name has the supervisor's process id and start time, and the namespace in which that id is one. The supervisor removes it when the run ends; the
fork server does where the supervisor was killed; and where both were, the next run on the machine finds that its owner is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.core.quantities import show_bytes
from meshwright.describe.discover import available_memory

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"meshwright-(\d+)-(\d+)-(\d+)-\w+")  # namespace, process, its start time
_REMOVAL_PATIENCE_S = 2.0


@contextmanager
def snapshot_folder(parent: Path = SHARED_MEMORY) -> Iterator[Path]:
    """A folder that only this user can read, until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"meshwright-{_namespace()}-{os.getpid()}-{_start_time(os.getpid())}-", dir=parent))  # with mode 0700
    try:
        yield folder
    finally:
        remove_folder(folder)


def lack_of_room(state_bytes: int, ranks_bytes: int, parent: Path = SHARED_MEMORY) -> str:
    """Why snapshots of so many bytes cannot be kept beside ranks that are to take `ranks_bytes` of this memory; empty if they can."""
    if not _is_in_memory(parent):
        return f"{parent} is no file system in memory"
    try:
        free = shutil.disk_usage(parent).free
    except OSError as error:
        return f"{parent}: {(error.strerror or str(error)).lower()}"
    needed = 2 * state_bytes + (1 << 20)  # one is replaced when the next is whole
    if free < needed:
        return f"they need {show_bytes(needed)}, and {show_bytes(free)} are free in {parent}"
    needed += state_bytes + ranks_bytes  # training waits only until the state is copied
    available = available_memory()
    return f"with the ranks they need {show_bytes(needed)}, and {show_bytes(available)} of memory are free" if available < needed else ""


def remove_stale(parent: Path = SHARED_MEMORY) -> None:
    """Remove this user's folders whose owner is gone."""
    try:
        folders = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return
    for folder in folders:
        if _is_stale(folder):
            remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder into which a process that is being killed may still write."""
    deadline = time.monotonic() + _REMOVAL_PATIENCE_S
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists() or time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _is_stale(folder: Path) -> bool:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    namespace, pid, started = match.groups()
    with contextlib.suppress(OSError):
        status = folder.lstat()
        return status.st_uid == os.getuid() and namespace == _namespace() and started != _start_time(int(pid))
    return False


def _namespace() -> str:
    """The number of the namespace in which process ids are unique: containers may share /dev/shm and not their processes."""
    try:
        return "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))
    except OSError:
        return "0"


def _start_time(pid: int) -> str:
    """When a process was started, in ticks since the machine was; empty if there is none, or it has ended and nobody has asked how."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _is_in_memory(folder: Path) -> bool:
    """Whether a tmpfs is mounted at the folder."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    return any(mount[1] == str(folder) and mount[2] in ("tmpfs", "ramfs") for mount in mounts) and os.access(folder, os.W_OK | os.X_OK)
