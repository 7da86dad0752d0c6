"""The GPT-2 family as an ordinary module: learned positions, LayerNorm before each half-block, tied output head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.zoo.attend import Attend
from meshwright.zoo.autocast import padded_head, to_autocast_dtype
from meshwright.zoo.keyed_random import KeyedDropout


@dataclass(frozen=True)
class GPTConfig:
    """The sizes that make one member of the family."""

    vocab: int
    context: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads")


GPT_CONFIGS: dict[str, GPTConfig] = {
    "gpt-tiny": GPTConfig(vocab=256, context=64, layers=2, heads=4, width=64),
    "gpt-mini": GPTConfig(vocab=256, context=128, layers=4, heads=4, width=128),
    "gpt2-124m": GPTConfig(vocab=50257, context=1024, layers=12, heads=12, width=768),
    "gpt2-355m": GPTConfig(vocab=50257, context=1024, layers=24, heads=16, width=1024),
    "gpt2-774m": GPTConfig(vocab=50257, context=1024, layers=36, heads=20, width=1280),
    "gpt2-1.5b": GPTConfig(vocab=50257, context=1024, layers=48, heads=25, width=1600),
    "gpt-1.3b": GPTConfig(vocab=50257, context=2048, layers=24, heads=16, width=2048),
    "gpt3-175b": GPTConfig(vocab=50257, context=2048, layers=96, heads=96, width=12288),
}


class TokenPositionEmbedding(nn.Module):
    """Tokens and their positions to vectors."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = KeyedDropout(config.dropout, site=0)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        return self.dropout(self.tokens(tokens) + self.positions(positions))


class Attention(nn.Module):
    """Causal self-attention. The rows of `qkv` are ordered by head (q, k, v of head 0, then of head 1, …), so that an even split of its rows gives
    entire heads to each tensor-parallel rank."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.index, self.head_width = index, config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, attend: Attend | None = None) -> Tensor:
        batch, length, _ = x.shape
        # The number of heads is inferred, since a tensor-parallel rank holds only some of them.
        qkv = self.qkv(x).view(batch, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        if attend is not None:
            return self.output(attend(self.index, qkv[0, 0], qkv[1, 0], qkv[2, 0]).reshape(1, length, -1))
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.output(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Two linear layers with a hidden width of four times the model's, and GELU in GPT-2's tanh form."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One layer. Dropout follows both residual branches; attention weights have none, since flash kernels cannot key it."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, index)
        self.attention_dropout = KeyedDropout(config.dropout, site=1 + 2 * index)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.mlp_dropout = KeyedDropout(config.dropout, site=2 + 2 * index)

    def forward(self, x: Tensor, attend: Attend | None = None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), attend))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Tokens (B, S) to logits (B, S, vocab). Inference packs the tokens of several sequences into one row, as for `Llama`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = TokenPositionEmbedding(config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie the head and initialize the weights as GPT-2 does. Also used after `to_empty` from meta, which unties."""
        self.head.weight = self.embedding.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear) and module is not self.head:
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        # 2L branches add up in the residual stream; with this scale, their sum has the variance of one branch.
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attend: Attend | None = None, rows: Tensor | None = None) -> Tensor:
        x = to_autocast_dtype(self.embedding(tokens, positions))
        for block in self.blocks:
            x = block(x, attend)
        return padded_head(self.norm(x if rows is None else x[:, rows]), self.head)
