"""Builds models and batches of fake tensors, which have shapes and no memory: the input of every trace."""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import init
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from meshwright.core.errors import RequestError
from meshwright.core.task import Batch, Task
from meshwright.describe.preserved_attributes import preserved_attributes

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}  # what autocast computes in


def example_batch(task: Task, batch: int, precision: str = "fp32") -> Batch:
    """A batch with a task's field shapes. Under a fake mode it takes no memory."""
    dtypes = {name: _parse_dtype(f.dtype, f"field '{name}' of {task.name}", precision) for name, f in task.fields.items()}
    return {name: torch.zeros((batch, *f.shape), dtype=dtypes[name]) for name, f in task.fields.items()}


def example_batch_like(like: Batch, batch: int) -> Batch:
    """A batch with the shapes of `like` and another number of samples."""
    return pytree.tree_map(lambda t: torch.zeros((batch, *t.shape[1:]), dtype=t.dtype) if torch.is_tensor(t) and t.dim() else t, like)


def samples_like(like: Batch, model: nn.Module, batch: int) -> Batch:
    """The first samples of `like`, repeated as often as needed, on the device that the model runs on."""
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[torch.arange(batch, device=tensor.device) % len(tensor)].to(device) if tensor.dim() else tensor.to(device)

    return pytree.tree_map(lambda t: take(t) if torch.is_tensor(t) else t, like)


def cached_fake_model(task: Task) -> tuple[nn.Module, FakeTensorMode]:
    """A task's model and the mode that its tensors belong to; built once per task."""

    def make() -> tuple[nn.Module, FakeTensorMode]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        return build_fake_model(task, mode), mode

    return task.memo.get_or_compute("fakes", (), (), make)


