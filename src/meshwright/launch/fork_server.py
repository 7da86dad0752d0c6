"""The fork server: a process that only imports torch, and from which worker processes are forked in milliseconds.

[Note: why a separate process]
A fork copies only the calling thread. The command line's process has threads by the time ranks are needed (progress display,
autograd, OpenMP), and CUDA must not be initialized before a fork; so ranks are forked from a clean process that does nothing but
import. It starts while the command line is still planning. Workers die with it (PR_SET_PDEATHSIG), and it exits when the
command line's end of the control socket closes, for whatever reason: no orphan is left, and no temporary folder, nor any other
folder that it was told of (`remove_at_end`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.errors import RunError

# torch._dynamo: every optimizer imports it on construction.
_PRELOAD = ("torch", "torch._dynamo", "torch.distributed", "meshwright.launch.worker_process")
# Environment defaults of ranks. Kineto logs each start and stop of the profiler on stderr; torch's GPU allocator loses 5 to 20% of the memory
# to fragmentation unless its segments are expandable (docs/measured/memory.md).
RANK_DEFAULTS = {"KINETO_LOG_LEVEL": "99", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Imports create very many objects and few cycles, so garbage collection would only cost time; `run_fork_server` enables it after them.
_ENTRY_POINT = """
import gc, sys
gc.disable()
try:
    from meshwright.launch.fork_server import run_fork_server
except Exception as error:
    sys.exit(f"meshwright: the fork server cannot import torch: {error}")
run_fork_server()
"""
_MAX_MESSAGE_BYTES = 1 << 16
_END_PATIENCE_S = 5.0  # for killed workers to be gone, before their folders are removed


class ForkServerExited(RunError):
    """The fork server ended, and its workers with it."""


class ForkServer:
    """The client of a fork server process: starts it, requests workers, and receives reports of their exits."""

    def __init__(self, threads: int, environ: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        self.threads = threads
        self.folder = Path(tempfile.mkdtemp(prefix="meshwright-"))  # for rendezvous files; whichever process ends last removes it
        self.control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ENTRY_POINT, str(server_end.fileno()), str(self.folder), *preload],
            pass_fds=(server_end.fileno(),),
            env={**RANK_DEFAULTS, **environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C in the terminal reaches only the command line, which stops the rest in order
            stdin=subprocess.DEVNULL,
        )
        self._early_reports: deque[dict[str, Any]] = deque()  # exits that were reported while a worker was forked
        server_end.close()

    def remove_at_end(self, folder: Path) -> None:
        """Have the fork server remove a folder when this process ends, however it ends."""
        with contextlib.suppress(ConnectionError):
            self.control.send(json.dumps({"remove": str(folder)}).encode())

    def spawn(self, log: str | None) -> tuple[int, socket.socket]:
        """Fork one worker; returns its pid and the socket connected to it. ForkServerExited if the fork server has exited."""
        peer, worker_end = socket.socketpair()
        try:
            socket.send_fds(self.control, [json.dumps({"log": log}).encode()], [worker_end.fileno()])
        except ConnectionError:
            raise self._exited() from None
        finally:
            worker_end.close()
        while "pid" not in (reply := self._receive()):
            if "refused" in reply:
                raise RunError(f"{reply['refused']}: raise the limit, or start fewer ranks with --nproc")
            self._early_reports.append(reply)
        return int(reply["pid"]), peer

    @property
    def has_early_reports(self) -> bool:
        """Whether `next_report` has an answer although nothing can be read from the control socket."""
        return bool(self._early_reports)

    def next_report(self) -> dict[str, Any]:
        """Block for {'ended': pid, 'status': …}; ForkServerExited when the fork server has exited."""
        return self._early_reports.popleft() if self._early_reports else self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            data = self.control.recv(_MAX_MESSAGE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise self._exited()
        return json.loads(data)  # type: ignore[no-any-return]

    def _exited(self) -> ForkServerExited:
        """The error for an exit that was not requested: how the process ended."""
        try:
            how = describe_exit(self._process.wait(timeout=5))
        except subprocess.TimeoutExpired:
            how = "closed its socket"
        return ForkServerExited(f"the fork server, from which ranks are forked, ended ({how}), and its ranks with it")

    def close(self) -> None:
        """End the fork server and its workers. It holds no state, so it is killed."""
        self.control.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def describe_exit(code: int) -> str:
    """How a process ended, from its exit code as Python gives it: negative for a signal."""
    if code >= 0:
        return f"exit {code}{' (SIGTERM)' * (code == 128 + signal.SIGTERM)}"
    hint = "; the kernel may have ended it for lack of memory" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


def run_fork_server() -> None:
    """The fork server process: import, then fork on request until the control socket closes; then remove the temporary folder."""
    control, folders = socket.socket(fileno=int(sys.argv[1])), [sys.argv[2]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for name in (*_PRELOAD, *sys.argv[3:]):
            importlib.import_module(name)
    except Exception as error:  # such as a limit on memory or descriptors
        sys.exit(f"meshwright: the fork server cannot import {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    gc.collect()
    gc.freeze()  # memory of imported modules stays shared between workers
    gc.enable()
    children: set[int] = set()
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        sources: list[Any] = [control, wakeup_read]
        ready, _, _ = select.select(sources, [], [])
        if wakeup_read in ready:
            os.read(wakeup_read, 4096)
            _reap_workers(children, control)
        if control in ready:
            try:
                message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 1)
            except ConnectionError:  # the command line has closed its end before it read the last reports
                break
            if not message:
                break
            request = json.loads(message)
            if "remove" in request:
                folders.append(request["remove"])
            elif descriptors:
                _fork_worker(request, descriptors[0], control, children)
            else:  # the kernel drops a descriptor that would exceed the limit
                control.send(json.dumps({"refused": "cannot start a rank: Too many open files"}).encode())
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_PATIENCE_S
    while children and time.monotonic() < deadline:  # a worker that still writes would make its folder anew
        _reap_workers(children, control)
        time.sleep(0.01)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _reap_workers(children: set[int], control: socket.socket) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            with contextlib.suppress(OSError):
                control.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def _fork_worker(request: dict[str, Any], descriptor: int, control: socket.socket, children: set[int]) -> None:
    fork_server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        control.send(json.dumps({"refused": f"cannot start a rank: {error.strerror}"}).encode())
        os.close(descriptor)
        return
    if pid:
        os.close(descriptor)
        children.add(pid)
        control.send(json.dumps({"pid": pid}).encode())
        return
    code = 1
    try:
        control.close()
        die_with_parent(fork_server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if request["log"]:
            _redirect_output(request["log"])
        from meshwright.launch.worker_process import serve_calls

        code = serve_calls(socket.socket(fileno=descriptor))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class _DroppingFile(io.FileIO):
    """A log file whose writes never fail: what a full disk does not take is dropped."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def _redirect_output(path: str) -> None:
    """Send stdout and stderr to a log file; to nowhere if it cannot be opened."""
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(_DroppingFile(fd, "w", closefd=False)), line_buffering=fd == 2, errors="backslashreplace") for fd in (1, 2)
    )


def die_with_parent(parent: int) -> None:
    """On Linux, have the kernel kill this process when its parent dies. Elsewhere workers exit when their socket closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
