"""Model names to tasks: the zoo's own, a local Hugging Face configuration, or a user's factory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.task import Field, Loss, Task
from meshwright.zoo import factory, huggingface, losses
from meshwright.zoo.cnn import CNN
from meshwright.zoo.cosmoflow import COSMOFLOW_CONFIGS, CosmoFlow
from meshwright.zoo.dlrm import DLRM, DLRM_CONFIGS
from meshwright.zoo.gpt import GPT, GPT_CONFIGS
from meshwright.zoo.llama import LLAMA_CONFIGS, Llama
from meshwright.zoo.vae import VAE, VAE_CONFIGS

_NUM_CLASSES = 10
# Default global batch and AdamW learning rate (None: by width). Large models have their published batch; models that run on one machine
# have a batch that fits there.
_TRAINING_DEFAULTS: dict[str, tuple[int, float | None]] = {
    "gpt-tiny": (16, 3e-3),
    "gpt-mini": (32, 3e-3),
    "gpt2-124m": (32, None),
    "gpt2-355m": (64, None),
    "gpt2-774m": (128, None),
    "gpt2-1.5b": (512, None),
    "gpt-1.3b": (512, None),
    "gpt3-175b": (1536, None),
    "llama-tiny": (16, 3e-3),
    "smollm2": (32, None),
    "llama3-1b": (128, None),
    "llama3-3b": (256, None),
    "llama3-8b": (512, None),
    "llama3-70b": (1024, None),
    "llama3-405b": (2048, None),
    "vae": (64, 1e-3),
    "vae-conv": (64, 1e-3),
    "cnn": (256, 1e-3),
    "cosmoflow": (64, 1e-3),
    "cosmoflow-tiny": (16, 3e-3),
    "dlrm": (2048, 1e-3),
    "dlrm-tiny": (64, 3e-3),
}


def names() -> tuple[str, ...]:
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
        llama = LLAMA_CONFIGS[name]
        return _language_task(name, partial(Llama, llama), llama.vocab, seq or llama.context)
    if name in COSMOFLOW_CONFIGS:
        _reject_options(name, seq, 0.0)
        return _cosmoflow_task(name, dropout)
    if name not in _TRAINING_DEFAULTS:
        raise unknown_name_error("model", name, names())
    _reject_options(name, seq, dropout)
    if name in DLRM_CONFIGS:
        return _dlrm_task(name)
    if name in VAE_CONFIGS:
        return _image_task(name, partial(VAE, VAE_CONFIGS[name]), losses.elbo_loss, VAE_CONFIGS[name].image)
    return _image_task(name, CNN, losses.classification_loss, CNN.image)


def _reject_options(name: str, seq: int | None, dropout: float) -> None:
    """Raise an error for an option that a model does not support, rather than ignore it."""
    if seq is not None:
        raise RequestError(f"--seq {seq}: {name} takes no sequence length; it is for the language models of the zoo and hf: models")
    if dropout:
        raise RequestError(f"dropout {dropout:g}: {name} has no dropout to set; it is for the gpt and cosmoflow models and hf: models")


def _make_task(name: str, build: Callable[[], nn.Module], loss: Loss, fields: dict[str, Field], data: str) -> Task:
    return Task(name, build, loss, fields, data, *_TRAINING_DEFAULTS[name])


def _language_task(name: str, build: Callable[[], nn.Module], vocab: int, seq: int) -> Task:
    fields = {"tokens": Field((seq + 1,), "int64", vocab)}
    return replace(_make_task(name, build, losses.next_token_loss, fields, "source"), tokens_per_sample=seq)


def _gpt_task(name: str, seq: int | None, dropout: float) -> Task:
    config = replace(GPT_CONFIGS[name], dropout=dropout)
    if seq is not None and seq > config.context:
        raise RequestError(f"--seq {seq} is longer than the context of {name}, which has learned positions: use --seq {config.context} or less")
    return _language_task(name, partial(GPT, config), config.vocab, seq or config.context)


def _image_task(name: str, build: Callable[[], nn.Module], loss: Loss, image: tuple[int, ...]) -> Task:
    return _make_task(name, build, loss, {"image": Field(image), "label": Field((), "int64", _NUM_CLASSES)}, "digits")


def _cosmoflow_task(name: str, dropout: float) -> Task:
    config = replace(COSMOFLOW_CONFIGS[name], dropout=dropout)
    fields = {"volume": Field(config.volume), "target": Field((config.targets,))}
    return _make_task(name, partial(CosmoFlow, config), losses.regression_loss, fields, "synthetic")


def _dlrm_task(name: str) -> Task:
    config = DLRM_CONFIGS[name]
    fields = {"dense": Field((config.dense,)), "sparse": Field((config.tables,), "int64", config.rows), "label": Field((), "int64", 2)}
    return _make_task(name, partial(DLRM, config), losses.click_loss, fields, "synthetic")
