"""Faults done to real runs: each row of the table in docs/faults.md is done, and what happens is what the row says."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.procs.fault_cases import (
    FAULTY_TASK,
    LAUNCH_SCRIPT,
    MESHWRIGHT,
    PATIENCE_S,
    Outcome,
    Run,
    await_condition,
    finish,
    send,
    start_run,
    wait_for_end,
)

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
pytestmark = pytest.mark.timeout(900)  # a busy machine is no failure
SHORT = 150  # steps of a run that a fault does not end


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    fault: str
    hits: str
    seen: str
    seconds: str
    exit: int
    left: frozenset[str]


def table_rows() -> list[Row]:
    text = PAGE.read_text().partition("## Over MPI")[0]
    lines = [line.strip().strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [Row(c[0], c[1], c[2], c[3], int(c[4]), frozenset(c[5].split(", ")) - {"nothing"}) for c in cells]


Case = Callable[[Path], Outcome]


def signalled(number: signal.Signals, to: str, *words: str, times: int = 1, **kwargs: int) -> Case:
    return lambda place: finish(start_run(place, *words, **kwargs), send(number, to, times))


def stopped_for_a_while(to: str) -> Case:
    """The run goes on while a process is stopped; the supervisor is woken once the ranks have gone on."""

    def act(run: Run) -> None:
        send(signal.SIGSTOP, to)(run)
        if to == "supervisor":
            run.await_steps(5)
            send(signal.SIGCONT, to)(run)

    return lambda place: finish(start_run(place, steps=SHORT), act)


def misbehaving(fault: str, *words: str) -> Case:
    def case(place: Path) -> Outcome:
        (place / "faulty.py").write_text(FAULTY_TASK)
        return wait_for_end(start_run(place, "--set", "profile=false", *words, model="faulty.py:task", environ={"FAULT": fault}))

    return case


def set_limit(pid: int, which: int, value: int) -> None:
    resource.prlimit(pid, which, (value, resource.getrlimit(which)[1]))


def full_disk(to: str) -> Case:
    """A limit on the size of files: a write fails as on a full disk. Space returns to a rank before the run ends."""

    def act(run: Run) -> None:
        pid = run.process.pid if to == "supervisor" else run.rank(0)
        if to == "one rank":
            run.await_steps(20)  # metrics outgrow stderr, which is a file here and stays below the limit
        stderr_bytes = 2400  # room for the messages, and not for a result
        set_limit(pid, resource.RLIMIT_FSIZE, stderr_bytes if to == "supervisor" else (run.folder / "metrics.jsonl").stat().st_size)
        if to == "one rank":
            await_condition(lambda: "dropped" in run.stderr() or run.process.poll() is not None)
            assert run.process.poll() is None, run.stderr()[-3000:]
            set_limit(pid, resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            await_condition(lambda: any(e["kind"] == "dropped" for e in run.events()) or run.process.poll() is not None)
            assert any(e["kind"] == "dropped" and e["data"]["records"] > 0 for e in run.events())

    return lambda place: finish(start_run(place, steps=SHORT if to == "supervisor" else 4 * SHORT), act)


def refused(*words: str, limit: Callable[[], None] | None = None) -> Case:
    """A command that ends before a run."""

    def case(place: Path) -> Outcome:
        (place / "file").write_text("")
        command = [*MESHWRIGHT, "train", "gpt-tiny", "--nproc", "2", "--steps", "3", *words]
        return bare(command, place, limit)

    return case


def bare(command: list[str], place: Path, limit: Callable[[], None] | None = None) -> Outcome:
    temporary = place / "tmp"
    temporary.mkdir()
    start = time.monotonic()
    env = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=PATIENCE_S, env=env, preexec_fn=limit, check=False)
    left = {"run folder" for _ in place.glob("runs/*")} | {"temporary folder" for _ in temporary.glob("meshwright-*")}
    return Outcome(done.returncode, time.monotonic() - start, done.stderr, [], [], left)


def limited_launch(limit: str, warm: bool) -> Case:
    return lambda place: bare([sys.executable, "-c", LAUNCH_SCRIPT.format(limit=limit, warm=warm)], place)


CASES: dict[tuple[str, str], Case] = {
    ("SIGINT", "supervisor"): signalled(signal.SIGINT, "supervisor"),
    ("SIGINT twice", "supervisor"): signalled(signal.SIGINT, "supervisor", times=2),
    ("SIGINT", "fork server"): signalled(signal.SIGINT, "fork server", steps=SHORT),
    ("SIGINT", "one rank"): signalled(signal.SIGINT, "one rank", steps=SHORT),
    ("SIGTERM", "supervisor"): signalled(signal.SIGTERM, "supervisor"),
    ("SIGTERM", "fork server"): signalled(signal.SIGTERM, "fork server"),
    ("SIGTERM", "one rank"): signalled(signal.SIGTERM, "one rank"),
    ("SIGKILL", "supervisor"): signalled(signal.SIGKILL, "supervisor"),
    ("SIGKILL", "fork server"): signalled(signal.SIGKILL, "fork server"),
    ("SIGKILL", "one rank"): signalled(signal.SIGKILL, "one rank", steps=SHORT),
    ("SIGKILL, max_restarts=0", "one rank"): signalled(signal.SIGKILL, "one rank", "--set", "max_restarts=0"),
    ("SIGSTOP", "supervisor"): stopped_for_a_while("supervisor"),
    ("SIGSTOP", "fork server"): stopped_for_a_while("fork server"),
    ("SIGSTOP", "one rank"): signalled(signal.SIGSTOP, "one rank", steps=SHORT),
    ("SIGSTOP, max_restarts=0", "one rank"): signalled(signal.SIGSTOP, "one rank", "--set", "max_restarts=0"),
    ("sleep, max_restarts=0", "one rank"): misbehaving("sleep", "--set", "max_restarts=0"),
    ("sleep longer than timeout_s, hang_s=none, max_restarts=0", "one rank"): misbehaving(
        "sleep", "--set", "timeout_s=15", "--set", "hang_s=none", "--set", "max_restarts=0"
    ),
    ("exception", "one rank"): misbehaving("exception"),
    ("exit 3 in every generation", "one rank"): misbehaving("exit 3", "--set", "snapshot_every=none"),
    ("disk full", "supervisor"): full_disk("supervisor"),
    ("disk full", "one rank"): full_disk("one rank"),
    ("read-only run folder", "supervisor"): refused("--run-dir", "file/runs"),
    ("descriptor limit", "supervisor"): limited_launch("limit(0, resource.RLIMIT_NOFILE, 64)", warm=True),
    ("descriptor limit", "fork server"): limited_launch("limit(server._process.pid, resource.RLIMIT_NOFILE, 3)", warm=True),
    ("descriptor limit", "one rank"): misbehaving("descriptors"),
    ("memory limit", "supervisor"): refused(limit=lambda: resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20))),
    ("memory limit", "fork server"): limited_launch("limit(server._process.pid, resource.RLIMIT_AS, 100 << 20)", warm=False),
    ("memory limit", "one rank"): misbehaving("memory"),
}
QUICK = {
    ("SIGINT twice", "supervisor"),
    ("SIGTERM", "supervisor"),
    ("SIGKILL", "fork server"),
    ("read-only run folder", "supervisor"),
    ("descriptor limit", "supervisor"),
    ("SIGKILL", "one rank"),
    ("exit 3 in every generation", "one rank"),
    ("SIGSTOP", "one rank"),
    ("sleep, max_restarts=0", "one rank"),
}


def test_the_table_has_a_row_for_each_case() -> None:
    assert sorted((row.fault, row.hits) for row in table_rows()) == sorted(CASES)


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=[] if (r.fault, r.hits) in QUICK else [pytest.mark.prove], id=f"{r.fault}, {r.hits}") for r in table_rows()]
)
def test_a_fault_does_what_the_table_says(row: Row, tmp_path: Path, measured: None) -> None:
    outcome = CASES[row.fault, row.hits](tmp_path)
    assert outcome.code % 256 == row.exit or (row.exit > 128 and outcome.code == 128 - row.exit), outcome.error[-3000:]
    for text in re.findall("`([^`]+)`", row.seen):
        assert re.search(".*".join(map(re.escape, text.split(" … "))), outcome.error), outcome.error[-3000:]
    assert outcome.error.count("Traceback") == int("traceback" in row.seen), outcome.error[-3000:]
    may_be_left = {"report"} if "twice" in row.fault else set()  # written where the second signal comes late
    assert outcome.left - may_be_left == row.left
    if "run folder" in row.left:
        assert bool(outcome.stops) == (row.exit in (130, 143))
        ranks = [fault["rank"] for fault in outcome.faults]
        restarts = 3 * ("in every generation" in row.fault) + ("restart 1" in row.seen)
        ends = row.exit == 1 and row.fault != "disk full"
        assert ranks == [1 if row.hits == "one rank" else -1] * (restarts + ends)


@pytest.mark.parametrize(
    ("number", "words", "sign"),
    [
        (signal.SIGTERM, ("plan", "llama3-405b", "--cluster", "dgx-h100:512", "--global-batch", "1024", "--seq", "8192"), "profiling"),
        pytest.param(signal.SIGINT, ("proxy", "fsdp", "--nproc", "2", "--runs", "100000"), "ranks over gloo", marks=pytest.mark.prove),
        pytest.param(signal.SIGTERM, ("bench", "comm", "--nproc", "2", "--backend", "gloo"), "measuring", marks=pytest.mark.prove),
        pytest.param(signal.SIGTERM, ("describe", "cluster", "--probe"), "measuring", marks=pytest.mark.prove),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_other_verbs_end_with_the_signals_code(number: signal.Signals, words: tuple[str, ...], sign: str, tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*MESHWRIGHT, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        seen = next((line for line in process.stderr if sign in line), None)
        assert seen, process.poll()
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(timeout=PATIENCE_S) == 128 + number
    assert "Traceback" not in rest
    assert rest.strip().splitlines()[-1].startswith("meshwright: ")
    assert not list(tmp_path.glob("meshwright-*"))


@pytest.mark.prove
def test_a_disk_that_is_really_full(tmp_path: Path, measured: None) -> None:
    """A file system of 64 KB: every step runs, the result cannot be written."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        outcome = wait_for_end(start_run(tmp_path, steps=SHORT, runs=small / "runs"))
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert outcome.code == 1
    assert "training goes on" in outcome.error or "could not be written" in outcome.error
    assert f"step {SHORT}/{SHORT}" in outcome.error or "loss 5." in outcome.error
    assert "Traceback" not in outcome.error
