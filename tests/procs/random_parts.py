"""Parts of models as people write them, each built from drawn data: linear layers, norms, attention, feed-forward layers, convolutions, and blocks
that join, reuse or share them. All blocks map (samples, positions, WIDTH) to the same shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

WIDTH, LENGTH = 8, 6
Drawn = dict[str, Any]


# -- linear layers --


class ScaledLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5 + 0.1


class ClippedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.clamp(-1, 1), self.weight.tanh(), self.bias)


class LoraLinear(nn.Module):
    """A frozen layer with a trainable product of two small matrices beside it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))  # type: ignore[no-any-return]


class HandWrittenLinear(nn.Module):
    """A product of its own; `how` says which function computes it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, how: str = "matmul") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1) if bias else None
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "einsum":
            out = torch.einsum("bsi,io->bso", x, self.weight)
        elif self.how == "bmm":
            out = torch.bmm(x, self.weight.expand(x.shape[0], -1, -1))
        elif self.how == "addmm":
            out = torch.addmm(torch.zeros_like(self.weight[0]), x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        else:
            out = x @ self.weight
        return out if self.bias is None else out + self.bias


class PointwiseConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.dense, self.dropout = nn.Linear(inputs, outputs, bias), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.dense(x))  # type: ignore[no-any-return]


def hooked_linear(inputs: int, outputs: int, bias: bool = True, *, before: bool = False) -> nn.Module:
    layer = nn.Linear(inputs, outputs, bias)
    if before:
        layer.register_forward_pre_hook(_halve_input)
    else:
        layer.register_forward_hook(_halve_output)
    return layer


def _halve_input(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0] * 0.5 + 0.1,)


def _halve_output(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output * 0.5 + 0.1


LINEAR_KINDS: dict[str, Any] = {
    "plain": nn.Linear, "scaled": ScaledLinear, "clipped": ClippedLinear, "lora": LoraLinear, "pointwise": PointwiseConv, "wrapped": Wrapped,
    "matmul": HandWrittenLinear, "hook": hooked_linear,
    "weight norm": lambda i, o, bias=True: parametrizations.weight_norm(nn.Linear(i, o, bias)),
    "einsum": lambda i, o, bias=True: HandWrittenLinear(i, o, bias, "einsum"),
    "bmm": lambda i, o, bias=True: HandWrittenLinear(i, o, bias, "bmm"),
    "addmm": lambda i, o, bias=True: HandWrittenLinear(i, o, bias, "addmm"),
    "input hook": lambda i, o, bias=True: hooked_linear(i, o, bias, before=True),
    "frozen": lambda i, o, bias=True: nn.Linear(i, o, bias).requires_grad_(False),
}  # fmt: skip


def linear(drawn: Drawn, inputs: int, outputs: int) -> nn.Module:
    return LINEAR_KINDS[drawn["linear"]](inputs, outputs, bias=drawn["bias"])  # type: ignore[no-any-return]


# -- norms --


class OffsetLayerNorm(nn.LayerNorm):
    """Its weight is an offset from one, as Gemma's is."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


