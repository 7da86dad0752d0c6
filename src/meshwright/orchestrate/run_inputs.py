"""A planned run, and the files in its folder that its ranks begin with: job.json, plan.json, cluster.json, ledger.json and estimate.json."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.injected_fault import FAULT_KINDS, parse_injected_faults
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes
from meshwright.core.serialization import to_data, write_json
from meshwright.core.task import Task
from meshwright.core.workload import OPTIMIZER_STATES
from meshwright.observe import RunFolder, create_run_folder
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.resume import check_resumable, checkpoints_of
from meshwright.plan import Ranking, plan_penalty
from meshwright.schedule import plan_ledgers

_INPUTS = ("job.json", "plan.json", "cluster.json", "ledger.json", "estimate.json")


@dataclass(frozen=True)
class PreparedRun:
    """A planned run that has not been launched: configuration, task, cluster, profile, plan and estimate."""

    config: RunConfig
    task: Task
    cluster: Cluster
    profile: ModelProfile
    plan: Plan
    estimate: Estimate
    why: str
    ranking: Ranking | None  # None if the plan was given
    learning_rate: str  # what the run begins with, and why: one line

    @property
    def alternatives(self) -> list[Plan]:
        """The plan, then what may run in its place; a plan that was given has no alternative."""
        return self.ranking.alternatives if self.ranking is not None else [self.plan]


def require_fit(prepared: PreparedRun) -> None:
    if not prepared.estimate.fits:
        raise RequestError(prepared.why.replace("\n", " "))


@contextmanager
def run_folder(prepared: PreparedRun, log_progress: Callable[[str], None]) -> Iterator[RunFolder]:
    """The run's folder with its inputs. A run that goes on gets its earlier inputs back if its ranks end before they have loaded its checkpoint: what
    was asked of it was wrong. Raises RequestError if the plan does not fit in memory."""
    require_fit(prepared)
    for fault in parse_injected_faults(prepared.config.inject, world=prepared.plan.world, steps=prepared.config.steps):
        log_progress(f"a fault will be injected: --inject {fault}: {FAULT_KINDS[fault.kind].what}")
    earlier = _folder_to_go_on_in(prepared)
    _check_disk(prepared, earlier.path if earlier is not None else Path(prepared.config.run_dir), log_progress)
    prefix = Path(prepared.task.name.removeprefix("hf:")).name
    folder = earlier or create_run_folder(Path(prepared.config.run_dir), prepared.config.name, prefix=prefix)
    before = {name: (folder.path / name).read_bytes() for name in _INPUTS if (folder.path / name).is_file()}
    began = time.time()
    try:
        _write_at_once(folder.path, prepared)
    except OSError as error:
        raise RequestError(f"cannot write {folder.path}: {error.strerror}; free some space, or choose another folder with --run-dir") from None
    try:
        yield folder
    except BaseException:
        if earlier is not None and not any(event.kind == "resumed" and event.time >= began for event in folder.events()):
            with contextlib.suppress(OSError):
                for name, content in before.items():
                    (folder.path / name).write_bytes(content)
        raise


def _folder_to_go_on_in(prepared: PreparedRun) -> RunFolder | None:
    """The folder of the run that goes on; None for a new run, and for one that goes on from a named checkpoint of another."""
    if prepared.config.resume is None:
        return None
    check_resumable(prepared.config, prepared.plan)
    root, step = checkpoints_of(Path(prepared.config.resume))
    folder = RunFolder(root.parent)
    if step is None and folder.status().state == "running":
        raise RequestError(f"--resume {prepared.config.resume}: the run is still running: stop it first")
    return folder if step is None else None


def _check_disk(prepared: PreparedRun, folder: Path, log_progress: Callable[[str], None]) -> None:
    """Say before the first step that no checkpoint fits on the disk; refuse if checkpoints were asked for."""
    config = prepared.config
    if config.checkpoint_every in ("none", 0):
        return
    trained = sum(t.bytes for t in prepared.profile.tensors if t.trainable)
    needed = sum(t.bytes for t in prepared.profile.tensors) + OPTIMIZER_STATES[config.optimizer] * trained
    free = shutil.disk_usage(next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())).free
    if free < needed:
        line = f"a checkpoint needs {show_bytes(needed)}, and {show_bytes(free)} are free in {folder}: free some space, or choose another --run-dir"
        if config.checkpoint_every != "auto":
            raise RequestError(f"{line}, or --set checkpoint_every=none")
        log_progress(line)


def _write_at_once(folder: Path, prepared: PreparedRun) -> None:
    """Write the inputs beside those of an earlier run, and put all of them in place when all are whole."""
    made = Path(tempfile.mkdtemp(prefix=".inputs-", dir=folder))
    try:
        write_run_inputs(made, prepared)
        for name in _INPUTS:
            os.replace(made / name, folder / name)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_run_inputs(path: Path, prepared: PreparedRun) -> None:
    """Write a run's inputs into a folder."""
    resolved = {**prepared.config.model_dump(), "global_batch": prepared.plan.global_batch, "precision": prepared.plan.memory.precision}
    write_json(path / "job.json", resolved)
    prepared.plan.save(path / "plan.json")
    write_json(path / "cluster.json", prepared.cluster)
    needs_norm = prepared.plan.memory.precision == "fp16" or prepared.config.on_nan in ("skip", "rollback")  # they look at the gradient
    write_json(path / "ledger.json", plan_ledgers(prepared.plan, prepared.profile, clip=prepared.config.clip > 0 or needs_norm, broadcasts=False))
    why = f"{prepared.why}\n{prepared.learning_rate}"
    write_json(path / "estimate.json", {"estimate": to_data(prepared.estimate), "why": why, "ranking": ranking_rows(prepared.ranking)})


def ranking_rows(ranking: Ranking | None, max_rows: int = 12) -> list[dict[str, Any]]:
    if ranking is None:
        return []
    return [
        {
            "summary": s.plan.summary(),
            "step_s": s.estimate.step_s,
            "memory_bytes": max(s.estimate.memory_bytes),
            "fits": s.estimate.fits,
            "reason": s.estimate.reason,
            "penalty": plan_penalty(s.plan, ranking.cluster) - 1.0,
        }
        for s in ranking.scored[:max_rows]
    ]
