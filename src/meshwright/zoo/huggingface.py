"""A local Hugging Face folder or config.json as a task: the architecture with random weights, trained on next tokens."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshwright.core.errors import RequestError
from meshwright.core.task import Batch, Field, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

_DEFAULT_SEQ = 1024
_BYTES = 256  # the smallest vocabulary that the built-in corpus of bytes fits in


def load(path: str, *, seq: int | None, dropout: float) -> Task:
    """The task for `hf:PATH`. Reads the configuration only; weights come when `build` is called."""
    config = _configuration(Path(path))
    length = _sequence(config, path, seq)
    _set_dropout(config, dropout)
    return Task(
        name=f"hf:{path}",
        build=partial(_build, config, path),
        loss=causal_loss,
        fields={"tokens": Field((length,), "int64", config.vocab_size)},
        data="source" if config.vocab_size >= _BYTES else "synthetic",
        global_batch=32,
        learning_rate=3e-4,
        tokens_per_sample=length,
        note=f"random weights; every dropout of the configuration is set to {dropout:g}" + (", and is not keyed by sample" if dropout else ""),
    )


def causal_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss, which shifts the labels by one itself."""
    tokens = batch["tokens"]
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise RequestError("hf: models need the transformers package: pip install 'meshwright[hf]'") from None


def _configuration(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise RequestError(f"hf:{path}: there is no {file}: give a local folder that holds config.json, or that file")
    try:
        config = _transformers().AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise RequestError(f"hf:{path}: not a configuration that transformers reads: {_one_line(error)}") from error
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise RequestError(f"hf:{path}: the configuration has no vocab_size, so it is not a language model")
    return config


def _sequence(config: Any, path: str, seq: int | None) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) is not None or hasattr(config, "rope_theta")
    if seq is None:
        return min(limit or _DEFAULT_SEQ, _DEFAULT_SEQ)
    if limit is not None and seq > limit and not rotary:
        raise RequestError(f"--seq {seq} is longer than the context of hf:{path}: use --seq {limit} or less")
    if seq < 2:
        raise RequestError(f"--seq {seq}: hf:{path} needs at least 2 tokens to predict one")
    return seq


def _set_dropout(config: Any, dropout: float) -> None:
    """Configurations spell it resid_pdrop, attention_dropout, hidden_dropout_prob and more; torch's dropout is not keyed, so
    by default none is left."""
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(config, key, dropout)


def _build(config: Any, path: str) -> nn.Module:
    try:
        model: nn.Module = _transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise RequestError(f"hf:{path}: no causal language model for this configuration: {_one_line(error)}") from error
    return model


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
