"""What torch's operations are to us: which move memory only, which compute with exponentials, which are dear, and what the dear ones compute."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from meshwright.core.model import KernelKind

_SPECIAL_OPS = ("gelu", "silu", "softmax", "tanh", "sigmoid", "exp", "erf", "logsumexp", "softplus", "mish", "binary_cross_entropy")


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """What torch's counter says; for recurrent layers, which it does not know, two products with their weights at each position."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    if "rnn_layer" not in str(packet):
        return 0.0
    positions = args[0].numel() // args[0].shape[-1]
    weights = sum(t.numel() for t in args[1:5] if torch.is_tensor(t) and t.dim() == 2)
    return 2.0 * positions * weights * (2.0 if "backward" in str(packet) else 1.0)


def kernel_kind(op_name: str, flops: float, dims: int = 0) -> KernelKind:
    """`dims`: of the largest tensor that goes in or comes out."""
    if flops:
        if "conv" in op_name:
            return "conv3" if dims == 5 else "conv2" if dims == 4 else "conv"
        return "attention" if "attention" in op_name else "batched" if "bmm" in op_name else "matmul"
    pools = "pool" in op_name and "backward" not in op_name  # looks at every window by itself
    return "special" if pools or any(word in op_name for word in _SPECIAL_OPS) else "memory"


def is_compute_intensive(func: Any) -> bool:
    """Matrix products, convolutions, attention and recurrent layers: what the counter counts, and its relatives on CPUs."""
    return func._overloadpacket in flop_registry or any(word in func.name() for word in ("_attention", "rnn_layer"))


def is_zero_cost(func: Any) -> bool:
    """Views, bare allocations and questions about a tensor move nothing."""
    returns, name = func._schema.returns, func.name()
    aliases = [r.alias_info for r in returns]
    view = any(a is not None and not a.is_write for a in aliases) or name in ("aten::_unsafe_view", "aten::detach")
    return view or not returns or not name.startswith("aten::") or "empty" in name
