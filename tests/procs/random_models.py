"""Models drawn at random from `random_parts.py`, and a job that trains one under a mesh, beside a plain loop on one device."""

from __future__ import annotations

import copy
import itertools
import json
import os
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.core.errors import RequestError
from meshwright.core.sample_coupling import describe_inexactness
from meshwright.execute.full_state import full_parameters
from tests.procs.random_parts import LENGTH, WIDTH, Block, Drawn, hidden_of

WORDS, FEATURES, SAMPLES, STEPS = 22, 5, 4, 3
Batch = dict[str, Tensor]


class ScaledEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


class RandomModel(nn.Module):
    """Blocks one after the other (`again` calls some of them once more), as an encoder and a decoder, as two towers, or around skips."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.blocks = nn.ModuleList(map(Block, drawn["blocks"]))
        embedding = ScaledEmbedding if drawn["scaled_embedding"] else nn.Embedding
        self.enter: nn.Module = embedding(WORDS, WIDTH) if drawn["front"] == "tokens" else nn.Linear(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if drawn["tied"] and drawn["front"] == "tokens":
            self.head.weight = self.enter.weight
        if drawn["positions"] == "embedding":
            self.positions = nn.Embedding(LENGTH, WIDTH)
        elif drawn["positions"] == "parameter":
            self.positions = nn.Parameter(torch.randn(1, LENGTH, WIDTH) * 0.1)
        elif drawn["positions"] == "buffer":
            self.register_buffer("positions", torch.randn(LENGTH, WIDTH) * 0.1)
        half = len(self.blocks) // 2
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range({"skips": half, "towers": 1}.get(drawn["shape"], 0)))
        self._share()
        self._freeze()

    def _share(self) -> None:
        """Let blocks have modules or weights in common."""
        first, last = self.blocks[0], self.blocks[-1]
        if self.drawn["shares"] == "norm":
            last.norm = first.norm
        if self.drawn["shares"] in ("core", "weights") and first.drawn["core"] == last.drawn["core"] and first.drawn == last.drawn:
            if self.drawn["shares"] == "core":
                last.core = first.core
            else:
                for module, other in zip(first.core.modules(), last.core.modules(), strict=True):
                    if isinstance(module, nn.Linear) and "weight" in module._parameters:
                        other.weight = module.weight

    def _freeze(self) -> None:
        parameters = list(self.parameters())
        half = len(self.blocks) // 2
        frozen: list[nn.Parameter] = []
        if self.drawn["frozen"] == "first half":
            frozen = [*self.enter.parameters(), *self.blocks[:half].parameters()]
        elif self.drawn["frozen"] == "last half":
            frozen = list(self.blocks[half:].parameters())
        elif self.drawn["frozen"] == "every other":
            frozen = parameters[::2]
        elif self.drawn["frozen"] == "matrices":
            frozen = [p for p in self.blocks.parameters() if p.dim() > 1]
        for parameter in frozen:
            parameter.requires_grad_(False)

    def embed(self, batch: Batch) -> Tensor:
        x = self.enter(batch["tokens"] if self.drawn["front"] == "tokens" else batch["features"])
        kind = self.drawn["positions"]
        if kind == "embedding":
            return x + self.positions(torch.arange(x.shape[1], device=x.device))  # type: ignore[operator, no-any-return]
        return x + self.positions if kind in ("parameter", "buffer") else x

    def run_block(self, block: nn.Module, x: Tensor, memory: Tensor | None = None) -> Tensor:
        out = block(hidden=x, memory=memory) if self.drawn["keywords"] else block(x, memory)
        hidden, extra = hidden_of(out)
        return hidden if extra is None else hidden + 0.1 * extra[..., None]

    def forward(self, batch: Batch) -> Any:
        x = self.embed(batch)
        half, shape = len(self.blocks) // 2, self.drawn["shape"]
        if shape == "encoder and decoder":
            memory = self.embed({"tokens": batch["tokens"].flip(1), "features": batch["features"].flip(1)})
            for block in self.blocks[:half]:
                memory = self.run_block(block, memory)
            for block in self.blocks[half:]:
                x = self.run_block(block, x, memory)
        elif shape == "towers":
            other = x.roll(1, 1)
            for block in self.blocks[:half]:
                other = self.run_block(block, other)
            for block in self.blocks[half:]:
                x = self.run_block(block, x)
            x = self.joins[0](torch.cat([x, other], -1))
        elif shape == "skips":
            skips = []
            for block in self.blocks[:half]:
                x = self.run_block(block, x)
                skips.append(x)
            for block, join in itertools.zip_longest(self.blocks[half:], self.joins):
                x = self.run_block(block, join(torch.cat([x, skips.pop()], -1)) if join is not None else x)
        else:
            order = [i % len(self.blocks) for i in (*range(len(self.blocks)), *self.drawn["again"])]
            for index in order:
                x = self.run_block(self.blocks[index], x)
        scores = self.head(self.norm(x))
        return {"tensor": scores, "dict": {"scores": scores, "hidden": x}, "tuple": (scores, x)}[self.drawn["returns"]]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch)
    scores = out["scores"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out
    return F.cross_entropy(scores.flatten(0, 1), batch["tokens"].roll(1, 1).flatten())


def build(drawn: Drawn) -> nn.Module:
    torch.manual_seed(0)
    return RandomModel(drawn).double()


def batches() -> list[Batch]:
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WORDS, (STEPS, SAMPLES, LENGTH), generator=made)
    features = torch.randn(STEPS, SAMPLES, LENGTH, FEATURES, generator=made, dtype=torch.float64)
    return [{"tokens": t, "features": f} for t, f in zip(tokens, features, strict=True)]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train_alone(model: nn.Module) -> dict[str, Any]:
    """The losses and gradient norms of a plain loop, and the final parameters that its gradients reached: weight decay moves others under some
    plans, which give the optimizer zeros instead of no gradient."""
    model = copy.deepcopy(model)
    optimizer, losses, norms = make_optimizer(model), [], []
    for batch in batches():
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item())
        reached = {name: p.detach() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "parameters": reached}


@mock.patch.dict(os.environ, {"MESHWRIGHT_CONSTRAINTS": json.dumps({"verify": False})})  # a wrong plan is to be seen, not refused
def compare(rank: int, world: int, init_method: str, drawn: Drawn, mesh: str, **constraints: Any) -> dict[str, Any]:
    """{"status": equal, wrong or refused, and why}; whatever else goes wrong raises."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        model = build(drawn)
        expected = train_alone(model)
        decision: list[Any] = [_plan(model, world, mesh, constraints) if rank == 0 else None]
        dist.broadcast_object_list(decision, src=0)
        if isinstance(decision[0], str):
            return {"status": "refused", "why": decision[0]}
        try:
            found = _train(model, decision[0])
        except RequestError as error:
            return {"status": "refused", "why": str(error)}
        differences = _differences(expected, found)
        worst = max(differences, key=lambda key: differences[key])
        cut = [s.parameter for d in decision[0].tensor.sharded_dims for s in d.parameter_shards]
        said = {"plan": decision[0].summary(), "inexact": describe_inexactness(decision[0]), "cut": cut, "worst": worst, "by": differences[worst]}
        return {"status": "equal" if differences[worst] < 1e-8 else "wrong", "differences": differences, **said}
    finally:
        dist.destroy_process_group()


