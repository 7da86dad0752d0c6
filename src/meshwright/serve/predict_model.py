"""A model that answers samples: runs batches of them, and gives each sample what the model would give it alone.

[Note: batches are tried]
Samples that came from different clients may only go through the model together if that changes nothing for any of them. So the first batch of each
shape is computed both together and one by one, and compared. A made-up sample, unlike the others, is added to it, because equal samples would hide
that they meet. If the results differ by more than rounding, or one cannot be told from the other (an output that is not one row a sample), samples
of that shape are computed one by one from then on.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import RunError
from meshwright.serve.model_inputs import ModelInputs

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # relative to the largest number of an output
_MAX_SHAPES = 256  # of which it is known whether they may be batched
_FATAL = ("CUDA error", "device-side assert")  # after these the process can compute nothing more

Inputs = Mapping[str, Tensor]


class ModelBrokenError(Exception):
    """The device has failed: the process has to end."""


@dataclass(frozen=True)
class Outputs:
    """What some samples of a batch, by their places in it, got: a tree of plain data in which {"$": i} stands for tensor i and {"": {…}} for an
    object. The tensors in `rows` have a row for each sample; the others are the same for all. `error` stands instead of them."""

    samples: tuple[int, ...]
    tree: Any = None
    tensors: tuple[Tensor, ...] = ()
    rows: frozenset[int] = frozenset()
    error: str = ""


@dataclass(frozen=True)
class _Verdict:
    """Whether samples of one shape may go together, and which of the output's tensors have a row for each."""

    together: bool
    rows: frozenset[int]


class PredictModel:
    """`call` computes the outputs of a batch. `sizes` are the sizes that a batch may have, if it is not any: a smaller one is filled up. `agreed`
    makes the ranks of one model decide alike."""

    def __init__(self, call: Callable[[Inputs], Any], sizes: Sequence[int] = (), agreed: Callable[[bool], bool] = lambda verdict: verdict) -> None:
        self._call, self._sizes, self._agreed = call, sorted(sizes), agreed
        self._verdicts: OrderedDict[Any, _Verdict] = OrderedDict()  # by the shapes of a sample
        self.left_out: set[str] = set()  # types of outputs that are no plain data

    @torch.inference_mode()
    def run(self, inputs: Inputs) -> list[Outputs]:
        """The outputs of all samples of a batch."""
        count = next(iter(inputs.values())).shape[0]
        key = tuple((name, *tensor.shape[1:], tensor.dtype) for name, tensor in inputs.items())
        verdict = self._verdicts.get(key)
        if verdict is None:
            return self._try_together(key, inputs, count)
        if verdict.together and count > 1:
            try:
                return [self._outputs(self._padded(inputs, count), tuple(range(count)), verdict.rows)]
            except Exception as error:  # of one sample, perhaps: the others are answered
                _raise_if_broken(error)
        return [self._alone(inputs, i, verdict.rows) for i in range(count)]

    @property
    def samples_meet(self) -> bool:
        """Whether a batch has given other results than its samples alone."""
        return not all(verdict.together for verdict in self._verdicts.values())

    def _alone(self, inputs: Inputs, place: int, rows: frozenset[int] | None = None) -> Outputs:
        """One sample's outputs; as long as nothing is known, tensors with one row have it for the sample."""
        try:
            return self._outputs({name: tensor[place : place + 1] for name, tensor in inputs.items()}, (place,), rows)
        except Exception as error:
            _raise_if_broken(error)
            return Outputs((place,), error=first_line(error))

    def _try_together(self, key: Any, inputs: Inputs, count: int) -> list[Outputs]:
        alone = [self._alone(inputs, i) for i in range(count)]
        if any(outputs.error for outputs in alone):  # nothing is known yet
            return alone
        more = {name: torch.cat([tensor, _unlike(tensor[:1])]) for name, tensor in inputs.items()}
        rows = alone[0].rows
        try:
            together = self._outputs(self._padded(more, count + 1), tuple(range(count + 1)), None)
            rows = _rows(alone[0], together)
            verdict = _agree(together, alone, rows)
        except Exception as error:
            _raise_if_broken(error)
            verdict = False
        self._verdicts[key] = _Verdict(self._agreed(verdict), rows)
        if len(self._verdicts) > _MAX_SHAPES:
            self._verdicts.popitem(last=False)
        return [replace(outputs, rows=rows) for outputs in alone]

    def _padded(self, inputs: Inputs, count: int) -> Inputs:
        """The batch with its last sample repeated up to the next size."""
        size = next((size for size in self._sizes if size >= count), count)
        if size == count:
            return inputs
        return {name: torch.cat([tensor, tensor[-1:].expand(size - count, *tensor.shape[1:])]) for name, tensor in inputs.items()}

    def _outputs(self, inputs: Inputs, samples: tuple[int, ...], rows: frozenset[int] | None) -> Outputs:
        size = next(iter(inputs.values())).shape[0]
        tensors: list[Tensor] = []
        tree = self._plain(self._call(inputs), tensors)
        found = frozenset(i for i, t in enumerate(tensors) if t.dim() and t.shape[0] == size)
        if rows is not None and not rows <= found:
            raise RunError("an output has not the shape that it had when the model was tried")
        if rows is None:
            return Outputs(samples, tree, tuple(tensors), found)
        return Outputs(samples, tree, tuple(t[: len(samples)] if i in rows else t for i, t in enumerate(tensors)), rows)

    def _plain(self, value: Any, tensors: list[Tensor]) -> Any:
        """Outputs as lists, objects and numbers, with places for the tensors."""
        if isinstance(value, Tensor):
            tensors.append(value)
            return {"$": len(tensors) - 1}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return {"": {str(key): self._plain(entry, tensors) for key, entry in value.items() if entry is not None}}
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            return self._plain(value._asdict(), tensors)
        if isinstance(value, (tuple, list)):
            return [self._plain(entry, tensors) for entry in value]
        if dataclasses.is_dataclass(value):
            return self._plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, tensors)
        self.left_out.add(type(value).__name__)
        return None


