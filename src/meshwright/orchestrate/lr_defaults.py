"""The learning rate and warm-up of a run that names neither: from the width and depth of the model, with the reason in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.core.task import Task
from meshwright.orchestrate.config import RunConfig

_BASE_RATE, _BASE_WIDTH = 6e-4, 768  # of Adam, as GPT-3's table; scaled by 1/width it stays within 1.6 times that table from width 768 to 12288
_MAX_RATE = 1e-3
_FINE_TUNING_RATE, _FINE_TUNING_WIDTH = 2e-5, 4096  # up to this width
_SGD_RATE = 1e-2
_MIN_WARMUP = 10
_MAX_WARMUP = 2000
_WARMUP_SHARE = 0.01  # of a long run
_MAX_WARMUP_SHARE = 0.25  # of a short run
# [Note: warm-up] An embedding begins with a standard deviation near 0.02, so that the residual stream does too. Adam's first step moves every
# weight by the learning rate, in a direction that all tokens share: an output projection of fan-in ~width, with inputs that grow with √width
# (weights of 0.02), moves the stream by about rate·0.02·width^1.5, and `depth` blocks add up. A first step of 1 / (depth·width^1.5) is as
# large as the stream itself. Runs whose first step is 14 times that still train; those with 40 times and more see their loss rise. A short run,
# most of which should train at the full rate, begins with a larger step.
_FIRST_STEP, _LARGEST_FIRST_STEP = 2.0, 14.0


@dataclass(frozen=True)
class ModelScale:
    """Width: the size that most elements of the trainable matrices share. Depth: their elements in units of a block's 12·width²."""

    width: int
    depth: float


def model_scale(shapes: Iterable[tuple[int, ...]]) -> ModelScale | None:
    """The scale of a model by the shapes of its trainable parameters; None if it has no matrix. Only the two largest dims of a shape count:
    the others are kernels and experts."""
    matrices = [(math.prod(shape), sorted(shape)[-2:]) for shape in shapes if len(shape) > 1]
    elements = Counter[int]()
    for numel, dims in matrices:
        for dim in set(dims):
            elements[dim] += numel
    if not elements:
        return None
    width = min(elements, key=lambda dim: (-elements[dim], dim))
    hidden = sum(numel for numel, dims in matrices if width in dims and dims[-1] <= 8 * width)  # no embeddings: a vocabulary is larger
    return ModelScale(width, hidden / (12 * width**2))


def default_peak(scale: ModelScale | None, optimizer: str, pretrained: bool) -> tuple[float, str]:
    """The peak learning rate, and its reason."""
    if optimizer in ("sgd", "momentum"):
        return _SGD_RATE, "the default of SGD, which clipping bounds"
    base, base_width = (_FINE_TUNING_RATE, _FINE_TUNING_WIDTH) if pretrained else (_BASE_RATE, _BASE_WIDTH)
    limit, weights = (base, ", for trained weights") if pretrained else (_MAX_RATE, "")
    if scale is None or base * base_width >= limit * scale.width:
        return limit, f"the largest by default{weights}"
    return float(f"{base * base_width / scale.width:.1e}"), f"{base:g} at width {base_width}, scaled to width {scale.width}{weights}"


def default_warmup(scale: ModelScale | None, peak: float, steps: int, *, pretrained: bool) -> tuple[int, str]:
    """The number of warm-up steps, and its reason. See [Note: warm-up]."""
    share = max(math.ceil(_WARMUP_SHARE * steps), _MIN_WARMUP)
    if scale is not None and not pretrained:
        first_step = peak * scale.depth * scale.width**1.5
        shortest = max(math.ceil(first_step / _LARGEST_FIRST_STEP), int(_MAX_WARMUP_SHARE * steps))
        needed = min(math.ceil(first_step / _FIRST_STEP), shortest, _MAX_WARMUP)
        if needed > share:
            return needed, f"for width {scale.width} and depth {scale.depth:.0f}"
    return share, f"{_WARMUP_SHARE:.0%} of the run" if share > _MIN_WARMUP else "the least by default"


def fill_learning_rate(config: RunConfig, task: Task, shapes: Iterable[tuple[int, ...]]) -> tuple[RunConfig, str]:
    """The configuration with its learning rate and warm-up, and one line that says where they come from; `shapes` as for `model_scale`."""
    scale = model_scale(shapes)
    if config.learning_rate is not None:
        peak, why_peak = config.learning_rate, "given"
    elif task.learning_rate is not None:
        peak, why_peak = task.learning_rate, f"the default of {task.name}"
    else:
        peak, why_peak = default_peak(scale, config.optimizer, task.pretrained)
    if config.warmup_steps is not None:
        warmup, why_warmup = config.warmup_steps, "given"
    else:
        adam = config.optimizer in ("adamw", "adam")
        warmup, why_warmup = default_warmup(scale if adam else None, peak, config.steps, pretrained=task.pretrained)
    reached = f"; this run of {config.steps} steps ends within it" if warmup >= config.steps else ""
    text = f"Learning rate {peak:g}: {why_peak}. Warm-up of {warmup} steps: {why_warmup}{reached}."
    return config.model_copy(update={"learning_rate": peak, "warmup_steps": warmup}), text