def _plan(model: nn.Module, world: int, mesh: str, constraints: dict[str, Any]) -> Any:
    """The best plan on a mesh, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = mw.plan_for(model, batches()[0], loss_of, world=world, mesh=mw.Mesh.parse(mesh), **constraints).best.plan
            return replace(plan, memory=replace(plan.memory, precision="fp64"))
    except RequestError as error:
        return str(error)


def _train(model: nn.Module, plan: Any) -> dict[str, Any]:
    run = mw.prepare(model, make_optimizer(model), batches(), loss_fn=loss_of, plan=plan, clip=1e9)
    losses, norms = [], []
    for batch in run.loader:
        result = run.session.step(batch, loss_of, total=run.loader.global_batch)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))  # type: ignore[arg-type]
    return {"losses": losses, "norms": norms, "parameters": dict(full_parameters(run.session.applied))}


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each loss, norm and parameter."""
    pairs = {f"{key} {step}": (a, b) for key in ("losses", "norms") for step, (a, b) in enumerate(zip(expected[key], found[key], strict=True))}
    differences = {name: abs(a - b) / max(abs(a), 1e-3) for name, (a, b) in pairs.items()}
    for name, tensor in expected["parameters"].items():
        differences[name] = (tensor - found["parameters"][name]).abs().max().item() if tensor.numel() else 0.0
    return {name: float("inf") if d != d else d for name, d in differences.items()}
