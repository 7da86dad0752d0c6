"""Recognises configuration files of the distributed-training tutorial by their keys and translates them into fields of RunConfig.

They name a strategy and a model id instead of a mesh and a path, and leave the number of ranks and the training recipe to the program.
Both are filled in here: the translation is a complete run, and every field of it can be overridden."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError, field_validator

from meshwright import zoo
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.mesh import Mesh
from meshwright.core.serialization import show_json

_PRECISION_NAMES = {"32": "fp32", "32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16", "64": "fp64", "64-true": "fp64"}
_TUTORIAL_ONLY_KEYS = frozenset({"model_id", "global_batch_size", "gradient_acc_steps", "tp_dimensions", "dataset_id", "num_epochs"})
_TRAINING_KEYS = ("global_batch_size", "gradient_acc_steps", "dataset_id", "num_epochs", "log_interval")
# The tutorial's training recipe: AdamW without decay, 100 steps of warm-up and a cosine, every block checkpointed, no validation.
_RECIPE: dict[str, Any] = {
    "optimizer": "adamw", "learning_rate": 1e-5, "betas": (0.9, 0.95), "adam_eps": 1e-5, "weight_decay": 0.0, "warmup_steps": 100,
    "lr_schedule": "cosine", "clip": 1.0, "recompute": "full", "seq": 256, "validate_batches": 0,
}  # fmt: skip

Settings = Mapping[str, Any]
RankCounter = Callable[[int | None, tuple[int, ...] | None], int]  # (--nproc, --devices) → number of ranks
TutorialStrategy = Literal["single_device", "ddp", "fsdp", "axonn"]
PositiveInt = Annotated[StrictInt, Field(ge=1)]


class TutorialConfig(BaseModel):
    """The tutorial's fields and defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_id: str = "TinyLlama-1.1B"
    strategy: TutorialStrategy = "axonn"
    precision: str = "32"
    global_batch_size: PositiveInt = 4
    gradient_acc_steps: PositiveInt = 1
    tp_dimensions: tuple[PositiveInt, ...] = ()
    compile: StrictBool = False
    dataset_id: str = "alpaca"
    seed: Annotated[StrictInt, Field(ge=0)] = 123456
    log_interval: PositiveInt = 1
    num_epochs: PositiveInt = 1
    random_init: StrictBool = False

    @field_validator("precision", mode="before")
    @classmethod
    def _check_precision(cls, value: Any) -> str:
        text = str(value)
        if isinstance(value, bool) or text not in _PRECISION_NAMES:
            raise ValueError(f"use one of {', '.join(_PRECISION_NAMES)}")
        return text

    @field_validator("tp_dimensions")
    @classmethod
    def _check_tp_dimensions(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(value) not in (0, 3):
            raise ValueError("write three numbers, like [2, 1, 1]")
        return value

    @property
    def tp_degree(self) -> int:
        return math.prod(self.tp_dimensions)


KEYS = frozenset(TutorialConfig.model_fields)


def is_tutorial_config(data: Settings) -> bool:
    """Whether this is a tutorial configuration: it has a key that only those have, or one of their strategies."""
    return not _TUTORIAL_ONLY_KEYS.isdisjoint(data) or data.get("strategy") in get_args(TutorialStrategy)


def translate(data: Settings, file: Path, settings: Settings, count_ranks: RankCounter) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of RunConfig, the `settings` that override them). Settings may use the tutorial's keys or those of RunConfig."""
    tutorial_settings = {key: value for key, value in settings.items() if _is_tutorial_setting(key, value)}
    run_settings = {key: value for key, value in settings.items() if key not in tutorial_settings}
    tutorial = _parse(data, file, tutorial_settings)
    if not any(key in data or key in settings for key in _TRAINING_KEYS) and not {"global_batch", "epochs", "steps"} & set(run_settings):
        raise RequestError(
            f"{file} has no training keys (no global_batch_size): it is for `meshwright generate`; to train with it, add --global-batch 4"
        )
    fields = {
        **_RECIPE,
        "model": _find_model(tutorial, file),
        "random_init": tutorial.random_init,
        "data": run_settings.get("data") or _find_dataset(tutorial, file),
        "precision": _PRECISION_NAMES[tutorial.precision],
        "global_batch": tutorial.global_batch_size,
        "micro_batches": tutorial.gradient_acc_steps,
        "seed": tutorial.seed,
        "log_interval": tutorial.log_interval,
        **({} if "steps" in run_settings else {"epochs": tutorial.num_epochs}),
        **_parallel_settings(tutorial, file, run_settings, count_ranks),
    }
    return fields, run_settings


