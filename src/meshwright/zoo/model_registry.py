"""Model names to tasks: the zoo's own, a local Hugging Face configuration, or a user's factory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.task import Field, Loss, Task
from meshwright.zoo import factory, huggingface, losses
from meshwright.zoo.cnn import CNN
from meshwright.zoo.cosmoflow import COSMOFLOW_CONFIGS, CosmoFlow
from meshwright.zoo.dlrm import DLRM, DLRM_CONFIGS
from meshwright.zoo.gpt import GPT, GPT_CONFIGS
from meshwright.zoo.llama import LLAMA_CONFIGS, Llama
from meshwright.zoo.vae import VAE, VAE_CONFIGS

if TYPE_CHECKING:
    from torch import nn

_NUM_CLASSES = 10


@dataclass(frozen=True)
class _TrainingDefaults:
    """A model's default global batch and AdamW learning rate."""

    global_batch: int
    learning_rate: float


# Large models have their published batch; models that run on one machine have a batch that fits there.
_TRAINING_DEFAULTS: dict[str, _TrainingDefaults] = {
    "gpt-tiny": _TrainingDefaults(16, 3e-3),
    "gpt-mini": _TrainingDefaults(32, 3e-3),
    "gpt2-124m": _TrainingDefaults(32, 6e-4),
    "gpt2-355m": _TrainingDefaults(64, 3e-4),
    "gpt2-774m": _TrainingDefaults(128, 2.5e-4),
    "gpt2-1.5b": _TrainingDefaults(512, 2e-4),
    "gpt-1.3b": _TrainingDefaults(512, 2e-4),
    "gpt3-175b": _TrainingDefaults(1536, 6e-5),
    "llama-tiny": _TrainingDefaults(16, 3e-3),
    "smollm2": _TrainingDefaults(32, 1e-3),
    "llama3-1b": _TrainingDefaults(128, 3e-4),
    "llama3-3b": _TrainingDefaults(256, 3e-4),
    "llama3-8b": _TrainingDefaults(512, 3e-4),
    "llama3-70b": _TrainingDefaults(1024, 1.5e-4),
    "llama3-405b": _TrainingDefaults(2048, 8e-5),
    "vae": _TrainingDefaults(64, 1e-3),
    "vae-conv": _TrainingDefaults(64, 1e-3),
    "cnn": _TrainingDefaults(256, 1e-3),
    "cosmoflow": _TrainingDefaults(64, 1e-3),
    "cosmoflow-tiny": _TrainingDefaults(16, 3e-3),
    "dlrm": _TrainingDefaults(2048, 1e-3),
    "dlrm-tiny": _TrainingDefaults(64, 3e-3),
}


def names() -> tuple[str, ...]:
    """The zoo's own models."""
    return tuple(_TRAINING_DEFAULTS)


def load(name: str, *, seq: int | None = None, dropout: float = 0.0, random_init: bool = False) -> Task:
    """The task for a zoo name, `hf:PATH`, `package.module:factory` or `path/to/file.py:factory`. Nothing is allocated yet.
    `random_init` ignores the weights of a Hugging Face folder; all other models begin with random weights anyway."""
    if not 0.0 <= dropout < 1.0:
        raise RequestError(f"dropout {dropout:g} must be at least 0 and less than 1")
    if seq is not None and seq < 1:
        raise RequestError(f"--seq {seq} must be at least 1")
    if name.startswith("hf:"):
        return huggingface.load(name.removeprefix("hf:"), seq=seq, dropout=dropout, random_init=random_init)
    if ":" in name:
        _reject_options(name, seq, dropout)
        return factory.load(name)
    if name in GPT_CONFIGS:
        return _gpt_task(name, seq, dropout)
    if name in LLAMA_CONFIGS:
        _reject_options(name, None, dropout)
        return _llama_task(name, seq)
    if name in COSMOFLOW_CONFIGS:
        _reject_options(name, seq, 0.0)
        return _cosmoflow_task(name, dropout)
    if name not in _TRAINING_DEFAULTS:
        raise unknown_name_error("model", name, names())
    _reject_options(name, seq, dropout)
    if name in VAE_CONFIGS:
        return _vae_task(name)
    return _dlrm_task(name) if name in DLRM_CONFIGS else _cnn_task(name)


def _reject_options(name: str, seq: int | None, dropout: float) -> None:
    """Reject an option that a model does not support, rather than ignore it."""
    if seq is not None:
        raise RequestError(f"--seq {seq}: {name} takes no sequence length; it is for the language models of the zoo and hf: models")
    if dropout:
        raise RequestError(f"dropout {dropout:g}: {name} has no dropout to set; it is for the gpt and cosmoflow models and hf: models")


def _make_task(name: str, build: Callable[[], nn.Module], loss: Loss, fields: dict[str, Field], data: str) -> Task:
    job = _TRAINING_DEFAULTS[name]
    return Task(name, build, loss, fields, data, job.global_batch, job.learning_rate)


def _language_task(name: str, build: Callable[[], nn.Module], vocab: int, seq: int) -> Task:
    fields = {"tokens": Field((seq + 1,), "int64", vocab)}
    return replace(_make_task(name, build, losses.next_token_loss, fields, "source"), tokens_per_sample=seq)


def _gpt_task(name: str, seq: int | None, dropout: float) -> Task:
    config = replace(GPT_CONFIGS[name], dropout=dropout)
    if seq is not None and seq > config.context:
        raise RequestError(f"--seq {seq} is longer than the context of {name}, which has learned positions: use --seq {config.context} or less")
    return _language_task(name, partial(GPT, config), config.vocab, seq or config.context)


def _llama_task(name: str, seq: int | None) -> Task:
    config = LLAMA_CONFIGS[name]
    return _language_task(name, partial(Llama, config), config.vocab, seq or config.context)


def _image_fields(shape: tuple[int, ...]) -> dict[str, Field]:
    return {"image": Field(shape), "label": Field((), "int64", _NUM_CLASSES)}


def _vae_task(name: str) -> Task:
    config = VAE_CONFIGS[name]
    return _make_task(name, partial(VAE, config), losses.elbo_loss, _image_fields(config.image), "digits")


def _cnn_task(name: str) -> Task:
    return _make_task(name, CNN, losses.classification_loss, _image_fields(CNN.image), "digits")


def _cosmoflow_task(name: str, dropout: float) -> Task:
    config = replace(COSMOFLOW_CONFIGS[name], dropout=dropout)
    fields = {"volume": Field(config.volume), "target": Field((config.targets,))}
    return _make_task(name, partial(CosmoFlow, config), losses.regression_loss, fields, "synthetic")


def _dlrm_task(name: str) -> Task:
    config = DLRM_CONFIGS[name]
    fields = {"dense": Field((config.dense,)), "sparse": Field((config.tables,), "int64", config.rows), "label": Field((), "int64", 2)}
    return _make_task(name, partial(DLRM, config), losses.click_loss, fields, "synthetic")
