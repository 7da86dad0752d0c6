"""What a model takes, found from the model itself: from the call that its loss makes, from what transformers says of it, or from its signature.

In: a loaded model and its task. Out: `ModelInputs`, which has a spec for each input and makes the call's arguments from their tensors.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshwright.core.errors import RequestError
from meshwright.core.task import Field, Task
from meshwright.serve.input_specs import InputSpec

_COUNT = 3  # samples in the batch that the loss is given
_OPEN_LENGTH = 8  # of made-up samples, where any length will do
_NOT_TENSORS = (int, float, bool, str, "int", "float", "bool", "str")
# What models of transformers take, by the names of their arguments: the dtype, and the number of dims of a sample.
_OF_TRANSFORMERS = {"input_ids": ("int64", 1), "attention_mask": ("int64", 1), "token_type_ids": ("int64", 1), "pixel_values": ("float32", 3),
                    "input_values": ("float32", 1), "input_features": ("float32", 2)}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where in a call's arguments an input stands."""

    name: str


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """`specs` are the inputs; `template` is (args, kwargs) of a call, with a `_Place` for each input; None: all inputs are keyword arguments."""

    specs: tuple[InputSpec, ...]
    template: Any = None

    def arguments(self, inputs: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the call for these tensors."""
        if self.template is None:
            return (), dict(inputs)
        args, kwargs = self.template
        kwargs = {
            key: value for key, value in kwargs.items() if not isinstance(value, _Place) or value.name in inputs
        }  # an optional one may be missing
        filled: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda leaf: inputs[leaf.name] if isinstance(leaf, _Place) else leaf, (args, kwargs)
        )
        return filled

    def made_up(self, count: int, device: torch.device) -> dict[str, Tensor] | None:
        """Tensors for so many samples with which the model can be tried; None where a shape is not known."""
        generator = torch.Generator().manual_seed(0)
        found = {}
        for spec in self.specs:
            if spec.shape is None or spec.dtype is None:
                return None
            shape = tuple(_OPEN_LENGTH if dim is None else dim for dim in spec.shape)
            found[spec.name] = _made_up(spec.name, Field(shape, spec.dtype, spec.high), count, generator).to(device)
        return found


def find_inputs(model: nn.Module, task: Task, device: torch.device) -> ModelInputs:
    """The inputs of a model. Collective, where the model is split over ranks."""
    if (found := _inputs_of_transformers(model)) is not None:
        return found
    if task.fields:
        return _inputs_of_loss(model, task, device)
    return _inputs_of_signature(model)


def _made_up(name: str, field: Field, count: int, generator: torch.Generator) -> Tensor:
    dtype, shape = getattr(torch, field.dtype), (count, *field.shape)
    if "mask" in name:
        return torch.ones(shape, dtype=dtype)
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else field.high or 2, shape, generator=generator).to(dtype)


# -- from the loss --


class _Captured(Exception):
    """Carries the arguments of the model's call out of the loss."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args_given, self.kwargs_given = args, kwargs


def _inputs_of_loss(model: nn.Module, task: Task, device: torch.device) -> ModelInputs:
    """The tensors with which the loss calls the model on a made-up batch. What else it gives is given each time."""
    generator = torch.Generator().manual_seed(0)
    batch = {name: _made_up(name, field, _COUNT, generator).to(device) for name, field in task.fields.items()}

    def capture(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Captured(args, kwargs)

    handle = model.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        task.loss(model, batch)
    except _Captured as call:
        return _inputs_of_call(model, call, batch, task.fields)
    except Exception as error:
        raise RequestError(f"{task.name}: what it takes is not known: its loss fails on made-up samples: {type(error).__name__}: {error}") from error
    finally:
        handle.remove()
    raise RequestError(f"{task.name}: its loss does not call the model, so what it takes is not known: let the loss call model(…)")


def _inputs_of_call(model: nn.Module, call: _Captured, batch: Mapping[str, Tensor], fields: Mapping[str, Field]) -> ModelInputs:
    bound = inspect.signature(model.forward).bind(*call.args_given, **call.kwargs_given)
    names = list(bound.arguments)
    highs = {tensor.untyped_storage().data_ptr(): fields[name].high for name, tensor in batch.items()}
    specs: list[InputSpec] = []

    def replace(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = _leaf_name(path, names)
        if not leaf.dim() or leaf.shape[0] != _COUNT:
            raise RequestError(
                f"{type(model).__name__}: its loss gives {name} the shape {tuple(leaf.shape)} for {_COUNT} samples: the first dim must count samples"
            )
        is_integer = not leaf.dtype.is_floating_point and leaf.dtype != torch.bool
        high = highs.get(leaf.untyped_storage().data_ptr(), 0) if is_integer else 0
        specs.append(InputSpec(name, tuple(leaf.shape[1:]), str(leaf.dtype).removeprefix("torch."), high))
        return _Place(name)

    template = pytree.tree_map_with_path(replace, (call.args_given, call.kwargs_given))
    return ModelInputs(tuple(specs), template)


def _leaf_name(path: Sequence[Any], names: Sequence[str]) -> str:
    """`image`, or `batch.image` for a tensor inside of an argument."""
    keys = [getattr(part, "key", getattr(part, "idx", part)) for part in path]
    first = names[min(keys[1], len(names) - 1)] if keys[0] == 0 else keys[1]
    return ".".join(map(str, (first, *keys[2:])))


# -- from what transformers says --


def _inputs_of_transformers(model: nn.Module) -> ModelInputs | None:
    """Text, pictures or sound for a model of transformers; None for any other model. Texts may have any length."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    if not hasattr(config, "model_type") or main not in _OF_TRANSFORMERS:
        return None
    parameters = inspect.signature(model.forward).parameters
    names = [main, *(n for n in ("attention_mask", "token_type_ids") if n in parameters and main == "input_ids")]
    kept = {name: value for name, value in (("use_cache", False), ("return_dict", True)) if name in parameters}
    specs = tuple(_spec_of_transformers(name, config, is_required=name == main) for name in names)
    template = ((), {**{name: _Place(name) for name in names}, **kept})
    return ModelInputs(specs, template)


def _spec_of_transformers(name: str, config: Any, *, is_required: bool) -> InputSpec:
    dtype, dims = _OF_TRANSFORMERS[name]
    shape: tuple[int | None, ...] = (None,) * dims
    if name == "pixel_values":
        size = getattr(config, "image_size", None)
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        shape = (getattr(config, "num_channels", None), *sides)
    highs = {
        "input_ids": config.vocab_size if name == "input_ids" else 0,
        "attention_mask": 2,
        "token_type_ids": getattr(config, "type_vocab_size", 0),
    }
    return InputSpec(name, shape, dtype, highs.get(name, 0) or 0, is_required)


# -- from the signature --


def _inputs_of_signature(model: nn.Module) -> ModelInputs:
    """The arguments of `forward`. Their shapes and types are not known; the first dim counts samples."""
    specs = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.annotation in _NOT_TENSORS:
            continue
        is_optional = parameter.default is not parameter.empty
        if not is_optional or parameter.default is None:
            specs.append(InputSpec(parameter.name, required=not is_optional))
    if not any(spec.required for spec in specs):
        raise RequestError(f"{type(model).__name__}: its forward names no argument: give it `fields`, a mapping of names to meshwright Field")
    return ModelInputs(tuple(specs))
