"""Models as somebody might write them, whose layers are not what their classes suggest; and a job that trains them under a mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from torch.utils.data import DataLoader

import meshwright as mw

WORDS, WIDTH, LENGTH, SAMPLES = 96, 16, 6, 32


class ScaledEmbedding(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 4.0


class OffsetPositions(nn.Embedding):
    """Looks up places that it computes itself."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return super().forward(places + 2)


class ClippedLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.clamp(-1, 1), self.weight.tanh(), self.bias)


class PaddedConv(nn.Conv1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(input, (1, 1)))


class WrappedLinear(nn.Module):
    """Runs the operations of its linear layer and no others."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense, self.dropout = nn.Linear(inputs, outputs), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.dense(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, linear: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(self.norm(x)).relu()))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class DepthwiseBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4 * WIDTH, 4 * WIDTH, 3, padding=1, groups=4 * WIDTH)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.conv(hidden.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class GroupedBlock(Block):
    """Convolutions in four groups of channels, with other numbers of channels in a group after them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4 * WIDTH, 8 * WIDTH, 3, padding=1, groups=4)
        self.back = nn.ConvTranspose1d(8 * WIDTH, 4 * WIDTH, 3, padding=1, groups=4)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.back(self.conv(hidden.transpose(1, 2)).relu()).transpose(1, 2)  # type: ignore[no-any-return]


class FunctionalDepthwiseBlock(DepthwiseBlock):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        out = F.conv1d(hidden.transpose(1, 2), self.conv.weight, self.conv.bias, padding=1, groups=4 * WIDTH)
        return out.transpose(1, 2)


class ConcatenatingBlock(Block):
    """Its second product takes features of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(5 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(torch.cat([self.up(normed).relu(), self.other(normed)], -1))  # type: ignore[no-any-return]


class SlopesBlock(Block):
    """Multiplies its heads by numbers that count them, as ALiBi does."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        slopes = 2.0 ** -torch.arange(1, 5, device=hidden.device)
        return (hidden.unflatten(2, (4, WIDTH)) * slopes[:, None]).flatten(2)


class RepeatingBlock(Block):
    """Repeats a mask for every head."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = (hidden[..., :1] > 0).to(hidden.dtype).repeat(1, 1, 4)
        return (hidden.unflatten(-1, (4, WIDTH)) * mask[..., None]).flatten(2)


class ManyReaders(nn.Module):
    """Several layers take its input, whose number of positions it reads before that."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.gates, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        values, gates = (layer(x).view(batch, length, -1, WIDTH) for layer in (self.values, self.gates))
        mixed = values * gates.sigmoid() * torch.linspace(0, 1, LENGTH)[:, None, None]
        return self.down(mixed.flatten(2))  # type: ignore[no-any-return]


class ParallelBlock(Block):
    """Two parts take one norm's output."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = ManyReaders()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.mixer(normed) + self.down(self.up(normed).relu())  # type: ignore[no-any-return]


class TransposedConvBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(WIDTH, 4 * WIDTH, 1), nn.ConvTranspose1d(4 * WIDTH, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x).transpose(1, 2)).relu()).transpose(1, 2)  # type: ignore[no-any-return]


class TokenMixingBlock(Block):
    """Its first product contracts positions, and the second has a bias for each."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.unmix = nn.Linear(LENGTH, 4 * WIDTH), nn.Linear(4 * WIDTH, LENGTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.unmix(self.mix(x.transpose(1, 2)).relu()).transpose(1, 2))


class UnflattenBlock(Block):
    """Counts the dim that it splits from the end."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.unflatten(-1, (4, WIDTH)).softmax(-1).flatten(-2)


class DroppedBlock(Block):
    """LayerDrop that never drops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand([]) < 0.0 else super().forward(x)


class FiniteBlock(Block):
    """Asks whether its input is finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(x).all() or (~torch.isnan(x)).logical_not().any():
            raise ValueError("not finite")
        return super().forward(x)


class CarefulBlock(Block):
    """Reads a value in Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1e6:
            raise ValueError("too large")
        return super().forward(x)


