"""Memory that ranks share: sums against those made on one process, with threads as ranks; and what happens when a rank ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm import ComposedComm, Ledger, SharedMemoryGroup, SharedMemoryWindow, ThreadComm, ThreadWorld, open_window, shared_collectives
from meshwright.comm import shared_memory_window as windows
from meshwright.core.errors import RunError

OPS = ("sum", "mean", "max", "min", "product")


class Near(SharedMemoryWindow):
    """Of a rank that is a thread: all of them hold each other's locks, and none goes before the others."""

    def _has_exited(self, peer: int) -> bool:
        return False


@contextmanager
def small(short: int = 64, piece: int = 4096) -> Iterator[None]:
    """Slots that a test's tensors fill several times."""
    before = shared_collectives._ONE_SHOT_MAX_BYTES, windows._MAX_CHUNK_BYTES
    shared_collectives._ONE_SHOT_MAX_BYTES, windows._MAX_CHUNK_BYTES = short, piece
    try:
        yield
    finally:
        shared_collectives._ONE_SHOT_MAX_BYTES, windows._MAX_CHUNK_BYTES = before


def near(ranks: int) -> list[SharedMemoryWindow]:
    memory, reason = windows.create_shared_memory(ranks)
    assert not reason
    found: list[SharedMemoryWindow] = [Near(os.dup(memory), range(ranks), me, 20.0) for me in range(ranks)]
    os.close(memory)
    found[0].init_semaphores()
    return found


def values(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank * 1000 + numel), dtype=torch.float64)


def expected(ranks: int, numel: int, op: str) -> torch.Tensor:
    stack = torch.stack([values(r, numel) for r in range(ranks)])
    found: dict[str, Any] = {"sum": stack.sum, "mean": stack.mean, "max": stack.amax, "min": stack.amin, "product": stack.prod}
    return found[op](0)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 4), lengths=st.lists(st.sampled_from([0, 1, 700, 5000, 12345]), min_size=4, max_size=4), in_place=st.booleans(),
)  # fmt: skip
def test_parts_of_unequal_lengths(ranks: int, lengths: list[int], in_place: bool) -> None:
    """In one step and in several, one operation after the other."""
    lengths = lengths[:ranks]
    with small():
        window = near(ranks)

        def job(comm: ThreadComm) -> list[torch.Tensor]:
            me, mine = window[comm.rank], values(comm.rank, lengths[comm.rank])
            gathered = torch.zeros(sum(lengths), dtype=torch.float64)
            spans = shared_collectives.address_ranges(gathered.split(lengths))
            if in_place:
                gathered.split(lengths)[comm.rank].copy_(mine)
            shared_collectives.all_gather(me, spans, spans[comm.rank][0] if in_place else mine.data_ptr(), "gather")
            whole = values(comm.rank, sum(lengths))
            part = whole.split(lengths)[comm.rank]
            out = part if in_place else torch.zeros_like(part)
            shared_collectives.reduce_scatter(me, shared_collectives.address_ranges(whole.split(lengths)), part, out, torch.add, "scatter")
            return [gathered, out.clone()]

        found = ThreadWorld(ranks).run(job)
    summed = expected(ranks, sum(lengths), "sum").split(lengths)
    for rank, (gathered, out) in enumerate(found):
        assert torch.equal(gathered, torch.cat([values(r, n) for r, n in enumerate(lengths)]))
        assert torch.allclose(out, summed[rank], rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 5), numels=st.lists(st.sampled_from([0, 1, 3, 8, 9, 700, 5000, 12345]), min_size=1, max_size=4), op=st.sampled_from(OPS),
    short=st.sampled_from([0, 64, 1 << 21]),
)  # fmt: skip
def test_an_all_reduce_by_shared_memory(ranks: int, numels: list[int], op: str, short: int) -> None:
    """Several under way at once, waited for from the last."""
    with small(short):
        window = near(ranks)

        def job(comm: ThreadComm) -> list[torch.Tensor]:
            way = ComposedComm(SharedMemoryGroup(comm, "threads", window[comm.rank]), "shared", Ledger())
            tensors = [values(comm.rank, n) for n in numels]
            for pending in reversed([way.all_reduce(t, "x", op) for t in tensors]):
                pending.wait()
            return tensors

        found = ThreadWorld(ranks).run(job)
    for mine in found:
        for tensor, first, numel in zip(mine, found[0], numels, strict=True):
            assert torch.equal(tensor, first)  # to the last bit
            assert torch.allclose(tensor, expected(ranks, numel, op), rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 3), each=st.integers(1, 3), numel=st.sampled_from([0, 1, 3, 700, 12345]), op=st.sampled_from(OPS), scaled=st.booleans()
)  # fmt: skip
def test_an_all_reduce_by_two_levels(nodes: int, each: int, numel: int, op: str, scaled: bool) -> None:
    """Ranks of a node share memory; those with the same place on every node reduce between nodes."""
    factor = 0.5 if scaled and op in ("sum", "mean") else None
    with small():
        windows = [window for _ in range(nodes) for window in near(each)]

        def job(comm: ThreadComm) -> torch.Tensor:
            across = comm.subgroup([node * each + comm.rank % each for node in range(nodes)])
            group = SharedMemoryGroup(comm, "threads", None, windows[comm.rank], across)
            assert group.has("two-level") and not group.has("shared")
            tensor = values(comm.rank, numel)
            ComposedComm(group, "two-level", Ledger()).all_reduce(tensor, "x", op, factor).wait()
            return tensor

        found = ThreadWorld(nodes * each).run(job)
    wanted = expected(nodes * each, numel, op) * (factor or 1.0)
    for mine in found:
        assert torch.equal(mine, found[0])
        assert torch.allclose(mine, wanted, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.sampled_from([0, 1, 2, 300, 1000]), min_size=1, max_size=5), even=st.booleans(), op=st.sampled_from(["sum", "max", "mean"]))
