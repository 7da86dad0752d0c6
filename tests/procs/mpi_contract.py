"""What torch's callers expect of backend `mpi` beyond collectives of dense tensors: checks on four ranks, and which of them failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.profiler import ProfilerActivity, profile

LARGE = 1 << 18  # numbers of a message whose sender waits for the receiver


def checks(folder: str) -> list[str]:
    each: dict[str, Callable[[int, int], object]] = {
        "coalesced": _coalesced, "sparse": _sparse, "short receives": _short_receives, "order": _order, "waiting senders": _waiting_senders,
        "sizes": _sizes, "times": _times, "events": _events, "refusals": _refusals,
        "async save": lambda rank, world: _async_save(rank, Path(folder) / "async"),
    }  # fmt: skip
    wrong = []
    for name, check in each.items():
        try:
            if not check(dist.get_rank(), dist.get_world_size()):
                wrong.append(name)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        dist.barrier()
    return wrong


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _coalesced(rank: int, world: int) -> bool:
    """`outputs[rank][i]` is the i-th input of a rank, and inputs may differ in size."""
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(world)]
    dist.all_gather_coalesced(outputs, [torch.full((2,), 10.0 * rank), torch.full((3,), 10.0 * rank + 1)])
    right = all(bool((t == 10 * r + i).all()) for r, each in enumerate(outputs) for i, t in enumerate(each))
    turned = _error(lambda: dist.all_gather_coalesced(list(map(list, zip(*outputs, strict=True))), [torch.zeros(2), torch.zeros(3)]))
    return right and "one per rank" in turned


def _sparse(rank: int, world: int) -> bool:
    def mine(layout: str = "coo") -> torch.Tensor:
        dense = torch.zeros(world + 1, 2)
        dense[0], dense[rank + 1] = 1.0, float(rank)
        return dense.to_sparse(1) if layout == "coo" else dense.to_sparse_csr()

    total, mean = mine(), mine()
    dist.all_reduce(total)
    work: Any = dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    expected = torch.tensor([float(world), *map(float, range(world))]).repeat(2, 1).t()
    refused = [
        _error(lambda: dist.all_reduce(mine(), op=dist.ReduceOp.MAX)),
        _error(lambda: dist.all_reduce(mine("csr"))),
        _error(lambda: dist.broadcast(mine(), 0)),
    ]
    return torch.equal(total.to_dense(), expected) and torch.equal(mean.to_dense(), expected / world) and all("ValueError" in e for e in refused)


def _short_receives(rank: int, world: int) -> bool:
    """A message that is longer than the tensor: an error that says who and how much, and nothing beyond the tensor is written."""
    source, right = (rank - 1) % world, True
    for numel in (4, LARGE):
        for early in (False, True):
            room = torch.zeros(2 * numel)
            sent: Any = None if early else dist.isend(torch.ones(2 * numel), (rank + 1) % world, tag=5)
            received: Any = dist.irecv(room[:numel], source, tag=5)
            sent = sent or dist.isend(torch.ones(2 * numel), (rank + 1) % world, tag=5)
            told = _error(received.wait)
            sent.wait()
            named = all(part in told for part in (f"rank {source}", "tag 5", f"{8 * numel} bytes", f"{4 * numel} bytes", "MPI_ERR_TRUNCATE"))
            right &= named and not bool(room[numel:].any())
    return right


def _order(rank: int, world: int) -> bool:
    """Messages go to receives in the order of the calls, whichever is waited for first, and a receive from any rank takes what is left."""
    if rank > 1:
        return True
    peer = 1 - rank
    boxes = [torch.zeros(n) for n in (3, LARGE, 3, LARGE)]
    received: list[Any] = [dist.irecv(boxes[0], peer, tag=1), dist.irecv(boxes[1], tag=1), dist.irecv(boxes[2], peer, tag=1)]
    received.append(dist.irecv(boxes[3], peer, tag=2))
    sent: list[Any] = [dist.isend(torch.full((LARGE,), 4.0), peer, tag=2)]
    sent += [dist.isend(torch.full((len(box),), n + 1.0), peer, tag=1) for n, box in enumerate(boxes[:3])]
    for work in (received[2], received[3], received[1], received[0], *sent):
        work.wait()
    return all(bool((box == n + 1).all()) for n, box in enumerate(boxes)) and received[1]._source_rank() == peer


def _waiting_senders(rank: int, world: int) -> bool:
    """A sender that waits goes on though the receiver waits elsewhere: in a collective, for a send, for a receive of another group."""
    other: Any = dist.new_group()
    source, box = (rank - 1) % world, torch.zeros(LARGE)
    received: Any = dist.irecv(box, source)
    dist.send(torch.full((LARGE,), float(rank)), (rank + 1) % world)
    dist.barrier()
    again: Any = dist.irecv(small := torch.zeros(LARGE), source, group=other)
    if rank % 2:
        dist.send(torch.full((LARGE,), float(rank)), (rank + 1) % world, group=other)
    dist.barrier()
    if not rank % 2:
        dist.send(torch.full((LARGE,), float(rank)), (rank + 1) % world, group=other)
    again.wait()
    received.wait()
    return bool((box == source).all()) and bool((small == source).all())


def _sizes(rank: int, world: int) -> bool:
    """A collective of unequal sizes, where MPI finds it out."""
    group: Any = dist.new_group([0, 1])
    if rank > 1:
        return True
    told = _error(lambda: dist.broadcast(torch.zeros(4 if rank else 8), 0, group=group))
    return not told if rank == 0 else all(part in told for part in ("broadcast number 1", "ranks 0, 1", "on rank 1", "16 bytes", "TRUNCATE"))


def _times(rank: int, world: int) -> bool:
    box = torch.zeros(4)
    received: Any = dist.irecv(box, (rank - 1) % world, tag=3)
    told = _error(lambda: received.wait(timedelta(seconds=0.05)))
    dist.barrier()
    dist.send(torch.ones(4), (rank + 1) % world, tag=3)
    received.wait()
    return all(part in told for part in ("TimeoutError", f"rank {(rank - 1) % world}", "tag 3", "0.05 s")) and bool(box.all())


def _events(rank: int, world: int) -> bool:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        dist.all_reduce(torch.ones(2, 3))
        work: Any = dist.all_reduce(torch.ones(2, 3), async_op=True)
        time.sleep(0.01)
        work.wait()
        received: Any = dist.irecv(torch.zeros(5), (rank - 1) % world)
        dist.send(torch.ones(5), (rank + 1) % world)
        received.wait()
    found = sorted((e.name, e.is_async, e.input_shapes) for e in seen.events() or [] if e.name.startswith("mpi:"))
    return found == [("mpi:all_reduce", True, [[2, 3]])] * 2 + [("mpi:recv", True, [[5]]), ("mpi:send", True, [[5]])]


def _refusals(rank: int, world: int) -> bool:
    told = [
        _error(lambda: dist.new_group(backend="gloo")),
        _error(lambda: dist.split_group(split_ranks=[[0, 1], [2, 3]])),
        _error(lambda: dist.new_group([rank], use_local_synchronization=True)),
    ]
    return all(part in line for part, line in zip(("make gloo the default", "RuntimeError", "use_local_synchronization"), told, strict=True))


def _async_save(rank: int, folder: Path) -> bool:
    """While the ranks go on with other collectives, over a group of its own."""
    group: Any = dist.new_group()
    saved: Any = dcp.async_save({f"rank {rank}": torch.full((3,), float(rank))}, checkpoint_id=folder, process_group=group)
    for _ in range(20):
        dist.all_reduce(torch.ones(4))
    saved.result()
    dist.barrier()
    state = {f"rank {r}": torch.zeros(3) for r in range(dist.get_world_size())}
    dcp.load(state, checkpoint_id=folder)
    return all(bool((state[f"rank {r}"] == r).all()) for r in range(dist.get_world_size()))
