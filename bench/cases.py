"""The engines that `overhead.py` compares: one model, loss and optimizer, trained by hand in torch, by each peer, and by Meshwright.

Every engine starts from the same weights and takes this rank's batch of a data-parallel world. `step` does what a training loop
does once: forward, backward, synchronise, optimizer step. It returns the loss, of this rank or of all ranks.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, SyncPolicy
from meshwright.execute.session import Session
from meshwright.zoo.gpt import GPT, GPTConfig
from meshwright.zoo.losses import next_token_loss
from rounds import Batch, Engine, Trial

SYNC = SyncPolicy()
DATA_PARALLEL, ZERO_3 = "data parallel", "ZeRO-3"
PEERS = {"Accelerate": "accelerate", "Lightning Fabric": "lightning"}  # shown name → package
_ALPHABET = 64  # tokens in use: their distribution is learnt within a few steps, so a wrong gradient shows in the loss


@dataclass(frozen=True)
class Case:
    """What is trained. `batch` is one rank's."""

    batch: int = 8
    seq: int = 256
    layers: int = 6
    width: int = 256
    heads: int = 8
    vocab: int = 8192
    seed: int = 0
    tied: bool = True  # the head's weight is the embedding's

    def model(self) -> GPT:
        torch.manual_seed(self.seed)
        model = GPT(GPTConfig(self.vocab, self.seq, self.layers, self.heads, self.width))
        if not self.tied:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model

    def data(self, rank: int, number: int) -> Batch:
        """Batch `number` of one rank: the same for every engine."""
        generator = torch.Generator().manual_seed(1_000_003 * number + rank)
        return {"tokens": torch.randint(0, _ALPHABET, (self.batch, self.seq + 1), generator=generator)}


def missing_peers() -> list[str]:
    return [name for name, package in PEERS.items() if importlib.util.find_spec(package) is None]


def trial(rank: int, world: int, **case: Any) -> Trial:
    """For one rank."""
    config = Case(**case)
    return Trial(list(engines(config, rank, world)), lambda number: config.data(rank, number))


def engines(case: Case, rank: int, world: int) -> Iterator[Engine]:
    """Every engine that can be built here, in one process group. The second of a block is the first again: what a ratio means.

    Raw DDP comes with torch's defaults, as the peers use it, and with the option that spares it a copy of every gradient back from
    its buckets; Meshwright's buckets never make that copy.
    """
    pose_as_launched(rank, world)
    yield Engine("raw DDP", DATA_PARALLEL, raw_ddp(case))
    yield Engine("raw DDP, again", DATA_PARALLEL, raw_ddp(case))
    yield Engine("raw DDP, bucket views", DATA_PARALLEL, raw_ddp(case, views=True))
    builders = {"Accelerate": accelerate, "Lightning Fabric": fabric}
    for name in [n for n in builders if n not in missing_peers()]:
        yield Engine(name, DATA_PARALLEL, builders[name](case, world))
    yield Engine("Meshwright", DATA_PARALLEL, meshwright(case, world, zero=0), ours=True)
    yield Engine("raw FSDP2", ZERO_3, raw_fsdp2(case, world))
    yield Engine("raw FSDP2, again", ZERO_3, raw_fsdp2(case, world))
    yield Engine("Meshwright", ZERO_3, meshwright(case, world, zero=3), ours=True)


def raw_ddp(case: Case, views: bool = False, group: Any = None) -> Callable[[Batch], Tensor]:
    model = DistributedDataParallel(case.model(), process_group=group, gradient_as_bucket_view=views)
    return by_hand(model, optimizer_of(model))


def raw_fsdp2(case: Case, world: int, group: Any = None) -> Callable[[Batch], Tensor]:
    model = case.model()
    mesh = init_device_mesh("cpu", (world,)) if group is None else DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return by_hand(model, optimizer_of(model))


def accelerate(case: Case, world: int) -> Callable[[Batch], Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world
    plain = case.model()
    model, optimizer = accelerator.prepare(plain, optimizer_of(plain))
    return by_hand(model, optimizer, accelerator.backward)


def fabric(case: Case, world: int) -> Callable[[Batch], Tensor]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy

    launcher = Fabric(accelerator="cpu", devices=world, strategy=DDPStrategy(cluster_environment=LightningEnvironment()))
    launcher.launch()
    assert launcher.world_size == world
    plain = case.model()
    model, optimizer = launcher.setup(plain, optimizer_of(plain))
    return by_hand(model, optimizer, launcher.backward)


def meshwright(case: Case, world: int, zero: int, sync: SyncPolicy = SYNC) -> Callable[[Batch], Tensor]:
    model = case.model()
    session = Session(plan_of(case, world, zero, sync), model, optimizer_of(model))
    return lambda batch: session.step(batch, next_token_loss).loss


def plan_of(case: Case, world: int, zero: int, sync: SyncPolicy) -> Plan:
    if not zero:
        return Plan("gpt", case.batch * world, Mesh(dp=world), sync=sync)
    memory = MemoryPolicy(zero=zero, units=tuple(f"blocks.{i}" for i in range(case.layers)))
    return Plan("gpt", case.batch * world, Mesh(shard=world), memory=memory, sync=sync)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[Tensor], None] = Tensor.backward,
    loss: Callable[[nn.Module, Batch], Tensor] = next_token_loss,
) -> Callable[[Batch], Tensor]:
    """The loop that everybody writes."""

    def step(batch: Batch) -> Tensor:
        value = loss(model, batch)
        backward(value)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def pose_as_launched(rank: int, world: int) -> None:
    """The peers take the process group that is there, once the environment looks like torchrun's. Nobody listens on the port."""
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
