"""What `mpirun` starts in tests: every check over backend `mpi` in one start; each rank writes what it found as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import mpi
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, SyncPolicy
from meshwright.core.routes import Route
from meshwright.core.serialization import to_data


def main(folder: str, full: bool) -> None:
    from tests.procs import collectives, contract, mpi_contract

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mpi.register(timeout_s=60)
    dist.init_process_group("mpi")
    rank = dist.get_rank()
    found = {
        "backend": dist.get_backend(),
        "conform": collectives.tell(lambda: collectives.over_torch(full)),
        "calls": collectives.tell(contract.calls),
        "contract": collectives.tell(lambda: mpi_contract.checks(folder)),
        "comm sync": collectives.tell(lambda: collectives.conform(_comm_sync, (torch.float32, torch.bfloat16, torch.bool))[1]),
        "counts": collectives.tell(_large_counts),
        "sync calls": collectives.tell(_sync_calls),
        "futures": collectives.tell(_futures),
        "pairwise": collectives.tell(_pairwise),
        "two groups": collectives.tell(lambda: [f"{numel} numbers" for numel in (700, 5000) if not _two_groups(numel)]),
        "faults": collectives.tell(_faults),
        "engines": collectives.tell(lambda: contract.engines(folder)),
    }
    dist.destroy_process_group()
    found["routed"] = collectives.tell(lambda: _routed(rank, folder))
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))


PLANS = {
    "data parallel": Plan("gpt-tiny", 8, Mesh(dp=4)),
    "ZeRO-2 hybrid": Plan("gpt-tiny", 8, Mesh(dp=2, shard=2), memory=MemoryPolicy(2)),
    "ZeRO-3": Plan("gpt-tiny", 8, Mesh(shard=4), memory=MemoryPolicy(3, ("blocks.0", "blocks.1"))),
}
ROUTES = (
    Route("all_reduce", "mpi", 10_000),
    Route("all_gather", "mpi"),
    Route("reduce_scatter", "mpi"),
    Route("reduce_scatter", "mpi", 5_000, "shared"),
)


def _routed(rank: int, folder: str) -> dict[str, list[Any]]:
    """Every plan over gloo alone, and with some of its calls over MPI: losses, norms, state and ledger of both."""
    from tests.procs.jobs import train_curve

    def run(name: str, routes: tuple[Route, ...]) -> dict[str, Any]:
        plan = replace(PLANS[name], sync=SyncPolicy(bucket_bytes=50_000, first_bucket_bytes=5_000, routes=routes))
        init_method = f"file://{folder}/{name.replace(' ', '-')}-{len(routes)}"
        return train_curve(rank, 4, init_method, to_data(plan), {"zoo": "gpt-tiny"}, steps=3, clip=1.0)

    return {name: [run(name, ()), run(name, ROUTES)] for name in PLANS}


def _sync_calls() -> list[str]:
    """Sync calls of torch's own functions, small and large."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(backend="mpi")
    wrong = []

    def check(what: str, right: bool) -> None:
        if not right:
            wrong.append(what)

    for numel in (2 * world, 800_000, 400_000 * world):
        every = [torch.arange(numel, dtype=torch.float32) % 97 + 100 * r for r in range(world)]
        total, part = torch.stack(every).sum(0), numel // world
        for turn in range(2):
            mine = every[rank].clone()
            dist.reduce(mine, group_dst=turn % world, group=group)
            check(f"reduce of {numel}", torch.equal(mine, total if rank == turn % world else every[rank]))
            mine = every[rank].clone()
            dist.all_reduce(mine, group=group)
            check(f"all_reduce of {numel}", torch.equal(mine, total))
            mine = torch.zeros(part)
            dist.reduce_scatter_tensor(mine, every[rank], group=group)
            check(f"reduce_scatter of {numel}", torch.equal(mine, total[rank * part :][:part]))
            mine = torch.zeros(numel)
            dist.all_gather_into_tensor(mine, every[rank][:part].clone(), group=group)
            check(f"all_gather of {numel}", torch.equal(mine, torch.cat([e[:part] for e in every])))
            mine = every[rank].clone()
            dist.broadcast(mine, group_src=turn % world, group=group)
            check(f"broadcast of {numel}", torch.equal(mine, every[turn % world]))
            mine = torch.zeros(numel)
            dist.all_to_all_single(mine, every[rank], group=group)
            check(f"all_to_all of {numel}", torch.equal(mine, torch.cat([e[rank * part :][:part] for e in every])))
            mine, right, left = torch.zeros(numel), (rank + 1) % world, (rank - 1) % world
            works = [dist.irecv(mine, group_src=left, group=group), dist.isend(every[rank], group_dst=right, group=group)]
            check(f"message of {numel}", all(work.wait() for work in works if work) and torch.equal(mine, every[left]))
    for call in (dist.all_gather_into_tensor, lambda whole, one, group: dist.reduce_scatter_tensor(one, whole, group=group)):
        try:
            call(torch.zeros(2 * world, dtype=torch.bfloat16), torch.zeros(2), group=group)
            wrong.append("tensors of unlike dtypes are taken")
        except ValueError:
            pass
    return wrong


