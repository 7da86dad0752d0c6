"""Synthetic samples for any fields, each a hash of (seed, index), with targets that a model can learn from the inputs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.core.errors import RequestError
from meshwright.core.task import Field

Array = np.ndarray[Any, np.dtype[Any]]

_SPLIT_SIZES = {"train": 4096, "validation": 512}
_TARGET_NAMES = ("label", "labels", "target", "targets")
_NUM_LEVELS = 16  # an input has this many segments, each with its own mean; targets are a function of the means
_NOISE_PERIOD = 1 << 16  # distinct noise values in a sample; larger inputs repeat them, since hashing a 128³ volume takes longer than training on it
_ALPHABET_SIZE = 64  # tokens in use, so that a short run sees each of them often


def _splitmix64(bits: Array) -> Array:
    """The finaliser of splitmix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _uniform(*key: Array) -> Array:
    """Numbers in [0, 1) for each combination of the keys, which broadcast."""
    state: Array = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):  # a hash relies on wraparound
        for part in key:
            state = _splitmix64(state + (part.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)) * 2.0**-53


class SyntheticDataset:
    """4096 training samples and 512 others for validation. Fields named label or target are functions of the rest."""

    def __init__(self, fields: Mapping[str, Field], split: str, seed: int) -> None:
        for name, field in fields.items():
            if not _is_float(field) and field.high < 1:
                raise RequestError(f"data set 'synthetic': the {field.dtype} field '{name}' has no bound: set its high")
        self._targets = {n: f for n, f in fields.items() if n in _TARGET_NAMES}
        self._inputs = {n: f for n, f in fields.items() if n not in _TARGET_NAMES}
        self._length = _SPLIT_SIZES[split]
        self._offset = 0 if split == "train" else _SPLIT_SIZES["train"]
        self._seed = np.array(seed % (1 << 63))

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        samples = indices.numpy().reshape(-1, 1) + self._offset
        columns: dict[str, Array] = {}
        features = [np.zeros((len(samples), 0))]
        for name, field in self._inputs.items():
            columns[name], field_features = self._input_field(name, field, samples)
            features.append(field_features)
        for name, field in self._targets.items():
            columns[name] = self._target_field(name, field, np.concatenate(features, axis=1))
        fields = {**self._inputs, **self._targets}
        return {name: _to_tensor(values, fields[name]) for name, values in columns.items()}

    def _uniform_draw(self, name: str, *key: Array) -> Array:
        # crc32, not hash(): Python's hash of a string differs from process to process.
        return _uniform(self._seed, np.array(zlib.crc32(name.encode())), *key)

    def _input_field(self, name: str, field: Field, samples: Array) -> tuple[Array, Array]:
        """(values, features that targets may depend on) of one input field."""
        if _is_float(field):
            return self._float_input(name, field, samples)
        if self._targets:
            return self._categorical_input(name, field, samples)
        return self._token_input(name, field, samples), np.zeros((len(samples), 0))

    def _float_input(self, name: str, field: Field, samples: Array) -> tuple[Array, Array]:
        """Values in [0, 1): noise around a mean that changes along the sample."""
        size = math.prod(field.shape)
        # Volumes get one mean per channel: a network that pools them to a point loses the position within the volume.
        count = field.shape[0] if len(field.shape) == 4 else min(_NUM_LEVELS, size)
        levels = self._uniform_draw(f"{name} level", samples, np.arange(count))
        segment_sizes = np.diff(np.arange(count + 1) * size // count)
        values = np.repeat((0.75 * levels).astype(np.float32), segment_sizes, axis=1)
        noise = (0.25 * self._uniform_draw(name, samples, np.arange(min(size, _NOISE_PERIOD)))).astype(np.float32)
        for start in range(0, size, _NOISE_PERIOD):
            part = values[:, start : start + _NOISE_PERIOD]
            part += noise[:, : part.shape[1]]
        return values, levels - 0.5

    def _categorical_input(self, name: str, field: Field, samples: Array) -> tuple[Array, Array]:
        """Indices below `high`, small ones far more frequent, as in real logs; each has a hidden weight that targets depend on."""
        column = np.arange(math.prod(field.shape))
        chosen = (field.high * self._uniform_draw(name, samples, column) ** 4).astype(np.int64)
        return chosen, self._uniform_draw(f"{name} weight", column, chosen) - 0.5

    def _token_input(self, name: str, field: Field, samples: Array) -> Array:
        """Tokens that count upwards by a fixed stride, one in ten replaced by a random one: each token is predictable from the previous one."""
        alphabet = min(field.high, _ALPHABET_SIZE)
        position = np.arange(math.prod(field.shape))
        start = (alphabet * self._uniform_draw(f"{name} start", samples)).astype(np.int64)
        stride = 1 + int(self._uniform_draw(f"{name} stride") * (alphabet - 1))
        random = (alphabet * self._uniform_draw(name, samples, position)).astype(np.int64)
        return np.where(self._uniform_draw(f"{name} noise", samples, position) < 0.1, random, (start + position * stride) % alphabet)

    def _target_field(self, name: str, field: Field, features: Array) -> Array:
        """A fixed random map of the features: the winning class for integers, a value in (−1, 1) for floats."""
        outputs = math.prod(field.shape) * (1 if _is_float(field) else field.high)
        weights = self._uniform_draw(name, np.arange(features.shape[1]).reshape(-1, 1), np.arange(outputs)) - 0.5
        # A sum along an axis, not a matrix product: its rounding does not depend on which other samples are in the batch.
        scores = (features[:, :, None] * weights).sum(axis=1)
        return np.tanh(2.0 * scores) if _is_float(field) else scores.reshape(len(scores), -1, field.high).argmax(axis=2)


def _torch_dtype(field: Field) -> torch.dtype:
    dtype = getattr(torch, field.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(f"data set 'synthetic': torch has no type '{field.dtype}'")
    return dtype


def _is_float(field: Field) -> bool:
    return _torch_dtype(field).is_floating_point


def _to_tensor(values: Array, field: Field) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(_torch_dtype(field)).reshape(len(values), *field.shape)
