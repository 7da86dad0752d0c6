"""A transformer that nobody has built yet, as numbers: its block and head as the same `LayerProfile`s of `Kernel`s that tracing a model gives.

In: the model's dimensions and how a rank's part is cut. Out: what one rank computes, moves and keeps for one micro-batch of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from meshwright.core.model import Kernel, KernelKind, LayerProfile

Recompute = Literal["none", "attention", "full"]
HALF = 2  # bytes of an activation: bf16 and fp16, and what surrounds products in fp8


@dataclass(frozen=True)
class Transformer:
    """Dimensions of a decoder. `experts` is 0 for a dense one; then `ffn` is every block's, else `expert_ffn` is each expert's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int
    glu: bool = False  # three matrices in a feed-forward part, not two
    tied: bool = True  # the head is the embedding
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    head_dim: int = 0  # of one head; 0 where all together are as wide as the model

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
        """Of one feed-forward part: the dense one, or one expert."""
        return self.hidden * (self.expert_ffn if self.experts else self.ffn) * (3 if self.glu else 2)

    @property
    def block_parameters(self) -> float:
        return self.attention_parameters + self.ffn_parameters * max(self.experts, 1)

    @property
    def parameters(self) -> float:
        return self.layers * self.block_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    def model_flops(self, samples: float, causal: bool = True) -> float:
        """Forward and backward of `samples` sequences, nothing recomputed; attention by its triangle, or by its square where not `causal`."""
        active = self.attention_parameters + self.ffn_parameters * (self.topk if self.experts else 1)
        products = 6 * self.seq * (self.layers * active + self.vocab * self.hidden)
        return samples * (products + 12 * self.layers * self.seq**2 * self.query_hidden * (0.5 if causal else 1.0))


@dataclass(frozen=True)
class Cut:
    """What one rank sees of one micro-batch: `samples` sequences, its share of every matrix and of every sequence."""

    samples: float
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    flash: bool = True
    dropout: bool = False
    frozen: bool = False  # weights stay as they are (adapters are trained beside them): no gradients of weights are computed
    narrow: bool = False  # products in fp8: each micro-batch casts its activations, and a weight's cast is kept
    unfused: float = 1.0  # passes over memory for each that the list below counts: how far element-wise work is from fused


@lru_cache(maxsize=4096)
def block(model: Transformer, cut: Cut) -> LayerProfile:
    """One block on one rank."""
    tokens = cut.samples * model.seq / cut.cp
    kernels = (*_attention(model, cut, tokens), *_feed_forward(model, cut, tokens), *_element_wise(model, cut, tokens))
    plain = tokens * model.hidden * HALF / (cut.tp if cut.sequence_parallel else 1)
    return _profile("block", kernels, _kept(model, cut, tokens), plain, _scores(model, cut, tokens))


@lru_cache(maxsize=4096)
def head(model: Transformer, cut: Cut) -> LayerProfile:
    """The product with the vocabulary and the loss over it; the look-up at the other end costs next to nothing."""
    tokens = cut.samples * model.seq / cut.cp
    logits = tokens * model.vocab / cut.tp
    kernels = (*_product(cut, tokens, model.vocab / cut.tp, model.hidden), _moved("forward", logits * 12), _moved("backward", logits * 10))
    return _profile("head", kernels, logits * (HALF + 4), logits * HALF, logits * 4)


def _profile(name: str, kernels: tuple[Kernel, ...], kept: float, output: float, scores: float) -> LayerProfile:
    forward = sum(k.flops * k.count for k in kernels if k.phase == "forward")
    backward = sum(k.flops * k.count for k in kernels if k.phase == "backward")
    return LayerProfile(name, name, 0, forward, backward, kept, output, transient_bytes=scores, kernels=kernels)


def _product(cut: Cut, rows: float, columns: float, inner: float, count: int = 1) -> tuple[Kernel, ...]:
    """A matrix product forward, and backward the one or two that give the gradients of what went in."""
    flops = 2 * rows * columns * inner
    moved = HALF * (rows * columns + rows * inner + (0.0 if cut.narrow else columns * inner))
    one = Kernel("matmul", "forward", flops, moved, count)
    return one, Kernel("matmul", "backward", flops, moved, count if cut.frozen else 2 * count)


def _moved(phase: Literal["forward", "backward"], moved: float, count: int = 1, kind: KernelKind = "memory") -> Kernel:
    return Kernel(kind, phase, 0.0, moved, count)


