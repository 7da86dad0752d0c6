"""The Llama family as an ordinary module: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.zoo.attend import Attend
from meshwright.zoo.autocast import to_autocast_dtype


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes that make one member of the family. `context` is the training length; rotary embeddings set no limit."""

    vocab: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    ffn: int
    rope_theta: float = 500000.0
    rope_factor: float = 1.0  # Llama 3.1's slowing of low frequencies for contexts beyond 8192; 1 is none
    tied_embeddings: bool = False
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"width {self.width}, {self.heads} heads and {self.kv_heads} key-value heads do not divide")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


LLAMA_CONFIGS: dict[str, LlamaConfig] = {
    "llama-tiny": LlamaConfig(vocab=256, context=64, layers=2, heads=4, kv_heads=2, width=64, ffn=176, rope_theta=10000.0),
    "smollm2": LlamaConfig(vocab=49152, context=2048, layers=30, heads=9, kv_heads=3, width=576, ffn=1536, rope_theta=100000.0, tied_embeddings=True),
    "llama3-1b": LlamaConfig(
        vocab=128256, context=8192, layers=16, heads=32, kv_heads=8, width=2048, ffn=8192, rope_factor=32.0, tied_embeddings=True
    ),
    "llama3-3b": LlamaConfig(
        vocab=128256, context=8192, layers=28, heads=24, kv_heads=8, width=3072, ffn=8192, rope_factor=32.0, tied_embeddings=True
    ),
    "llama3-8b": LlamaConfig(vocab=128256, context=8192, layers=32, heads=32, kv_heads=8, width=4096, ffn=14336),
    "llama3-70b": LlamaConfig(vocab=128256, context=8192, layers=80, heads=64, kv_heads=8, width=8192, ffn=28672),
    "llama3-405b": LlamaConfig(vocab=128256, context=8192, layers=126, heads=128, kv_heads=8, width=16384, ffn=53248, rope_factor=8.0),
}


def rope_frequencies(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Radians per position for each pair of features."""
    pairs = torch.arange(0, config.head_width, 2, device=device).to(dtype)
    base = config.rope_theta ** (-pairs / config.head_width)
    if config.rope_factor == 1.0:
        return base
    # Llama 3.1: frequencies of at least 4 turns in 8192 positions stay, those below 1 turn are divided by the factor, those between are blended.
    turns = 8192 * base / (2 * math.pi)
    unscaled = ((turns - 1.0) / 3.0).clamp(0.0, 1.0)
    return base * (unscaled + (1.0 - unscaled) / config.rope_factor)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions 0…S−1, (2, S, head width / 2). Computed in each forward pass: a table in a buffer would
    be lost by `to_empty`, and would limit the length."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        positions = (torch.arange(x.shape[1], device=x.device) if positions is None else positions[0]).to(dtype)
        angles = torch.outer(positions, rope_frequencies(self.config, x.device, dtype))
        return torch.stack((angles.cos(), angles.sin()))


def apply_rotary(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate each pair of features (i, i + half) by its position's angle; x is (B, heads, S, head width)."""
    cos, sin = rotary[0], rotary[1]
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which several query heads share one key-value head."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.index, self.head_width = index, config.head_width
        self.grouped = config.kv_heads != config.heads
        kv_width = config.kv_heads * config.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def _split_heads(self, x: Tensor) -> Tensor:
        # The number of heads is inferred, since a tensor-parallel rank holds only some of them.
        return x.view(x.shape[0], x.shape[1], -1, self.head_width).transpose(1, 2)

    def forward(self, x: Tensor, rotary: Tensor, attend: Attend | None = None) -> Tensor:
        query = apply_rotary(self._split_heads(self.query(x)), rotary)
        key = apply_rotary(self._split_heads(self.key(x)), rotary)
        value = self._split_heads(self.value(x))
        if attend is not None:
            return self.output(attend(self.index, query[0], key[0], value[0]).reshape(1, x.shape[1], -1))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        return self.output(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class MLP(nn.Module):
    """SwiGLU: one projection gates the other."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn, bias=False)
        self.up = nn.Linear(config.width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer; `rotary` is the same tensor for all layers."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.eps)
        self.attention = Attention(config, index)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Tensor, attend: Attend | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, attend)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Tokens (B, S) to logits (B, S, vocab). Inference packs the tokens of several sequences into one row: it gives their positions, an attention of
    its own, and the rows whose logits it wants."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.rotary = RotaryEmbedding(config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie the head if the configuration says so, and initialize the weights; also used after `to_empty`, which unties."""
        if self.config.tied_embeddings:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            else:
                branch = name.endswith(("attention.output.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers) if branch else 0.02)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attend: Attend | None = None, rows: Tensor | None = None) -> Tensor:
        x = to_autocast_dtype(self.embedding(tokens))
        rotary = self.rotary(x, positions)
        for block in self.blocks:
            x = block(x, rotary, attend)
        return self.head(self.norm(x if rows is None else x[:, rows]))