@contextmanager
def _skip_initialization() -> Iterator[None]:
    """Skip weight initialisation: fake tensors have no values, and it takes as long as the rest of a constructor. A library that is imported
    meanwhile may keep what it finds in `torch.nn.init`, as transformers does, so what it finds works again afterwards."""
    originals = {name: getattr(init, name) for name in dir(init) if name.endswith("_") and not name.startswith("_")}
    is_skipping = True

    def skippable(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def initialize(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return tensor if is_skipping else function(tensor, *args, **kwargs)

        return initialize

    for name, function in originals.items():
        setattr(init, name, skippable(function))
    try:
        yield
    finally:
        is_skipping = False
        for name, function in originals.items():
            setattr(init, name, function)


def build_fake_model(task: Task, mode: FakeTensorMode) -> nn.Module:
    try:
        with mode, _skip_initialization():
            return task.build()
    except RequestError:
        raise
    except Exception as error:
        first = error
    try:
        with torch.device("meta"):
            return task.build()
    except Exception:
        reason = str(first).strip().splitlines() or [type(first).__name__]
        raise RequestError(f"model {task.name}: its constructor needs real tensors, so it cannot be profiled: {reason[0][:160]}") from first


def _parse_dtype(name: str, where: str, precision: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(f"{where}: torch has no dtype '{name}': write float32, int64, …")
    return torch.float64 if precision == "fp64" and dtype.is_floating_point else dtype


@contextmanager
def fake_parameters(model: nn.Module, precision: str = "fp32", device: str = "cpu") -> Iterator[dict[str, torch.Tensor]]:
    """While active, the model's parameters and buffers are fakes on `device`; the model itself is not modified. Needs an active fake mode."""
    named = [*model.named_parameters(), *model.named_buffers()]
    fakes = {name: _fake_like(tensor, precision, device) for name, tensor in named}
    with (
        preserved_attributes(model),
        _replaced_tensors(model, [(tensor, fakes[name]) for name, tensor in named]),
        _shape_only_experts(model),
        _shape_only_masks(),
        _KnownAnswers(),
    ):
        yield fakes


@contextmanager
def copied_parameters(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """While active, the model's parameters and buffers are copies; the model itself is not modified, whatever runs. On meta it has no values, and
    noise stands for them: what is measured is time and memory."""
    named = [*model.named_parameters(), *model.named_buffers()]
    generator = torch.Generator().manual_seed(0)

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.detach().clone()
        values = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return values.normal_(0.0, 0.02, generator=generator) if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else values

    copies = {name: copy_of(tensor).requires_grad_(tensor.requires_grad) for name, tensor in named}
    with preserved_attributes(model), _replaced_tensors(model, [(tensor, copies[name]) for name, tensor in named]):
        yield copies


@contextmanager
def _replaced_tensors(model: nn.Module, replacements: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """While active, the model's parameters and buffers are others, wherever they are registered. torch's `functional_call` goes by names, and does
    not put back the tensors of a module that has two: that several modules contain."""
    by_id = {id(tensor): replacement for tensor, replacement in replacements}
    registries: list[dict[str, Any]] = [registry for module in model.modules() for registry in (module._parameters, module._buffers)]
    before = [dict(registry) for registry in registries]
    for registry in registries:
        registry.update({key: by_id[id(tensor)] for key, tensor in registry.items() if tensor is not None})
    try:
        yield
    finally:
        for registry, tensors in zip(registries, before, strict=True):
            registry.clear()
            registry.update(tensors)


class _KnownAnswers(TorchFunctionMode):
    """Answers what code asks about values, where the answer is known although fake tensors have none: `torch.rand([]) < p` is false for p ≤ 0, so
    layers that LayerDrop never drops are always run; and values are taken to be finite."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: list[torch.Tensor] = []
        self._answers: dict[int, tuple[torch.Tensor, bool]] = {}  # tensors whose elements all have one known value; they are kept alive

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_less = self._draws and func in (torch.Tensor.lt, torch.Tensor.__lt__) and not torch.is_tensor(args[1])
        if is_less and args[1] <= 0 and any(args[0] is draw for draw in self._draws):
            return False
        name = getattr(func, "__name__", "")
        known = self._answers.get(id(args[0])) if args else None
        if known is not None and name in ("__bool__", "item"):
            return known[1]
        out = func(*args, **(kwargs or {}))
        if func is torch.rand and out.numel() == 1:
            self._draws.append(out)
        answer = _FINITE_ANSWERS.get(name) if known is None else {"all": known[1], "any": known[1]}.get(name)
        if known is not None and name in ("logical_not", "bitwise_not", "__invert__"):
            answer = not known[1]
        if answer is not None and torch.is_tensor(out):
            self._answers[id(out)] = out, answer
        return out


_FINITE_ANSWERS = {"isfinite": True, "isnan": False, "isinf": False}  # for values that are finite


@contextmanager
def _shape_only_experts(model: nn.Module) -> Iterator[None]:
    """transformers' MoE layers loop over the experts that were hit, which is unknown on fake tensors; its "batched_mm" implementation takes all
    tokens at once."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None and hasattr(c, "_experts_implementation")}
    before = {key: config._experts_implementation for key, config in configs.items()}
    for config in configs.values():
        config._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]


@contextmanager
def _shape_only_masks() -> Iterator[None]:
    """torch's transformer modules read a mask's values to detect whether it is causal, which fake tensors cannot answer; the result is only a
    hint."""
    original = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original


@contextmanager
def assume_unpacked_sequences() -> Iterator[None]:
    """transformers reads the values of position ids to detect packed sequences, and builds a mask if it cannot read them, as on fakes. A traced
    batch has one sequence per sample, so the answer is no."""
    masks = sys.modules.get("transformers.masking_utils")
    find = getattr(masks, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return

    def find_and_ignore(position_ids: torch.Tensor) -> None:
        find(position_ids)  # its operations are part of the dataflow

    masks.find_packed_sequence_indices = find_and_ignore  # type: ignore[union-attr]
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = find  # type: ignore[union-attr]


def _fake_like(tensor: torch.Tensor, precision: str, device: str) -> torch.Tensor:
    dtype = torch.float64 if precision == "fp64" and tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device).requires_grad_(tensor.requires_grad)


@contextmanager
def silence_torch_logging() -> Iterator[None]:
    """torch logs a traceback of its own when shapes do not match; the RequestError says it in one line. It also warns that a norm is computed in
    two precisions, which is what autocast requests."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch._subclasses", "torch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