def _futures() -> list[str]:
    """A message's future completes though nobody waits for the message; a future's callback may call a collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent, arrived = torch.full((1 << 20,), float(rank)), torch.zeros(1 << 20)
    receive: Any = dist.irecv(arrived, (rank - 1) % world)
    send: Any = dist.isend(sent, (rank + 1) % world)
    receive.get_future().wait()
    send.wait()
    wrong = [] if arrived.eq(float((rank - 1) % world)).all() else ["message"]

    def again(first: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        work: Any = dist.all_reduce(first.value()[0] * 2, async_op=True)
        return work.get_future().wait()[0]

    outer: Any = dist.all_reduce(torch.ones(4), async_op=True)
    found = outer.get_future().then(again).wait()
    return wrong + ([] if found.eq(2.0 * world * world).all() else ["callback"])


def _large_counts() -> list[str]:
    """As if MPI counted to 100: what lies beyond is cut into pieces or described by larger types."""
    from meshwright.comm.mpi import buffers
    from tests.procs import collectives

    kept, buffers.max_count = buffers.max_count, 100
    buffers._CHUNK_BYTES = 64
    buffers.byte_datatype.cache_clear()
    try:
        _, wrong = collectives.conform(lambda groups: _comm(groups), (torch.complex64,), ("plain",))
    finally:
        buffers.max_count = kept
    return wrong


def _pairwise() -> list[str]:
    """As if every tensor were large enough for the pairwise reduce-scatter."""
    from meshwright.comm.mpi import blocking_collectives
    from tests.procs import collectives

    kept, blocking_collectives.PAIRWISE_MIN_BYTES = blocking_collectives.PAIRWISE_MIN_BYTES, 0
    try:
        _, wrong = collectives.conform(lambda groups: _comm(groups), (torch.float32, torch.bool, torch.complex64), ("plain", "strided", "empty"))
        group: Any = dist.new_group(backend="mpi")
        each = [(numel, dtype) for numel in (0, 1, 1003) for dtype in (torch.int16, torch.complex128)]
        return wrong + [f"{numel} numbers, {dtype}" for numel, dtype in each if not _summed(group, numel, dtype)]
    finally:
        blocking_collectives.PAIRWISE_MIN_BYTES = kept


def _summed(group: Any, numel: int, dtype: torch.dtype) -> bool:
    """Reduced to each rank in turn, and scattered in equal parts; what is given is left as it was."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = [torch.arange(numel).to(dtype) * (r + 1) for r in range(world)]
    right = True
    for root in range(world):
        mine = every[rank].clone()
        dist.reduce(mine, group_dst=root, group=group)
        right &= torch.equal(mine, sum(every) if rank == root else every[rank])
    whole, part = every[rank].repeat(world), torch.zeros(numel, dtype=dtype)
    dist.reduce_scatter_tensor(part, whole, group=group)
    return right and torch.equal(part, sum(every)) and torch.equal(whole, every[rank].repeat(world))


def _faults() -> list[str]:
    """Memory that a call of MPI's takes is there when the next one asks for it: without `tune_malloc` each of these has 10,000 pages cleared."""
    import resource

    from mpi4py import MPI

    whole = torch.ones(10_000_000).numpy()
    into = whole.copy() if dist.get_rank() == 0 else None
    for turn in range(6):
        if turn == 3:
            begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        MPI.COMM_WORLD.Reduce(whole, into)
    each = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun) / 3
    return [f"{each} pages cleared for every call"] if each > 1000 else []


def _two_groups(numel: int) -> bool:
    """All-reduces of two groups, begun in different orders by different ranks and waited for from the last; the same bits everywhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(backend="mpi"), dist.new_group(backend="mpi")]
    every = [[torch.randn(numel, generator=torch.Generator().manual_seed(10 * r + k)) for k in range(6)] for r in range(world)]
    mine = [t.clone() for t in every[rank]]
    order = (0, 1) if rank % 2 else (1, 0)
    works = [dist.all_reduce(mine[2 * turn + g], group=groups[g], async_op=True) for turn in range(3) for g in order]
    for work in reversed(works):
        work.wait()
    right = all(torch.allclose(t, torch.stack([every[r][k] for r in range(world)]).sum(0), atol=1e-5) for k, t in enumerate(mine))
    others: list[Any] = [None] * world
    dist.all_gather_object(others, [t.tolist() for t in mine])
    return right and all(other == others[0] for other in others)


def _comm(groups: list[list[int]]):  # type: ignore[no-untyped-def]
    from meshwright.comm import Ledger, TorchComm

    return TorchComm(dist.new_subgroups_by_enumeration(groups)[0], Ledger())


def _comm_sync(groups: list[list[int]]):  # type: ignore[no-untyped-def]
    return _comm(groups).sync


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    main(sys.argv[1], sys.argv[2:] == ["full"])
