"""The supervisor: a pool of workers that execute calls together; if one fails, the call fails with a single root cause."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import MeshwrightError, RequestError, RunError
from meshwright.core.event import Fault
from meshwright.launch.fork_server import ForkServer, ForkServerExited, describe_exit
from meshwright.launch.progress_watch import HANG, ProgressWatch
from meshwright.launch.worker_process import receive_message, send_message

_ROOT_CAUSE_GRACE_S = 2.0  # after a rank reports a lost peer: how long to wait for the peer's own report
_STOP_GRACE_S = 3.0
_KILL_PATIENCE_S = 10.0  # for the fork server to report that killed workers are gone; a GPU's memory may take a while to be freed


class RankFailure(MeshwrightError):
    """A call failed. `fault` is the root cause, not the lost connection of another rank."""

    def __init__(self, fault: Fault) -> None:
        is_request = fault.kind == RequestError.__name__
        how = f"rank {fault.rank} hangs" if fault.kind == HANG else f"rank {fault.rank} failed: {fault.kind}"
        super().__init__(fault.message if is_request or fault.rank < 0 else f"{how}: {fault.message}")
        self.fault = fault
        if is_request:
            self.exit_code = RequestError.exit_code


@dataclass
class _Worker:
    rank: int
    pid: int
    peer: socket.socket
    alive: bool = True
    ended: bool = False  # the fork server has reported its exit


class WorkerPool:
    """`count` workers forked from a fork server. Used as a context manager, it stops them all on exit."""

    def __init__(self, fork_server: ForkServer, count: int, *, logs: Path | None = None) -> None:
        self._fork_server = fork_server
        self._rendezvous_dir = Path(tempfile.mkdtemp(prefix="pool-", dir=fork_server.folder))  # rendezvous files of this pool
        self._call_count = 0
        self.is_stopping = False  # an interrupt was passed on to the workers
        self._workers: list[_Worker] = []
        try:
            for rank in range(count):
                log = str(logs / f"rank-{rank}.log") if logs and rank else None  # rank 0 writes to this process's stdout and stderr
                pid, peer = fork_server.spawn(log)
                self._workers.append(_Worker(rank, pid, peer))
        except BaseException as error:
            self.close()
            if isinstance(error, (RunError, OSError)):
                raise RankFailure(_launch_fault(error, count)) from None
            raise

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [w.pid for w in self._workers]

    def call(
        self, target: str, kwargs: Mapping[str, Any], *, world: int | None = None, timeout_s: float | None = None, stop_grace_s: float = 0.0,
        watch: ProgressWatch | None = None,
    ) -> list[Any]:  # fmt: skip
        """Run `target(rank=…, world=…, init_method=…, **kwargs)` on the first `world` workers; returns results in rank order.

        RankFailure gives the root cause; after it, the pool can only be closed. With `stop_grace_s`, an interrupt of this process asks the workers to
        end by SIGTERM, and their results are waited for; a second interrupt is raised. With `watch`, the target is also given progress=…, the folder
        in which it opens its progress page, and a rank that hangs is a failure.
        """
        workers = self._workers[:world]
        self._call_count += 1
        init_method = f"file://{self._rendezvous_dir / f'call-{self._call_count}'}"
        if watch is not None:
            kwargs = {**kwargs, "progress": str(watch.begin(self._rendezvous_dir / f"progress-{self._call_count}", len(workers)))}
        for worker in workers:
            with contextlib.suppress(ConnectionError):  # a worker that has ended is found below
                send_message(worker.peer, (target, {"rank": worker.rank, "world": len(workers), "init_method": init_method, **kwargs}))
        results: dict[int, Any] = {}
        faults: list[Fault] = []
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while len(results) < len(workers):
            try:
                self._poll([w for w in workers if w.rank not in results and w.alive], results, faults)
            except KeyboardInterrupt as stop:
                if not stop_grace_s or getattr(stop, "at_once", False):
                    raise
                self._signal_alive(signal.SIGTERM)
                self.is_stopping = True
                deadline, stop_grace_s = time.monotonic() + stop_grace_s, 0.0
            if watch is not None and not faults and (hang := watch.look([w.rank for w in workers if w.alive and w.rank not in results])):
                raise RankFailure(hang)
            if faults:
                raise RankFailure(self._root_cause(workers, results, faults))
            if deadline and time.monotonic() > deadline:
                late = [w for w in workers if w.rank not in results]
                reason = f"no answer from ranks {[w.rank for w in late]} within {timeout_s:.0f} s"
                raise RankFailure(_late_fault(late, reason))
        return [results[w.rank] for w in workers]

    def _poll(self, waiting: list[_Worker], results: dict[int, Any], faults: list[Fault]) -> None:
        """Add the results and faults that arrive within 0.1 s."""
        patience_s = 0.0 if self._fork_server.has_early_reports else 0.1
        ready, _, _ = select.select([*(w.peer for w in waiting), self._fork_server.control], [], [], patience_s)
        for worker in waiting:
            if worker.peer in ready:
                self._receive_result(worker, results, faults)
        if self._fork_server.control in ready or self._fork_server.has_early_reports:
            self._handle_report(faults)

    def _receive_result(self, worker: _Worker, results: dict[int, Any], faults: list[Fault]) -> None:
        try:
            state, value = receive_message(worker.peer)
        except (EOFError, OSError):
            worker.alive = False  # the fork server reports its exit status
            return
        if state == "done":
            results[worker.rank] = value
        else:
            faults.append(value)

    def _handle_report(self, faults: list[Fault]) -> None:
        try:
            report = self._fork_server.next_report()
        except ForkServerExited as error:
            for worker in self._workers:
                worker.alive, worker.ended = False, True
            faults.append(Fault(time.time(), -1, "fork server", str(error)))
            return
        for worker in self._workers:
            if worker.pid == report.get("ended"):
                worker.alive, worker.ended = False, True
                how, _, hint = describe_exit(int(report["status"])).partition("; ")
                faults.append(Fault(time.time(), worker.rank, how, f"the worker process ended{'; ' * bool(hint)}{hint}"))

    def _root_cause(self, workers: list[_Worker], results: dict[int, Any], faults: list[Fault]) -> Fault:
        """The first fault that is not secondary; waits briefly for one while only secondary faults are known. If there is none, ranks waited
        in vain for one that does not answer, or that came too late."""
        deadline = time.monotonic() + _ROOT_CAUSE_GRACE_S
        while all(f.secondary for f in faults) and time.monotonic() < deadline:
            answered = {*results, *(f.rank for f in faults)}
            self._poll([w for w in workers if w.alive and w.rank not in answered], results, faults)
        primary = [f for f in faults if not f.secondary]
        if primary:
            return min(primary, key=lambda f: f.time)
        first, last = min(faults, key=lambda f: f.time), max(faults, key=lambda f: f.time)
        silent = [w for w in workers if w.alive and w.rank not in {*results, *(f.rank for f in faults)}]
        if silent:
            return _late_fault(silent, f"rank {first.rank} waited for it: {first.message}")
        if _is_timeout(first) and not _is_timeout(last):
            return Fault(last.time, last.rank, "Timeout", f"it came too late: rank {first.rank} waited for it: {first.message}")
        return first

    def kill(self) -> bool:
        """SIGKILL every worker, without a grace, and wait until all are gone; False if the fork server does not report it."""
        for worker in self._workers:
            if not worker.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_PATIENCE_S
        while any(not w.ended for w in self._workers) and time.monotonic() < deadline:
            self._poll([], {}, [])
        return all(w.ended for w in self._workers)

    def close(self) -> None:
        """Stop every worker: SIGTERM, a short wait, then SIGKILL. A StopRequest that arrives meanwhile ends the wait."""
        try:
            for worker in self._workers:
                worker.peer.close()
            self._signal_alive(signal.SIGTERM)
            deadline = time.monotonic() + _STOP_GRACE_S
            while any(w.alive for w in self._workers) and time.monotonic() < deadline:
                ready, _, _ = select.select([self._fork_server.control], [], [], 0.05)
                if ready:
                    self._handle_report([])
        finally:
            self._signal_alive(signal.SIGKILL)
            shutil.rmtree(self._rendezvous_dir, ignore_errors=True)

    def _signal_alive(self, signal_number: int) -> None:
        for worker in self._workers:
            if worker.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal_number)


def _launch_fault(error: Exception, count: int) -> Fault:
    """The fault of a launch that failed before any rank ran."""
    if isinstance(error, OSError):
        error = RunError(f"cannot start {count} ranks: {error.strerror}: raise the limit (ulimit -n, ulimit -u), or start fewer with --nproc")
    return Fault(time.time(), -1, "launch", str(error))


def _late_fault(late: list[_Worker], reason: str) -> Fault:
    """The fault of the ranks that others waited for: those whose process is stopped, or else all that did not answer."""
    stopped = [w for w in late if _is_stopped(w.pid)]
    if stopped:
        return Fault(time.time(), stopped[0].rank, "stopped", f"its process is stopped (SIGSTOP, or a debugger); {reason}")
    others = f"; ranks {[w.rank for w in late]} did not answer" if len(late) > 1 else ""
    return Fault(time.time(), late[0].rank, "Timeout", reason if "no answer" in reason else f"it did not answer; {reason}{others}")


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in ("T", "t")
    except OSError:
        return False


def _is_timeout(fault: Fault) -> bool:
    return "timed out" in fault.message.lower() or "timeout" in fault.message.lower()