def test_halves_by_shared_memory_take_unequal_parts(sizes: list[int], even: bool, op: str) -> None:
    rows = [sizes[0]] * len(sizes) if even else sizes
    with small():
        window = near(len(rows))

        def job(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor]:
            way = ComposedComm(SharedMemoryGroup(comm, "threads", window[comm.rank]), "shared", Ledger())
            tensor = values(comm.rank, sum(rows) * 3).view(-1, 3)
            kept, part = tensor.clone(), torch.empty(rows[comm.rank], 3, dtype=torch.float64)
            way.reduce_scatter(part, tensor, "s", op, None if even else rows).wait()
            assert torch.equal(tensor, kept)
            whole = torch.empty_like(tensor)
            way.all_gather(whole, part, "g", sizes=None if even else rows).wait()
            return part, whole

        found = ThreadWorld(len(rows)).run(job)
    wanted = expected(len(rows), sum(rows) * 3, op).view(-1, 3)
    for rank, (part, whole) in enumerate(found):
        assert torch.allclose(whole, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(part, whole.split(rows)[rank])


def test_a_rank_that_ends_is_named_by_those_who_wait() -> None:
    """What it said before it ended still counts."""
    with small():
        memory, _ = windows.create_shared_memory(2)
        path = f"/proc/{os.getpid()}/fd/{memory}"
        window = SharedMemoryWindow(memory, (4, 7), 0, 20.0)
        window.init_semaphores()
        if (child := os.fork()) == 0:
            SharedMemoryWindow(os.open(path, os.O_RDWR), (4, 7), 1, 20.0).signal_peers(windows.SLOT_FILLED)
            os._exit(0)
        window.await_peers(windows.SLOT_FILLED, "grads/bucket0")
        os.waitpid(child, 0)
        with pytest.raises(RunError, match="rank 7 has ended while others waited for it at grads/bucket1"):
            window.await_peers(windows.SLOT_FILLED, "grads/bucket1")
        with pytest.raises(RunError, match="rank 7"):
            window.await_peers(windows.SLOT_FILLED, "grads/bucket2")


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    with small():
        late = near(2)[0]
        late._timeout_s = 0.3
        with pytest.raises(RunError, match="Timed out waiting 0 s for rank 1 at x"):
            late.await_peers(windows.SLOT_FILLED, "x")


def test_without_memory_ranks_go_by_messages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, and one line says why."""
    monkeypatch.setattr(windows, "create_shared_memory", lambda ranks: (-1, "64 bytes: No space left on device"))
    assert ThreadWorld(3).run(lambda comm: open_window(comm, (0, 1, 2), 5.0)) == [None] * 3
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "meshwright: the node has no memory that ranks 0, 1, 2 can share (64 bytes: No space left on device): their collectives use messages"
    ]


def test_ranks_of_several_nodes_share_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = iter(["one", "two", "one"])
    monkeypatch.setattr(windows.socket, "gethostname", lambda: next(hosts))
    assert ThreadWorld(3).run(lambda comm: open_window(comm, (3, 4, 5), 5.0)) == [None] * 3
    assert "they are on several nodes" in capsys.readouterr().err
