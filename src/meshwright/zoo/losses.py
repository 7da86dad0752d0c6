"""The losses of the zoo's models: `(model, batch) -> mean`, or (sum, count) where some targets are ignored; in any float dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.core.task import Batch


def _to_model_dtype(model: nn.Module, values: Tensor) -> Tensor:
    return values.to(next(model.parameters()).dtype)


def _at_least_fp32(values: Tensor) -> Tensor:
    """Cast to at least float32: sums of many half-precision terms lose the small ones."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each token given those before it."""
    tokens = batch["tokens"]
    logits = _at_least_fp32(model(tokens[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def answer_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """(sum, count) of the cross entropy over the targets that are not ignored."""
    return counted_cross_entropy(model(batch["tokens"]), batch["targets"])


def counted_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) of the cross entropy over the targets other than -100, torch's default ignore_index."""
    total = F.cross_entropy(_at_least_fp32(logits).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def elbo_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Minus the evidence lower bound: reconstruction summed over pixels plus divergence from N(0, 1), mean over samples."""
    image = batch["image"]
    logits, mean, log_variance = (_at_least_fp32(x) for x in model(_to_model_dtype(model, image)))
    reconstruction = F.binary_cross_entropy_with_logits(logits, image.to(logits.dtype), reduction="sum")
    divergence = -0.5 * torch.sum(1.0 + log_variance - mean.square() - log_variance.exp())
    return (reconstruction + divergence) / image.shape[0]


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Negative log-likelihood of the label under a model that returns log-probabilities."""
    return F.nll_loss(_at_least_fp32(model(_to_model_dtype(model, batch["image"]))), batch["label"])


def regression_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the targets."""
    predicted = _at_least_fp32(model(_to_model_dtype(model, batch["volume"])))
    return F.mse_loss(predicted, batch["target"].to(predicted.dtype))


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Binary cross entropy of clicked or not."""
    logits = _at_least_fp32(model(_to_model_dtype(model, batch["dense"]), batch["sparse"]))
    return F.binary_cross_entropy_with_logits(logits, batch["label"].to(logits.dtype))
