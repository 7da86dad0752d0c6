"""Collectives composed of messages: every algorithm against sums made on one process, for any number of ranks and elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.comm import Composed, Ledger, Mail, ThreadComm, ThreadWorld
from meshwright.comm import algorithms as made_of_messages
from meshwright.core.routes import ALGORITHMS, on_nodes

MESSAGES = {op: [a for a in names if a != "shared"] for op, names in ALGORITHMS.items()}  # memory that is shared: see test_window.py
OPS = ("sum", "mean", "max", "min", "product")


def composed(comm: ThreadComm, algorithm: str, nodes: tuple[int, ...] = ()) -> Composed:
    return Composed(Mail(comm, "threads"), algorithm, Ledger(), on_nodes(range(comm.size), nodes or (comm.size,)))


def values(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    made = torch.Generator().manual_seed(rank * 1000 + numel)
    return torch.randn(numel, generator=made, dtype=torch.float64).to(dtype)


def expected(ranks: int, numel: int, op: str) -> torch.Tensor:
    stack = torch.stack([values(r, numel) for r in range(ranks)])
    found: dict[str, Any] = {"sum": stack.sum, "mean": stack.mean, "max": stack.amax, "min": stack.amin, "product": stack.prod}
    return found[op](0)


@settings(max_examples=120)
@given(
    ranks=st.integers(1, 7), numel=st.sampled_from([0, 1, 2, 3, 5, 7, 16, 33, 100]), algorithm=st.sampled_from(MESSAGES["all_reduce"]),
    op=st.sampled_from(OPS), segment=st.sampled_from([8, 24, 1 << 19]), cuts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    at_once=st.booleans(),
)  # fmt: skip
def test_an_all_reduce_is_the_same_whatever_the_algorithm(
    ranks: int, numel: int, algorithm: str, op: str, segment: int, cuts: list[int], at_once: bool
) -> None:
    nodes = tuple(min(c, max(ranks - sum(cuts[:i]), 0)) for i, c in enumerate(cuts))
    nodes = tuple(n for n in (*nodes, ranks - sum(nodes)) if n)

    def job(comm: ThreadComm) -> torch.Tensor:
        tensor = values(comm.rank, numel)
        way = composed(comm, algorithm, nodes)
        (way.at_once if at_once else way).all_reduce(tensor, "x", op).wait()
        return tensor

    before, made_of_messages._SEGMENT = made_of_messages._SEGMENT, segment
    try:
        found = ThreadWorld(ranks).run(job)
    finally:
        made_of_messages._SEGMENT = before
    for mine in found:
        assert torch.equal(mine, found[0])  # to the last bit
        assert torch.allclose(mine, expected(ranks, numel, op), rtol=1e-12, atol=1e-12)


@settings(max_examples=80)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6), algorithm=st.sampled_from(MESSAGES["all_gather"]), even=st.booleans())
def test_halves_take_unequal_parts(sizes: list[int], algorithm: str, even: bool) -> None:
    ranks = len(sizes)
    rows = [sizes[0]] * ranks if even else sizes

    def job(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        way = composed(comm, algorithm)
        tensor = values(comm.rank, sum(rows) * 3).view(-1, 3)
        kept, part = tensor.clone(), torch.empty(rows[comm.rank], 3, dtype=torch.float64)
        way.reduce_scatter(part, tensor, "s", sizes=None if even else rows).wait()
        assert torch.equal(tensor, kept)
        whole = torch.empty_like(tensor)
        way.all_gather(whole, part, "g", sizes=None if even else rows).wait()
        return part, whole, expected(ranks, tensor.numel(), "sum").view(-1, 3)

    for rank, (part, whole, wanted) in enumerate(ThreadWorld(ranks).run(job)):
        assert torch.allclose(whole, wanted, rtol=1e-12, atol=1e-12)
        assert torch.allclose(part, wanted.split(rows)[rank], rtol=1e-12, atol=1e-12)


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5), even=st.booleans(), op=st.sampled_from(["sum", "max", "mean"]))
def test_a_scatter_may_be_a_whole_reduction_of_which_a_part_is_kept(sizes: list[int], even: bool, op: str) -> None:
    rows = [sizes[0]] * len(sizes) if even else sizes

    def job(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        way, tensor = composed(comm, "whole"), values(comm.rank, sum(rows) * 3).view(-1, 3)
        part = torch.empty(rows[comm.rank], 3, dtype=torch.float64)
        way.reduce_scatter(part, tensor, "s", op, None if even else rows).wait()
        return part, expected(comm.size, tensor.numel(), op).view(-1, 3), [line.bytes for line in way.ledger.take()]

    for rank, (part, wanted, counted) in enumerate(ThreadWorld(len(rows)).run(job)):
        assert torch.allclose(part, wanted.split(rows)[rank], rtol=1e-12, atol=1e-12)
        assert counted == [sum(rows) * 3 * 8]


@pytest.mark.parametrize("algorithm", MESSAGES["all_reduce"])
def test_calls_keep_their_order_and_are_counted_as_what_they_are(algorithm: str) -> None:
    """Several under way at once; messages are in nobody's ledger."""

    def job(comm: ThreadComm) -> tuple[list[float], list[tuple[str, str, int, int, int]]]:
        way = composed(comm, algorithm, (2, 2))
        tensors = [torch.full((n,), float(comm.rank)) for n in (1, 40_000, 3)]
        for pending in reversed([way.all_reduce(t, f"call{i % 2}", "mean") for i, t in enumerate(tensors)]):
            pending.wait()
        scaled = torch.ones(5)
        way.all_reduce(scaled, "scaled", factor=0.5).wait()
        counted = [(line.name, line.op, line.group, line.calls, line.bytes) for line in way.ledger.take()]
        return [float(t[-1]) for t in (*tensors, scaled)], counted

    wanted = [("call0", "all_reduce", 4, 2, 16), ("call1", "all_reduce", 4, 1, 160_000), ("scaled", "all_reduce", 4, 1, 20)]
    assert ThreadWorld(4).run(job) == [([1.5, 1.5, 1.5, 2.0], wanted)] * 4
