"""Launching: the first failing rank is named once, nothing is left behind, Ctrl-C ends everything, workers die with their supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch import ForkServer, RankFailure, WorkerPool

HERE = Path(__file__).parent


def gone(pid: int, within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):  # it may end between the two
            return True
        time.sleep(0.05)
    return False


def test_the_rank_that_failed_is_named_not_the_ones_that_lost_it(fork_server: ForkServer) -> None:
    with WorkerPool(fork_server, 3) as workers, pytest.raises(RankFailure) as caught:
        workers.call("procs.behaviours:fail_on", {"who": 2}, timeout_s=120)
    assert caught.value.fault.rank == 2
    assert "planted" in caught.value.fault.message
    assert "ValueError" in caught.value.fault.traceback
    assert all(gone(pid) for pid in workers.pids)


def test_a_killed_rank_is_a_fault_and_takes_the_others_along(fork_server: ForkServer) -> None:
    with WorkerPool(fork_server, 2) as workers, pytest.raises(RankFailure) as caught:
        workers.call("procs.behaviours:die_on", {"who": 1}, timeout_s=120)
    assert caught.value.fault.rank == 1
    assert "SIGKILL" in caught.value.fault.kind
    assert all(gone(pid) for pid in workers.pids)


@pytest.mark.parametrize(("how", "kind"), [("SIGSTOP", "stopped"), ("sleep", "Timeout")])
def test_the_rank_that_others_waited_for_is_named(how: str, kind: str, fork_server: ForkServer) -> None:
    with WorkerPool(fork_server, 3) as workers, pytest.raises(RankFailure) as caught:
        workers.call("procs.behaviours:stop_on", {"who": 1, "how": how}, timeout_s=120)
    assert (caught.value.fault.rank, caught.value.fault.kind) == (1, kind)
    assert "waited for it" in caught.value.fault.message
    assert all(gone(pid) for pid in workers.pids)


def test_a_fork_server_that_dies_is_one_line(ground: Path) -> None:
    server = ForkServer(1, {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])})
    try:
        with WorkerPool(server, 2) as workers:
            threading.Timer(0.5, os.kill, (server._process.pid, signal.SIGKILL)).start()
            with pytest.raises(RankFailure, match=r"the fork server.*killed by SIGKILL") as caught:
                workers.call("procs.behaviours:hang_on", {"who": 0}, timeout_s=60)
        assert caught.value.fault.traceback == ""
        with pytest.raises(RankFailure, match="the fork server"):  # later, too: not a broken pipe
            WorkerPool(server, 1)
    finally:
        server.close()
    assert not server.folder.exists()


def test_a_rank_that_hangs_is_a_timeout(fork_server: ForkServer) -> None:
    with WorkerPool(fork_server, 2) as workers:
        workers.call("procs.behaviours:whoami", {})  # both have started: from here on, a rank that does not hang answers at once
        with pytest.raises(RankFailure, match=r"no answer from ranks \[1\]"):
            workers.call("procs.behaviours:hang_on", {"who": 1}, timeout_s=5)
    assert all(gone(pid) for pid in workers.pids)


def test_a_rank_that_swallows_sigterm_is_killed(fork_server: ForkServer) -> None:
    with WorkerPool(fork_server, 1) as workers, pytest.raises(RankFailure):
        workers.call("procs.behaviours:ignore_everything", {}, timeout_s=1)
    assert all(gone(pid) for pid in workers.pids)


def test_a_request_error_in_a_rank_stays_one_line(fork_server: ForkServer) -> None:
    with WorkerPool(fork_server, 1) as workers, pytest.raises(RankFailure) as caught:
        workers.call("procs.behaviours:refuse", {}, timeout_s=120)
    assert caught.value.exit_code == 2
    assert caught.value.fault.traceback == ""


def test_results_come_in_rank_order_and_workers_are_reused(pool: Any) -> None:
    first = pool.run("procs.behaviours:whoami", world=4)
    again = pool.run("procs.behaviours:whoami", world=2)
    assert [rank for rank, _ in first] == [0, 1, 2, 3]
    assert [pid for _, pid in again] == [pid for _, pid in first[:2]]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_their_supervisor(how: signal.Signals, tmp_path: Path) -> None:
    """However the supervisor ends, no orphan stays."""
    script = tmp_path / "supervise.py"
    script.write_text(
        "import os, sys\n"
        "from meshwright.launch import ForkServer, WorkerPool\n"
        "fork_server = ForkServer(1, os.environ)\n"
        "workers = WorkerPool(fork_server, 2)\n"
        "print(fork_server._process.pid, *workers.pids, flush=True)\n"
        "workers.call('procs.behaviours:hang_on', {'who': 0})\n"
    )
    env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3
        time.sleep(0.3)
        process.send_signal(how)
        process.wait()
    assert all(gone(pid) for pid in pids)
