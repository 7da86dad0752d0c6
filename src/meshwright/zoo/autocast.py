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
    return padded_linear(x, head.weight, padding)


def padded_linear(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """`F.linear` with `padding` more outputs, which a bias makes so low that they get neither probability nor gradient. The matmul adds the bias."""
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    bias = F.pad(x.new_zeros(weight.shape[0]), (0, padding), value=torch.finfo(dtype).min / 2)
    return F.linear(x, F.pad(weight, (0, 0, 0, padding)), bias)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Cast the residual stream to the low precision of autocast: half the memory traffic, and the same as under ZeRO-3."""
    device_type = x.device.type
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return x.to(torch.get_autocast_dtype(device_type)) if enabled else x