class Encoder(nn.Module):
    """Returns a value that it computed long before."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early = self.early(x)
        for block in self.blocks:
            x = block(x)
        return x, early


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, mask: torch.Tensor | None, x: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(early).tanh()
        return x if mask is None else x * mask


class Summing(nn.Module):
    """Returns a value, and sums over its positions too."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.block(x) * 2.0
        return x, x.cumsum(1)


class Counting(nn.Module):
    """Spells out the shape of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).view(-1, LENGTH, WIDTH)  # type: ignore[no-any-return]


class Gated(nn.Module):
    """A gate for each sample, which every position of a block's output is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        for gate, block in zip(self.gates, self.blocks, strict=True):
            x = x + gate(condition)[:, None] * block(x)
        return x


class SamplesSecondBlock(Block):
    """Counts samples where another view of as many dims counts heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1).contiguous().view(LENGTH, 1, x.shape[0], WIDTH)[:, 0].transpose(0, 1)
        return super().forward(x)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view(hidden.shape[0], hidden.shape[1], 8, 8).softmax(-1).flatten(2)


class WindowBlock(Block):
    """Splits its positions into windows, whose number it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        windows = (x + self.down(self.up(self.norm(x)).relu())).view(batch, length // LENGTH, LENGTH, width)
        return windows.view(batch, length, width)  # type: ignore[no-any-return]


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.words(tokens))  # type: ignore[no-any-return]


