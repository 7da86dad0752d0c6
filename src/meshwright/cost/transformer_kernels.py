"""The closed form's transformer: its block and head as `LayerProfile`s of `Kernel`s, the same that tracing a model gives.

In: the model's dimensions and a rank's shard. Out: what one rank computes, moves and saves for one micro-batch of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from meshwright.core.model import Kernel, LayerProfile

TransformerRecompute = Literal["none", "attention", "full"]
ACTIVATION_ITEMSIZE = 2  # bytes of an activation: bf16 and fp16, and the tensors around fp8 matmuls


@dataclass(frozen=True)
class TransformerConfig:
    """Dimensions of a decoder. `experts` is 0 for a dense model, with `ffn` the width of every block's MLP; otherwise `expert_ffn` is each
    expert's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int
    glu: bool = False  # three matrices in the MLP, not two
    tied_embeddings: bool = True  # the head is the embedding
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    head_dim: int = 0  # width of one head; 0 where all heads together are as wide as the model

    @property
    def query_hidden(self) -> float:
        return self.heads * self.head_dim if self.head_dim else self.hidden

    @property
    def kv_hidden(self) -> float:
        return self.query_hidden * self.kv_heads / self.heads

    @property
    def attention_parameters(self) -> float:
        return 2 * self.hidden * (self.query_hidden + self.kv_hidden)

    @property
    def ffn_parameters(self) -> float:
        """Parameters of one MLP: the dense one, or one expert."""
        return self.hidden * (self.expert_ffn if self.experts else self.ffn) * (3 if self.glu else 2)

    @property
    def block_parameters(self) -> float:
        return self.attention_parameters + self.ffn_parameters * max(self.experts, 1)

    @property
    def parameters(self) -> float:
        return self.layers * self.block_parameters + self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    def model_flops(self, samples: float, causal: bool = True) -> float:
        """FLOPs of forward and backward of `samples` sequences without recomputation; attention as half the score matrix, or all of it if not
        `causal`."""
        active = self.attention_parameters + self.ffn_parameters * (self.topk if self.experts else 1)
        products = 6 * self.seq * (self.layers * active + self.vocab * self.hidden)
        return samples * (products + 12 * self.layers * self.seq**2 * self.query_hidden * (0.5 if causal else 1.0))


@dataclass(frozen=True)
class TransformerShard:
    """One rank's shard of one micro-batch: `samples` sequences, its share of every matrix and of every sequence."""

    samples: float
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    flash_attention: bool = True
    dropout: bool = False
    frozen: bool = False  # weights are frozen (adapters are trained beside them): no weight gradients are computed
    fp8: bool = False  # matmuls in fp8: each micro-batch casts its activations; a weight's cast is kept
    unfused_passes: float = 1.0  # memory passes for each that the formulas below count: how far element-wise work is from fully fused


@lru_cache(maxsize=4096)
def block_profile(model: TransformerConfig, shard: TransformerShard) -> LayerProfile:
    """One block on one rank."""
    tokens = shard.samples * model.seq / shard.cp
    kernels = (*_attention_kernels(model, shard, tokens), *_feed_forward_kernels(model, shard, tokens), *_elementwise_kernels(model, shard, tokens))
    output_bytes = tokens * model.hidden * ACTIVATION_ITEMSIZE / (shard.tp if shard.sequence_parallel else 1)
    return _layer_profile("block", kernels, _saved_bytes(model, shard, tokens), output_bytes, _score_bytes(model, shard, tokens))


@lru_cache(maxsize=4096)
def head_profile(model: TransformerConfig, shard: TransformerShard) -> LayerProfile:
    """The output projection and the loss over the vocabulary; the embedding lookup costs next to nothing."""
    tokens = shard.samples * model.seq / shard.cp
    logits = tokens * model.vocab / shard.tp
    projection = _matmul_kernels(shard, tokens, model.vocab / shard.tp, model.hidden)
    kernels = (*projection, _memory_kernel("forward", logits * 12), _memory_kernel("backward", logits * 10))
    return _layer_profile("head", kernels, logits * (ACTIVATION_ITEMSIZE + 4), logits * ACTIVATION_ITEMSIZE, logits * 4)


def _layer_profile(name: str, kernels: tuple[Kernel, ...], saved_bytes: float, output: float, scores: float) -> LayerProfile:
    forward, backward = (sum(k.flops * k.count for k in kernels if k.phase == phase) for phase in ("forward", "backward"))
    return LayerProfile(name, name, 0, forward, backward, saved_bytes, output, transient_bytes=scores, kernels=kernels)


def _matmul_kernels(shard: TransformerShard, rows: float, columns: float, inner: float, count: int = 1) -> tuple[Kernel, ...]:
    """A matmul's forward, and the one or two matmuls of its backward."""
    flops = 2 * rows * columns * inner
    moved = ACTIVATION_ITEMSIZE * (rows * columns + rows * inner + (0.0 if shard.fp8 else columns * inner))
    return Kernel("matmul", "forward", flops, moved, count), Kernel("matmul", "backward", flops, moved, count if shard.frozen else 2 * count)


def _memory_kernel(phase: Literal["forward", "backward"], bytes_moved: float, count: int = 1) -> Kernel:
    return Kernel("memory", phase, 0.0, bytes_moved, count)


