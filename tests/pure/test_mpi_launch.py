"""Ranks under mpirun: which rank failed, which ports a job of one node opens, what is recorded, and how ranks wait while rank 0 plans."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.core.errors import RunError
from meshwright.core.event import Fault
from meshwright.launch import LaunchedRank, RankFailure, detect_launched_rank, mpi_launcher
from meshwright.launch.mpi_launcher import MpirunExit, find_fault, is_one_node, strip_exit_banners
from meshwright.observe import Recorder, RunFolder
from meshwright.orchestrate import mpirun, planning_wait

RULE = "-" * 74 + "\n"
KILLED = [RULE, "prterun noticed that process rank 1 with PID 10235 on node vm exited on\n", "signal 9 (Killed).\n", RULE]
EXITED = [
    RULE, "prterun detected that one or more processes exited with non-zero status,\n",
    "thus causing the job to be terminated. The first process to do so was:\n", "\n",
    "   Process name: [prterun-vm-10277@1,3]\n", "   Exit code:    2\n", RULE,
]  # fmt: skip
LATE = "meshwright: rank 1 did not arrive at all_reduce number 7 of world within 20 s; 1 ranks waited\n"


@pytest.mark.parametrize(
    ("lines", "code", "rank", "kind"),
    [
        (KILLED, 137, 1, "killed by SIGKILL"),
        (EXITED, 2, 3, "exit 2"),
        ([LATE, *EXITED], 1, 1, "Timeout"),
        ([], -9, -1, "mpirun"),
        ([], 1, -1, "mpirun"),
    ],
)  # fmt: skip
def test_the_rank_that_failed(lines: list[str], code: int, rank: int, kind: str) -> None:
    removed: list[str] = []
    shown = list(strip_exit_banners(lines, removed))
    fault = find_fault([*removed, *(line for line in shown if line == LATE)], code)
    assert fault is not None and (fault.rank, fault.kind) == (rank, kind)
    assert shown == [line for line in lines if line == LATE]
    assert find_fault([], 0) is None


def test_only_what_nobody_has_reported_is_raised() -> None:
    assert MpirunExit(0).require_reported() == 0
    assert MpirunExit(2, Fault(0.0, 1, "exit 2", "")).require_reported() == 2  # the rank printed a line
    for fault in (Fault(0.0, 1, "killed by SIGSEGV", ""), Fault(0.0, -1, "mpirun", "")):
        with pytest.raises(RankFailure):
            MpirunExit(1, fault).require_reported()


def test_ranks_of_one_node_open_no_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ompi_info").touch()
    monkeypatch.setattr(mpi_launcher, "find_mpirun", lambda: tmp_path / "mpirun")
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "OMPI_MCA_btl", *mpi_launcher._HOST_LIST_VARS):
        monkeypatch.delenv(name, raising=False)
    assert mpi_launcher.mpirun_command(2, {})[1]["OMPI_MCA_btl"] == "^tcp"
    assert mpi_launcher.mpirun_command(2, {"OMPI_MCA_btl": "self,tcp"})[1]["OMPI_MCA_btl"] == "self,tcp"
    for name, value in (("SLURM_JOB_NUM_NODES", "2"), ("PBS_NODEFILE", "hosts"), ("PRTE_MCA_prte_default_hostfile", "hosts")):
        assert "OMPI_MCA_btl" not in mpi_launcher.mpirun_command(2, {name: value})[1] and not is_one_node({name: value})
    assert is_one_node({"SLURM_JOB_NUM_NODES": "1"})


def test_a_supervised_rank_knows_its_supervisor() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "MESHWRIGHT_SUPERVISOR": "/tmp/x",
        "MESHWRIGHT_INIT_METHOD": "file:///tmp/x/r",
    }
    launched = detect_launched_rank(environ)
    assert launched is not None and (launched.supervisor, launched.init_method) == ("/tmp/x", "file:///tmp/x/r")
    LaunchedRank(0, 1, 0, 1, "", "python").die_with_launcher()  # a plain process has no launcher


def test_a_fault_is_recorded_once_with_the_last_step(tmp_path: Path) -> None:
    supervisor, path = tmp_path / "supervisor", tmp_path / "run"
    supervisor.mkdir()
    assert mpirun.read_run_folder(supervisor) is None
    with Recorder(path, 0) as recorder:
        recorder.event("start", pid=1)
        recorder.metrics({"step": 4, "step_s": 0.1, "loss": 1.0})
    mpirun.announce_run_folder(str(supervisor), path)
    run = mpirun.read_run_folder(supervisor)
    assert run == RunFolder(path)
    for _ in range(2):
        with pytest.raises(RankFailure, match="rank 1 failed: killed by SIGKILL"):
            mpirun._record_end(run, MpirunExit(137, find_fault(KILLED, 137)))
    (event,) = [e for e in run.events() if e.kind == "fault"]
    assert event.step == 4 and event.rank == 1 and (path / "report.html").exists()


def _stores() -> tuple[dist.TCPStore, dist.TCPStore]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    return server, dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))


def test_ranks_wait_for_rank_0_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_wait, "_LINE_INTERVAL_S", 0.05)
    server, client = _stores()
    said: list[str] = []

    def wait() -> None:
        with planning_wait.waiting_lines(said.append):
            planning_wait.await_plan(client)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while len(said) < 3:  # longer than one wait of the store
        time.sleep(0.01)
    assert waiting.is_alive() and "waiting for rank 0, which measures this machine and plans" in said[0]
    planning_wait.announce_plan(server)
    waiting.join(60)
    assert not waiting.is_alive()
    planning_wait.await_plan(None)  # over MPI


def test_ranks_end_when_rank_0_ends() -> None:
    server, client = _stores()
    failures: list[RunError] = []

    def wait() -> None:
        try:
            planning_wait.await_plan(client)
        except RunError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.2)
    del server
    waiting.join(60)
    assert "rank 0 ended while it planned" in str(failures[0])
