"""What `mpirun` starts in the GPU test: tensors on a CUDA device over backend `mpi`, ranks sharing the device if there are more of them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm import mpi
from meshwright.comm.mpi import mpi_library


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
    _lists(rank, world)
    _ordered(world)
    _same_as_on_the_host(rank, world)
    _timed(rank)
    print(f"rank {rank}: all held on {torch.cuda.get_device_name()}", flush=True)
    dist.destroy_process_group()


def _lists(rank: int, world: int) -> None:
    """What is joined, copied or scaled on the device before it is sent, behind work that the device is still busy with."""
    busy = torch.randn(4096, 4096, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        late = torch.ones((), device="cuda", dtype=dtype) + (busy @ busy @ busy).mul(0).sum().to(dtype)  # 1, in a while
        mine = [torch.full((5, 3), 10 * rank + r, device="cuda", dtype=dtype) * late for r in range(world)]
        arrived = [torch.empty(5, 3, device="cuda", dtype=dtype) for _ in range(world)]
        dist.all_to_all(arrived, mine)
        assert [t.unique().tolist() for t in arrived] == [[10 * r + rank] for r in range(world)], dtype
        one = torch.empty(5, 3, device="cuda", dtype=dtype)
        dist.reduce_scatter(one, [t * late for t in mine])
        assert bool((one == sum(10 * r + rank for r in range(world))).all()), dtype
        strided = (torch.arange(64, device="cuda").to(dtype).view(8, 8) * late + rank)[:, 1::2]
        dist.broadcast(strided, 0)
        assert strided[3].tolist() == [25, 27, 29, 31], dtype
        mean = torch.full((7,), 2.0 * rank, device="cuda", dtype=dtype) * late
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert bool((mean == world - 1).all()), dtype
        root = [torch.empty(5, 3, device="cuda", dtype=dtype) for _ in range(world)] if rank == 0 else None
        dist.gather(mine[0] * late, root, 0)
        assert root is None or [t.unique().tolist() for t in root] == [[10 * r] for r in range(world)], dtype
        dist.scatter(one, [t * late for t in mine] if rank == 0 else None, 0)
        assert bool((one == rank).all()), dtype
        sent = (torch.full((6, 6), float(rank), device="cuda", dtype=dtype) * late).t()[:, ::2]
        got = torch.empty(6, 3, device="cuda", dtype=dtype)
        pair = [dist.P2POp(dist.isend, sent, (rank + 1) % world), dist.P2POp(dist.irecv, got, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        assert bool((got == (rank - 1) % world).all()), dtype


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
        way = "on the device" if mpi_library.is_cuda_aware() else "staged"
        print(f"16 MB all-reduce, {way}: {(time.perf_counter() - begun) * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
