"""Launching, without processes: whose rank we are by the environment, and how a failure is told."""

from __future__ import annotations

import pickle
import re
import socket
import threading

import pytest

from meshwright.core.errors import RequestError, RunError
from meshwright.core.event import Fault
from meshwright.launch import LaunchedRank, RankFailure, detect_launched_rank
from meshwright.launch.worker_process import describe_fault, receive_message, send_message

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node0-12345@1",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
}  # fmt: skip
ALL = {"torchrun": TORCHRUN, "mpirun": MPIRUN, "mpich": MPICH, "srun": SRUN}


@pytest.mark.parametrize("launcher", ALL)
def test_each_launcher_says_who_we_are(launcher: str) -> None:
    place = detect_launched_rank({"HOME": "/root", **ALL[launcher]})
    assert place is not None
    assert (place.rank, place.world, place.local_rank, place.local_world, place.launcher) == (3, 8, 1, 2, launcher)
    assert (place.run, place.plan) == ("", "")


def test_a_plain_process_is_nobodys_rank() -> None:
    assert detect_launched_rank({}) is None
    assert detect_launched_rank({"HOME": "/root", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}) is None


def test_a_batch_scripts_own_shell_is_no_rank() -> None:
    """sbatch sets SLURM_PROCID=0 for the script itself; only srun makes a step."""
    shell = {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}
    assert detect_launched_rank(shell) is None


def test_torchrun_inside_an_allocation_is_torchruns() -> None:
    place = detect_launched_rank({**SRUN, "SLURM_PROCID": "0", **TORCHRUN})
    assert place is not None
    assert (place.launcher, place.rank) == ("torchrun", 3)


def test_srun_with_pmi2_is_still_srun() -> None:
    place = detect_launched_rank({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "8"})
    assert place is not None
    assert (place.launcher, place.local_rank) == ("srun", 1)


def test_tasks_per_node_may_be_written_with_a_count() -> None:
    place = detect_launched_rank({**SRUN, "SLURM_NTASKS_PER_NODE": "2(x4)"})
    assert place is not None
    assert place.local_world == 2


def test_what_is_left_out_is_taken_from_one_machine() -> None:
    place = detect_launched_rank({"RANK": "1", "WORLD_SIZE": "4"})
    assert place is not None
    assert (place.local_rank, place.local_world) == (1, 4)


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({**TORCHRUN, "RANK": "first"}, "RANK=first"),
        ({**TORCHRUN, "WORLD_SIZE": "8.0"}, "WORLD_SIZE=8.0"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE="),
        ({**MPIRUN, "OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK=x"),
        ({**SRUN, "SLURM_NTASKS": "many"}, "SLURM_NTASKS=many"),
    ],
)
def test_numbers_that_are_not_numbers_are_named(environ: dict[str, str], names: str) -> None:
    with pytest.raises(RequestError, match=re.escape(names)):
        detect_launched_rank(environ)


@pytest.mark.parametrize(("name", "launcher"), [("LOCAL_RANK", "torchrun"), ("LOCAL_WORLD_SIZE", "torchrun"), ("SLURM_NTASKS_PER_NODE", "srun")])
def test_a_local_number_that_is_not_one_is_named(name: str, launcher: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"{name}=two")):
        detect_launched_rank({**ALL[launcher], name: "two"})


@pytest.mark.parametrize(("rank", "world"), [("8", "8"), ("-1", "8"), ("0", "0"), ("0", "-2")])
def test_a_rank_outside_its_world_is_refused(rank: str, world: str) -> None:
    with pytest.raises(RequestError):
        detect_launched_rank({**TORCHRUN, "RANK": rank, "WORLD_SIZE": world})


# Where ranks meet


def test_torchruns_agent_holds_the_store() -> None:
    assert detect_launched_rank(TORCHRUN).init_method == "env://"  # type: ignore[union-attr]


@pytest.mark.parametrize("launcher", ["mpirun", "mpich", "srun"])
def test_an_address_that_is_given_is_used(launcher: str) -> None:
    place = detect_launched_rank({**ALL[launcher], "MASTER_ADDR": "node7", "MASTER_PORT": "1234"})
    assert place is not None
    assert place.init_method == "tcp://node7:1234"


