"""Jobs that verify plans: of unusual models, of models whose samples meet, and with bugs put back into the rank's own code."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright import api
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data
from meshwright.core.verification import Verification
from meshwright.describe import layers
from meshwright.execute import gradient_sync, tensor_parallel, verify_memory
from meshwright.execute.state_digest import state_digest
from meshwright.execute.verify import verify
from meshwright.orchestrate import plan_verification
from meshwright.plan import memory_planner, mesh_proposals, planning_problem
from tests.procs.unusual_models import SAMPLES, WIDTH, WORDS, Language, language_loss, loader


@contextmanager
def process_group(rank: int, world: int, init_method: str) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- bugs --


def _replace_forward(layer: nn.Module, logical_dim: Any, comm: Any, reduce: Any, eager: Any, traced: bool) -> None:
    first, count = logical_dim.shard_range(comm.rank, comm.size)

    def look_up(tokens: torch.Tensor) -> torch.Tensor:
        is_local = (tokens >= first) & (tokens < first + count)
        rows = F.embedding(torch.where(is_local, tokens - first, 0), layer.weight)  # type: ignore[arg-type]
        return reduce(rows * is_local.unsqueeze(-1))  # type: ignore[no-any-return]

    layer.forward = look_up


@contextmanager
def _uncalled_units() -> Iterator[None]:
    """A ModuleList is taken for a block, and a block for a unit though nobody calls it."""

    def blocks(profile: ModelProfile) -> tuple[str, ...]:
        return tuple(layer.name for layer in profile.layers if layer.block)

    with ExitStack() as patches:
        patches.enter_context(patch.object(layers, "_has_forward", lambda _: True))
        for module in (memory_planner, planning_problem, mesh_proposals):
            patches.enter_context(patch.object(module, "choose_units", blocks))
        yield


BUGS: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "embedding without its own code": lambda: patch.object(tensor_parallel, "_shard_embedding", _replace_forward),
    "unit that is never called": _uncalled_units,
    "input hooked for each call": lambda: patch.object(tensor_parallel, "_one_per_input", lambda sites: sites),
    "every second reduction missing": lambda: patch.object(tensor_parallel, "_reduce_output", lambda *_: None),
    "stepped shards not gathered": lambda: patch.object(gradient_sync.BucketReducer, "gather_parameters", lambda *_: None),
}


def plan_of(model: nn.Module, loss_fn: Any, mesh: str, **constraints: Any) -> Plan:
    parsed = mw.Mesh.parse(mesh)
    return mw.plan_for(model, next(iter(loader())), loss_fn, world=parsed.size, mesh=parsed, **constraints).best.plan


def verify_language(rank: int, world: int, init_method: str, kind: str, mesh: str, bug: str = "", **constraints: Any) -> Verification:
    with process_group(rank, world, init_method), BUGS[bug]():
        torch.manual_seed(0)
        model = Language(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return verify(plan_of(model, language_loss, mesh, **constraints), model, optimizer, next(iter(loader())), language_loss)


# -- samples that meet --


class Meeting(nn.Module):
    def __init__(self, normalizes: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, 4)
        self.norm = nn.BatchNorm1d(32) if normalizes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)).relu())  # type: ignore[no-any-return]


def plain_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["noise"]), batch["tokens"][:, 0] % 4)


def masked_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = torch.where(batch["tokens"][:, 0] % 2 == 0, -100, batch["tokens"][:, 0] % 4)
    labels = torch.cat([labels[:1] % 4, labels[1:]])  # the first one is never masked
    return F.cross_entropy(model(batch["noise"]), labels)


def noisy_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return plain_loss(model, {**batch, "noise": batch["noise"] + torch.randn_like(batch["noise"])})


LOSSES = {"plain": plain_loss, "masked": masked_loss, "noisy": noisy_loss}


def verify_meeting(rank: int, world: int, init_method: str, normalizes: bool, loss: str, mesh: str, **constraints: Any) -> Verification:
    with process_group(rank, world, init_method):
        torch.manual_seed(0)
        model, loss_fn = Meeting(normalizes), LOSSES[loss]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return verify(plan_of(model, loss_fn, mesh, **constraints), model, optimizer, next(iter(loader())), loss_fn)


# -- models that do not fit beside themselves --


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
        return x + scale * self.down(F.gelu(self.up(self.norm(x)))), scale


class Deep(nn.Module):
    """Eight equal blocks, and two others."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, scale = self.words(tokens), 1.0
        for block in self.blocks:
            x, scale = block(x, scale)
        return self.head(x)  # type: ignore[no-any-return]


def deep_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten())