class ChannelNorm(nn.Module):
    """A norm over groups of channels and all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


NORM_KINDS: dict[str, Any] = {
    "layer": nn.LayerNorm, "own": OffsetLayerNorm, "rms": RootMeanSquare, "torch rms": nn.RMSNorm, "group": ChannelNorm,
    "none": lambda _: nn.Identity(),
}  # fmt: skip


# -- blocks --


class FeedForward(nn.Module):
    """Features up, an activation or a gate, and down."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.gate, hidden = drawn["gate"], drawn["hidden"]
        fused = self.gate in ("glu", "chunk", "split", "strided")
        self.up, self.down = linear(drawn, WIDTH, hidden * (2 if fused else 1)), linear(drawn, hidden, WIDTH)
        self.other = linear(drawn, WIDTH, hidden) if self.gate == "two" else None
        self.inner = NORM_KINDS[drawn["inner_norm"]](hidden)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.gate == "glu":
            up = F.glu(up, -1)
        elif self.gate == "chunk":
            a, b = up.chunk(2, -1)
            up = F.silu(a) * b
        elif self.gate == "split":
            a, b = torch.split(up, up.shape[-1] // 2, dim=-1)
            up = a.tanh() * b
        elif self.gate == "strided":
            up = up[..., ::2] * up[..., 1::2].sigmoid()
        elif self.other is not None:
            up = F.gelu(up) * self.other(x)
        else:
            up = F.relu(up)
        return self.down(self.inner(up))  # type: ignore[no-any-return]


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on (…, positions, head width)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 0.3 ** torch.arange(half, dtype=x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Attention(nn.Module):
    """Attention over positions, or over those of `memory`. Written as the drawn data says."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn, self.heads, self.groups = drawn, drawn["heads"], drawn["kv_heads"]
        self.size = WIDTH // self.heads
        keys = self.groups * self.size
        if drawn["fused"]:
            self.qkv = linear(drawn, WIDTH, WIDTH + 2 * keys)
        else:
            self.q, self.k, self.v = linear(drawn, WIDTH, WIDTH), linear(drawn, WIDTH, keys), linear(drawn, WIDTH, keys)
        self.out = linear(drawn, WIDTH, WIDTH)
        self.norm = NORM_KINDS["rms"](self.size) if drawn["qk_norm"] else nn.Identity()
        if drawn["attention_bias"] == "relative":
            self.table = nn.Embedding(2 * LENGTH, self.heads)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1)
        self.register_buffer("slopes", slopes[:, None, None], persistent=False)
        self.register_buffer("mask", torch.full((1, 1, LENGTH, LENGTH), -1e4).triu(1), persistent=False)

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (samples, heads, positions, head width)."""
        batch, length = x.shape[:2]
        fused, size = self.drawn["fused"], self.size
        if not fused:
            q = self.q(x).view(batch, length, self.heads, size)
            k, v = (part.view(batch, memory.shape[1], self.groups, size) for part in (self.k(memory), self.v(memory)))
        elif fused == "split":
            keys = self.groups * size
            q, k, v = (part.unflatten(-1, (-1, size)) for part in self.qkv(x).split([WIDTH, keys, keys], dim=-1))
        elif fused == "view":
            q, k, v = self.qkv(x).view(batch, length, 3, self.heads, size).unbind(2)
        elif fused == "by head":
            q, k, v = self.qkv(x).view(batch, length, self.heads, 3 * size).chunk(3, dim=-1)
        else:
            q, k, v = (part.reshape(batch, length, self.heads, size) for part in self.qkv(x).chunk(3, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (self.norm(q), self.norm(k), v))
        return (rotate(q), rotate(k), v) if self.drawn["rotary"] else (q, k, v)

    def scores_bias(self, length: int, keys: int) -> Tensor | None:
        kind = self.drawn["attention_bias"]
        distance = torch.arange(keys)[None, :] - torch.arange(length)[:, None]
        if kind == "alibi":
            return 2.0 ** -torch.arange(1, self.heads + 1)[:, None, None] * distance.abs()
        if kind == "alibi buffer":
            return self.slopes * distance
        if kind == "relative":
            return self.table(distance + LENGTH).permute(2, 0, 1)  # type: ignore[no-any-return]
        if kind == "mask":
            return self.mask[:, :, :length, :keys]  # type: ignore[index, no-any-return]
        return None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x, x if memory is None or self.drawn["fused"] else memory)
        bias, how, (batch, heads, length, size) = self.scores_bias(q.shape[2], k.shape[2]), self.drawn["attend"], q.shape
        if self.groups != self.heads and how != "grouped":
            k, v = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (k, v))
        if how == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, None if bias is None else bias.to(q.dtype).expand(1, heads, -1, -1))
        elif how == "grouped":
            mixed = F.scaled_dot_product_attention(q, k, v, None if bias is None else bias.to(q.dtype).expand(1, heads, -1, -1), enable_gqa=True)
        elif how == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(size)
            mixed = torch.einsum("bhqk,bhkd->bhqd", (scores if bias is None else scores + bias).softmax(-1), v)
        elif how == "bmm":
            scores = torch.bmm(q.reshape(-1, length, size), k.reshape(-1, k.shape[2], size).transpose(1, 2)).view(batch, heads, length, -1)
            scores = (scores if bias is None else scores + bias).softmax(-1)
            mixed = torch.bmm(scores.view(batch * heads, length, -1), v.reshape(batch * heads, -1, size)).view(batch, heads, length, size)
        else:
            scores = q @ k.transpose(-1, -2) * size**-0.5
            mixed = (scores if bias is None else scores + bias).softmax(-1).to(v.dtype) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))  # type: ignore[no-any-return]


class Convolution(nn.Module):
    """Convolutions over positions: depthwise, grouped, or down and up again."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.kind, hidden = drawn["conv"], drawn["hidden"]
        if self.kind == "down and up":
            self.first, self.second = nn.Conv1d(WIDTH, hidden, 2, stride=2), nn.ConvTranspose1d(hidden, WIDTH, 2, stride=2)
        else:
            groups = {"full": 1, "grouped": 2, "depthwise": hidden, "multiplied": hidden}[self.kind]
            out = 2 * hidden if self.kind == "multiplied" else hidden
            self.first = nn.Conv1d(WIDTH, hidden, 1)
            self.middle = nn.Conv1d(hidden, out, 3, padding=1, groups=groups, bias=drawn["bias"])
            self.second = nn.Conv1d(out, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.transpose(1, 2)).relu()
        x = x if self.kind == "down and up" else self.middle(x).relu()
        return self.second(x).transpose(1, 2)  # type: ignore[no-any-return]


class Parallel(nn.Module):
    """Attention and feed-forward layers of one input, added, as in GPT-J, or concatenated."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(drawn), FeedForward(drawn)
        self.join = nn.Linear(2 * WIDTH, WIDTH) if drawn["join"] == "cat" else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        a, b = self.attention(x, memory), self.mlp(x)
        return a + b if self.join is None else self.join(torch.cat([a, b], -1))


