"""Runs a function of rank_entrypoints.py on every rank, generation after generation: after a fault that a restart can mend, new ranks go on from the
freshest state. What happened is in the run folder's events."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.checkpoint_folder import FOLDER_NAME, begin_save, publish, saved_steps, step_folder
from meshwright.core.errors import RequestError
from meshwright.core.workload import OPTIMIZER_STATES
from meshwright.launch import ForkServer, RankFailure, WorkerPool
from meshwright.observe import Recorder, RunFolder, write_report
from meshwright.orchestrate.checkpoint_interval import parse_interval
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.recovery import FIRST_GENERATION, Failure, Generation, SavedState, is_restartable, judge
from meshwright.orchestrate.run_inputs import PreparedRun
from meshwright.orchestrate.snapshot_folder import SHARED_MEMORY, lack_of_room, remove_stale, snapshot_folder

_STOP_GRACE_S = 300.0  # for a save, after the first signal; a second one ends it
_TAIL_BYTES = 1 << 16  # of the metrics, in which the last step is
_MAX_CANDIDATES = 2  # states of each kind that ranks are told of: where the newest is broken they use the other


@dataclass
class Recovery:
    """How a run may go on after faults: how often in a row, with snapshots in which folder, and what its generations came to so far."""

    max_restarts: int = 0
    snapshots: Path | None = None
    before_restart: Callable[[], None] = lambda: None
    keeps_checkpoints: bool = False
    begins_again: bool = True  # where there is no state yet; a script does not, unless it has said that it goes on
    failures: list[Failure] = field(default_factory=list)
    generation: Generation = FIRST_GENERATION


@contextmanager
def prepared_recovery(
    prepared: PreparedRun, fork_server: ForkServer, log_progress: Callable[[str], None], before_restart: Callable[[], None]
) -> Iterator[Recovery]:
    """The recovery that a run's configuration asks for, with a folder for snapshots where there is room. Leaves nothing in memory."""
    config = prepared.config
    recovery = Recovery(config.max_restarts, None, before_restart, parse_interval(config.checkpoint_every)[0] != 0)
    if not config.max_restarts or parse_interval(config.snapshot_every, "snapshot_every")[0] == 0:
        yield recovery
        return
    remove_stale()
    trained = sum(t.bytes for t in prepared.profile.tensors if t.trainable)
    state_bytes = sum(t.bytes for t in prepared.profile.tensors) + OPTIMIZER_STATES[config.optimizer] * trained
    ranks_bytes = sum(prepared.estimate.memory_bytes) if prepared.plan.device == "cpu" else 0
    with contextlib.ExitStack() as stack:
        reason = lack_of_room(state_bytes, ranks_bytes)
        if not reason:
            try:
                recovery.snapshots = stack.enter_context(snapshot_folder())
            except OSError as error:
                reason = f"{SHARED_MEMORY}: {(error.strerror or str(error)).lower()}"
        if recovery.snapshots is not None:
            fork_server.remove_at_end(recovery.snapshots)
        elif config.snapshot_every != "auto":
            raise RequestError(f"snapshot_every={config.snapshot_every}: there can be no snapshots in memory: {reason}")
        else:
            log_progress(f"no snapshots in memory: {reason}; after a fault the run goes on from its newest checkpoint")
        yield recovery


@contextmanager
def script_recovery(config: RunConfig, fork_server: ForkServer) -> Iterator[Recovery]:
    """The recovery of a user's own script: from snapshots only, which its ranks take if it says that it goes on. They know whether there is room."""
    recovery = Recovery(config.max_restarts, begins_again=False)
    with contextlib.ExitStack() as stack:
        if config.max_restarts and parse_interval(config.snapshot_every, "snapshot_every")[0] != 0 and not lack_of_room(0, 0):
            remove_stale()
            with contextlib.suppress(OSError):
                recovery.snapshots = stack.enter_context(snapshot_folder())
                fork_server.remove_at_end(recovery.snapshots)
        yield recovery


def call_ranks(
    folder: RunFolder, fork_server: ForkServer, world: int, entry_point: str, kwargs: Mapping[str, Any], monitor: AbstractContextManager[None],
    recovery: Recovery,
) -> list[Any]:  # fmt: skip
    """The results of all ranks. A failure or a stop is recorded in the run folder, and its report written."""
    (folder.path / "logs").mkdir(exist_ok=True)
    try:
        with monitor:
            return _run_generations(folder, fork_server, world, entry_point, kwargs, recovery)
    except RankFailure as failure:
        _record_fault(folder, failure, recovery)
        _keep_snapshot(folder, recovery)
        with contextlib.suppress(RequestError):  # what a full disk does not take must not hide the failure
            write_report(folder)
        raise
    except KeyboardInterrupt as stop:
        with contextlib.suppress(RequestError):
            with Recorder(folder.path, 0) as recorder:
                recorder.event("stop", reason=str(stop) or "interrupted")
            if not getattr(stop, "at_once", False):
                _keep_snapshot(folder, recovery)  # ranks that were just killed could not save
                write_report(folder)
        raise


