"""Jobs that verify plans: of unusual models, of models whose samples meet, and with bugs put back into the rank's own code."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.core.plan import Plan
from meshwright.core.verification import Verification
from meshwright.describe import layers
from meshwright.execute import tensor_parallel
from meshwright.execute.verify import verify
from tests.procs import unusual_models
from tests.procs.unusual_models import WIDTH, Language, language_loss, loader


@contextmanager
def _process_group(rank: int, world: int, init_method: str) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- bugs --


def _drop_own_forward(layer: nn.Module, logical_dim: Any, comm: Any, name: str, eager: Any, cache: Any) -> None:
    """Tensor parallelism replaces the forward of every embedding, a subclass's own code included."""
    first, count = logical_dim.shard_range(comm.rank, comm.size)

    def look_up(tokens: torch.Tensor) -> torch.Tensor:
        is_local = (tokens >= first) & (tokens < first + count)
        rows = F.embedding(torch.where(is_local, tokens - first, 0), layer.weight)  # type: ignore[arg-type]
        return tensor_parallel.ReduceFromTensorParallel.apply(rows * is_local.unsqueeze(-1), comm, name, cache)

    layer.forward = look_up


BUGS: dict[str, Callable[[], Any]] = {
    "embedding without its own code": lambda: patch.object(tensor_parallel, "_shard_embedding", _drop_own_forward),
    "unit that is never called": lambda: patch.object(layers, "_has_forward", lambda _: True),
    "input hooked for each call": lambda: patch.object(tensor_parallel, "_one_per_input", lambda sites: sites),
}


def verify_language(rank: int, world: int, init_method: str, kind: str, mesh: str, bug: str = "", **constraints: Any) -> Verification:
    with _process_group(rank, world, init_method), BUGS[bug]() if bug else patch.object(layers, "__name__", layers.__name__):
        torch.manual_seed(0)
        model, batch = Language(kind), next(iter(loader()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        plan = mw.plan_for(model, batch, language_loss, world=world, mesh=mw.Mesh.parse(mesh), **constraints).best.plan
        return verify(plan, model, optimizer, batch, language_loss)