def bind_model(model: nn.Module, inputs: ModelInputs) -> Callable[[Inputs], Any]:
    """The model's call for named tensors; floats are given to it in its own precision."""
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def call(tensors: Inputs) -> Any:
        cast = {name: tensor.to(own) if tensor.dtype == torch.float32 else tensor for name, tensor in tensors.items()}
        args, kwargs = inputs.arguments(cast)
        return model(*args, **kwargs)

    return call


def _unlike(sample: Tensor) -> Tensor:
    """Another sample with numbers in the same range."""
    generator = torch.Generator().manual_seed(0)
    if sample.dtype == torch.bool or not sample.numel():
        return ~sample if sample.dtype == torch.bool else sample
    low, high = sample.min(), sample.max()
    if sample.is_floating_point():
        drawn = torch.rand(sample.shape, generator=generator).to(sample.device, sample.dtype)
        return low + drawn * (high - low if high > low else high.abs() + 1)
    return torch.randint(int(low), int(high) + 1, sample.shape, generator=generator).to(sample.device, sample.dtype)


def _rows(alone: Outputs, together: Outputs) -> frozenset[int]:
    """The tensors that have a row for each sample. None, if the outputs for more samples are of another form: a list with one entry a sample, say.
    A sample then gets what the model gives for a batch of one."""
    if alone.tree != together.tree or len(alone.tensors) != len(together.tensors):
        return frozenset()
    return frozenset(i for i in alone.rows & together.rows if alone.tensors[i].shape[1:] == together.tensors[i].shape[1:])


def _agree(together: Outputs, alone: Sequence[Outputs], rows: frozenset[int]) -> bool:
    """Whether each of these samples has got together, where there is a further one, what it got alone, but for rounding."""
    if any(outputs.tree != together.tree or len(outputs.tensors) != len(together.tensors) for outputs in alone):
        return False
    for i, all_of_them in enumerate(together.tensors):
        for place, outputs in enumerate(alone):
            mine = outputs.tensors[i]
            if not is_close(mine[0] if i in rows else mine, all_of_them[place] if i in rows else all_of_them):
                return False
    return True


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are equal but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return bool((a == b).all())
    a, b, tolerance = a.double(), b.double(), _TOLERANCE.get(a.dtype, 0.05)
    scale = b[b.isfinite()].abs().max() if b.isfinite().any() else torch.ones((), dtype=b.dtype)
    return torch.allclose(a, b, rtol=tolerance, atol=float(scale) * tolerance, equal_nan=True)


def _raise_if_broken(error: Exception) -> None:
    if any(words in str(error) for words in _FATAL):
        raise ModelBrokenError(first_line(error)) from error


def first_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:300]}"