def _run_generations(
    folder: RunFolder, fork_server: ForkServer, world: int, entry_point: str, kwargs: Mapping[str, Any], recovery: Recovery
) -> list[Any]:
    target = f"meshwright.orchestrate.rank_entrypoints:{entry_point}"
    given = {"folder": str(folder.path.resolve()), **kwargs}
    recovery.generation = Generation(snapshots=str(recovery.snapshots) if recovery.snapshots is not None else None)
    while True:
        with WorkerPool(fork_server, world, logs=folder.path / "logs") as workers:
            try:
                return workers.call(target, {**given, "generation": recovery.generation}, stop_grace_s=_STOP_GRACE_S)
            except RankFailure as failure:
                may_restart = recovery.max_restarts > 0 and not workers.is_stopping and is_restartable(failure.fault)
                if not may_restart or not workers.kill():
                    raise
                recovery.generation = _next_generation(folder, failure, recovery)


def _next_generation(folder: RunFolder, failure: RankFailure, recovery: Recovery) -> Generation:
    """Record the fault and the restart, and wait before it; raises the failure that ends the run if there is to be none. No rank is alive."""
    states = saved_states(folder, recovery.snapshots)
    if not states and not recovery.begins_again:
        raise failure
    recovery.failures.append(Failure(failure.fault, steps_done(folder) if recovery.begins_again else None, states[0] if states else None))
    verdict = judge(recovery.failures, recovery.max_restarts, str(folder.path / "logs"))
    if not verdict.restarts:
        raise RankFailure(verdict.fault) from None
    _record_fault(folder, failure, recovery)
    following = replace(recovery.generation, number=recovery.generation.number + 1, states=states)
    last = recovery.failures[-1]
    with contextlib.suppress(RequestError), Recorder(folder.path, 0, generation=following.number) as recorder:
        facts = {"pid": os.getpid(), "host": socket.gethostname(), "fault_time": last.fault.time, "failed_rank": last.fault.rank}
        source = last.state.kind if last.state else "beginning"
        recorder.event("restart", last.state.step if last.state else -1, source=source, failed_at=last.step, delay_s=verdict.delay_s, **facts)
    print(f"meshwright: {verdict.line}", file=sys.stderr, flush=True)
    recovery.before_restart()
    time.sleep(verdict.delay_s)
    return following


def _record_fault(folder: RunFolder, failure: RankFailure, recovery: Recovery) -> None:
    with contextlib.suppress(RequestError), Recorder(folder.path, max(failure.fault.rank, 0), generation=recovery.generation.number) as recorder:
        recorder.fault(failure.fault, steps_done(folder) - 1)


def _keep_snapshot(folder: RunFolder, recovery: Recovery) -> None:
    """Make the newest snapshot of a run that failed a checkpoint, where it is the freshest state and the run is to have checkpoints."""
    states = saved_states(folder, recovery.snapshots)
    if not states or states[0].kind != "snapshot" or not recovery.keeps_checkpoints:
        return
    source, root = step_folder(Path(states[0].root), states[0].step), folder.path / FOLDER_NAME
    try:
        if shutil.disk_usage(folder.path).free < sum(path.stat().st_size for path in source.iterdir()):
            return
        shutil.copytree(source, begin_save(root, states[0].step), dirs_exist_ok=True)
        publish(root, states[0].step)
    except OSError:
        return
    print(f"meshwright: step {states[0].step} is saved; to go on from it: meshwright train --resume {folder.path}", file=sys.stderr, flush=True)


def saved_states(folder: RunFolder, snapshots: Path | None) -> tuple[SavedState, ...]:
    """The states that ranks can go on from, the freshest first; of the same step a snapshot, which is read faster, before a checkpoint."""
    checkpoints = (folder.path / FOLDER_NAME).resolve()
    found = [SavedState(str(snapshots), step, "snapshot") for step in saved_steps(snapshots)[-_MAX_CANDIDATES:]] if snapshots is not None else []
    found += [SavedState(str(checkpoints), step, "checkpoint") for step in saved_steps(checkpoints)[-_MAX_CANDIDATES:]]
    return tuple(sorted(found, key=lambda state: (-state.step, state.kind != "snapshot")))


def steps_done(folder: RunFolder) -> int:
    """How many steps are finished, as far as metrics have been written, from the end of the file: of steps that are done again the later count."""
    try:
        with (folder.path / "metrics.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that is cut
            record = json.loads(line)
            if "loss" in record:
                return int(record["step"]) + 1
    return 0


def restart_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """What result.json says of each restart."""
    events, rows = folder.events(), list[dict[str, Any]]()
    records = [record for record in folder.metrics() if "loss" in record]
    for event in (e for e in events if e.kind == "restart"):
        loaded = next((e for e in events if e.kind == "resumed" and e.generation == event.generation and e.time > event.time), None)
        done = next((record for record in records if record["time"] > event.time), None)
        rows.append(
            {
                "generation": event.generation,
                "failed_rank": event.data["failed_rank"],
                "failed_at": event.data["failed_at"],
                "step": loaded.step if loaded is not None else max(event.step, 0),
                "source": loaded.data.get("source") if loaded is not None else event.data["source"],
                "seconds": done["time"] - event.data["fault_time"] if done is not None else None,
            }
        )
    return rows
