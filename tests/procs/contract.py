"""What torch's own engines ask of a backend: DDP, FSDP2, tensor parallelism, pipelining and DCP, unchanged, over whichever process group there is."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, all_to_all_single, reduce_scatter_tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from meshwright.launch import Rendezvous, join_process_group, leave_process_group

STEPS = 20


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def batch(step: int, share: int = 0, shares: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(16, width, dtype=torch.float64, generator=generator) for width in (8, 4))
    return x.chunk(shares)[share], y.chunk(shares)[share]


def train(net: nn.Module, share: int, shares: int) -> list[float]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, share, shares)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(float(mean))
    return losses


def ddp(folder: str) -> list[float]:
    return train(DistributedDataParallel(model(), bucket_cap_mb=0.005), dist.get_rank(), dist.get_world_size())


def power_sgd(folder: str) -> list[float]:
    """Compressed gradients: each collective of torch's hook is called in the callback of the one before. With several buckets, callbacks would run
    in an order that may differ between ranks, on gloo too: there is one."""
    net = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(net, dist.get_rank(), dist.get_world_size())


def fsdp2(folder: str) -> list[float]:
    """Trained; then saved, and loaded into another copy, which must hold the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded() -> nn.Module:
        net = model()
        for layer in net:
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    net, other = sharded(), sharded()
    losses = train(net, dist.get_rank(), dist.get_world_size())
    dcp.save(net.state_dict(), checkpoint_id=folder)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    for name, value in net.state_dict().items():
        assert isinstance(value, DTensor) and torch.equal(value.to_local(), state[name].to_local()), name
    return losses


