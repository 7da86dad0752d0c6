"""Hardware-dependent details of language models: the residual stream's dtype under autocast, and an output head padded for tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def padded_head(x: Tensor, head: nn.Linear) -> Tensor:
    """The head's logits. Tensor cores and the loss's kernels need a width that is a multiple of 64, and GPT-2's vocabulary (50,257) is odd: when
    training on a GPU the matmul is padded, and the padding's logits are so low that they get neither probability nor gradient."""
    vocab = head.weight.shape[0]
    padding = -vocab % 64
    if not padding or not head.training or type(head) is not nn.Linear or head.weight.device.type == "cpu":
        return head(x)
    logits = F.linear(x, F.pad(head.weight, (0, 0, 0, padding)))
    real = torch.arange(vocab + padding, device=x.device) < vocab
    return torch.where(real, logits, torch.finfo(logits.dtype).min / 2)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Cast the residual stream to the low precision of autocast: half the memory traffic, and the same as under ZeRO-3."""
    device_type = x.device.type
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return x.to(torch.get_autocast_dtype(device_type)) if enabled else x
