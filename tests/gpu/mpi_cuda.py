"""What `mpirun` starts in the GPU test: tensors on a CUDA device over backend `mpi`, ranks sharing the device if there are more of them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm import mpi


def main() -> None:
    mpi.register(60)
    dist.init_process_group("mpi")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    total = world * (world + 1) / 2
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.full((1000, 33), rank + 1, device="cuda").to(dtype)
        dist.all_reduce(tensor)
        assert bool((tensor == total).all()), dtype
        gathered = torch.empty(world * 4, 5, device="cuda", dtype=dtype)
        dist.all_gather_into_tensor(gathered, torch.full((4, 5), rank, device="cuda").to(dtype))
        assert gathered[:, 0].tolist() == [r for r in range(world) for _ in range(4)], dtype
        part = torch.empty(3, device="cuda", dtype=dtype)
        dist.reduce_scatter_tensor(part, torch.ones(3 * world, device="cuda", dtype=dtype))
        assert bool((part == world).all()), dtype
    strided = torch.zeros(8, 8, device="cuda")
    works = [dist.isend(torch.full((8, 4), float(rank), device="cuda"), (rank + 1) % world), dist.irecv(strided[:, ::2], (rank - 1) % world)]
    for work in works:
        assert work is not None
        work.wait()
    assert bool((strided[:, ::2] == (rank - 1) % world).all())
    _ordered(world)
    _same_as_on_the_host(rank, world)
    _timed(rank)
    print(f"rank {rank}: all held on {torch.cuda.get_device_name()}", flush=True)
    dist.destroy_process_group()


def _ordered(world: int) -> None:
    """A collective sees what its stream was given before, and what comes after sees the collective."""
    large = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        tensor = (large @ large).mul_(0).add_(1)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert float((tensor * 2).mean()) == 2 * world


def _same_as_on_the_host(rank: int, world: int) -> None:
    losses = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).double().to(device))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(20):
            x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step * world + rank)).to(device)
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert abs(losses[0] - losses[1]) <= 1e-9 * abs(losses[1]), losses


def _timed(rank: int) -> None:
    tensor = torch.ones(16 * 2**20 // 4, device="cuda")
    for _ in range(3):
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    if rank == 0:
        print(f"16 MB all-reduce, staged: {(time.perf_counter() - begun) * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