def inference_settings(data: Settings, file: Path, settings: Settings) -> dict[str, Any]:
    """The settings of `generate` that a tutorial's file and the request give: greedy answers of 256 tokens. Its three tensor dimensions are ranks
    that split the model along one."""
    tutorial_settings = {key: value for key, value in settings.items() if key in KEYS and key not in ("seed", "precision")}
    tutorial = _parse(data, file, tutorial_settings)
    own = {key: value for key, value in settings.items() if key not in tutorial_settings}
    mesh = {} if {"mesh", "nproc"} & set(own) else {"mesh": f"tp={tutorial.tp_degree}"}
    precision = _PRECISION_NAMES[tutorial.precision]
    return {"model": _find_model(tutorial, file), "random_init": tutorial.random_init, "precision": precision, "max_tokens": 256, **mesh, **own}


def first_error(error: ValidationError) -> tuple[str, str]:
    """(key, one-line message) of the first validation error."""
    first = error.errors()[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    reason = first["msg"].removeprefix("Value error, ")
    if not key:
        return key, reason
    return key, f"{'.'.join(map(str, first['loc']))}={show_json(first.get('input'))}: {reason[0].lower()}{reason[1:]}"


def _is_tutorial_setting(key: str, value: Any) -> bool:
    """Whether a setting is the tutorial's. precision, compile and strategy are keys of both configurations; the value decides."""
    if key == "precision":
        return str(value) in _PRECISION_NAMES
    if key == "strategy":
        return ":" not in str(value)
    return isinstance(value, bool) if key == "compile" else key in KEYS


def _parse(data: Settings, file: Path, settings: Settings) -> TutorialConfig:
    for key in data:
        if key not in KEYS:
            raise unknown_name_error("key", key, KEYS, str(file))
    try:
        return TutorialConfig(**{**data, **settings})
    except ValidationError as error:
        key, reason = first_error(error)
        raise RequestError(f"{'--set' if key in settings else f'{file}:'} {reason}") from None


# -- number of ranks and parallelism --


def _parallel_settings(tutorial: TutorialConfig, file: Path, run_settings: Settings, count_ranks: RankCounter) -> dict[str, Any]:
    """The mesh, ZeRO stage and compile mode. A mesh among `run_settings` is kept."""
    if tutorial.strategy != "axonn" and tutorial.tp_degree > 1:
        raise RequestError(f"{file}: tp_dimensions {list(tutorial.tp_dimensions)} is for strategy axonn, not {tutorial.strategy}: change one of them")
    if run_settings.get("mesh") is not None:
        return {"zero": 3 if tutorial.strategy == "fsdp" else 0, "compile": "blocks" if tutorial.compile else "none"}
    world = _world_size(tutorial, file, run_settings, count_ranks)
    mesh = Mesh(dp=world // tutorial.tp_degree, tp=tutorial.tp_dimensions or (1,)).canonical()
    _check_batch(tutorial, file, run_settings, mesh.data_parallel_size)
    compiled = ("model" if world == 1 else "blocks") if tutorial.compile else "none"
    if tutorial.strategy == "fsdp" and world > 1:
        return {"mesh": f"shard={world}", "zero": 3, "compile": compiled}
    return {"mesh": str(mesh), "zero": 3 if mesh.shard > 1 else 0, "compile": compiled}


def _world_size(tutorial: TutorialConfig, file: Path, run_settings: Settings, count_ranks: RankCounter) -> int:
    nproc, devices = run_settings.get("nproc"), run_settings.get("devices")
    if tutorial.strategy == "single_device":
        if nproc not in (None, 1):
            raise RequestError(f"{file}: strategy single_device has 1 rank, and --nproc is {nproc}: change strategy to ddp or fsdp")
        return 1
    world = count_ranks(nproc if isinstance(nproc, int) else None, tuple(devices) if isinstance(devices, (list, tuple)) else None)
    tp, error = tutorial.tp_degree, f"{file}: tp_dimensions {list(tutorial.tp_dimensions)} needs"
    if tp > world:
        available = f"--nproc is {world}" if nproc else f"this machine has {world} device{'s' * (world > 1)}"
        raise RequestError(f"{error} {tp} ranks, and {available}: change tp_dimensions to a product of {world} or less")
    if world % tp:
        raise RequestError(f"{error} a multiple of {tp} ranks, and there are {world}: use --nproc {world // tp * tp}")
    return world


def _check_batch(tutorial: TutorialConfig, file: Path, run_settings: Settings, data_parallel_size: int) -> None:
    """Raise RequestError unless the global batch divides by accumulation steps × data-parallel ranks."""
    batch = run_settings.get("global_batch", tutorial.global_batch_size)
    steps = run_settings.get("micro_batches", tutorial.gradient_acc_steps)
    if not isinstance(batch, int) or not isinstance(steps, int) or steps < 1 or batch < 1:
        return  # RunConfig reports this error
    divisor = steps * data_parallel_size
    if batch % divisor:
        better = " or ".join(str(n * divisor) for n in sorted({max(batch // divisor, 1), batch // divisor + 1}))
        divisors = f"{steps} gradient_acc_steps × {data_parallel_size} ranks"
        raise RequestError(f"{file}: global_batch_size {batch} is not a multiple of {divisors}: change global_batch_size to {better}")


# -- local models and datasets --


def _find_model(tutorial: TutorialConfig, file: Path) -> str:
    """'hf:FOLDER' for a local folder, 'hf:NAME' for a published size; the folder must hold weights unless random_init is set."""
    name = tutorial.model_id
    folder = _find_path(name, file, lambda path: (path / "config.json").is_file())
    if tutorial.random_init:
        if folder is None and zoo.published_config(name) is None:
            if Path(name).is_dir():
                raise RequestError(f"{file}: model_id {name} is a folder without config.json: give one that has it")
            raise unknown_name_error("model_id", name.rpartition("/")[2], zoo.published_names(), str(file))
        return f"hf:{folder or name}"
    if folder is None:
        raise RequestError(f"{file}: no folder with weights of {name} was found: use --set model_id=PATH, or --set random_init=true for random ones")
    if not zoo.has_weights(folder):
        raise RequestError(f"{file}: {folder} has no weights (*.safetensors): put them there, or use --set random_init=true for random ones")
    return f"hf:{folder}"


def _find_dataset(tutorial: TutorialConfig, file: Path) -> str:
    name = tutorial.dataset_id
    path = _find_path(name, file, lambda path: path.suffix == ".json" and path.is_file(), suffix=".json")
    if path is None:
        raise RequestError(f"{file}: no file of dataset {name} was found: use --data PATH, a JSON list of {{instruction, input, output}}")
    return str(path)


def _find_path(name: str, file: Path, is_valid: Callable[[Path], bool], suffix: str = "") -> Path | None:
    """The first valid path among `name` and its last component, in the current folder or beside the configuration file."""
    last = name.rstrip("/").rpartition("/")[2]
    bases = [Path(name), Path(last), file.parent / name, file.parent / last]
    return next((path for base in bases for path in (base, base.with_name(base.name + suffix)) if path.name and is_valid(path)), None)
