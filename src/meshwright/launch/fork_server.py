"""The fork server: a process that only imports torch, and from which worker processes are forked in milliseconds.

[Note: why a separate process]
A fork copies only the calling thread. The command line's process has threads by the time ranks are needed (progress display,
autograd, OpenMP), and CUDA must not be initialized before a fork; so ranks are forked from a clean process that does nothing but
import. It starts while the command line is still planning. Workers die with it (PR_SET_PDEATHSIG), and it exits when the
command line's end of the control socket closes, for whatever reason: no orphan is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# torch._dynamo: every optimizer imports it on construction.
_PRELOAD = ("torch", "torch._dynamo", "torch.distributed", "meshwright.launch.worker_process")
# Environment defaults of ranks. Kineto logs each start and stop of the profiler on stderr; torch's GPU allocator loses 5 to 20% of the memory
# to fragmentation unless its segments are expandable (docs/measured/memory.md).
RANK_DEFAULTS = {"KINETO_LOG_LEVEL": "99", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Imports create very many objects and few cycles, so garbage collection would only cost time; `run_fork_server` enables it after them.
_ENTRY_POINT = "import gc; gc.disable(); from meshwright.launch.fork_server import run_fork_server; run_fork_server()"
_MAX_MESSAGE_BYTES = 1 << 16


class ForkServer:
    """The client of a fork server process: starts it, requests workers, and receives reports of their exits."""

    def __init__(self, threads: int, environ: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        self.threads = threads
        self.control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ENTRY_POINT, str(server_end.fileno()), *preload],
            pass_fds=(server_end.fileno(),),
            env={**RANK_DEFAULTS, **environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C in the terminal reaches only the command line, which stops the rest in order
            stdin=subprocess.DEVNULL,
        )
        server_end.close()

    def spawn(self, log: str | None) -> tuple[int, socket.socket]:
        """Fork one worker; returns its pid and the socket connected to it."""
        peer, worker_end = socket.socketpair()
        socket.send_fds(self.control, [json.dumps({"log": log}).encode()], [worker_end.fileno()])
        worker_end.close()
        while "pid" not in (reply := self.next_report()):
            pass
        return int(reply["pid"]), peer

    def next_report(self) -> dict[str, Any]:
        """Block for {'pid': …} or {'ended': pid, 'status': …}; ConnectionError when the fork server has exited."""
        data = self.control.recv(_MAX_MESSAGE_BYTES)
        if not data:
            raise ConnectionError("the fork server has exited")
        return json.loads(data)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.control.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_fork_server() -> None:
    """The main loop of the fork server process: import, then fork on request until the control socket closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in (*_PRELOAD, *sys.argv[2:]):
        importlib.import_module(name)
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
            message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 1)
            if not message:
                break
            _fork_worker(json.loads(message), descriptors[0], control, children)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap_workers(children: set[int], control: socket.socket) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            with contextlib.suppress(OSError):
                control.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def _fork_worker(request: dict[str, Any], descriptor: int, control: socket.socket, children: set[int]) -> None:
    fork_server = os.getpid()
    pid = os.fork()
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
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
        from meshwright.launch.worker_process import serve_calls

        code = serve_calls(socket.socket(fileno=descriptor))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def die_with_parent(parent: int) -> None:
    """On Linux, have the kernel kill this process when its parent dies. Elsewhere workers exit when their socket closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
