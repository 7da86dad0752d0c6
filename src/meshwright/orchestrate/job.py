"""What a configuration names: the task, the data, and how many steps it takes. The orchestrator and every rank ask here."""

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
    """The model with its loss; on a file of instructions, the loss of the answers."""
    task = zoo.load(config.model, seq=config.seq, dropout=config.dropout, random_init=config.random_init)
    return zoo.instruction_task(task) if data.is_instruction_file(config.data) else task


def load_dataset(config: RunConfig, task: Task, split: Literal["train", "validation"]) -> data.Dataset:
    """The data in the task's shape. Without validation nothing is held out."""
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
    """How the model can be traced again, at another length of samples or in another precision, to see whether it then fits."""

    def shorter(length: int) -> ModelProfile:
        return trace_task(load_task(config.model_copy(update={"seq": length})), precision=precision)

    return RetraceOptions(shorter if task.tokens_per_sample else None, lambda lower: trace_task(task, precision=lower))


def resolve_job(config: RunConfig) -> tuple[RunConfig, Task]:
    """The task, and the configuration with epochs counted out in steps. What is wrong with a file of data is said here, before any rank starts."""
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
