"""The configuration of a run: one flat, strict set of fields, filled from flags, `--set key=value` and JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from meshwright.core.backends import Backend
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.pipeline_schedules import PipelineSchedule
from meshwright.core.plan import Offload, Overlap
from meshwright.core.plan_checks import MAX_MICRO_BATCHES, MAX_TIMEOUT_S
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.core.sample_coupling import BatchNormMode, SampleSplit
from meshwright.core.serialization import read_json
from meshwright.core.workload import Objective
from meshwright.orchestrate import tutorial_config

# Beyond every run that can end; a larger number is a mistake, and some would overflow later.
_MAX_STEPS = 10**12
_MAX_SAMPLES = 10**9


class RunConfig(BaseModel):
    """Every setting of `train`. None means: the model's default, or the planner's choice."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field("gpt-mini", description="zoo name, hf:PATH, or package.module:factory")
    random_init: bool = Field(False, description="hf: models: random weights even where the folder holds some")
    steps: int = Field(100, ge=1, le=_MAX_STEPS, description="optimizer steps")
    epochs: int | None = Field(None, ge=1, le=_MAX_STEPS, description="passes over the data, instead of steps")
    global_batch: int | None = Field(None, ge=1, le=_MAX_SAMPLES, description="samples in one optimizer step, over all ranks")
    seq: int | None = Field(None, ge=1, le=_MAX_SAMPLES, description="tokens in a sample, for language models")
    seed: int = Field(0, ge=0, lt=2**63, description="of parameters, data order and keyed randomness")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="where the model has dropout")

    data: str | None = Field(None, description="built-in dataset, or a JSON file of instructions; the model's own by default")
    data_dir: str | None = Field(None, description="folder for mnist or cifar10")
    optimizer: Literal["adamw", "adam", "sgd", "momentum"] = "adamw"
    learning_rate: float | None = Field(None, gt=0, description="peak; the model's own, or by its width and the optimizer, unless given")
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[float, float] = Field((0.9, 0.95), description="of Adam: decay rates of its two moving averages")
    adam_eps: float = Field(1e-8, gt=0, description="of Adam: added to the denominator")
    lr_schedule: Literal["constant", "cosine"] = Field("constant", description="after the warm-up; cosine decays to zero at the last step")
    warmup_steps: int | None = Field(
        None, ge=0, le=_MAX_STEPS, description="steps over which the learning rate rises from zero; by width and depth unless given"
    )
    clip: float = Field(1.0, ge=0, description="largest gradient norm; 0: gradients are not clipped")
    validate_every: int = Field(0, ge=0, le=_MAX_STEPS, description="steps between validations; 0: once, at the end")
    validate_batches: int = Field(4, ge=0, le=_MAX_STEPS, description="global batches in one validation; 0: none")

    plan: str = Field("auto", description="auto, or a plan.json")
    strategy: str | None = Field(None, description="a function of yours that changes the best plan: FILE.py:NAME or package.module:NAME")
    mesh: str | None = Field(None, description="like dp=2 or shard=2; an axis left out is 1")
    order: str | None = Field(None, description="mesh axes from outermost to innermost, like dp,pp; the planner's choice unless given")
    nproc: int | None = Field(None, ge=1, le=65536, description="number of ranks; one for each device by default")
    devices: tuple[int | Literal["cpu"], ...] | None = Field(None, description='which devices, like [0, 2] or [0, "cpu"]')
    cluster: str = Field("here", description="to plan for: here, a machine such as dgx-h100:16, ideal[:N], or a file")
    schedule: PipelineSchedule | None = Field(None, description="order of micro-batches in a pipeline")
    placements: dict[str, str] = Field(default_factory=dict, description='tensor parallelism by layer, like {"head": "replicate"}')
    sequence: bool | None = Field(None, description="sequence parallelism: tensor-parallel ranks split activations by position between their layers")
    spatial: str | None = Field(None, description="grid of cp ranks over the last spatial dims, like 2x2 or 4x1")
    samples: SampleSplit | None = Field(None, description="keep a batch together, or apart on data ranks; together where samples are compared")
    batchnorm: BatchNormMode | None = Field(None, description="statistics of each data rank's samples (local), or of the whole batch (sync)")
    zero: Literal[0, 1, 2, 3] | None = None
    micro_batches: int | None = Field(None, ge=1, le=MAX_MICRO_BATCHES, description="gradient accumulation: micro-batches of a rank in one step")
    recompute: RecomputeMode | None = Field(None, description="of blocks in backward: none, selective (all but matmuls and attention), or full")
    recompute_layers: dict[str, RecomputeMode] = Field(default_factory=dict, description="by block; also written recompute.NAME=MODE")
    offload: Offload | None = Field(None, description="what is stored in host memory: none, or optimizer (its state)")
    precision: Literal["auto", "best", "fp64", "fp32", "bf16", "fp16", "fp8"] = Field(
        "auto", description="auto: bf16 on GPUs, fp32 on CPUs; best: the one of fp32, bf16 and fp8 that is predicted fastest"
    )
    compile: Literal["none", "blocks", "model"] | None = None
    backend: Literal[Backend, "auto"] | None = Field(None, description="by device unless given; auto: the fastest measured for each call")
    bucket_mb: float | None = Field(None, gt=0, le=1e6, description="size of a gradient bucket")
    compression: Literal["none", "bf16", "powersgd", "auto"] | None = Field(None, description="of gradients (inexact); auto: if predicted faster")
    compression_rank: int | None = Field(None, ge=1, le=65536, description="of powersgd's factors; 4 unless given")
    overlap: tuple[Overlap, ...] | None = Field(None, description='what to overlap with computation, like ["gradients", "inputs"]; [] for none')
    timeout_s: float = Field(120.0, gt=0, le=MAX_TIMEOUT_S, description="longest wait in one collective")
    objective: Objective = Field("time", description="what plans are ranked by: step time, throughput per device, memory, money or energy")
    price: float = Field(0.0, ge=0, description="of one device for one hour, for objective=money")
    watts: float = Field(0.0, ge=0, description="power of one device, for objective=energy")

    checkpoint_every: int | str = Field("auto", description="steps (500) or time (10m) between checkpoints; auto: by their cost and mtbf_h; none")
    keep_checkpoints: int = Field(2, ge=1, le=_MAX_STEPS, description="the last checkpoints that are kept, beside the one with the best validation")
    keep_every: int = Field(0, ge=0, le=_MAX_STEPS, description="also keep the checkpoints of every so many steps; 0: none")
    snapshot_every: int | str = Field(
        "auto", description="steps or time between snapshots in memory, from which a run goes on after a fault; auto; none"
    )
    max_restarts: int = Field(3, ge=0, le=_MAX_STEPS, description="of ranks after faults, without progress between them; 0: a fault ends the run")
    mtbf_h: float = Field(50_000.0, gt=0, le=1e9, description="hours between failures of one device, for checkpoint_every=auto")
    resume: str | None = Field(None, description="a run's folder, or checkpoints/STEP in it: go on from there")
    init_from: str | None = Field(None, description="a folder of weights to begin with: a run's, a checkpoint, or a Hugging Face folder")
    allow_changes: bool = Field(False, description="go on although the data, the batch or another setting that samples depend on is another")
    export: bool = Field(True, description="leave the weights in the run's folder, as model/")
    run_dir: str = Field("runs", description="folder that holds runs")
    name: str | None = Field(None, description="of the run; made from the model and the time unless given")
    log_interval: int = Field(0, ge=0, le=_MAX_STEPS, description="print one line every so many steps; 0: the live view instead")
    verify: bool = Field(True, description="compare a plan that is new for the model with one device before step 1; off: trust it")
    hang_s: float | str = Field("auto", description="seconds without progress that are a hang; auto: by the time of steps; none")
    inject: tuple[str, ...] = Field((), description='faults to rehearse, like ["kill:rank=1,step=7"]')
    on_nan: Literal["stop", "skip", "rollback", "continue"] = Field(
        "stop", description="on a loss or gradient that is NaN or infinite: end; skip the step; go on from the last good state; or apply it"
    )
    digest: bool = Field(False, description="at the end, put a hash of the whole state into result.json; --json asks for it too")
    profile: bool = Field(True, description="profile one step: trace.json and the exposed communication")
    tensorboard: bool = Field(False, description="also write TensorBoard events into the run's folder")
    prometheus_port: int | None = Field(None, ge=1, le=65535, description="also serve metrics on 127.0.0.1")

    @field_validator("inject", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("hang_s")
    @classmethod
    def _positive(cls, value: float | str) -> float | str:
        if value not in ("auto", "none") and (isinstance(value, str) or value <= 0):
            raise ValueError("give seconds above 0, auto or none")
        return value

    @model_validator(mode="before")
    @classmethod
    def _reject_bool_for_number(cls, data: Any) -> Any:
        """Reject true and false for numeric fields: Python counts them as numbers, in a configuration they are mistakes."""
        for key, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(key)
            if isinstance(value, bool) and field is not None and bool not in (field.annotation, *get_args(field.annotation)):
                raise ValueError(f"{key}={str(value).lower()} is a bool: write a number or a name")
        return data


def load_config(file: Path | None, settings: dict[str, Any], count_ranks: tutorial_config.RankCounter | None = None) -> RunConfig:
    """The configuration from a file's fields, overridden by `settings`. Every wrong key or value is one line that says what to change.
    A tutorial's file (see tutorial_config.py) is translated; `count_ranks` gives the number of ranks, which such files do not state."""
    data: dict[str, Any] = {}
    settings = _merge_recompute_layers(settings)
    if file is not None:
        data = read_json(file)
        if not isinstance(data, dict):
            raise RequestError(f"{file}: a run's configuration is one JSON object")
        data = _merge_recompute_layers(data)
        if tutorial_config.is_tutorial_config(data):
            assert count_ranks is not None
            check_keys(settings, "--set", {*RunConfig.model_fields, *tutorial_config.KEYS})
            data, settings = tutorial_config.translate(data, file, settings, count_ranks)
        check_keys(data, str(file))
    check_keys(settings, "--set")
    given = {**data, **settings}
    if given.get("epochs") is not None and "steps" in given:
        raise RequestError("steps and epochs both say how long to train: leave one of them out")
    try:
        return RunConfig(**given)
    except ValidationError as error:
        key, reason = tutorial_config.first_error(error)
        where = f"{file}: " if file and key in data and key not in settings else ""
        raise RequestError(f"{where}{reason}") from None


def _merge_recompute_layers(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with each 'recompute.NAME' key moved into recompute_layers."""
    layers = {key.removeprefix("recompute."): value for key, value in settings.items() if key.startswith("recompute.")}
    rest = {key: value for key, value in settings.items() if not key.startswith("recompute.")}
    return {**rest, "recompute_layers": {**rest.get("recompute_layers", {}), **layers}} if layers else rest


def parse_setting(text: str) -> tuple[str, Any]:
    """'zero=3' → ('zero', 3); the value is parsed as JSON if possible, otherwise kept as text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise RequestError(f"--set {text}: write it as key=value")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):  # no JSON, or too deep or long for it
        return key, value


def check_keys(data: dict[str, Any], where: str, known: Iterable[str] = RunConfig.model_fields) -> None:
    known = set(known)
    for key in data:
        if key not in known:
            raise unknown_name_error("key", key, known, where)
