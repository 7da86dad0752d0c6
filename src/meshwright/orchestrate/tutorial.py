"""Configurations of the distributed-training tutorial, as they are: recognised by their keys and translated into a run's configuration.

They say a strategy and a model's id where ours say a mesh and a path, and leave the number of ranks and the recipe of training to the
program. Both are filled in here: what is translated is a complete run, and every field of it can be overridden."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError, field_validator

from meshwright import zoo
from meshwright.core.errors import RequestError, unknown
from meshwright.core.mesh import Mesh

_PRECISIONS = {"32": "fp32", "32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16", "64": "fp64", "64-true": "fp64"}
_ONLY_THERE = frozenset({"model_id", "global_batch_size", "gradient_acc_steps", "tp_dimensions", "dataset_id", "num_epochs"})
_OF_TRAINING = ("global_batch_size", "gradient_acc_steps", "dataset_id", "num_epochs", "log_interval")
_TOKENS = 256
# How the tutorial trains: AdamW without decay, 100 steps of warm-up and a cosine, every block checkpointed, no validation.
_RECIPE: dict[str, Any] = {
    "optimizer": "adamw",
    "learning_rate": 1e-5,
    "betas": (0.9, 0.95),
    "adam_eps": 1e-5,
    "weight_decay": 0.0,
    "warmup_steps": 100,
    "lr_schedule": "cosine",
    "clip": 1.0,
    "recompute": "full",
    "seq": _TOKENS,
    "validate_batches": 0,
}

Ranks = Callable[[int | None, tuple[int, ...] | None], int]  # (--nproc, --devices) → how many ranks there would be
Strategy = Literal["single_device", "ddp", "fsdp", "axonn"]
Count = Annotated[StrictInt, Field(ge=1)]


class Tutorial(BaseModel):
    """The tutorial's fields and defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_id: str = "TinyLlama-1.1B"
    strategy: Strategy = "axonn"
    precision: str = "32"
    global_batch_size: Count = 4
    gradient_acc_steps: Count = 1
    tp_dimensions: tuple[Count, ...] = ()
    compile: StrictBool = False
    dataset_id: str = "alpaca"
    seed: Annotated[StrictInt, Field(ge=0)] = 123456
    log_interval: Count = 1
    num_epochs: Count = 1
    random_init: StrictBool = False

    @field_validator("precision", mode="before")
    @classmethod
    def _known_precision(cls, value: Any) -> str:
        text = str(value)
        if isinstance(value, bool) or text not in _PRECISIONS:
            raise ValueError(f"use one of {', '.join(_PRECISIONS)}")
        return text

    @field_validator("tp_dimensions")
    @classmethod
    def _three_dimensions(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(value) not in (0, 3):
            raise ValueError("write three numbers, like [2, 1, 1]")
        return value

    @property
    def tensor_ranks(self) -> int:
        return math.prod(self.tp_dimensions)


KEYS = frozenset(Tutorial.model_fields)


def recognised(data: Mapping[str, Any]) -> bool:
    """Whether a file is one of the tutorial's: it has a key that only those have, or one of their strategies."""
    return not _ONLY_THERE.isdisjoint(data) or data.get("strategy") in get_args(Strategy)


def translate(
    data: Mapping[str, Any], file: Path, settings: Mapping[str, Any], ranks: Ranks
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """(a run's fields, what remains of `settings` for them). Settings may use the tutorial's words or ours."""
    theirs = {key: value for key, value in settings.items() if _is_theirs(key, value)}
    ours = {key: value for key, value in settings.items() if key not in theirs}
    asked = _read(data, file, theirs)
    if not any(key in data or key in settings for key in _OF_TRAINING) and not {"global_batch", "epochs", "steps"} & set(ours):
        raise RequestError(
            f"{file} says nothing of training (no global_batch_size): it is for `meshwright generate`, which comes later; "
            "to train with it all the same, add --global-batch 4"
        )
    fields = {
        **_RECIPE,
        "model": _find_model(asked, file),
        "random_init": asked.random_init,
        "data": ours.get("data") or _find_data(asked, file),
        "precision": _PRECISIONS[asked.precision],
        "global_batch": asked.global_batch_size,
        "micro_batches": asked.gradient_acc_steps,
        "seed": asked.seed,
        "log_interval": asked.log_interval,
        **({} if "steps" in ours else {"epochs": asked.num_epochs}),
        **_layout(asked, file, ours, ranks),
    }
    return fields, ours


def first_mistake(error: ValidationError) -> tuple[str, str]:
    """(key, one line) of what is wrong first."""
    first = error.errors()[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    reason = first["msg"].removeprefix("Value error, ")
    if not key:
        return key, reason
    return key, f"{'.'.join(map(str, first['loc']))}={json.dumps(first.get('input'), default=str)}: {reason[0].lower()}{reason[1:]}"


def _is_theirs(key: str, value: Any) -> bool:
    """precision, compile and strategy (a function's name, in ours) are keys of both; the value tells whose is meant."""
    if key == "precision":
        return str(value) in _PRECISIONS
    if key == "strategy":
        return ":" not in str(value)
    return isinstance(value, bool) if key == "compile" else key in KEYS


def _read(data: Mapping[str, Any], file: Path, settings: Mapping[str, Any]) -> Tutorial:
    for key in data:
        if key not in KEYS:
            raise unknown("key", key, KEYS, str(file))
    try:
        return Tutorial(**{**data, **settings})
    except ValidationError as error:
        key, reason = first_mistake(error)
        raise RequestError(f"{'--set' if key in settings else f'{file}:'} {reason}") from None


# -- how many ranks, and what each holds --


def _layout(asked: Tutorial, file: Path, ours: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Mesh, ZeRO and compilation. A mesh that was asked for by hand stands."""
    if asked.strategy != "axonn" and asked.tensor_ranks > 1:
        raise RequestError(f"{file}: tp_dimensions {list(asked.tp_dimensions)} is for strategy axonn, not {asked.strategy}: change one of them")
    if ours.get("mesh") is not None:
        return {"zero": 3 if asked.strategy == "fsdp" else 0, "compile": "blocks" if asked.compile else "none"}
    world = _world(asked, file, ours, ranks)
    mesh = Mesh(dp=world // asked.tensor_ranks, tp=asked.tp_dimensions or (1,)).flattened()
    _check_batch(asked, file, ours, mesh.data_width)
    compiled = ("model" if world == 1 else "blocks") if asked.compile else "none"
    if asked.strategy == "fsdp" and world > 1:
        return {"mesh": f"shard={world}", "zero": 3, "compile": compiled}
    return {"mesh": str(mesh), "zero": 3 if mesh.shard > 1 else 0, "compile": compiled}


def _world(asked: Tutorial, file: Path, ours: Mapping[str, Any], ranks: Ranks) -> int:
    if asked.strategy == "single_device":
        if ours.get("nproc") not in (None, 1):
            raise RequestError(f"{file}: strategy single_device is 1 rank, and --nproc asks for {ours['nproc']}: change strategy to ddp or fsdp")
        return 1
    number, devices = ours.get("nproc"), ours.get("devices")
    world = ranks(number if isinstance(number, int) else None, tuple(devices) if isinstance(devices, (list, tuple)) else None)
    needed, dimensions = asked.tensor_ranks, list(asked.tp_dimensions)
    if needed > world:
        there = f"--nproc is {world}" if ours.get("nproc") else f"this machine has {world} device{'s' * (world > 1)}"
        raise RequestError(
            f"{file}: tp_dimensions {dimensions} needs {needed} ranks, and {there}: change tp_dimensions to a product of {world} or less"
        )
    if world % needed:
        raise RequestError(
            f"{file}: tp_dimensions {dimensions} takes {needed} ranks at a time, which do not divide {world}: use --nproc {world // needed * needed}"
        )
    return world


def _check_batch(asked: Tutorial, file: Path, ours: Mapping[str, Any], width: int) -> None:
    """Micro-batch = global batch / accumulation / ranks that take samples: all whole."""
    batch, pieces = ours.get("global_batch", asked.global_batch_size), ours.get("micro_batches", asked.gradient_acc_steps)
    if not isinstance(batch, int) or not isinstance(pieces, int) or pieces < 1 or batch < 1:
        return  # said by the run's own configuration
    step = pieces * width
    if batch % step:
        better = " or ".join(str(n * step) for n in sorted({max(batch // step, 1), batch // step + 1}))
        raise RequestError(
            f"{file}: global_batch_size {batch} does not divide into {pieces} gradient_acc_steps × {width} ranks: "
            f"change global_batch_size to {better}"
        )


# -- models and data at hand --


def _find_model(asked: Tutorial, file: Path) -> str:
    """'hf:FOLDER' for a folder at hand, 'hf:NAME' for published sizes; weights must be there unless random ones are wanted."""
    name = asked.model_id
    folder = _nearby(name, file, lambda path: (path / "config.json").is_file())
    if asked.random_init:
        if folder is None and zoo.published_config(name) is None:
            if Path(name).is_dir():
                raise RequestError(f"{file}: model_id {name} holds no config.json: give a folder that does")
            raise unknown("model_id", name.rpartition("/")[2], zoo.published_names(), str(file))
        return f"hf:{folder or name}"
    if folder is None:
        raise RequestError(
            f"{file}: no folder here holds the weights of {name}: give a local one with --set model_id=PATH, "
            "or train random weights with --set random_init=true"
        )
    if not zoo.has_weights(folder):
        raise RequestError(f"{file}: {folder} holds no weights (*.safetensors): put them there, or train random ones with --set random_init=true")
    return f"hf:{folder}"


def _find_data(asked: Tutorial, file: Path) -> str:
    found = _nearby(asked.dataset_id, file, lambda path: path.suffix == ".json" and path.is_file(), suffix=".json")
    if found is None:
        raise RequestError(
            f"{file}: no file of the data set {asked.dataset_id} is here: give it with --data PATH, a JSON list of {{instruction, input, output}}"
        )
    return str(found)


def _nearby(name: str, file: Path, good: Callable[[Path], bool], suffix: str = "") -> Path | None:
    """A path as it is, or something of that name, or of its last part, in the current folder or next to the file."""
    last = name.rstrip("/").rpartition("/")[2]
    places = [Path(name), Path(last), file.parent / name, file.parent / last]
    return next((path for place in places for path in (place, place.with_name(place.name + suffix)) if path.name and good(path)), None)
