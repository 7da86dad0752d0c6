"""What `mpirun` starts in tests: every check over backend `mpi` in one start; each rank writes what it found as JSON."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import mpi
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, SyncPolicy
from meshwright.core.routes import Route
from meshwright.core.serial import to_data


def main(folder: str, full: bool) -> None:
    from tests.procs import collectives, contract

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mpi.register(timeout_s=60)
    dist.init_process_group("mpi")
    rank = dist.get_rank()
    found = {
        "backend": dist.get_backend(),
        "conform": collectives.tell(lambda: collectives.over_torch(full)),
        "calls": collectives.tell(contract.calls),
        "comm at once": collectives.tell(lambda: collectives.conform(_comm_at_once, (torch.float32, torch.bfloat16, torch.bool))[1]),
        "counts": collectives.tell(_large_counts),
        "at once": collectives.tell(_made_at_once),
        "compiled": dist.group.WORLD._quick is not None,
        "unlike ranks": collectives.tell(lambda: _made_at_once(compiled=rank % 2 == 0)),
        "without methods": collectives.tell(lambda: [*_without_methods(), *_by_names(_without_methods)]),
        "unattended": collectives.tell(lambda: [*_unattended(), *_unattended(compiled=rank % 2 == 0)]),
        "near": collectives.tell(_near),
        "pairs": collectives.tell(_pairs),
        "same bits": collectives.tell(_same_bits),
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
        meeting = f"file://{folder}/{name.replace(' ', '-')}-{len(routes)}"
        return train_curve(rank, 4, meeting, to_data(plan), {"zoo": "gpt-tiny"}, steps=3, clip=1.0)

    return {name: [run(name, ()), run(name, ROUTES)] for name in PLANS}


def _made_at_once(compiled: bool = True) -> list[str]:
    """Calls that are waited for at once, as torch's functions make them, small and large; the way of a large one is tried meanwhile."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(backend="mpi")
    if not compiled:
        group._quick = group._calls.compiled = None
    wrong = []

    def check(what: str, right: bool) -> None:
        if not right:
            wrong.append(what)

    for numel in (2 * world, 800_000, 400_000 * world):  # up to, in, and beyond one step of the shared memory
        every = [torch.arange(numel, dtype=torch.float32) % 97 + 100 * r for r in range(world)]
        total, part = torch.stack(every).sum(0), numel // world
        for turn in range(40 if numel == 800_000 else 2):
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


def _without_methods() -> list[str]:
    """What is compiled does the ordinary small calls by itself: Python's methods would fail here. Nothing to say where nothing is compiled."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(backend="mpi")
    if group._quick is None:
        return []
    kept, group._calls = group._calls, None
    every = [torch.arange(3.0 * world) + 10 * r for r in range(world)]
    total, mine, sums = torch.stack(every).sum(0), [every[rank].clone() for _ in range(6)], torch.zeros(3)
    dist.all_reduce(mine[0], group=group)
    dist.reduce(mine[1], group_dst=1, group=group)
    dist.broadcast(mine[2], group_src=world - 1, group=group)
    dist.reduce_scatter_tensor(sums, mine[3], group=group)
    dist.all_gather_into_tensor(mine[4], every[rank][:3].clone(), group=group)
    dist.all_to_all_single(mine[5], every[rank], group=group)
    dist.all_reduce(mine[3], dist.ReduceOp.MAX, group=group)
    group._calls = kept
    right = {
        "all_reduce": torch.equal(mine[0], total),
        "reduce": rank != 1 or torch.equal(mine[1], total),
        "broadcast": torch.equal(mine[2], every[-1]),
        "reduce_scatter": torch.equal(sums, total[3 * rank :][:3]),
        "all_gather": torch.equal(mine[4], torch.cat([e[:3] for e in every])),
        "all_to_all": torch.equal(mine[5], torch.cat([e[3 * rank :][:3] for e in every])),
        "maximum": torch.equal(mine[3], every[-1]),
    }
    return [op for op, fine in right.items() if not fine]


def _unattended(compiled: bool = True) -> list[str]:
    """A large message that nobody waits for arrives, and is let go."""
    from meshwright.comm.mpi import backend

    rank, world = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(backend="mpi")
    if not compiled:
        group._quick = None
    for number in range(1, 4):
        sent, arrived = torch.full((1 << 20,), float(number + rank)), torch.zeros(1 << 20)
        dist.irecv(arrived, group_src=(rank - 1) % world, group=group)
        dist.isend(sent, group_dst=(rank + 1) % world, group=group)
        until = time.monotonic() + 20
        while backend._post.under_way and time.monotonic() < until:
            time.sleep(0.001)
        if backend._post.under_way or not arrived.eq(float(number + (rank - 1) % world)).all():
            return [f"message {number}: {len(backend._post.under_way)} under way"]
    return []


def _by_names(check: Callable[[], list[str]]) -> list[str]:
    """As if it were not known where torch's options keep what is asked of them."""
    from meshwright.comm.mpi import backend
    from meshwright.comm.mpi.fields import Fields

    kind, module = backend.MpiGroup, backend._quick.module
    if not module:
        return []
    names = {"allreduce": "all_reduce", "reduce": "reduce", "broadcast": "broadcast"} | {
        name: op
        for op, both in (
            ("reduce_scatter", ("reduce_scatter_single", "_reduce_scatter_base")),
            ("all_gather", ("all_gather_single", "_allgather_base")),
            ("all_to_all", ("all_to_all_single", "alltoall_base")),
        )
        for name in both
    }
    kept = {name: vars(kind)[name] for name in names}
    try:
        for name, op in names.items():
            setattr(kind, name, module.Operation(op, kept[name].__wrapped__, *Fields()))
        return [f"{op}, asked by name" for op in check()]
    finally:
        for name, method in kept.items():
            setattr(kind, name, method)


