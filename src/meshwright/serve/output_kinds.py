"""What a model's outputs mean, and what they say over a data set: reconstructions, classes, clicks, regressed values, or plain tensors.

The task's loss tells the kind for models of the zoo; for others, the outputs' shape and an integer label field do. A kind gives columns, tensors with
one row a sample, and figures, which are computed from the columns that have one number a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.core.task import Batch, Loss, Task
from meshwright.serve.tensor_messages import Array
from meshwright.zoo import losses

_LABELS = ("label", "labels", "target", "targets")
_TOP = 5
Columns = dict[str, Tensor]


@dataclass(frozen=True)
class Figure:
    """One number about all samples; None where it is not defined."""

    key: str
    label: str
    value: float | None
    is_share: bool = False


@dataclass(frozen=True)
class OutputKind:
    """`columns` of a batch, from the model's outputs; `figures`, from the columns of all samples. `image` and `reconstruction` name the field and the
    column that a picture shows."""

    name: str
    columns: Callable[[Any, Batch], Columns]
    figures: Callable[[Mapping[str, Array]], list[Figure]] = lambda columns: []
    image: str = ""
    reconstruction: str = ""


def known_kind(task: Task) -> OutputKind | None:
    """The kind of a task whose loss is one of the zoo's."""
    return KINDS[_BY_LOSS[task.loss]] if task.loss in _BY_LOSS else None


def find_kind(task: Task, outputs: Any, count: int) -> OutputKind:
    """The kind of the outputs of a batch of `count` samples."""
    if (kind := known_kind(task)) is not None:
        return kind
    scores, labels = _scores_of(outputs), [n for n, f in task.fields.items() if n in _LABELS and f.dtype == "int64" and f.shape == ()]
    if len(labels) == 1 and isinstance(scores, Tensor) and scores.is_floating_point() and scores.shape[:1] == (count,):
        high = task.fields[labels[0]].high
        if scores.dim() == 2 and scores.shape[1] >= 2 and high in (0, scores.shape[1]):
            return replace(KINDS["classes"], columns=partial(_class_columns, label=labels[0]))
        if scores.numel() == count and high == 2:
            return replace(KINDS["scores"], columns=partial(_score_columns, label=labels[0]))
    return KINDS["tensors"]


def flatten_outputs(outputs: Any, name: str = "output") -> Columns:
    """The tensors in a model's outputs by name: `output`, `output.0`, or the keys of an object."""
    if isinstance(outputs, Tensor):
        return {name: outputs}
    if is_dataclass(outputs) and not isinstance(outputs, (type, Mapping)):
        outputs = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    if isinstance(outputs, tuple) and hasattr(outputs, "_asdict"):
        outputs = outputs._asdict()
    prefix = "" if name == "output" else f"{name}."
    if isinstance(outputs, Mapping):
        return {k: v for key, value in outputs.items() for k, v in flatten_outputs(value, f"{prefix}{key}").items()}
    if isinstance(outputs, (tuple, list)):
        return {k: v for i, value in enumerate(outputs) for k, v in flatten_outputs(value, f"{name}.{i}").items()}
    return {}


def _scores_of(outputs: Any) -> Any:
    return outputs.get("logits") if isinstance(outputs, Mapping) else outputs


def _mean(values: Array) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None


# -- variational autoencoders --


def _vae_columns(outputs: Sequence[Tensor], batch: Batch) -> Columns:
    logits, mean, log_variance = (tensor.float() for tensor in outputs)
    image = batch["image"].to(logits.dtype)
    reconstruction = torch.sigmoid(logits)
    return {
        "reconstruction": reconstruction,
        "mean": mean,
        "log_variance": log_variance,
        "reconstruction_error": F.binary_cross_entropy_with_logits(logits, image, reduction="none").flatten(1).double().sum(1),
        "divergence": -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).double().sum(1),
        "squared_error": (reconstruction - image).square().flatten(1).double().mean(1),
    }


def _vae_figures(columns: Mapping[str, Array]) -> list[Figure]:
    error, divergence = columns["reconstruction_error"], columns["divergence"]
    return [
        Figure("reconstruction_error", "reconstruction error, nats a sample", _mean(error)),
        Figure("divergence", "divergence from N(0, 1), nats a sample", _mean(divergence)),
        Figure("negative_elbo", "minus ELBO: both together", _mean(error + divergence)),
        Figure("squared_error", "squared error of a pixel", _mean(columns["squared_error"])),
    ]


