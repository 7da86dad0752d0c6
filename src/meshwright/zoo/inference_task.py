"""Models by name for inference alone: what is trained as a task, and beside it modules without a loss, and every architecture of transformers."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.core.errors import RequestError
from meshwright.core.serialization import read_json
from meshwright.core.task import Batch, Field, Task
from meshwright.zoo import factory, huggingface, model_registry
from meshwright.zoo.factory import one_line

Kind = Literal["text", "predict"]
_TRACED_TOKENS = 16


def load_for_inference(name: str, kind: Kind) -> Task:
    """The task of a model that generates text, or answers samples. The loss of an architecture of transformers is a sum of its outputs."""
    if name.startswith("hf:") and kind == "predict":
        return _transformers_task(Path(name.removeprefix("hf:")), name)
    return factory.load_module(name) if ":" in name and not name.startswith("hf:") else model_registry.load(name)


def kind_of(name: str) -> Kind:
    """Whether a model generates text or answers samples."""
    if name.startswith("hf:"):
        return _kind_of_folder(Path(name.removeprefix("hf:")))
    task = load_for_inference(name, "text")
    fields = list(task.fields.values())
    is_text = len(fields) == 1 and fields[0].dtype == "int64" and len(fields[0].shape) == 1 and fields[0].high > 0
    return "text" if is_text else "predict"


def has_loss(task: Task) -> bool:
    """Whether the task's loss says how good the model is; some stand for the loss of a module that has none."""
    return task.loss not in (factory.call_with_fields, _sum_of_outputs)


def _kind_of_folder(path: Path) -> Kind:
    """A folder's architecture decides; where it names none, its type: one that has a form with masked language modelling is an encoder."""
    file = path / "config.json" if path.is_dir() else path
    data = read_json(file) if file.is_file() else {}
    names = data.get("architectures") if isinstance(data, dict) else None
    mappings = _mappings()
    if isinstance(names, list) and names:
        return "text" if names[0] in {*mappings["causal"].values(), *mappings["seq2seq"].values()} else "predict"
    kind = data.get("model_type") if isinstance(data, dict) else None
    generates = kind in mappings["seq2seq"] or (kind in mappings["causal"] and kind not in mappings["masked"])
    return "text" if generates or kind is None or kind not in mappings["any"] else "predict"


def _mappings() -> dict[str, dict[str, Any]]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return {
        "causal": dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "seq2seq": dict(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        "masked": dict(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES), "any": dict(auto.MODEL_MAPPING_NAMES),
    }  # fmt: skip


def _transformers_task(path: Path, name: str) -> Task:
    transformers = huggingface.import_transformers()
    huggingface.refuse_pickled_weights(path)
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # configurations validate themselves, with errors of many types
        raise RequestError(f"{name}: not a configuration that transformers reads: {one_line(error)}") from error
    names = getattr(config, "architectures", None) or []
    model_class = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if model_class is None:
        raise RequestError(f"{name}: this transformers has no {names[0]}, which its config.json names")
    folder = path if huggingface.has_weights(path) else None
    return Task(
        name=name,
        build=partial(_build, model_class, config, name, folder),
        architecture=partial(_build, model_class, config, name, None),
        loss=_sum_of_outputs,
        fields=_fields(config, getattr(model_class, "main_input_name", "input_ids")),
        weights=str(folder) if folder is not None else "",
    )


def _build(model_class: Any, config: Any, name: str, folder: Path | None) -> nn.Module:
    if folder is not None and huggingface.reads_weights():
        return huggingface.load_pretrained(model_class, config, folder).to(torch.empty(0).device)
    try:
        return model_class.from_config(config) if hasattr(model_class, "from_config") else model_class(config)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's code does with sizes that do not go together
        raise RequestError(f"{name}: no {model_class.__name__} for this configuration: {one_line(error)}") from error


def _fields(config: Any, main: str) -> dict[str, Field]:
    """A sample to plan with, where its shape is known."""
    if main == "input_ids" and isinstance(getattr(config, "vocab_size", None), int):
        return {main: Field((_TRACED_TOKENS,), "int64", config.vocab_size)}
    size = getattr(config, "image_size", None)
    if main == "pixel_values" and isinstance(size, (int, list, tuple)):
        sides = tuple(size) if not isinstance(size, int) else (size, size)
        return {main: Field((getattr(config, "num_channels", 3), *sides))}
    return {}


def _sum_of_outputs(model: nn.Module, batch: Batch) -> Tensor:
    out = model(**batch, return_dict=True)
    leaves = [leaf for leaf in pytree.tree_leaves(dict(out)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.float().mean() for leaf in leaves]).sum()
