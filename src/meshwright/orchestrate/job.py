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

_VERIFIED_TOKENS = 128
_INSTRUCTION_TOKENS = 256  # of an instruction and its answer, unless given: as long as the tutorial's


def load_task(config: RunConfig) -> Task:
    """The model with its loss; for an instruction file, the loss counts the answers only."""
    task = zoo.load(config.model, seq=config.seq, dropout=config.dropout, random_init=config.random_init)
    if not data.is_instruction_file(config.data):
        return task
    if config.seq is None and not _is_own(config) and (task.tokens_per_sample or 0) > _INSTRUCTION_TOKENS:
        task = zoo.load(config.model, seq=_INSTRUCTION_TOKENS, dropout=config.dropout, random_init=config.random_init)
    return zoo.instruction_task(task)


def _is_own(config: RunConfig) -> bool:
    """Whether the model is a user's own, whose samples are as long as its factory says."""
    return ":" in config.model and not config.model.startswith("hf:")


def with_verified_samples(config: RunConfig, task: Task, plan: Plan) -> RunConfig:
    """The configuration with samples that a CPU compares in seconds: shorter ones, for language models and plans that do not depend on length."""
    tokens = _INSTRUCTION_TOKENS if data.is_instruction_file(config.data) else _VERIFIED_TOKENS  # answers come after their instructions
    depends = plan.mesh.cp > 1 or plan.tensor.is_sequence_parallel or plan.tensor.sequence_scatter_sites
    if plan.device != "cpu" or _is_own(config) or depends or (task.tokens_per_sample or 0) <= tokens:
        return config
    return config.model_copy(update={"seq": tokens})


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
