"""Batch inference: a model over a data set, on one device or on several replicas; outputs, figures and pictures go into a folder of their own."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes
from meshwright.core.serialization import to_data, write_json
from meshwright.core.task import Task
from meshwright.launch import ForkServer, WorkerPool
from meshwright.observe import RunFolder, create_run_folder
from meshwright.observe.run_folder import slug
from meshwright.plan import describe_plan
from meshwright.serve.batch_replica import DRAWN, PICTURE, BatchJob, BatchReplica, load_samples
from meshwright.serve.column_files import check_alike, join_columns, read_numbers
from meshwright.serve.config import ServeConfig
from meshwright.serve.generation import Say
from meshwright.serve.model_source import ModelSource, describe_source
from meshwright.serve.output_kinds import KINDS, Figure, known_kind
from meshwright.serve.served_model import plan_predictions

PREDICTIONS, SUMMARY = "predictions.safetensors", "summary.json"
_FOLDER = "predictions"  # of a run
_TARGET = "meshwright.serve.batch_replica:run_batch_rank"
_MAX_BATCH, _BATCH_BYTES = 256, 1 << 26  # of a batch that is not given
_FOR_TEXT = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "stop_tokens", "ignore_end", "chat", "system", "context",
    "prompt", "kv_pages", "page_tokens",
)  # fmt: skip
FOR_SAMPLES = ("data", "data_dir", "split", "samples")


@dataclass(frozen=True)
class PreparedBatch:
    """A model and the samples that it is to be run on. Nothing is loaded, and no folder made yet: those of `job` are empty."""

    source: ModelSource
    task: Task
    plan: Plan
    job: BatchJob
    run_dir: Path


@dataclass(frozen=True)
class BatchResult:
    """What came out: the folder with the files, and the figures. `loss` is None for a model without one; `nonfinite` counts samples."""

    folder: Path
    files: tuple[str, ...]
    figures: tuple[Figure, ...]
    loss: float | None
    samples: int
    batch: int
    seconds: float
    nonfinite: int
    picture_rows: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(self.seconds, 1e-9)


def prepare_batch(
    config: ServeConfig, source: ModelSource, run_dir: Path, environ: Mapping[str, str], say: Say = lambda _: None
) -> PreparedBatch:  # fmt: skip
    """Find the samples, and plan."""
    for name in _FOR_TEXT:
        if name in config.model_fields_set:
            raise RequestError(f"{name} is for models that generate text, and {source.name} computes outputs for samples: leave it out")
    task = source.load_task()
    if not task.fields:
        raise RequestError(f"{source.name}: its inputs are not known: give the module `fields`, a mapping of names to meshwright Field")
    kind = known_kind(task)
    if config.seed is not None and not (kind is not None and kind.image):
        raise RequestError(f"--seed is for what is drawn at random, and {source.name} draws nothing: leave it out")
    trained = RunFolder(Path(source.run)).job() if source.run else {}
    folder = config.data_dir or trained.get("data_dir") or ""
    job = BatchJob(
        data=str(config.data or trained.get("data") or task.data), data_dir=str(Path(folder).resolve()) if folder else "", split=config.split,
        samples=0, batch=1, replicas=1, folder="", parts="", seed=config.seed or 0,
    )  # fmt: skip
    available = len(load_samples(job, task, source.seed))
    if config.samples is not None and config.samples > available:
        other = ", or --set split=train" if job.split == "validation" else ""
        raise RequestError(f"--samples {config.samples}: the {job.split} part of {job.data} has {available:,}: give fewer{other}")
    samples = config.samples or available
    plan, replicas = plan_predictions(config, source, environ, say)
    replicas = min(replicas, samples)
    batch = min(config.batch if "batch" in config.model_fields_set else _usual_batch(task), -(-samples // replicas))
    plan = replace(plan, serve=replace(plan.serve, replicas=replicas), compile="model" if config.compile else "none")
    say(f"{source.name}: {describe_source(source)}; {describe_plan(plan)}")
    say(f"{samples:,} samples of {job.data}, its {job.split} part; {batch} at once" + f", on each of {replicas} replicas" * (replicas > 1))
    return PreparedBatch(source, task, plan, replace(job, samples=samples, batch=batch, replicas=replicas), run_dir)


def run_batch(prepared: PreparedBatch, environ: Mapping[str, str], say: Say = lambda _: None) -> BatchResult:
    """Run the model over the samples and write what it gives. What is left of an attempt that fails is removed."""
    folder = _make_folder(prepared)
    parts = folder / ".parts"
    try:
        parts.mkdir()
        found = _compute(prepared, replace(prepared.job, folder=str(folder), parts=str(parts)), environ, say)
        result = _join(prepared, found, folder, parts)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(parts)
    return result


def _usual_batch(task: Task) -> int:
    """Many samples, but not much memory."""
    sample = sum(math.prod(field.shape) * torch.empty(0, dtype=getattr(torch, field.dtype)).element_size() for field in task.fields.values())
    return max(1, min(_MAX_BATCH, _BATCH_BYTES // max(sample, 1)))


def _make_folder(prepared: PreparedBatch) -> Path:
    """In the run that trained the model; for other models, beside the runs."""
    source, job = prepared.source, prepared.job
    data = slug(f"{Path(job.data).stem}-{job.split}")
    if source.run:
        return create_run_folder(Path(source.run) / _FOLDER, data).path
    return create_run_folder(prepared.run_dir, slug(f"{Path(source.name.removeprefix('hf:')).name}-{_FOLDER}-{data}")).path


def _compute(prepared: PreparedBatch, job: BatchJob, environ: Mapping[str, str], say: Say) -> list[dict[str, Any]]:
    """What each replica's first rank returns: in this process if there is one rank, else from processes that have ended by then."""
    source, plan = prepared.source, prepared.plan
    world = plan.world * job.replicas
    if world == 1:
        return [BatchReplica(source, plan, job, 0, torch.device(plan.device_of(0, 0)), say).run()]
    fork_server = ForkServer(plan.threads or 1, environ, (_TARGET.partition(":")[0],))
    try:
        with WorkerPool(fork_server, world) as pool:
            return pool.call(_TARGET, {"source": to_data(source), "plan": to_data(plan), "job": to_data(job)})[:: plan.world]
    finally:
        fork_server.close()