class Language(nn.Module):
    """A language model; `kind` says what is unusual about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        embeddings = {"scaled embedding": ScaledEmbedding(WORDS, WIDTH), "renormalized embedding": nn.Embedding(WORDS, WIDTH, max_norm=0.5)}
        self.words = embeddings.get(kind) or nn.Embedding(WORDS, WIDTH)
        self.places = OffsetPositions(WORDS, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS.get(kind, Block)() for _ in range(1 if kind == "tied without repeats" else 2))
        self.pairs = nn.ModuleList(nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH)]) for _ in range(2)) if kind == "uncalled lists" else None
        self.single = nn.ModuleList([Block()]) if kind == "uncalled lists" else None
        self.conv = PaddedConv(WIDTH, WIDTH, 3) if kind == "conv with its own forward" else None
        self.gain = nn.Parameter(torch.rand(WIDTH)) if kind == "a parameter of its own" else None
        self.encoder, self.mixer = (Encoder(), Mixer()) if kind == "a value used late" else (None, None)
        self.sides = nn.ModuleList([Embeddings(), Embeddings()]) if kind == "tied in a block" else None
        self.summing = Summing() if kind == "an output used inside" else None
        self.gated = Gated() if kind == "gates by sample" else None
        self.counting = Counting() if kind == "an output written to" else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if self.sides is not None:
            self.head.weight = self.sides[1].words.weight  # type: ignore[union-attr, assignment]
        if kind in ("scaled embedding", "renormalized embedding", "tied without repeats"):
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(tokens)
        if self.gain is not None:
            x = x * self.gain
        if self.sides is not None:
            x = x + self.sides[0](tokens) * self.sides[1](tokens)
        if self.kind == "a part of a block":
            x = x + self.blocks[0].norm(x)  # type: ignore[operator]
        if self.encoder is not None:
            x, early = self.encoder(x)
        for _ in range(3 if self.kind == "reused blocks" else 1):
            for block in self.blocks:
                x = block.forward(x) if self.kind == "blocks by forward" else block(x)
        for block, linear in self.pairs or ():  # type: ignore[misc]
            x = linear(block(x))
        for block in self.single or ():
            x = block(x)
        if self.conv is not None:
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        if self.summing is not None:
            x, sums = self.summing(x)
            x = x + sums
        if self.gated is not None:
            x = self.gated(x, x[:, 0])
        if self.counting is not None:
            x = self.counting(x)
            x[:, :1] = 0.0
        if self.mixer is not None:
            x = self.mixer(torch.ones(()) if is_fake(tokens) else None, x, early)  # a mask that the trace alone sees
        return self.head(x)  # type: ignore[no-any-return]


class ClippedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = ClippedLinear(WIDTH, 4 * WIDTH)


class WrappedBlock(Block):
    def __init__(self) -> None:
        super().__init__(WrappedLinear)


BLOCKS: dict[str, type[Block]] = {
    "linear with its own forward": ClippedBlock, "linear in a wrapper": WrappedBlock, "depthwise conv": DepthwiseBlock,
    "depthwise conv as a function": FunctionalDepthwiseBlock, "concatenated features": ConcatenatingBlock, "slopes by head": SlopesBlock,
    "repeated mask": RepeatingBlock, "blocks that might be dropped": DroppedBlock, "reads a value": CarefulBlock,
    "heads by unflatten": UnflattenBlock, "asks for finite values": FiniteBlock, "grouped convs": GroupedBlock,
    "parallel parts": ParallelBlock, "transposed conv": TransposedConvBlock, "mixed tokens": TokenMixingBlock, "windows": WindowBlock,
    "samples second": SamplesSecondBlock,
}  # fmt: skip
KINDS = (
    "scaled embedding", "renormalized embedding", "conv with its own forward", "reused blocks", "uncalled lists", "a parameter of its own",
    "a value used late", "gates by sample", "an output used inside", "an output written to",
    "blocks by forward", "tied without repeats", "tied in a block", "a part of a block", *BLOCKS,
)  # fmt: skip


def language_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].roll(1, 1).flatten())


def loader() -> DataLoader[Any]:
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    noise = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    return DataLoader([{"tokens": t, "noise": n} for t, n in zip(tokens, noise, strict=True)], batch_size=8)


def trained_alone(kind: str) -> list[float]:
    """The losses of a plain loop."""
    torch.manual_seed(0)
    model, losses = Language(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader():
        loss = language_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(rank: int, world: int, init_method: str, kind: str, mesh: str, **constraints: Any) -> list[float]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        torch.manual_seed(0)
        model, batches = Language(kind), loader()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = mw.plan_for(model, next(iter(batches)), language_loss, world=world, mesh=mw.Mesh.parse(mesh), **constraints).best.plan
        run = mw.prepare(model, optimizer, batches, loss_fn=language_loss, plan=plan)
        return [float(run.step(batch, language_loss)) for batch in run.loader]
    finally:
        dist.destroy_process_group()


class Adversaries(nn.Module):
    """A generator and a discriminator, as small as they come."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 4))
        self.judge = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

    def judge_loss(self, judge: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        real, made = judge(batch["tokens"][:, :4] / WORDS), judge(self.maker(batch["noise"]).detach())
        return F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made))

    def maker_loss(self, maker: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        made = self.judge(maker(batch["noise"]))
        return F.binary_cross_entropy_with_logits(made, torch.ones_like(made))


def adversaries_alone() -> list[tuple[float, float]]:
    both, losses = Adversaries(), []
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (both.judge, both.maker)]
    for batch in loader():
        values = []
        for loss_fn, model, optimizer in zip((both.judge_loss, both.maker_loss), (both.judge, both.maker), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        losses.append((values[0], values[1]))
    return losses


def adversaries(rank: int, world: int, init_method: str, zero: int) -> list[tuple[float, float]]:
    """Two models that are prepared one by one; the generator's loss runs through the discriminator."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        both, batches = Adversaries(), loader()
        runs = []
        for model, loss_fn in ((both.judge, both.judge_loss), (both.maker, both.maker_loss)):
            mesh = mw.Mesh(shard=world) if zero else mw.Mesh(dp=world)
            plan = mw.plan_for(model, next(iter(batches)), loss_fn, world=world, mesh=mesh, zero=zero).best.plan
            runs.append(mw.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), batches, loss_fn=loss_fn, plan=plan))
        judge, maker = runs
        return [(float(judge.step(b, both.judge_loss)), float(maker.step(b, both.maker_loss))) for b in judge.loader]
    finally:
        dist.destroy_process_group()