def _attention(model: Transformer, cut: Cut, tokens: float) -> tuple[Kernel, ...]:
    wide = model.query_hidden / cut.tp
    qkv = _product(cut, tokens, wide + 2 * model.kv_hidden / cut.tp, model.hidden)
    out = _product(cut, tokens, model.hidden, wide)
    square = 2 * tokens * model.seq * wide  # FLOPs of one product over every pair of positions
    if cut.flash:
        traffic = 4 * tokens * wide * HALF
        core = (Kernel("attention", "forward", square, traffic), Kernel("attention", "backward", 2.5 * square, 2 * traffic))
        return (*qkv, *core, *out)
    scores = HALF * tokens * model.seq * model.heads / cut.tp
    moved = scores + 2 * tokens * wide * HALF
    products = (Kernel("matmul", "forward", square, moved, 2), Kernel("matmul", "backward", square, moved, 4))
    # Scaled, masked, softmax and dropout: read and written once each where fused, with a mask of one byte.
    passes = (_moved("forward", 4.5 * scores * cut.unfused, 1), _moved("backward", 4.5 * scores * cut.unfused, 1))
    return (*qkv, *products, *passes, *out)


def _feed_forward(model: Transformer, cut: Cut, tokens: float) -> tuple[Kernel, ...]:
    gates = 2 if model.glu else 1
    if not model.experts:
        wide = model.ffn / cut.tp
        return (*_product(cut, tokens, gates * wide, model.hidden), *_product(cut, tokens, model.hidden, wide))
    own = max(model.experts // cut.ep, 1)
    each = tokens * model.topk * cut.ep / model.experts
    wide = model.expert_ffn / cut.tp
    route = _product(cut, tokens, model.experts, model.hidden)
    shuffled = tuple(_moved(phase, 4 * tokens * model.topk * model.hidden * HALF, 2) for phase in ("forward", "backward"))
    experts = (*_product(cut, each, gates * wide, model.hidden, own), *_product(cut, each, model.hidden, wide, own))
    return (*route, *shuffled, *experts)  # type: ignore[arg-type]


def _element_wise(model: Transformer, cut: Cut, tokens: float) -> tuple[Kernel, ...]:
    """Two norms, two sums with the residual stream (and dropout), the activation function, rotations of q and k."""
    plain = tokens * model.hidden * HALF / (cut.tp if cut.sequence_parallel else 1) * cut.unfused
    wide = tokens * _ffn_width(model) / cut.tp * HALF * cut.unfused
    rotated = tokens * (model.query_hidden + model.kv_hidden) / cut.tp * HALF * cut.unfused if model.glu else 0.0
    masks = 0.5 * plain if cut.dropout else 0.0
    gates = 3 if model.glu else 2
    forward = (_moved("forward", 2 * plain, 2), _moved("forward", 3 * plain + masks, 2), _moved("forward", gates * wide))
    backward = (_moved("backward", 4 * plain, 2), _moved("backward", 2 * plain + masks, 2), _moved("backward", (gates + 1) * wide))
    return (*forward, *backward, _moved("forward", 2 * rotated), _moved("backward", 2 * rotated))


def _ffn_width(model: Transformer) -> float:
    return model.expert_ffn * model.topk if model.experts else model.ffn


def _kept(model: Transformer, cut: Cut, tokens: float) -> float:
    """Bytes saved for backward, after Korthikanti et al. (2022): what tensor parallelism does not cut, what it does, and the scores."""
    entering = 1 if cut.narrow else HALF  # bytes of what enters a product
    whole = tokens * model.hidden * (2 * HALF + 2 * entering + (2 if cut.dropout else 0)) / (cut.tp if cut.sequence_parallel else 1)
    passing = (2 if cut.narrow else 3) if model.glu else 1  # between the two products; kernels for fp8 fuse the gate
    wide = _ffn_width(model) * (HALF * passing + entering)
    routed = 2 * model.topk * model.hidden * HALF * tokens if model.experts else 0.0
    share = tokens * (HALF * (model.query_hidden + 2 * model.kv_hidden) + entering * model.query_hidden + wide) / cut.tp
    return whole + share + routed + _scores(model, cut, tokens)


def _scores(model: Transformer, cut: Cut, tokens: float) -> float:
    """Softmax, dropout's mask and its result over every pair of positions; a flash kernel keeps none of them."""
    if cut.flash:
        return 0.0
    return (HALF + (HALF + 1 if cut.dropout else 0)) * tokens * model.seq * model.heads / cut.tp
