"""Every operation of `Comm` × dtype × group × form of tensor, against a reference that each rank computes by itself. Runs over any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from meshwright.comm import ComposedComm, Ledger, RoutedComm, ThreadComm, ThreadWorld, TorchComm, shared_memory_window
from meshwright.core.comm import Comm
from meshwright.core.plan import SyncPolicy
from meshwright.core.routes import ALGORITHMS, Route
from meshwright.execute.process_groups import shared_memory_group
from meshwright.launch import Rendezvous, join_process_group, leave_process_group

GROUPS = ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3]], [[0], [1], [2], [3]])
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
QUICK = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float8_e4m3fn)
FORMS = ("plain", "transposed", "strided", "empty")
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def made(rows: int, dtype: torch.dtype, form: str, seed: int) -> torch.Tensor:
    """`rows` × 6 small whole numbers, which every dtype holds exactly and sums exactly."""
    rows = 0 if form == "empty" else rows
    values = torch.randint(0, 3, (rows, 6), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return laid(values.to(torch.get_default_device(), torch.float32).to(dtype), form)


def laid(values: torch.Tensor, form: str) -> torch.Tensor:
    """The same values with other strides."""
    if form == "transposed":
        return values.t().contiguous().t()
    if form == "strided":
        wide = torch.zeros(values.shape[0], 12, dtype=torch.float32).to(values.dtype)
        wide[:, ::2] = values
        return wide[:, ::2]
    return values.clone()


def reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """On one process, in the widest type."""
    kind = parts[0].dtype
    wide = torch.complex128 if kind.is_complex else torch.float64
    stack = torch.stack([p.to(wide) for p in parts])
    found: torch.Tensor = {
        "sum": lambda: stack.sum(0), "mean": lambda: stack.mean(0), "product": lambda: stack.prod(0),
        "max": lambda: stack.real.amax(0), "min": lambda: stack.real.amin(0),
    }[op]()  # fmt: skip
    return found.to(kind)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    wide = torch.complex128 if found.is_complex() else torch.float64
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(found.dtype, 1e-6)  # of a mean over three; all else is exact
    return found.shape == wanted.shape and torch.allclose(found.to(wide), wanted.to(wide), rtol=tolerance)


class Cases:
    """The cases of one group as one rank sees them; each yields a name and whether it held."""

    def __init__(self, comm: Comm, dtype: torch.dtype, form: str) -> None:
        self.comm, self.dtype, self.form = comm, dtype, form
        self.n, self.me = comm.size, comm.rank
        self.seed = 0

    def parts(self, rows: int | Sequence[int]) -> list[torch.Tensor]:
        """What each rank holds, the same on every rank."""
        counts = [rows] * self.n if isinstance(rows, int) else list(rows)
        self.seed += 100
        return [made(count, self.dtype, self.form, self.seed + r) for r, count in enumerate(counts)]

    def room(self, rows: int) -> torch.Tensor:
        return laid(torch.full((0 if self.form == "empty" else rows, 6), 1.0).to(self.dtype), self.form)

    def ops(self) -> tuple[str, ...]:
        if self.dtype.is_complex:
            return ("sum", "mean")
        if self.dtype == torch.bool:
            return ("sum", "max", "min")
        return ("sum", "max", "min", "product", *(("mean",) if self.dtype in _FLOATS else ()))

    def reductions(self) -> Iterator[tuple[str, bool]]:
        for op in self.ops():
            parts = self.parts(4)
            wanted = reduced(parts, op)
            tensor = parts[self.me]
            self.comm.all_reduce(tensor, "c", op).wait()
            yield f"all_reduce {op}", same(tensor, wanted)
            parts = self.parts(4)
            wanted, tensor, root = reduced(parts, op), parts[self.me], self.n - 1
            self.comm.reduce(tensor, "c", op, root).wait()
            yield f"reduce {op}", self.me != root or same(tensor, wanted)
            parts = self.parts(2 * self.n)
            wanted, output = reduced(parts, op), self.room(2)
            self.comm.reduce_scatter(output, parts[self.me], "c", op).wait()
            yield f"reduce_scatter {op}", same(output, wanted[2 * self.me :][: len(output)])
        sizes = [0 if self.form == "empty" else r + 1 for r in range(self.n)]
        parts = self.parts(sum(sizes))
        wanted, output = reduced(parts, "sum").split(sizes)[self.me], self.room(self.me + 1)
        self.comm.reduce_scatter(output, parts[self.me], "c", sizes=sizes).wait()
        yield "reduce_scatter uneven", same(output, wanted)
        if self.dtype in _FLOATS:
            parts = self.parts(3)
            wanted, tensor = reduced(parts, "sum") * 0.5, parts[self.me]
            self.comm.all_reduce(tensor, "c", factor=0.5).wait()
            yield "all_reduce scaled", same(tensor, wanted)

    def movements(self) -> Iterator[tuple[str, bool]]:
        parts = self.parts(3)
        output = self.room(3 * self.n)
        self.comm.all_gather(output, parts[self.me], "c").wait()
        yield "all_gather", same(output, torch.cat(parts))
        sizes = [0 if self.form == "empty" else r for r in range(self.n)]
        parts, output = self.parts(sizes), self.room(sum(sizes))
        self.comm.all_gather(output, parts[self.me], "c", sizes=sizes).wait()
        yield "all_gather uneven", same(output, torch.cat(parts))
        root = self.n - 1
        parts = self.parts(3)
        tensor = parts[self.me].clone() if self.form == "plain" else laid(parts[self.me].contiguous(), self.form)
        self.comm.broadcast(tensor, "c", root).wait()
        yield "broadcast", same(tensor, parts[root])
        output = self.room(3 * self.n)
        self.comm.gather(output if self.me == root else None, parts[self.me], "c", root).wait()
        yield "gather", self.me != root or same(output, torch.cat(parts))
        whole, output = self.parts(2 * self.n)[0], self.room(2)
        self.comm.scatter(output, whole if self.me == root else None, "c", root).wait()
        yield "scatter", same(output, whole[2 * self.me :][: len(output)])
        yield from self.exchanges()

    def exchanges(self) -> Iterator[tuple[str, bool]]:
        counts = [[0 if self.form == "empty" else (a + b) % 3 for b in range(self.n)] for a in range(self.n)]  # rows from a to b
        parts = self.parts([sum(row) for row in counts])
        arriving = [row[self.me] for row in counts]
        output = self.room(sum(arriving))
        self.comm.all_to_all(output, parts[self.me], "c", arriving, counts[self.me]).wait()
        yield "all_to_all", same(output, torch.cat([p.split(row)[self.me] for p, row in zip(parts, counts, strict=True)]))
        if self.n > 1:
            parts, received = self.parts(3), self.room(3)
            behind = (self.me - 1) % self.n
            self.comm.exchange([((self.me + 1) % self.n, parts[self.me])], [(behind, received)], "c").wait()
            yield "exchange", same(received, parts[behind])
        self.comm.barrier()


def conform(
    comm_of: Callable[[list[list[int]]], Comm], dtypes: Sequence[torch.dtype] = DTYPES, forms: Sequence[str] = FORMS
) -> tuple[int, list[str]]:  # fmt: skip
    """How many cases there were, and those that did not hold. `comm_of` gives this rank's comm among groups of ranks."""
    count, wrong = 0, []
    for groups in GROUPS:
        comm = comm_of(groups)
        for dtype in dtypes:
            for form in forms:
                cases = Cases(comm, dtype, form)
                for checks in (cases.reductions, cases.movements):
                    for name, held in checks():
                        count += 1
                        wrong += [] if held else [f"{name} of {dtype}, {form}, among {groups}"]
    return count, wrong