def _attention_kernels(model: TransformerConfig, shard: TransformerShard, tokens: float) -> tuple[Kernel, ...]:
    width = model.query_hidden / shard.tp
    qkv = _matmul_kernels(shard, tokens, width + 2 * model.kv_hidden / shard.tp, model.hidden)
    out = _matmul_kernels(shard, tokens, model.hidden, width)
    flops = 2 * tokens * model.seq * width  # of one matmul over all pairs of positions
    if shard.flash_attention:
        moved = 4 * tokens * width * ACTIVATION_ITEMSIZE
        return (*qkv, Kernel("attention", "forward", flops, moved), Kernel("attention", "backward", 2.5 * flops, 2 * moved), *out)
    scores = ACTIVATION_ITEMSIZE * tokens * model.seq * model.heads / shard.tp
    moved = scores + 2 * tokens * width * ACTIVATION_ITEMSIZE
    matmuls = (Kernel("matmul", "forward", flops, moved, 2), Kernel("matmul", "backward", flops, moved, 4))
    # Scaling, mask, softmax and dropout: read and written once each where fused, with a mask of one byte.
    softmax = 4.5 * scores * shard.unfused_passes
    return (*qkv, *matmuls, _memory_kernel("forward", softmax), _memory_kernel("backward", softmax), *out)


def _feed_forward_kernels(model: TransformerConfig, shard: TransformerShard, tokens: float) -> tuple[Kernel, ...]:
    gates = 2 if model.glu else 1
    if not model.experts:
        width = model.ffn / shard.tp
        return (*_matmul_kernels(shard, tokens, gates * width, model.hidden), *_matmul_kernels(shard, tokens, model.hidden, width))
    local_experts, width = max(model.experts // shard.ep, 1), model.expert_ffn / shard.tp
    rows = tokens * model.topk * shard.ep / model.experts  # per expert
    router = _matmul_kernels(shard, tokens, model.experts, model.hidden)
    permuted = 4 * tokens * model.topk * model.hidden * ACTIVATION_ITEMSIZE
    up = _matmul_kernels(shard, rows, gates * width, model.hidden, local_experts)
    down = _matmul_kernels(shard, rows, model.hidden, width, local_experts)
    return (*router, _memory_kernel("forward", permuted, 2), _memory_kernel("backward", permuted, 2), *up, *down)


def _elementwise_kernels(model: TransformerConfig, shard: TransformerShard, tokens: float) -> tuple[Kernel, ...]:
    """Two norms, two residual additions (and dropout), the activation function, rotary embedding of q and k."""
    hidden = tokens * model.hidden * ACTIVATION_ITEMSIZE / (shard.tp if shard.sequence_parallel else 1) * shard.unfused_passes
    ffn = tokens * _ffn_width(model) / shard.tp * ACTIVATION_ITEMSIZE * shard.unfused_passes
    rotated = tokens * (model.query_hidden + model.kv_hidden) / shard.tp * ACTIVATION_ITEMSIZE * shard.unfused_passes if model.glu else 0.0
    masks = 0.5 * hidden if shard.dropout else 0.0
    passes = 3 if model.glu else 2
    forward = (_memory_kernel("forward", *kernel) for kernel in ((2 * hidden, 2), (3 * hidden + masks, 2), (passes * ffn, 1)))
    backward = (_memory_kernel("backward", *kernel) for kernel in ((4 * hidden, 2), (2 * hidden + masks, 2), ((passes + 1) * ffn, 1)))
    return (*forward, *backward, _memory_kernel("forward", 2 * rotated), _memory_kernel("backward", 2 * rotated))


def _ffn_width(model: TransformerConfig) -> float:
    return model.expert_ffn * model.topk if model.experts else model.ffn


def _saved_bytes(model: TransformerConfig, shard: TransformerShard, tokens: float) -> float:
    """Bytes saved for backward, after Korthikanti et al. (2022): what tensor parallelism does not shard, what it does, and the scores."""
    input_itemsize = 1 if shard.fp8 else ACTIVATION_ITEMSIZE  # of a matmul's input
    replicated = tokens * model.hidden * (2 * ACTIVATION_ITEMSIZE + 2 * input_itemsize + (2 if shard.dropout else 0))
    replicated /= shard.tp if shard.sequence_parallel else 1
    between = (2 if shard.fp8 else 3) if model.glu else 1  # tensors saved between the two matmuls; fp8 kernels fuse the gate
    ffn = _ffn_width(model) * (ACTIVATION_ITEMSIZE * between + input_itemsize)
    routed = 2 * model.topk * model.hidden * ACTIVATION_ITEMSIZE * tokens if model.experts else 0.0
    attention = ACTIVATION_ITEMSIZE * (model.query_hidden + 2 * model.kv_hidden) + input_itemsize * model.query_hidden
    return replicated + tokens * (attention + ffn) / shard.tp + routed + _score_bytes(model, shard, tokens)


def _score_bytes(model: TransformerConfig, shard: TransformerShard, tokens: float) -> float:
    """Bytes of softmax, dropout mask and dropout result over all pairs of positions; a flash-attention kernel saves none of them."""
    if shard.flash_attention:
        return 0.0
    return (ACTIVATION_ITEMSIZE + (ACTIVATION_ITEMSIZE + 1 if shard.dropout else 0)) * tokens * model.seq * model.heads / shard.tp