def tensor_parallel(folder: str) -> list[float]:
    """Two ways data parallel, two ways tensor parallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(net, mesh=mesh["dp"])
    return train(net, mesh["dp"].get_local_rank(), 2)


def pipeline(folder: str) -> list[float]:
    """Four stages, of which each holds a part of the layers; four micro-batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [(0, 1), (1, 3), (3, 4), (4, 5)]
    whole = model()
    stage = PipelineStage(nn.Sequential(*list(whole)[slice(*parts[rank])]), rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    parameters = list(stage.submod.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-2, foreach=False) if parameters else None
    found = []
    for step in range(STEPS):
        x, y = batch(step)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros((), dtype=torch.float64)
        dist.broadcast(mean, src=world - 1)
        found.append(float(mean))
    return found


LOSSY = "ddp with powerSGD"  # the one that does not train as one process does
ENGINES: dict[str, Callable[[str], list[float]]] = {
    "ddp": ddp, LOSSY: power_sgd, "fsdp2": fsdp2, "tensor parallel": tensor_parallel, "pipeline": pipeline,
}  # fmt: skip


def engines(folder: str) -> dict[str, list[float]]:
    """Losses of every engine, one a step."""
    warnings.simplefilter("ignore")
    return {name: job(str(Path(folder) / name.replace(" ", "-"))) for name, job in ENGINES.items()}


def engines_over_gloo(rank: int, world: int, init_method: str, folder: str) -> dict[str, list[float]]:
    join_process_group(Rendezvous(rank, world, init_method))
    try:
        return engines(folder)
    finally:
        leave_process_group()


def serial() -> list[float]:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# -- torch's own calls, those that `Comm` does not use --


def calls() -> list[str]:
    """Names of torch's calls that did not do what they should; run over `mpi`."""
    checks: dict[str, Callable[[int, int], Any]] = {
        "objects": _objects, "lists": _lists, "functional": _functional, "messages": _messages, "late messages": _late, "work": _work,
        "subgroups": _subgroups, "operations": _operations, "mistakes": _mistakes,
    }  # fmt: skip
    return [name for name, check in checks.items() if check(dist.get_rank(), dist.get_world_size()) is False]


def _ones(*shape: int, value: float = 1.0) -> torch.Tensor:
    return torch.full(shape, float(value))


def _objects(rank: int, world: int) -> bool:
    every: list[Any] = [None] * world
    dist.all_gather_object(every, {"rank": rank, "text": "x" * rank})
    told: list[Any] = [("from", rank)]
    dist.broadcast_object_list(told, src=world - 1)
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
    return [e["rank"] for e in every] == list(range(world)) and told == [("from", world - 1)] and gathered in (None, list(range(world))) and (
        scattered == [f"for {rank}"]
    )  # fmt: skip


def _lists(rank: int, world: int) -> bool:
    outputs = [torch.empty(r + 1, 2) for r in range(world)]
    dist.all_gather(outputs, _ones(rank + 1, 2, value=rank))
    arrived = [torch.empty(rank + 1) for _ in range(world)]
    dist.all_to_all(arrived, [_ones(r + 1, value=10 * rank + r) for r in range(world)])
    single = torch.empty(world)
    dist.all_to_all_single(single, torch.arange(world, dtype=torch.float32) + 10 * rank)
    part = torch.empty(rank + 1)
    dist.reduce_scatter(part, [_ones(r + 1, value=rank) for r in range(world)])
    return (
        all(bool((o == r).all()) for r, o in enumerate(outputs))
        and all(bool((a == 10 * r + rank).all()) for r, a in enumerate(arrived))
        and bool((single == 10 * torch.arange(world) + rank).all())
        and bool((part == sum(range(world))).all())
    )


def _functional(rank: int, world: int) -> bool:
    total = world * (world - 1) / 2
    reduced = all_reduce(_ones(3, value=rank), "sum", dist.group.WORLD)
    gathered = all_gather_tensor(_ones(2, value=rank), 0, dist.group.WORLD)
    scattered = reduce_scatter_tensor(_ones(2 * world, value=rank), "avg", 0, dist.group.WORLD)
    turned = all_to_all_single(torch.arange(world), None, None, dist.group.WORLD)
    with dist._coalescing_manager(async_ops=True) as manager:
        tensors = [_ones(4, value=rank + k) for k in range(3)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return (
        bool((reduced == total).all())
        and gathered.tolist() == [float(r) for r in range(world) for _ in range(2)]
        and bool((scattered == total / world).all())
        and bool((turned == rank).all())
        and all(bool((t == total + world * k).all()) for k, t in enumerate(tensors))
    )


def _messages(rank: int, world: int) -> bool:
    right, left = (rank + 1) % world, (rank - 1) % world
    large = _ones(1 << 18, value=rank)
    inbox = torch.empty(1 << 18)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, large, right), dist.P2POp(dist.irecv, inbox, left)]):
        work.wait()
    wide = torch.zeros(4, 6)
    sent = dist.isend(_ones(4, 3, value=rank).t().contiguous().t(), right, tag=7)
    received = dist.irecv(wide[:, ::2], left, tag=7)
    assert sent is not None and received is not None
    waited = received.get_future().then(lambda _: received.wait())  # what hangs on a message's future may wait for the message
    sent.get_future().wait()
    assert waited.wait() and received.wait() and sent.wait() and sent.is_completed()
    anyone = torch.empty(1)
    if rank == 0:
        sources = {dist.recv(anyone) for _ in range(world - 1)}
        known = sources == set(range(1, world))
    else:
        dist.send(_ones(1), 0)
        known = True
    return bool((inbox == left).all()) and bool((wide[:, ::2] == left).all()) and bool((wide[:, 1::2] == 0).all()) and known


