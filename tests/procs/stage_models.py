"""Small models that are hard to cut into pipeline stages, and a job that trains one on two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw

WIDTH, SAMPLES, STEPS = 8, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Slice(nn.Module):
    """Returns a view of some positions, which of one sample alone is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)[:, :3]  # type: ignore[no-any-return]


class InPlace(Block):
    """Changes what it is given, which a stage receives."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.silu(x, inplace=True))


COLLECTED: list[Tensor] = []  # what hooks collected in this forward pass


class Collecting(nn.Module):
    """Collects what its layers return by hooks that it registers when it first runs, and reads the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(WIDTH, WIDTH)
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            for layer in self.layers:
                layer.register_forward_hook(lambda _m, _args, output: COLLECTED.append(output))
        COLLECTED.clear()
        self.layers(x)
        return self.head(COLLECTED[3])  # type: ignore[no-any-return]


class AskedForDtype(nn.Module):
    """Asks each layer for the dtype of its parameters, also those of other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for dtype in [next(layer.parameters()).dtype for layer in self.layers]:
            x = x.to(dtype)
        for layer in self.layers:
            x = layer(x)
        return x


class Reading(Block):
    """Returns an index beside its output, which the next block takes."""

    def forward(self, x: Tensor, order: Tensor | None = None) -> Any:  # type: ignore[override]
        x = super().forward(x if order is None else x.gather(-1, order))
        return x, x.argsort(-1)


class Reordering(nn.Module):
    """Hands indices from block to block beside activations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reading() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        order = None
        for block in self.blocks:
            x, order = block(x, order)
        return x


class Queries(nn.Module):
    """Adds the same learned queries in every block, as a DETR decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.blocks, self.head = nn.Embedding(6, WIDTH), nn.ModuleList(QueryBlock() for _ in range(8)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class QueryBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query.tanh()
        return super().forward(super().forward(x + query) + query)


class OptionalLayers(nn.Module):
    """A list of layers that says with None where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.between = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), None, None])

    def forward(self, x: Tensor) -> Tensor:
        for block, between in zip(self.blocks, self.between, strict=True):
            x = block(x)
            x = x if between is None else between(x)
        return x


class SingleValueNorms(nn.Module):
    """Norms whose groups have one value in each sample: torch refuses a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(4)), nn.GroupNorm(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x.mean(1))  # type: ignore[no-any-return]


class SharedNorm(nn.Module):
    """One norm takes the outputs of three blocks, after all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(6)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for block in self.blocks[:3]:
            x = block(x)
            outputs.append(x)
        x = sum(0.5**i * self.norm(out) for i, out in enumerate(outputs))
        for block in self.blocks[3:]:
            x = block(x)
        return x


class Stem(nn.Module):
    """Returns a mask beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), x.detach().mean(-1) > 0


class MaskedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).masked_fill(mask, 0.5)


class MaskFromStem(nn.Module):
    """Its own code makes a mask for all blocks of one that its first layer returned: no parameters are in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = Stem(), nn.ModuleList(MaskedBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.stem(x)
        mask = mask.logical_not()[..., None]
        for block in self.blocks:
            x = block(x, mask)
        return x


KINDS: dict[str, Any] = {
    "slices": lambda: nn.Sequential(Block(), Slice(), Block(), Block()),
    "activations in place": lambda: nn.Sequential(Block(), InPlace(), InPlace(), InPlace()),
    "hooks that collect": Collecting, "asked for a dtype": AskedForDtype, "indices beside activations": Reordering,
    "parameters used twice": Queries, "lists with None": OptionalLayers,
    "one norm for many": SharedNorm, "a mask from a stem": MaskFromStem,
}  # fmt: skip
REFUSED: dict[str, Any] = {"norms of single values": SingleValueNorms}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return (KINDS | REFUSED)[kind]()  # type: ignore[no-any-return]


def batch() -> Tensor:
    return torch.randn(SAMPLES, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out - torch.linspace(-1, 1, out[0].numel()).view_as(out[0])).square().mean()


def trained_alone(kind: str) -> list[float]:
    """The losses of a plain loop."""
    model, losses = build(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = loss_fn(model, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(rank: int, world: int, init_method: str, kind: str, mesh: str, **constraints: Any) -> list[float]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        model = build(kind)
        plan = mw.plan_for(model, batch(), loss_fn, world=world, mesh=mw.Mesh.parse(mesh), **constraints).best.plan
        run = mw.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch()] * STEPS, loss_fn=loss_fn, plan=plan)
        return [float(run.step(part, loss_fn)) for part in run.loader]
    finally:
        dist.destroy_process_group()
