"""What worker processes do in tests of checkpoints: train and save under one plan, load and go on under another."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.checkpoint_folder import problems_of, saved_steps
from meshwright.checkpoint.manifest import read_manifest
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data
from meshwright.execute.full_state import full_state
from meshwright.execute.save_state import CheckpointSaver
from meshwright.execute.session import Session
from meshwright.execute.session_state import describe_session, restore_session
from meshwright.execute.state_digest import replica_differences, state_digest
from meshwright.launch import Rendezvous, join_process_group, leave_process_group
from tests.procs.jobs import build, global_batch, make_optimizer


@contextmanager
def _session(
    rank: int, world: int, init_method: str, plan: dict[str, Any], model: dict[str, Any], dtype: str, seed: int, **options: Any
) -> Iterator[Any]:
    """A session under a plan, its loss, and a function that takes one step and returns its loss."""
    torch.set_num_threads(1)
    told, kind = from_data(Plan, plan, "plan").for_rank(rank), getattr(torch, dtype)
    join_process_group(Rendezvous(rank, world, init_method, timeout_s=60))
    try:
        network, loss = build(model, kind, seed)
        optimizer = make_optimizer(options.get("optimizer", "adamw"), network)
        session = Session(told, network, optimizer, seed=7, clip=options.get("clip"))
        first, count = told.sample_range(told.mesh.data_rank(rank))

        def step() -> float:
            whole = global_batch(model, told.global_batch, session.steps_done, kind)
            return float(session.step({k: v[first : first + count] for k, v in whole.items()}, loss).loss)

        yield session, step
    finally:
        leave_process_group()


def train_and_save(
    rank: int, world: int, init_method: str, folder: str, plan: dict[str, Any], model: dict[str, Any], saves: list[int], steps: int,
    dtype: str = "float64", **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train `steps` steps and save after each of `saves`; losses, digests at the saves and at the end, and what saves reported."""
    with _session(rank, world, init_method, plan, model, dtype, 3, **options) as (session, step):
        saver = CheckpointSaver(session.applied, Path(folder), {}, lambda steps: [])
        losses, digests = [], {}
        for index in range(steps):
            losses.append(step())
            if index + 1 in saves:
                digests[index + 1] = state_digest(session.applied)
                saver.save(describe_session(session, {"note": "tests"}))
        saver.wait()
        reports = [vars(report) for report in saver.take_reports()]
        return {"losses": losses, "digests": digests, "final": state_digest(session.applied), "reports": reports}


def load_and_train(
    rank: int, world: int, init_method: str, folder: str, plan: dict[str, Any], model: dict[str, Any], steps: int, dtype: str = "float64",
    at: int | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Load a checkpoint into a model of other values, and train to `steps` steps."""
    with _session(rank, world, init_method, plan, model, dtype, 50 + rank, **options) as (session, step):
        manifest, problems = restore_session(session, Path(folder), at)
        loaded, state = state_digest(session.applied), {n: t.double().sum().item() for n, t in full_state(session.applied)}
        differences = replica_differences(session.applied)
        losses = [step() for _ in range(session.steps_done, steps)]
        return {
            "step": manifest.step, "loaded": loaded, "state": state, "differences": differences, "problems": problems, "losses": losses,
            "final": state_digest(session.applied),
        }  # fmt: skip


@contextmanager
def _broken(fault: str, disk: Path) -> Iterator[None]:
    """While active, this process's files fail: the disk reports an error when they are flushed, takes only so many bytes, is full or read-only."""
    if fault == "full":
        filler = disk / "filler"
        with filler.open("wb") as file, suppress(OSError):
            while True:
                file.write(bytes(2**16))
                file.flush()
        try:
            yield
        finally:
            filler.unlink()
    elif fault == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        try:
            yield
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    elif fault == "input/output error":
        fsync = os.fsync

        def fail(_: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.fsync = fail  # type: ignore[assignment]
        try:
            yield
        finally:
            os.fsync = fsync
    else:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_on_a_broken_disk(rank: int, world: int, init_method: str, folder: str, plan: dict[str, Any], fault: str, where: int) -> dict[str, Any]:
    """Save, save again while the files of one rank fail, and a third time; training goes on. What saves reported, and what can be loaded."""
    with _session(rank, world, init_method, plan, {"zoo": "gpt-tiny"}, "float64", 3) as (session, step):
        saver = CheckpointSaver(session.applied, Path(folder), {}, lambda steps: [])
        errors, digests = [], {}
        for index in range(3):
            step()
            with _broken(fault, Path(folder).parent) if index == 1 and rank == where else nullcontext():
                saver.save(describe_session(session, {}))
                saver.wait()
            torch.distributed.barrier()
            errors.append(next((report.error for report in saver.take_reports()), ""))
            digests[session.steps_done] = state_digest(session.applied)
        manifest, _ = restore_session(session, Path(folder))
        return {
            "errors": errors, "steps": saved_steps(Path(folder)), "left": sorted(p.name for p in Path(folder).iterdir()),
            "is_same": state_digest(session.applied) == digests[manifest.step],
            "problems": [p for s in saved_steps(Path(folder)) for p in problems_of(Path(folder) / str(s), read_manifest(Path(folder) / str(s)))],
        }  # fmt: skip


def killed_while_saving(rank: int, world: int, init_method: str, folder: str, kills: int, seed: int) -> dict[str, Any]:
    """A child saves one state after the other and is killed at a random instant; what is there afterwards must be whole, and of one step. Each child
    goes on from what the one before has left."""
    root, draws = Path(folder), random.Random(seed)
    torch.set_num_threads(1)
    network = torch.nn.Linear(256, 256)
    session = Session(Plan("test", 1, Mesh()), network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
    found: list[int] = []
    for _ in range(kills):
        save_s = _seconds_of_a_save(session, root.parent / f"{root.name}-timed")  # other work may begin or end on this machine
        pid = os.fork()
        if pid == 0:
            _save_for_ever(session, root)
        time.sleep(save_s * draws.uniform(0.2, 4.0))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for step in saved_steps(root):
            manifest = read_manifest(root / str(step))
            assert list(problems_of(root / str(step), manifest)) == [], "a checkpoint that can be seen is not whole"
        if saved_steps(root):
            manifest, problems = restore_session(session, root)
            assert problems == [] and manifest.step >= max(found, default=0), "an older one than before"
            assert all(bool((p == manifest.step).all()) for p in network.parameters()), "values of another step"
            found.append(manifest.step)
    return {"kills": kills, "steps": found, "left": sorted(path.name for path in root.iterdir())}


def _seconds_of_a_save(session: Session, root: Path) -> float:
    saver, started = CheckpointSaver(session.applied, root, {}, lambda steps: steps), time.perf_counter()
    saver.save(describe_session(session, {}))
    saver.wait()
    shutil.rmtree(root)
    return time.perf_counter() - started


def _save_for_ever(session: Session, root: Path) -> None:
    saver = CheckpointSaver(session.applied, root, {}, lambda steps: steps[:-2])
    while True:
        session.steps_done += 1
        with torch.no_grad():
            for param in session.model.parameters():
                param.fill_(session.steps_done)
        saver.save(describe_session(session, {}))