class Mixer(nn.Module):
    """Products over positions, and a gate from their mean."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.positions = nn.Sequential(nn.Linear(LENGTH, 2 * LENGTH), nn.GELU(), nn.Linear(2 * LENGTH, LENGTH))
        self.squeeze, self.excite = linear(drawn, WIDTH, 4), linear(drawn, 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.positions(x.transpose(1, 2)).transpose(1, 2)
        return mixed * self.excite(self.squeeze(x.mean(1, keepdim=True)).relu()).sigmoid()  # type: ignore[no-any-return]


class SoftExperts(nn.Module):
    """Every token goes to every expert, weighted; the experts' weights are single parameters."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(2, *shape) * 0.3) for shape in ((WIDTH, drawn["hidden"]), (drawn["hidden"], WIDTH)))
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bsi,eih->bseh", x, self.up).relu()
        return torch.einsum("bseh,ehi,bse->bsi", hidden, self.down, self.router(x).softmax(-1))


class Recurrence(nn.Module):
    """A loop over positions that calls one layer each time, and a gate by channel, as state space models have."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        hidden = drawn["hidden"]
        self.enter, self.leave, self.cell = linear(drawn, WIDTH, 2 * hidden), linear(drawn, hidden, WIDTH), nn.Linear(hidden, hidden)
        self.decay = nn.Parameter(torch.rand(hidden))
        self.mixes = drawn["mixes"]

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.enter(x).chunk(2, dim=-1)
        state, states = torch.zeros_like(values[:, 0]), []
        for position in range(x.shape[1]):
            state = state * self.decay.sigmoid() + values[:, position]
            state = self.cell(state).tanh() if self.mixes else state
            states.append(state)
        return self.leave(torch.stack(states, 1) * F.silu(gates))  # type: ignore[no-any-return]


class TorchLayer(nn.Module):
    """A layer of torch's own."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.kind = drawn["torch_layer"]
        if self.kind == "attention":
            self.layer: nn.Module = nn.MultiheadAttention(WIDTH, drawn["heads"], batch_first=True)
        elif self.kind == "encoder":
            self.layer = nn.TransformerEncoderLayer(WIDTH, drawn["heads"], drawn["hidden"], dropout=0.0, batch_first=True)
        elif self.kind == "gru":
            self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        else:
            self.layer = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "attention":
            return self.layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]
        if self.kind == "gru":
            return self.layer(x)[0]  # type: ignore[no-any-return]
        return self.layer(x) if self.kind == "encoder" else self.layer(x, x)


class Prompted(nn.Module):
    """Learned positions are put before the others, and dropped after a feed-forward layer and a mean over all."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.prompt, self.inner, self.gain = nn.Parameter(torch.randn(2, WIDTH)), FeedForward(drawn), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        longer = torch.cat([self.prompt.expand(x.shape[0], -1, -1), x], 1)
        longer = self.inner(longer) + longer.mean(1, keepdim=True)
        return longer[:, 2:] * self.gain


CORES: dict[str, Any] = {
    "mlp": FeedForward, "attention": Attention, "conv": Convolution, "parallel": Parallel, "mixer": Mixer, "experts": SoftExperts,
    "recurrence": Recurrence, "torch": TorchLayer, "prompted": Prompted,
}  # fmt: skip


@dataclass
class BlockOutput:
    hidden: Tensor
    extra: Tensor | None = None


torch.utils._pytree.register_dataclass(BlockOutput)


class Block(nn.Module):
    """A norm, a core and a residual sum; what it returns, and how often its core runs, is drawn."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.norm, self.core = NORM_KINDS[drawn["norm"]](WIDTH), CORES[drawn["core"]](drawn)
        self.gain = nn.Parameter(torch.rand(WIDTH)) if drawn["gain"] else None
        self.takes_memory = drawn["core"] in ("attention", "parallel")

    def forward(self, hidden: Tensor, memory: Tensor | None = None) -> Any:
        x = hidden
        for _ in range(self.drawn["repeats"]):
            normed = self.norm(x) if self.drawn["norm_first"] else x
            update = self.core(normed, memory) if self.takes_memory else self.core(normed)
            update = update if self.gain is None else update * self.gain
            x = x + update if self.drawn["residual"] else update
            x = x if self.drawn["norm_first"] else self.norm(x)
        extra = x.mean(-1) if self.drawn["extra"] else None
        returns = self.drawn["returns"]
        return {"tensor": x, "tuple": (x, extra), "dict": {"hidden": x, "extra": extra}, "dataclass": BlockOutput(x, extra)}[returns]


def hidden_of(output: Any) -> tuple[Tensor, Tensor | None]:
    """What a block returned, whatever holds it."""
    if torch.is_tensor(output):
        return output, None
    if isinstance(output, dict):
        return output["hidden"], output["extra"]
    return (output.hidden, output.extra) if isinstance(output, BlockOutput) else output
