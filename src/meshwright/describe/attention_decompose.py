"""Replaces `nn.MultiheadAttention`'s forward with plain calls that a trace can follow and tensor parallelism can shard.

`nn.MultiheadAttention` computes inside one function, which a trace sees as one call and which merges samples and heads into one dim. The decomposed
forward does not fix the number of heads, so a rank may hold some of them. Cases that it does not cover (attention weights are requested, learned
extra keys) run torch's own forward and stay unsharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def decompose_attention(model: nn.Module) -> None:
    """Decompose every attention module of `model`, in place. torch's encoder layers, which run a fused fast path when nothing is trained, then go
    through their modules too: the fast path would skip the hooks that a plan puts on them."""
    for module in _standard_attentions(model):
        module.forward = MethodType(_decomposed_forward, module)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0  # the only condition of the fast path that affects nothing else
        elif isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


@contextmanager
def decomposed_attention(model: nn.Module) -> Iterator[None]:
    """`decompose_attention` for the duration of a trace, in which something is trained."""
    modules = _standard_attentions(model)
    for module in modules:
        module.forward = MethodType(_decomposed_forward, module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _standard_attentions(model: nn.Module) -> list[Any]:
    """Attention modules that run torch's own forward: no subclass with its own, no module with a patched one."""
    modules = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    return [m for m in modules if type(m).forward is nn.MultiheadAttention.forward and "forward" not in vars(m)]


def _decomposed_forward(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if need_weights or module.bias_k is not None or module.add_zero_attn or query.is_nested or (is_causal and attn_mask is None):
        args = (query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        return nn.MultiheadAttention.forward(module, *args)
    unbatched = query.dim() == 2
    sequence_first = not module.batch_first and not unbatched
    q, k, v = (_heads_first(x, sequence_first, unbatched) for x in _project_qkv(module, query, key, value))
    causal = is_causal and key_padding_mask is None  # then attn_mask says nothing more
    mask = None if causal else _merge_masks(attn_mask, key_padding_mask, q)
    out = F.scaled_dot_product_attention(q, k, v, mask, module.dropout if module.training else 0.0, causal)
    out = module.out_proj(out.transpose(1, 2).flatten(2))
    return (out.squeeze(0) if unbatched else out.transpose(0, 1) if sequence_first else out), None


def _project_qkv(module: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values with heads as a separate dim; one matmul where all three are projections of the same tensor."""
    if module._qkv_same_embed_dim and key is query and value is query:
        return F.linear(query, module.in_proj_weight, module.in_proj_bias).unflatten(-1, (3, -1, module.head_dim)).unbind(-3)
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.unflatten(0, (3, -1)).unbind(0)
    biases = module.in_proj_bias.unflatten(0, (3, -1)).unbind(0) if module.in_proj_bias is not None else (None, None, None)
    projections = zip((query, key, value), weights, biases, strict=True)
    return tuple(F.linear(x, w, b).unflatten(-1, (-1, module.head_dim)) for x, w, b in projections)


def _heads_first(x: Tensor, sequence_first: bool, unbatched: bool) -> Tensor:
    """The tensor as (sample, head, position, width), from either layout of positions and samples."""
    if unbatched:
        return x.transpose(0, 1).unsqueeze(0)
    return x.permute(1, 2, 0, 3) if sequence_first else x.transpose(1, 2)


def _merge_masks(attn_mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask to add to the scores. In a mask of three dims the first is samples × heads."""
    mask = None
    if attn_mask is not None:
        mask = _additive_mask(attn_mask, query)
        mask = mask.unflatten(0, (query.shape[0], -1)) if mask.dim() == 3 else mask
    if padding is not None:
        padding = _additive_mask(padding, query).reshape(query.shape[0], 1, 1, padding.shape[-1])
        mask = padding if mask is None else mask + padding
    return mask


def _additive_mask(mask: Tensor, query: Tensor) -> Tensor:
    return mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, float("-inf"))
