"""A local Hugging Face folder or config.json as a task, trained on next tokens: with the folder's weights, or with random ones."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.core.errors import RequestError
from meshwright.core.task import Batch, Field, Task
from meshwright.zoo.factory import one_line
from meshwright.zoo.losses import counted_cross_entropy
from meshwright.zoo.published_configs import published_config, published_names

_DEFAULT_SEQ_LENGTH = 1024
_BYTE_VOCAB_SIZE = 256  # the smallest vocabulary that the built-in corpus of bytes fits in


def load(path: str, *, seq: int | None, dropout: float, random_init: bool = False) -> Task:
    """The task for `hf:PATH`, or for the name of a published model. Reads only the configuration; `build` loads the weights."""
    config = _load_config(Path(path))
    folder = Path(path) if not random_init and has_weights(Path(path)) else None
    length = _sequence_length(config, path, seq)
    _set_dropout(config, dropout)
    return Task(
        name=f"hf:{path}",
        build=partial(_build_model, config, path, folder),
        loss=causal_loss,
        fields={"tokens": Field((length,), "int64", config.vocab_size)},
        data="source" if config.vocab_size >= _BYTE_VOCAB_SIZE else "synthetic",
        global_batch=32,
        tokens_per_sample=length,
        pretrained=folder is not None,
        note=f"{'the weights in its folder' if folder else 'random weights'}; every dropout of the configuration is set to {dropout:g}"
        + (", and is not keyed by sample" if dropout else ""),
    )


def causal_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss, which shifts the labels by one itself."""
    tokens = batch["tokens"]
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def answer_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """(sum, count) over the targets that are not ignored. Padding follows every predicted token, so causal attention needs no padding mask."""
    return counted_cross_entropy(model(input_ids=batch["tokens"], use_cache=False).logits, batch["targets"])


def has_weights(path: Path) -> bool:
    """Whether a folder holds weights in safetensors; pickled weights are not read."""
    return path.is_dir() and any(path.glob("*.safetensors"))


def _import_transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise RequestError("hf: models need the transformers package: pip install 'meshwright[hf]'") from None


def _load_config(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        file = published_config(str(path)) or file
    if not file.is_file():
        known = ", ".join(published_names())
        raise RequestError(f"hf:{path}: there is no {file}: give a local folder that holds config.json, that file, or one of {known}")
    try:
        config = _import_transformers().AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise RequestError(f"hf:{path}: not a configuration that transformers reads: {one_line(error)}") from error
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise RequestError(f"hf:{path}: the configuration has no vocab_size, so it is not a language model")
    return config


def _sequence_length(config: Any, path: str, seq: int | None) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) is not None or hasattr(config, "rope_theta")
    if seq is None:
        return min(limit or _DEFAULT_SEQ_LENGTH, _DEFAULT_SEQ_LENGTH)
    if limit is not None and seq > limit and not rotary:
        raise RequestError(f"--seq {seq} is longer than the context of hf:{path}: use --seq {limit} or less")
    if seq < 2:
        raise RequestError(f"--seq {seq}: hf:{path} needs at least 2 tokens to predict one")
    return seq


def _set_dropout(config: Any, dropout: float) -> None:
    """Set every dropout of the configuration (resid_pdrop, attention_dropout, …); torch's dropout is not keyed, so the default is none."""
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(config, key, dropout)


def _build_model(config: Any, path: str, folder: Path | None) -> nn.Module:
    """The model on torch's current device. Weights are not read on meta or fake tensors: a trace needs only their shapes."""
    probe = torch.empty(0)
    if folder is not None and not probe.is_meta and not isinstance(probe, FakeTensor):
        return _load_pretrained(config, folder).to(probe.device)
    try:
        return _import_transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise RequestError(f"hf:{path}: no causal language model for this configuration: {one_line(error)}") from error


def _load_pretrained(config: Any, folder: Path) -> nn.Module:
    """The model with the folder's weights, in fp32 on the host. A tensor missing from the files is an error, since it would be random."""
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True, "dtype": torch.float32}
    try:
        with torch.device("cpu"), _progress_bars_disabled():
            auto_model = _import_transformers().AutoModelForCausalLM
            model, info = auto_model.from_pretrained(str(folder), config=config, output_loading_info=True, **options)
    except Exception as error:  # safetensors and transformers raise their own types for files that are broken, truncated or of another model
        raise RequestError(f"hf:{folder}: its weights cannot be loaded: {one_line(error)}; repair the files, or --set random_init=true") from error
    if missing := sorted(info["missing_keys"]):
        lack = f"its weights lack {len(missing)} tensors of the model, such as {missing[0]}"
        raise RequestError(f"hf:{folder}: {lack}: repair the files, or --set random_init=true")
    return model.train()  # transformers returns a loaded model in evaluation mode


@contextmanager
def _progress_bars_disabled() -> Iterator[None]:
    """Disable transformers' progress bars, which every rank would draw."""
    logging = _import_transformers().utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
