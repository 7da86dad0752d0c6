"""Compressed gradients: what travels, what is lost and what is kept for the next step, on threads; and which plans are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.pure import fake_inputs

from meshwright.comm import ThreadComm, ThreadWorld
from meshwright.core.compression_policy import low_rank_shape
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, SyncPolicy
from meshwright.execute.compression_runtime import CastCompression, PowerSgd
from meshwright.schedule import plan_ledger
from meshwright.schedule.buckets import assign_buckets
from meshwright.schedule.compression_actions import bucket_collectives

SHAPES = [(12, 20), (20,), (6, 5, 8)]


def gradient(rank: int, step: int, true_rank: int = 99) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    found = [torch.randn(*shape, generator=made, dtype=torch.float64) for shape in SHAPES]
    return [g if g.dim() == 1 else _cut(g, true_rank) for g in found]


def _cut(tensor: torch.Tensor, true_rank: int) -> torch.Tensor:
    """Every rank's matrices lie in the same few directions, so that their mean does too."""
    flat = tensor.view(tensor.shape[0], -1)
    made = torch.Generator().manual_seed(7)
    if true_rank < min(flat.shape):
        flat = torch.randn(flat.shape[0], true_rank, generator=made, dtype=torch.float64) @ torch.randn(
            true_rank, flat.shape[1], generator=made, dtype=torch.float64
        )
        flat = flat * (1 + tensor.flatten()[0])
    return flat.view(tensor.shape)


def reduced(comm: ThreadComm, way: Any, tensors: list[torch.Tensor], op: str) -> list[torch.Tensor]:
    flat = torch.cat([t.reshape(-1) for t in tensors])
    parts = [p.view(t.shape) for p, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
    way.all_reduce(comm, flat, "grads/bucket0", op, "bucket0", lambda: parts).wait()
    return parts


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_factors_of_full_rank_give_the_gradient_back(op: str) -> None:
    """Matrices of rank 2 as factors of rank 4; what travels is what the schedule counts."""

    def job(comm: ThreadComm) -> list[tuple[str, int]]:
        way = PowerSgd(4)
        for step in range(3):
            found = reduced(comm, way, gradient(comm.rank, step, 2), op)
            for mine, *every in zip(found, *(gradient(r, step, 2) for r in range(3)), strict=True):
                wanted = torch.stack(every).sum(0) / (3 if op == "mean" else 1)
                assert torch.allclose(mine, wanted, rtol=1e-9, atol=1e-9)
        assert max(float(m.error_feedback.abs().max()) for m in way.states["bucket0"].matrices) > 0  # a rank's own is not the mean
        return [(line.name, line.bytes // line.calls) for line in comm.ledger.drain()]

    (bucket,) = assign_buckets([torch.Size(s).numel() for s in SHAPES], [8] * 3, ["k"] * 3, first_bytes=10**9, bytes_cap=10**9, shards=1)
    sends = bucket_collectives(SyncPolicy(compression="powersgd"), bucket, SHAPES)
    wanted = [(f"grads/bucket0{s.suffix}", s.bytes) for s in sends]
    assert wanted == [("grads/bucket0", 160), ("grads/bucket0.p", 8 * 4 * (12 + 6)), ("grads/bucket0.q", 8 * 4 * (20 + 40))]
    assert ThreadWorld(3).run(job) == [wanted] * 3


def test_what_is_left_out_is_sent_later() -> None:
    """The same gradient again and again, as factors of rank 1: the mean of what arrives comes nearer and nearer."""

    def job(comm: ThreadComm) -> list[float]:
        way = PowerSgd(1)
        wanted = (gradient(0, 0)[0] + gradient(1, 0)[0]) / 2
        total, errors = torch.zeros_like(wanted), []
        for step in range(1, 65):
            total += reduced(comm, way, gradient(comm.rank, 0), "mean")[0]
            errors.append(float((total / step - wanted).norm() / wanted.norm()))
        return [errors[0], errors[15], errors[63]]

    first, later, last = ThreadWorld(2).run(job)[0]
    assert first > 0.7 and later < 0.5 * first and last < 0.4 * later


def test_state_lives_by_bucket() -> None:
    def job(comm: ThreadComm) -> int:
        way = PowerSgd(2)
        for bucket in ("a", "b"):
            grads = torch.randn(64)
            way.all_reduce(comm, grads, bucket, "mean", bucket, lambda g=grads: [g.view(8, 8)]).wait()
        return len(way.states)

    assert ThreadWorld(2).run(job) == [2, 2]


def test_rounding_stays_within_its_bound() -> None:
    def job(comm: ThreadComm) -> float:
        every = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(4)]
        mine, own = every[comm.rank].clone(), torch.empty(250)
        CastCompression(torch.bfloat16).reduce_scatter(comm, own, mine, "s", "mean").wait()
        CastCompression(torch.bfloat16).all_reduce(comm, mine, "a", "mean").wait()
        wanted, largest = torch.stack(every).mean(0), torch.stack(every).abs().amax(0)
        assert torch.equal(own, mine.split(250)[comm.rank])
        assert [line.bytes for line in comm.ledger.drain()] == [2000, 2000]
        return float(((mine - wanted).abs() / largest).max())

    assert max(ThreadWorld(4).run(job)) < 2**-7


def test_small_tensors_go_whole() -> None:
    assert low_rank_shape((1024, 1024), 4) == (1024, 1024, 4)
    assert low_rank_shape((6, 5, 8), 4) == (6, 40, 4)
    assert low_rank_shape((1024,), 4) is None and low_rank_shape((4, 4), 4) is None and low_rank_shape((0, 4), 4) is None


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_ledger_counts_rounded_bytes(zero: int) -> None:
    profile = fake_inputs.blocks(3, ((64, 64), (64,)))
    mesh = Mesh(dp=2, shard=2) if zero else Mesh(dp=4)
    plan = Plan(profile.name, 8, mesh, memory=MemoryPolicy(zero))  # type: ignore[arg-type]
    sizes = []
    for kind in ("none", "bf16"):
        lines = plan_ledger(Plan(**{**vars(plan), "sync": SyncPolicy(compression=kind)}), profile)  # type: ignore[arg-type]
        sizes.append({line.name: line.bytes for line in lines if line.phase == "step"})
    for name, size in sizes[0].items():
        assert sizes[1][name] == (size // 2 if name.startswith(("grads/", "replicas/")) else size)


@pytest.mark.parametrize(
    ("compression", "mesh", "memory", "said"),
    [
        ("bf16", Mesh(shard=2), MemoryPolicy(3), "zero=0, 1 or 2"),
        ("bf16", Mesh(dp=2), MemoryPolicy(precision="fp64"), "precision=fp64"),
        ("bf16", Mesh(), MemoryPolicy(), "leave it out"),
        ("bf16", Mesh(tp=(2,)), MemoryPolicy(), "leave it out"),
        ("powersgd", Mesh(shard=2), MemoryPolicy(1), "zero=1 shards them"),
        ("powersgd", Mesh(dp=2, tp=(2,)), MemoryPolicy(), "tp shards them"),
    ],
)
def test_plans_that_cannot_be_compressed_are_refused(compression: Any, mesh: Mesh, memory: MemoryPolicy, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Plan("gpt", 8, mesh, memory=memory, sync=SyncPolicy(compression=compression))