@pytest.mark.parametrize(
    ("launcher", "rank", "job"), [("mpirun", "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE"), ("srun", "SLURM_PROCID", "SLURM_JOB_ID")]
)
def test_without_one_all_ranks_of_a_job_find_the_same_and_other_jobs_another(launcher: str, rank: str, job: str) -> None:
    def init_method(**changes: str) -> str:
        place = detect_launched_rank({**ALL[launcher], **changes})
        assert place is not None
        return place.init_method

    first = init_method(**{rank: "0"})
    assert first == init_method(**{rank: "5"})
    assert first != init_method(**{job: "another-job"})
    port = re.fullmatch(r"tcp://127\.0\.0\.1:(\d+)", first)
    assert port is not None
    assert 1024 < int(port[1]) < 65536


def test_our_own_supervisor_says_where_and_what() -> None:
    ours = {"MESHWRIGHT_INIT_METHOD": "file:///tmp/x", "MESHWRIGHT_RUN": "/runs/a", "MESHWRIGHT_PLAN": "auto"}
    place = detect_launched_rank({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **ours})
    assert place == LaunchedRank(0, 2, 0, 2, "file:///tmp/x", "torchrun", "/runs/a", "auto")


# Failures


def failure(error: Exception) -> Fault:
    try:
        raise error
    except Exception as raised:
        return describe_fault(raised, 3)


def test_a_fault_says_who_what_and_where() -> None:
    fault = failure(ValueError("first line\nsecond line"))
    assert (fault.rank, fault.kind, fault.message, fault.secondary) == (3, "ValueError", "first line", False)
    assert "Traceback" in fault.traceback
    assert "second line" in fault.traceback
    assert "test_launch.py" in fault.traceback


def test_an_error_without_words_is_called_by_its_name() -> None:
    assert failure(KeyError()).message == "KeyError"


def test_the_first_line_with_words_is_the_message() -> None:
    assert failure(RuntimeError("\nout of cheese")).message == "out of cheese"


@pytest.mark.parametrize("error", [RequestError("use --nproc 2"), RunError("it broke")])
def test_what_we_say_on_purpose_needs_no_traceback(error: Exception) -> None:
    fault = failure(error)
    assert fault.traceback == ""
    assert fault.message == str(error)


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5023",
        "writev [127.0.0.1]:5023: Connection reset by peer",
        "[Errno 32] Broken pipe",
        "Timed out waiting 120000ms for recv operation to complete",
    ],
)
def test_a_lost_peer_is_not_the_cause(text: str) -> None:
    assert failure(RuntimeError(text)).secondary
    assert not failure(RuntimeError("CUDA out of memory")).secondary


def test_a_rank_failure_exits_as_its_cause_would() -> None:
    wrong, broken = RankFailure(failure(RequestError("use --nproc 2"))), RankFailure(failure(ValueError("x")))
    assert wrong.exit_code == 2
    assert broken.exit_code == 1
    assert str(broken) == "rank 3 failed: ValueError: x"


# Messages between supervisor and worker


VALUES = {"none": None, "dict": {"a": [1, 2.5, "x"]}, "large": b"\0" * 3_000_000, "fault": ("failed", Fault(1.0, 2, "k", "m"))}


@pytest.mark.parametrize("name", VALUES)
def test_values_cross_a_socket_whole(name: str) -> None:
    value = VALUES[name]
    a, b = socket.socketpair()
    with a, b:
        sender = threading.Thread(target=send_message, args=(a, value))
        sender.start()
        assert receive_message(b) == value
        sender.join()


def test_a_closed_socket_is_the_end() -> None:
    a, b = socket.socketpair()
    a.close()
    with b, pytest.raises(EOFError):
        receive_message(b)


def test_half_a_message_is_the_end_too() -> None:
    a, b = socket.socketpair()
    data = pickle.dumps("whole")
    a.sendall((len(data)).to_bytes(8, "big") + data[:-2])
    a.close()
    with b, pytest.raises(EOFError):
        receive_message(b)