def verify_deep(rank: int, world: int, init_method: str, mesh: str, copies: float, bug: str = "", **constraints: Any) -> Verification:
    """Verify where every rank may allocate so many times the bytes of the model's parameters."""
    with process_group(rank, world, init_method), BUGS[bug]():
        torch.manual_seed(0)
        model = Deep()
        free = int(copies * sum(p.nbytes for p in model.parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        plan = plan_of(model, deep_loss, mesh, **constraints)
        limits = {"free_bytes": lambda *_: free, "free_host_bytes": lambda *_: free}
        with patch.multiple(verify_memory, **limits):
            return verify(plan, model, optimizer, next(iter(loader())), deep_loss)


def count_blocks(rank: int, world: int, init_method: str, mesh: str, **constraints: Any) -> tuple[int, int]:
    """How many blocks there are in memory before and after verification."""
    with process_group(rank, world, init_method):
        model = Deep()
        plan, batch = plan_of(model, deep_loss, mesh, **constraints), next(iter(loader()))
        gc.collect()
        counts = [sum(isinstance(thing, Block) for thing in gc.get_objects())]
        verify(plan, model, torch.optim.AdamW(model.parameters()), batch, deep_loss)
        return counts[0], sum(isinstance(thing, Block) for thing in gc.get_objects())


def verify_on(rank: int, world: int, init_method: str, plan: Any, device: str, copies: float) -> tuple[Verification, int]:
    """Verify a given plan on one device that all ranks share, of which each may allocate so much; also the bytes that stay allocated."""
    with process_group(rank, world, init_method):
        torch.manual_seed(0)
        model = Deep().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        free = int(copies * sum(p.nbytes for p in model.parameters()))
        before = _allocated_bytes(device)
        with patch.multiple(verify_memory, free_bytes=lambda *_: free, free_host_bytes=lambda *_: free):
            found = verify(from_data(Plan, plan, "plan"), model, optimizer, next(iter(loader())), deep_loss)
        return found, _allocated_bytes(device) - before


def _allocated_bytes(device: str) -> int:
    """What tensors take on a GPU, without cuBLAS's workspace, which the first product allocates for good."""
    if device == "cpu":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


# -- models that fail --


class Failing(nn.Module):
    """Raises an error on one rank, or on all, under a plan and not on one device."""

    def __init__(self, ranks: tuple[int, ...], phase: str) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, 4)
        self.ranks, self.phase, self.calls = ranks, phase, 0
        self.second.register_forward_pre_hook(self._fail)

    def _fail(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if dist.get_rank() not in self.ranks or not is_under_a_plan():
            return
        if self.phase == "forward":
            raise ArithmeticError("planted")
        inputs[0].register_hook(lambda _: (_ for _ in ()).throw(ArithmeticError("planted")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def is_under_a_plan() -> bool:
    return any(frame.name == "_run_plan" for frame in traceback.extract_stack())


def verify_failing(
    rank: int, world: int, init_method: str, mesh: str, ranks: tuple[int, ...], phase: str, **constraints: Any
) -> tuple[Verification, float, str]:
    """What is found, how long it takes, and what the next best plan is, if one is prepared."""
    with process_group(rank, world, init_method):
        torch.manual_seed(0)
        model = Failing(ranks, phase)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plans = [plan_of(model, plain_loss, mesh, **constraints), plan_of(Failing((), ""), plain_loss, "shard=2", zero=1)]
        start = time.perf_counter()
        found = verify(plans[0], model, optimizer, next(iter(loader())), plain_loss)
        seconds = time.perf_counter() - start
        model.second._forward_pre_hooks.clear()
        check = plan_verification.make_collective_check(model, optimizer, lambda: next(iter(loader())), plain_loss, 0, {"XDG_CACHE_HOME": "/none"})
        lines: list[str] = []
        plan_verification.choose_verified(plans, lambda plan: found if plan is plans[0] else check(plan), lines.append)
        return found, seconds, "\n".join(lines)


# -- prepare --


class Dropping(nn.Module):
    """Draws random numbers in training, and counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.3), nn.BatchNorm1d(32), nn.Linear(32, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.body(F.dropout(x, 0.2, self.training))  # type: ignore[no-any-return]


def train_with(rank: int, world: int, init_method: str, verified: bool, mesh: str, **constraints: Any) -> dict[str, Any]:
    """The losses and the final state of a run, and numbers drawn after it."""
    with process_group(rank, world, init_method), patch.dict(os.environ, MESHWRIGHT_CONSTRAINTS=json.dumps({"verify": verified})):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Dropping()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(3)
        samples = [s for batch in loader() for s in _samples(batch)]
        batches = DataLoader(samples, batch_size=8, shuffle=True, generator=generator)  # type: ignore[arg-type]
        plan = plan_of(model, plain_loss, mesh, **constraints)
        run = mw.prepare(model, optimizer, batches, loss_fn=plain_loss, plan=plan)
        losses = [float(run.step(batch, plain_loss)) for batch in run.loader]
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand()), torch.rand((), generator=generator).item()]
        buffers = hashlib.sha256(b"".join(b.numpy().tobytes() for b in model.buffers())).hexdigest()
        return {"losses": losses, "state": state_digest(run.session.applied), "drawn": drawn, "buffers": buffers, "why": run.why}


def _samples(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{key: value[i] for key, value in batch.items()} for i in range(SAMPLES // 4)]


def prepare_language(rank: int, world: int, init_method: str, meshes: list[str], bug: str, times: int = 1) -> list[str]:
    """The strategies and reasons of runs that are prepared one after the other; each mesh is a plan, the best first."""
    with process_group(rank, world, init_method), BUGS[bug]():
        found, calls = [], []
        for _ in range(times):
            torch.manual_seed(0)
            model = Language("scaled embedding")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            plans = [plan_of(model, language_loss, mesh) for mesh in meshes]
            counted = patch.object(plan_verification, "verify", lambda *args, **kwargs: [calls.append(1), verify(*args, **kwargs)][1])
            with patch.object(api, "_resolve_plan", return_value=(plans, "")), counted:
                run = mw.prepare(model, optimizer, loader(), loss_fn=language_loss)
            found.append(f"{run.plan.strategy}: {run.why} [{len(calls)} calls]")
        return found