def _join(prepared: PreparedBatch, found: list[dict[str, Any]], folder: Path, parts: Path) -> BatchResult:
    """One file of all replicas' outputs, and the figures."""
    columns, kinds = [replica["columns"] for replica in found], {replica["kind"] for replica in found}
    assert len(kinds) == 1, kinds
    check_alike(columns, (DRAWN,))
    join_columns(parts, columns, folder / PREDICTIONS)
    figures = tuple(KINDS[kinds.pop()].figures(read_numbers(parts, columns)))
    losses = [replica["loss"] for replica in found if replica["loss"] is not None]
    total, count = (sum(values) for values in zip(*losses, strict=True)) if losses else (0.0, 0.0)
    job = prepared.job
    result = BatchResult(
        folder, (PREDICTIONS, *((PICTURE,) if found[0]["picture_rows"] else ()), SUMMARY), figures, total / count if count else None, job.samples,
        max(replica["batch"] for replica in found), max(replica["seconds"] for replica in found), sum(replica["nonfinite"] for replica in found),
        found[0]["picture_rows"],
    )  # fmt: skip
    write_json(folder / SUMMARY, summary(prepared, result))
    return result


def summary(prepared: PreparedBatch, result: BatchResult) -> dict[str, Any]:
    """What was computed and what came out, as plain data."""
    source, job = prepared.source, prepared.job
    return {
        "model": source.name, "weights": source.checkpoint or source.weights or "random", "plan": prepared.plan.summary(), "replicas": job.replicas,
        "data": job.data, "split": job.split, "samples": result.samples, "batch": result.batch, "seed": job.seed, "loss": result.loss,
        "figures": {figure.key: figure.value for figure in result.figures}, "nonfinite_samples": result.nonfinite, "seconds": result.seconds,
        "samples_per_s": result.samples_per_s, "folder": str(result.folder), "files": list(result.files),
    }  # fmt: skip


def describe_memory(result: BatchResult) -> str:
    """How large the files are."""
    return ", ".join(f"{name} ({show_bytes((result.folder / name).stat().st_size)})" for name in result.files)