def _late(rank: int, world: int) -> bool:
    """Messages that are asked about in every way before they come: small ones, and those that are looked after."""
    right, left = (rank + 1) % world, (rank - 1) % world
    boxes = [torch.zeros(n) for n in (4, 4, 4, 1 << 17, 1 << 17)]
    received: list[Any] = [dist.irecv(box, left, tag=9) for box in boxes]
    for work in (received[0], received[3]):
        with contextlib.suppress(TimeoutError):
            work.wait(timedelta(milliseconds=5))
            return False
    early = [work.is_completed() for work in received]
    futures = [received[n].get_future() for n in (1, 4)]
    helper = threading.Thread(target=received[2].wait)
    helper.start()
    dist.barrier()
    sent: list[Any] = [dist.isend(_ones(len(box), value=rank + n), right, tag=9) for n, box in enumerate(boxes)]
    while not received[3].is_completed():  # by whoever looks after it
        time.sleep(1e-3)
    for future in futures:
        future.wait()
    for work in (*received, *sent):
        work.wait()
        work.synchronize()
    helper.join()
    whole = all(bool((box == left + n).all()) for n, box in enumerate(boxes))
    known = [work.source_rank() for work in received] == [left] * 5 and received[2].result()[0] is boxes[2]
    return whole and known and not any(early) and all(isinstance(work, dist.Work) and work.is_success() for work in (*received, *sent))


def _work(rank: int, world: int) -> bool:
    """Several calls under way, waited for in another order; futures; what hangs on a future may communicate."""
    tensors = [_ones(1 << k) for k in (1, 12, 18, 3)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    assert all(w is not None for w in works)
    works[3].wait()  # type: ignore[union-attr]
    futures = [w.get_future() for w in works]  # type: ignore[union-attr]
    again = futures[1].then(lambda f: dist.all_reduce(f.value()[0]) or f.value()[0])
    again.wait()
    for work in works:
        work.wait(timedelta(seconds=30))  # type: ignore[union-attr]
    return all(w.is_completed() for w in works) and all(bool((t == (world**2 if k == 1 else world)).all()) for k, t in enumerate(tensors))  # type: ignore[union-attr]


def _subgroups(rank: int, world: int) -> bool:
    """Groups used in different orders on different ranks, both under way."""
    first, second = dist.new_group([0, 1]), dist.new_group(list(range(world)))
    a, b = _ones(3), _ones(3)
    calls = [(b, second)] if rank > 1 else [(a, first), (b, second)] if rank == 0 else [(b, second), (a, first)]
    for work in [dist.all_reduce(t, group=g, async_op=True) for t, g in calls][::-1]:
        work.wait()  # type: ignore[union-attr]
    split: Any = dist.group.WORLD
    half = split.split_group([r for r in range(world) if r % 2 == rank % 2])
    c = _ones(2)
    half.allreduce([c]).wait()
    return bool((b == world).all()) and (rank > 1 or bool((a == 2).all())) and bool((c == world / 2).all())


def _operations(rank: int, world: int) -> bool:
    scaled, mean, whole, bits, flag = _ones(3), _ones(3, value=rank), torch.tensor([7 * rank]), torch.tensor([1 << rank]), torch.tensor([rank == 1])
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.25))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    dist.all_reduce(bits, op=dist.ReduceOp.BOR)
    dist.all_reduce(flag)
    return (
        bool((scaled == world / 4).all()) and bool((mean == (world - 1) / 2).all()) and int(whole) == 7 * sum(range(world)) // world
        and int(bits) == 2**world - 1 and bool(flag)
    )  # fmt: skip


def _mistakes(rank: int, world: int) -> bool:
    """A call that cannot be is refused on every rank, and the group goes on working."""
    refused = 0
    for wrong in (
        lambda: dist.all_reduce(_ones(3), op=dist.ReduceOp.BAND),
        lambda: dist.all_to_all_single(torch.empty(world + 1), _ones(world + 1)),
        lambda: dist.all_reduce(torch.tensor([True]), op=dist.ReduceOp.AVG),
    ):
        try:
            wrong()
        except ValueError:
            refused += 1
    for numel in (4, 1 << 17):  # more arrives than there is room for: who waits is told, whoever found it out
        room = torch.zeros(2 * numel)
        received: Any = dist.irecv(room[:numel], (rank - 1) % world, tag=5)
        sent: Any = dist.isend(_ones(2 * numel), (rank + 1) % world, tag=5)
        time.sleep(0.01)
        try:
            received.wait()
        except Exception as error:
            refused += "trunc" in str(error).lower()
        sent.wait()
    tensor = _ones(2)
    dist.all_reduce(tensor)
    return refused == 5 and bool((tensor == world).all())
