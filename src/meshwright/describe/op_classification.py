"""Classifies torch's operations: zero-cost, memory-bound, transcendental or compute-intensive, with the FLOPs and the kernel kind of each."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from meshwright.core.model import KernelKind

_SPECIAL_OPS = ("gelu", "silu", "softmax", "tanh", "sigmoid", "exp", "erf", "logsumexp", "softplus", "mish", "binary_cross_entropy")


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """FLOPs by torch's counter; for recurrent layers, which it does not cover, two matmuls with their weights at each position."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    if "rnn_layer" not in str(packet):
        return 0.0
    positions = args[0].numel() // args[0].shape[-1]
    weights = sum(t.numel() for t in args[1:5] if torch.is_tensor(t) and t.dim() == 2)
    return 2.0 * positions * weights * (2.0 if "backward" in str(packet) else 1.0)


def kernel_kind(op_name: str, flops: float, dims: int = 0) -> KernelKind:
    """The kernel kind of an operation; `dims` is the rank of its largest input or output."""
    if flops:
        if "conv" in op_name:
            return "conv3" if dims == 5 else "conv2" if dims == 4 else "conv"
        return "attention" if "attention" in op_name else "batched" if "bmm" in op_name else "matmul"
    pools = "pool" in op_name and "backward" not in op_name  # pooling processes every window separately
    return "special" if pools or any(word in op_name for word in _SPECIAL_OPS) else "memory"


def is_compute_intensive(func: Any) -> bool:
    """Whether it is a matmul, convolution, attention or recurrent layer: what the counter covers, and its CPU variants."""
    return func._overloadpacket in flop_registry or any(word in func.name() for word in ("_attention", "rnn_layer"))


def is_zero_cost(func: Any) -> bool:
    """Whether it moves no data: views, bare allocations and metadata queries."""
    returns, name = func._schema.returns, func.name()
    aliases = [r.alias_info for r in returns]
    view = any(a is not None and not a.is_write for a in aliases) or name in ("aten::_unsafe_view", "aten::detach")
    return view or not returns or not name.startswith("aten::") or "empty" in name
