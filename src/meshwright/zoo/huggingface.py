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
from meshwright.core.serialization import read_json, show_json
from meshwright.core.task import Batch, Field, Task
from meshwright.zoo.factory import one_line
from meshwright.zoo.losses import counted_cross_entropy
from meshwright.zoo.published_configs import published_config, published_names

_DEFAULT_SEQ_LENGTH = 1024
_MAX_LAYERS = 10_000
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")
_TRAINER_FILES = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")  # what a trainer leaves beside weights
_BYTE_VOCAB_SIZE = 256  # the smallest vocabulary that the built-in corpus of bytes fits in


def load(path: str, *, seq: int | None, dropout: float, random_init: bool = False) -> Task:
    """The task for `hf:PATH`, or for the name of a published model. Reads only the configuration; `build` loads the weights."""
    config = _load_config(Path(path))
    folder = Path(path) if not random_init and has_weights(Path(path)) else None
    if folder is None and not random_init:
        refuse_pickled_weights(Path(path))
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
        weights=str(folder) if folder is not None else "",
        architecture=partial(_build_model, config, path, None),
        note=f"{_describe_weights(folder, random_init)}; every dropout of the configuration is set to {dropout:g}"
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


def _describe_weights(folder: Path | None, random_init: bool) -> str:
    if folder is not None:
        return "the weights in its folder"
    return "random weights, as random_init asks" if random_init else "random weights: there are no *.safetensors files beside its config.json"


def refuse_pickled_weights(path: Path) -> None:
    """Raise for a folder whose weights are pickled: they are not read, because a pickle can run code, and random ones would be a surprise."""
    files = [p.name for pattern in _PICKLES for p in sorted(path.glob(pattern))] if path.is_dir() else []
    weights = [name for name in files if not name.startswith(_TRAINER_FILES)]
    if weights:
        model = f"AutoModelForCausalLM.from_pretrained({str(path)!r}, use_safetensors=False)"
        convert = f'python -c "from transformers import AutoModelForCausalLM; {model}.save_pretrained({str(path)!r})"'
        raise RequestError(
            f"hf:{path}: its weights ({weights[0]}) are pickled, and only safetensors are read: convert files that you trust with: {convert}; "
            "or use random weights: --set random_init=true"
        )


def import_transformers() -> Any:
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
    data = read_json(file)
    if not isinstance(data, dict) or not isinstance(data.get("model_type", ""), str):
        raise RequestError(f"hf:{path}: {file} is no object with a model_type: give a model's config.json")
    try:
        config = import_transformers().AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except RequestError:
        raise
    except Exception as error:  # configurations validate themselves, with errors of many types
        raise RequestError(f"hf:{path}: not a configuration that transformers reads: {one_line(error)}") from error
    if not isinstance(getattr(config, "vocab_size", None), int) or config.vocab_size < 1:
        raise RequestError(f"hf:{path}: the configuration has no vocab_size, so it is not a language model")
    layers = getattr(config, "num_hidden_layers", 1)
    if not isinstance(layers, int) or not 1 <= layers <= _MAX_LAYERS:
        raise RequestError(f"hf:{path}: the number of layers is {show_json(layers)}, and must be from 1 to {_MAX_LAYERS:,}")
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
    """The model on torch's current device."""
    if folder is not None and reads_weights():
        return load_pretrained(_auto_class(config), config, folder).to(torch.empty(0).device)
    try:
        return _auto_class(config).from_config(config, dtype=torch.float32)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's code does with sizes that do not go together
        raise RequestError(f"hf:{path}: no causal language model for this configuration: {one_line(error)}") from error


def _auto_class(config: Any) -> Any:
    transformers = import_transformers()
    return transformers.AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else transformers.AutoModelForCausalLM


def reads_weights() -> bool:
    """Whether a model that is built now may have its weights: on meta or fake tensors, a trace needs only their shapes."""
    probe = torch.empty(0)
    return not probe.is_meta and not isinstance(probe, FakeTensor)


def load_pretrained(model_class: Any, config: Any, folder: Path) -> nn.Module:
    """The model with the folder's weights, in fp32 on the host. A tensor missing from the files is an error, since it would be random."""
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True, "dtype": torch.float32}
    try:
        with torch.device("cpu"), _progress_bars_disabled():
            model, info = model_class.from_pretrained(str(folder), config=config, output_loading_info=True, **options)
    except Exception as error:  # safetensors and transformers raise their own types for files that are broken, truncated or of another model
        raise RequestError(f"hf:{folder}: its weights cannot be loaded: {one_line(error)}; repair the files, or --set random_init=true") from error
    if missing := sorted(info["missing_keys"]):
        lack = f"its weights lack {len(missing)} tensors of the model, such as {missing[0]}"
        raise RequestError(f"hf:{folder}: {lack}: repair the files, or --set random_init=true")
    return model.train()  # transformers returns a loaded model in evaluation mode


@contextmanager
def _progress_bars_disabled() -> Iterator[None]:
    """Disable transformers' progress bars, which every rank would draw."""
    logging = import_transformers().utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
