"""Resolves what a configuration names: the task, the dataset and the number of steps. Used by the orchestrator and by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from meshwright import data, zoo
from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.task import Task
from meshwright.core.workload import Precision
from meshwright.describe.profile_tracer import trace_task
from meshwright.orchestrate.config import RunConfig
from meshwright.plan import RetraceOptions


def load_task(config: RunConfig) -> Task:
    """The model with its loss; for an instruction file, the loss counts the answers only."""
    task = zoo.load(config.model, seq=config.seq, dropout=config.dropout, random_init=config.random_init)
    return zoo.instruction_task(task) if data.is_instruction_file(config.data) else task


def load_dataset(config: RunConfig, task: Task, split: Literal["train", "validation"]) -> data.Dataset:
    """The dataset in the task's shape. Without validation no samples are held out."""
    local = Path(config.model.removeprefix("hf:")) if config.model.startswith("hf:") else None
    return data.load(
        config.data or task.data,
        task.fields,
        split=split,
        folder=Path(config.data_dir) if config.data_dir else None,
        seed=config.seed,
        tokenizer=local if local is not None and local.is_dir() else None,
        hold_out=config.validate_batches > 0,
    )


def make_retrace(config: RunConfig, task: Task, precision: Precision) -> RetraceOptions:
    """Functions that trace the model again with shorter samples or a lower precision, to find out whether it then fits."""

    def shorter(length: int) -> ModelProfile:
        return trace_task(load_task(config.model_copy(update={"seq": length})), precision=precision)

    return RetraceOptions(shorter if task.tokens_per_sample else None, lambda lower: trace_task(task, precision=lower))


def resolve_job(config: RunConfig) -> tuple[RunConfig, Task]:
    """The configuration with epochs converted to steps, and the task. Errors in a data file are raised here, before any rank starts."""
    task = load_task(config)
    if config.epochs is None and not data.is_instruction_file(config.data):
        return config, task
    length = len(load_dataset(config, task, "train"))
    if config.epochs is None:
        return config, task
    batch = Plan.load(Path(config.plan)).global_batch if config.plan != "auto" else config.global_batch or task.global_batch
    if length < batch:
        name = config.data or task.data
        raise RequestError(f"{name} has {length} samples, less than one global batch of {batch}: use --global-batch {length} or less, or more data")
    return config.model_copy(update={"steps": config.epochs * (length // batch), "epochs": None}), task
