"""Positions that tensor-parallel ranks share between cut parts: what is found in a model's dataflow, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.procs.plan_cases import FAMILIES, model_of, traced
from torch import nn
from torch.nn import functional as F

from meshwright.comm import ThreadComm, ThreadWorld
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.tensor_policy import SequenceLayout, TensorPolicy
from meshwright.describe.dataflow_tracer import trace_module_dataflow
from meshwright.execute.recompute_runtime import RecomputeCache
from meshwright.execute.sequence_parallel import (
    GatherFromSequence,
    ReduceScatterToSequence,
    ScatterToSequence,
    SequenceLength,
    SequenceShard,
    _shard_dropout_mask,
)
from meshwright.plan.tensor_planner import choose_tensor_grid


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, own: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down(F.gelu(self.up(self.norm(x))))
        return x + (F.dropout(out, 0.5, self.training) if self.own else self.drop(out))


class Counting(Block):
    """Takes the number of positions from what is shared, and uses it for what is whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        return x + self.down(F.gelu(self.up(self.norm(x))).reshape(batch, length, -1))


def cut(*blocks: nn.Module, shape: tuple[int, ...] = (2, 6, 8), ways: int = 2) -> TensorPolicy:
    model = nn.Sequential(*blocks)
    flow = trace_module_dataflow(model, lambda m, b: m(b["x"]).square().mean(), {"x": torch.zeros(shape)})
    return choose_tensor_grid(flow, (ways,), sequence_parallel=True)[0]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", *FAMILIES])
def test_every_architecture_shares_all_its_sums(name: str) -> None:
    _, flow = traced(model_of(name))
    policy = choose_tensor_grid(flow, (2,), sequence_parallel=True)[0]
    plain = choose_tensor_grid(flow, (2,))[0]
    assert policy.is_sequence_parallel and all(m.sequence_layout for m in policy.reduce_sites)
    assert len(policy.partial_grad_parameters) > len(plain.partial_grad_parameters) and policy.unsharded_reasons == plain.unsharded_reasons
    assert [s for s in policy.sharded_dims if s.parameter_shards] == list(plain.sharded_dims)


def test_a_region_begins_at_a_sum_and_ends_at_a_cut_part() -> None:
    policy = cut(nn.Linear(8, 8), Block(0.5), Block(0.5))
    assert [m.module for m in policy.reduce_sites] == ["1.down", "2.down"]
    assert [(m.module, m.position) for m in policy.sequence_scatter_sites] == [("1", 0)]
    assert [m.module for m in policy.copy_sites if m.sequence_layout] == ["1.up", "2.up"]
    assert [(m.module, m.sequence_layout.dim) for m in policy.dropout_sites] == [("1.drop", 1), ("2.drop", 1)]
    assert set(policy.partial_grad_parameters) == {f"{i}.{name}" for i in (1, 2) for name in ("norm.weight", "norm.bias", "down.bias")}
    assert [(m.module, m.at_output) for m in policy.sequence_gather_sites] == [("2", True)]  # the model returns it


def test_bytes_are_those_of_the_whole_and_ranks_hold_pieces() -> None:
    policy = cut(nn.Linear(8, 8), Block(), Block(), shape=(2, 7, 8))
    (positions,) = [s for s in policy.sharded_dims if not s.parameter_shards]
    plan = Plan("test", 2, Mesh(tp=(2,)), tensor=policy)
    assert [plan.logical_dim_shards[rank][positions.name] for rank in range(2)] == [(4, 7), (3, 7)]
    assert {m.bytes for m in (*policy.reduce_sites, *policy.copy_sites, *policy.sequence_scatter_sites)} == {7 * 8 * 4}
    assert "sequence parallel" in plan.summary()


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ((Block(), Block(own=True)), "draws random numbers itself"),
        ((Block(), Counting()), "takes the number of positions from one value and uses it for another"),
        ((nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), "no tensor-parallel layer is followed by another"),
    ],
)
def test_what_cannot_share_positions_is_refused_with_the_place(blocks: tuple[nn.Module, ...], reason: str) -> None:
    with pytest.raises(RequestError, match=rf"sequence=true: .*{reason}.*: leave it out"):
        cut(nn.Linear(8, 8), *blocks)


def test_two_sequences_of_unlike_lengths_may_be_under_way() -> None:
    """Backward of the first comes after forward of the second: each has its own number of positions."""

    def job(comm: ThreadComm) -> list[torch.Tensor]:
        share = SequenceShard(SequenceLength(comm, 7), SequenceLayout("sequence", 1), "test")
        given = [torch.arange(2.0 * length * 3).view(2, length, 3).requires_grad_() for length in (7, 4)]
        sums = []
        for x in given:
            entered = GatherFromSequence.apply(ScatterToSequence.apply(x, share), share, RecomputeCache())
            sums.append(ReduceScatterToSequence.apply(entered * (comm.rank + 1), share, RecomputeCache()).square().sum())
        sum(sums).backward()
        return [x.grad / x.detach().clamp(min=1) for x in given if x.grad is not None]

    for found in ThreadWorld(2).run(job):
        for ratio in found:
            assert torch.equal(ratio.flatten()[1:], torch.full((ratio.numel() - 1,), 18.0))  # of (3x)² it is 18x


class Numbers(nn.Module):
    """Multiplies by numbers that depend on the place alone, as a dropout's do on the draw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.numel(), dtype=x.dtype).view_as(x)


@pytest.mark.parametrize(
    "along", [SequenceLayout("sequence", 1), SequenceLayout("sequence", 0, has_outer_dims=True)], ids=["positions", "samples × positions"]
)
def test_random_numbers_are_those_of_the_whole_wherever_positions_lie(along: SequenceLayout) -> None:
    whole = torch.randn(2, 5, 3) if along.dim else torch.randn(10, 3)

    def job(comm: ThreadComm) -> torch.Tensor:
        module, share = Numbers(), SequenceShard(SequenceLength(comm, 5), along, "test")
        _shard_dropout_mask(module, share, lambda function: function)
        return share.all_gather(module(share.local_shard(whole)))

    for found in ThreadWorld(2).run(job):
        torch.testing.assert_close(found, Numbers()(whole))


def test_channels_are_no_positions() -> None:
    """A convolution's output has its channels in the middle; its own bias counts them."""
    _, flow = traced(model_of("cosmoflow-tiny"))
    with pytest.raises(RequestError, match="no tensor-parallel layer is followed by another"):
        choose_tensor_grid(flow, (2,), sequence_parallel=True)


def test_one_dimension_and_no_other_ranks_with_positions() -> None:
    _, flow = traced(model_of("gpt-tiny"))
    with pytest.raises(RequestError, match="needs one tensor axis"):
        choose_tensor_grid(flow, (2, 2), sequence_parallel=True)
    policy = choose_tensor_grid(flow, (2,), sequence_parallel=True)[0]
    changes: dict[str, Any] = {"tensor": policy}
    with pytest.raises(RequestError, match=r"does not go with ep yet .*: set sequence=false"):
        Plan("test", 4, Mesh(ep=2, tp=(2,)), **changes)