# -- classes --


def _class_columns(outputs: Any, batch: Batch, label: str = "label") -> Columns:
    """`correct`, and `in_top5` where there are many classes: whether the right class is the first by score, or among the first. Never with NaN."""
    scores, right = _scores_of(outputs).float(), batch[label]
    of_right = scores.gather(1, right[:, None])
    before = (scores > of_right) | ((scores == of_right) & (torch.arange(scores.shape[1], device=scores.device) < right[:, None]))
    rank = before.sum(1).where(~scores.isnan().any(1), scores.shape[1])
    found = {"scores": scores, "predicted": scores.argmax(1), "label": right, "correct": rank < 1}
    return {**found, "in_top5": rank < _TOP} if scores.shape[1] > 2 * _TOP else found


def _class_figures(columns: Mapping[str, Array]) -> list[Figure]:
    found = [Figure("accuracy", "accuracy", _mean(columns["correct"]), is_share=True)]
    if "in_top5" in columns:
        found.append(Figure("top5_accuracy", f"right class among the first {_TOP}", _mean(columns["in_top5"]), is_share=True))
    return found


# -- two classes by one score --


def _score_columns(outputs: Any, batch: Batch, label: str = "label") -> Columns:
    """The scores of a user's model: probabilities or logits, nobody knows, so only their order counts."""
    return {"output": _scores_of(outputs).reshape(-1).float(), "label": batch[label]}


def _score_figures(columns: Mapping[str, Array]) -> list[Figure]:
    return [Figure("auc", "area under the ROC curve", area_under_curve(columns["output"], columns["label"]))]


def _click_columns(logits: Tensor, batch: Batch) -> Columns:
    logits = logits.float()
    return {"logit": logits, "score": torch.sigmoid(logits), "label": batch["label"]}


def _click_figures(columns: Mapping[str, Array]) -> list[Figure]:
    logit, label = columns["logit"].astype(np.float64), columns["label"]
    log_loss = np.maximum(logit, 0.0) - logit * label + np.log1p(np.exp(-np.abs(logit)))
    return [
        Figure("auc", "area under the ROC curve", area_under_curve(logit, label)),
        Figure("log_loss", "log loss", _mean(log_loss)),
        Figure("accuracy", "accuracy", _mean(np.where(np.isnan(logit), False, (logit > 0) == (label == 1))), is_share=True),
        Figure("clicked", "clicked, of all samples", _mean(label == 1), is_share=True),
    ]


def area_under_curve(scores: Array, label: Array) -> float | None:
    """The probability that a positive sample has a larger score than a negative one; equal scores count half. None without samples of both kinds, or
    with NaN."""
    positive = label == 1
    hits, misses = int(positive.sum()), int((~positive).sum())
    if not hits or not misses or np.isnan(scores).any():
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # of equal scores: their mean
    return float((ranks[place][positive].sum() - hits * (hits + 1) / 2) / (hits * misses))


# -- regressed values --


def _regression_columns(predicted: Tensor, batch: Batch) -> Columns:
    predicted, target = predicted.float(), batch["target"].float()
    error = (predicted - target).flatten(1).double()
    return {"prediction": predicted, "target": target, "squared_error": error.square().mean(1), "absolute_error": error.abs().mean(1)}


def _regression_figures(columns: Mapping[str, Array]) -> list[Figure]:
    squared = _mean(columns["squared_error"])
    return [
        Figure("squared_error", "mean squared error", squared),
        Figure("root_squared_error", "its root", None if squared is None else math.sqrt(squared)),
        Figure("absolute_error", "mean absolute error", _mean(columns["absolute_error"])),
    ]


KINDS = {
    kind.name: kind
    for kind in (
        OutputKind("reconstructions", _vae_columns, _vae_figures, "image", "reconstruction"),
        OutputKind("classes", _class_columns, _class_figures),
        OutputKind("clicks", _click_columns, _click_figures),
        OutputKind("scores", _score_columns, _score_figures),
        OutputKind("values", _regression_columns, _regression_figures),
        OutputKind("tensors", lambda outputs, _: flatten_outputs(outputs)),
    )
}
_BY_LOSS: dict[Loss, str] = {
    losses.elbo_loss: "reconstructions", losses.classification_loss: "classes", losses.click_loss: "clicks", losses.regression_loss: "values"
}  # fmt: skip