def _extent(full: bool) -> tuple[Sequence[torch.dtype], Sequence[str]]:
    return (DTYPES, FORMS) if full else (QUICK, ("plain", "strided", "empty"))


def over_torch(full: bool) -> tuple[int, list[str]]:
    """Over the process group there is."""
    ledger = Ledger()

    def comm_of(groups: list[list[int]]) -> Comm:
        group, _ = dist.new_subgroups_by_enumeration(groups)
        return TorchComm(group, ledger)

    return conform(comm_of, *_extent(full))


def over_gloo(rank: int, world: int, init_method: str, full: bool, places: Sequence[str] = ("cpu",) * 4) -> tuple[int, list[str]]:
    """Tensors of each rank are where `places` says."""
    join_process_group(Rendezvous(rank, world, init_method))
    try:
        with torch.device(places[rank]):
            return over_torch(full)
    finally:
        leave_process_group()


def over_threads(full: bool) -> list[tuple[int, list[str]]]:
    def job(comm: ThreadComm) -> tuple[int, list[str]]:
        return conform(lambda groups: comm.subgroup(next(g for g in groups if comm.rank in g)), *_extent(full))

    return ThreadWorld(4).run(job)


def over_shared(rank: int, world: int, init_method: str, full: bool) -> tuple[int, list[str]]:
    """By memory that ranks share; gloo does what that lacks."""
    join_process_group(Rendezvous(rank, world, init_method))

    def comm_of(groups: list[list[int]]) -> Comm:
        having = {op for op, names in ALGORITHMS.items() if "shared" in names}
        routes = tuple(Route(op, dist.get_backend(), 0, "shared") for op in having)
        memory = shared_memory_group(groups, dist.get_backend(), SyncPolicy(timeout_s=60, routes=routes))
        assert memory.has("shared")
        return RoutedComm(
            {"own": memory.comm}, lambda op, _: "shared" if op in having else "own", {"shared": ComposedComm(memory, "shared", Ledger())}
        )

    try:
        return conform(comm_of, *_extent(full))
    finally:
        leave_process_group()


def two_level_without_memory_on(rank: int, world: int, init_method: str, node: int) -> bool:
    """Whether this rank would go by two levels where the ranks of one of two nodes (-1: none) cannot share memory."""
    join_process_group(Rendezvous(rank, world, init_method))
    sync = SyncPolicy(timeout_s=60, routes=(Route("all_reduce", "gloo", 0, "two-level"),), ranks_per_node=(2, 2))
    refused = patch.object(shared_memory_window, "create_shared_memory", lambda ranks: (-1, "none here")) if rank // 2 == node else nullcontext()
    try:
        with refused:
            return shared_memory_group([list(range(world))], "gloo", sync).has("two-level")
    finally:
        leave_process_group()


def tell(job: Callable[[], Any]) -> Any:
    """What a job returns, or its error as text: one rank's failure must not hang the others for long."""
    try:
        return job()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