def _large_counts() -> list[str]:
    """As if MPI counted to 100: what lies beyond is cut into pieces or described by larger types."""
    from meshwright.comm.mpi import buffers
    from tests.procs import collectives

    kept, buffers.most = buffers.most, 100
    buffers._UNIT = 64
    buffers.of_bytes.cache_clear()
    try:
        _, wrong = collectives.conform(lambda groups: _comm(groups), (torch.complex64,), ("plain",))
    finally:
        buffers.most = kept
    return wrong


def _near() -> list[str]:
    """As if every tensor were large: what MPI's ranks do through memory that they share, in pieces; several groups at once, calls under way."""
    from meshwright.comm import window
    from meshwright.comm.mpi import near
    from tests.procs import collectives

    kept = near.FROM, near.SUMS_FROM, window._PIECE
    near.FROM, near.SUMS_FROM, window._PIECE = 0, 0, 4096
    try:
        _, wrong = collectives.conform(lambda groups: _comm(groups), (torch.float32, torch.bool, torch.bfloat16), ("strided", "empty"))
        wrong += [f"{numel} numbers at once" for numel in (700, 5000) if not _at_once(numel)]
        return wrong + ([] if _tried() else ["ways that were tried"])
    finally:
        near.FROM, near.SUMS_FROM, window._PIECE = kept


def _pairs() -> list[str]:
    """As if every sum were large and no memory shared: added up by messages, by ranks that are all compiled and where every second one is not."""
    from meshwright.comm.mpi import calls, library, near
    from tests.procs import collectives

    rank, kept, neighbours = dist.get_rank(), (calls.PAIRWISE, near.FROM), library.neighbours
    calls.PAIRWISE, near.FROM = 0, 1 << 40
    try:
        _, wrong = collectives.conform(lambda groups: _comm(groups), (torch.float32, torch.bool, torch.complex64), ("plain", "strided", "empty"))
        group: Any = dist.new_group(backend="mpi")
        if rank % 2:
            group._quick = group._calls.compiled = None
        library.neighbours = lambda: frozenset({rank})  # type: ignore[assignment]
        apart: Any = dist.new_group(backend="mpi")
        wrong += ["reduced between nodes by pairs"] if apart._calls.reduces_from < near.NEVER else []
        each = [(group, numel, dtype) for group in (group, apart) for numel in (0, 1, 1003) for dtype in (torch.int16, torch.complex128)]
        return wrong + [f"{numel} numbers, {dtype}" for group, numel, dtype in each if not _summed(group, numel, dtype)]
    finally:
        library.neighbours = neighbours
        calls.PAIRWISE, near.FROM = kept


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


def _same_bits() -> list[str]:
    """A sum that is scattered: by memory that ranks share, by messages, by messages of ranks that are compiled and by those of every second one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(backend="mpi")
    whole = torch.randn(world << 17, generator=torch.Generator().manual_seed(rank))
    near, compiled = group._calls.near, group._quick
    found = {}
    for way in ("any", "shared", "messages", "compiled", "unlike"):
        if way != "any":  # the first call has opened the window
            near.settled["reduce_scatter", whole.nbytes.bit_length()] = near._window if way == "shared" else None
            group._quick = group._calls.compiled = compiled if way == "compiled" or (way == "unlike" and rank % 2) else None
        found[way] = torch.zeros(1 << 17)
        dist.reduce_scatter_tensor(found[way], whole, group=group)
    return [way for way, part in found.items() if not torch.equal(part.view(torch.int32), found["shared"].view(torch.int32))]


def _faults() -> list[str]:
    """Memory that a call of MPI's takes is there when the next one asks for it: without `keep_memory` each of these has 10,000 pages cleared."""
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


def _tried() -> bool:
    """Pairs of ranks find out which way is quicker, while they go both: every sum and every copy is right, and both ranks come to the same end."""
    rank = dist.get_rank()
    pair = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]], backend="mpi")[0]
    right = True
    for turn in range(36):
        total, copied = torch.full((300,), float(rank + turn)), torch.full((300,), float(rank))
        dist.all_reduce(total, group=pair)
        dist.broadcast(copied, group_src=1, group=pair)
        right &= bool((total == 2 * (rank // 2 * 2 + turn) + 1).all()) and bool((copied == rank | 1).all())
    if rank % 2:
        pair._quick = None  # one rank's calls are compiled, the other's are not: only what both know may decide their way
    near = pair._calls.near
    kept = dict(near.settled)
    near.settled.update(dict.fromkeys(kept))
    for op, end in ((dist.ReduceOp.MAX, rank | 1), (dist.ReduceOp.SUM, 2 * (rank // 2 * 2) + 1)):
        found = torch.full((300,), float(rank))
        dist.all_reduce(found, op, group=pair)
        right &= bool((found == end).all())
    near.settled.update(kept)
    ends = sorted((op, window is not None) for (op, _), window in pair._calls.near.settled.items())
    both: list[Any] = [None, None]
    dist.all_gather_object(both, ends, group=pair)
    shared = pair._calls.near._window is not None
    again = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]], backend="mpi")[0]
    copied = torch.full((300,), float(rank))
    dist.broadcast(copied, group_src=1, group=again)
    right &= bool((copied == rank | 1).all()) and {key: way is not None for key, way in again._calls.near.settled.items()} == {
        key: way is not None for key, way in kept.items()
    }
    return right and both[0] == both[1] and (not shared or {op for op, _ in ends} >= {"all_reduce", "broadcast"})


def _at_once(numel: int) -> bool:
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


def _comm_at_once(groups: list[list[int]]):  # type: ignore[no-untyped-def]
    return _comm(groups).at_once


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    main(sys.argv[1], sys.argv[2:] == ["full"])
