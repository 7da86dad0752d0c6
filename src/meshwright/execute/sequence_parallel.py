"""Sequence parallelism: autograd functions and hooks that shard positions over tensor-parallel ranks outside of tensor-parallel regions (see
[Note: sequence] in core/tensor_policy.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.core.comm import Comm, Work
from meshwright.core.tensor_policy import SequenceLayout, TensorPolicy, shard_range
from meshwright.execute.autograd_collectives import all_gather_uneven
from meshwright.execute.module_hooks import TensorFn, at_module_input, at_module_output
from meshwright.execute.recompute_runtime import RecomputeCache


class SequenceLength:
    """The sequence length of the current batch, shared by all regions of one logical dim. A batch may be shorter than the planned one."""

    def __init__(self, comm: Comm, length: int) -> None:
        self.comm, self.length = comm, length

    @property
    def shard_lengths(self) -> list[int]:
        return [shard_range(self.length, rank, self.comm.size)[1] for rank in range(self.comm.size)]


class SequenceShard:
    """Shards and gathers the positions along one dim of one kind of tensor."""

    def __init__(self, sequence: SequenceLength, sequence_layout: SequenceLayout, name: str) -> None:
        self.sequence, self.comm, self.sequence_layout, self.name = sequence, sequence.comm, sequence_layout, name

    def record_length(self, full: torch.Tensor) -> None:
        """Take the current sequence length from a full tensor."""
        if not self.sequence_layout.has_outer_dims:
            self.sequence.length = full.shape[self.sequence_layout.dim] // self.sequence_layout.inner

    def snapshot(self) -> SequenceShard:
        """A copy that keeps the current sequence length for backward, whatever runs in between."""
        return SequenceShard(SequenceLength(self.comm, self.sequence.length), self.sequence_layout, self.name)

    def local_shard(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's positions of a full tensor."""
        first, count = shard_range(self.sequence.length, self.comm.rank, self.comm.size)
        return self._flatten_positions(
            self._unflatten_positions(full, self.sequence.length).narrow(self.sequence_layout.dim + 1, first, count)
        ).contiguous()

    def full_shape(self, shard: torch.Tensor) -> list[int]:
        mine = self.sequence.shard_lengths[self.comm.rank]
        return [n // mine * self.sequence.length if d == self.sequence_layout.dim else n for d, n in enumerate(shard.shape)]

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """All positions, from every rank's own."""
        counts, dim = self.sequence.shard_lengths, self.sequence_layout.dim + 1
        pieces = all_gather_uneven(self._unflatten_positions(shard, counts[self.comm.rank]), self.comm, dim, counts, self.name)
        return self._flatten_positions(torch.cat(pieces, dim))

    def reduce_scatter(self, partial: torch.Tensor, comm: Comm | None = None) -> PendingReduceScatter:
        """Start summing partial sums of all positions over ranks; the result is this rank's positions of the sum. `comm` may be another
        communicator of the same group."""
        counts = self.sequence.shard_lengths
        most, front = max(counts), self._unflatten_positions(partial, self.sequence.length).movedim(self.sequence_layout.dim + 1, 0)
        if min(counts) < most:  # backends scatter equal pieces only
            padded = front.new_zeros((len(counts) * most, *front.shape[1:]))
            for rank, run in enumerate(front.split(counts)):
                padded[rank * most : rank * most + len(run)] = run
            front = padded
        out = front.new_empty((most, *front.shape[1:]))
        sent = front.contiguous()
        sent = sent.clone() if sent.data_ptr() == partial.data_ptr() else sent  # `partial` may still be used elsewhere
        return PendingReduceScatter(self, out, sent, (comm or self.comm).reduce_scatter(out, sent, self.name))

    def _unflatten_positions(self, x: torch.Tensor, length: int) -> torch.Tensor:
        return x.unflatten(self.sequence_layout.dim, (-1, length, self.sequence_layout.inner))

    def _flatten_positions(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(self.sequence_layout.dim, self.sequence_layout.dim + 2)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        count = self.sequence.shard_lengths[self.comm.rank]
        return self._flatten_positions(padded.narrow(0, 0, count).movedim(0, self.sequence_layout.dim + 1)).contiguous()


class PendingReduceScatter:
    """A reduce-scatter in flight; it keeps the input buffer alive."""

    def __init__(self, sequence_shard: SequenceShard, out: torch.Tensor, sent_buffer: torch.Tensor, pending: Work) -> None:
        self._sequence_shard, self._out, self._sent_buffer, self._pending = sequence_shard, out, sent_buffer, pending

    def wait(self) -> torch.Tensor:
        self._pending.wait()
        return self._sequence_shard.unpad(self._out)


class ReduceScatterToSequence(torch.autograd.Function):
    """Forward reduce-scatters partial sums of all positions to this rank's positions; backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence_shard: SequenceShard, recompute_cache: RecomputeCache) -> torch.Tensor:
        sequence_shard.record_length(x)
        ctx.share = sequence_shard.snapshot()
        return recompute_cache.run_or_replay(lambda: sequence_shard.reduce_scatter(x, sequence_shard.comm.sync).wait())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.share.all_gather(grad), None, None


class GatherFromSequence(torch.autograd.Function):
    """Forward all-gathers positions for a tensor-parallel region; backward reduce-scatters the partial gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence_shard: SequenceShard, recompute_cache: RecomputeCache) -> torch.Tensor:
        ctx.share = sequence_shard.snapshot()
        return recompute_cache.run_or_replay(lambda: sequence_shard.all_gather(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.share.reduce_scatter(grad, ctx.share.comm.sync).wait(), None, None


class ScatterToSequence(torch.autograd.Function):
    """Forward keeps this rank's positions of a full tensor; backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence_shard: SequenceShard) -> torch.Tensor:
        sequence_shard.record_length(x)
        ctx.share = sequence_shard.snapshot()
        return sequence_shard.local_shard(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.share.all_gather(grad), None


class GatherToReplicated(GatherFromSequence):
    """Forward all-gathers positions for code that every rank runs identically; backward keeps this rank's positions of the gradient."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.share.local_shard(grad), None, None


class SequenceParallelRegion:
    """The sharded sequences of one tensor-parallel axis."""

    def __init__(self, policy: TensorPolicy, comm: Comm) -> None:
        self._sequences = {s.name: SequenceLength(comm, s.size) for s in policy.sharded_dims if not s.parameter_shards}

    def sequence_shard(self, sequence_layout: SequenceLayout, name: str) -> SequenceShard:
        return SequenceShard(self._sequences[sequence_layout.logical_dim], sequence_layout, name)

    def install(
        self, modules: dict[str, nn.Module], policy: TensorPolicy, compiler_disabled: Callable[..., Any], recompute_cache: RecomputeCache
    ) -> None:
        """Install scatters and gathers at module inputs and outputs, and dropout masks that do not depend on the rank."""
        for site in policy.sequence_scatter_sites:
            assert site.sequence_layout is not None
            at_module_input(
                modules[site.module],
                site.position,
                _scatter_fn(self.sequence_shard(site.sequence_layout, f"seq_scatter/{site.module}")),
                compiler_disabled,
            )
        for site in policy.sequence_gather_sites:
            assert site.sequence_layout is not None
            place = at_module_output if site.at_output else at_module_input
            place(
                modules[site.module],
                site.position,
                _gather_fn(self.sequence_shard(site.sequence_layout, f"seq_gather/{site.module}"), recompute_cache),
                compiler_disabled,
            )
        for mask in policy.dropout_sites:
            _shard_dropout_mask(modules[mask.module], self.sequence_shard(mask.sequence_layout, mask.module), compiler_disabled)


def _scatter_fn(sequence_shard: SequenceShard) -> TensorFn:
    return lambda x: ScatterToSequence.apply(x, sequence_shard)  # type: ignore[no-any-return]


def _gather_fn(sequence_shard: SequenceShard, recompute_cache: RecomputeCache) -> TensorFn:
    return lambda x: GatherToReplicated.apply(x, sequence_shard, recompute_cache)  # type: ignore[no-any-return]


def _shard_dropout_mask(module: nn.Module, sequence_shard: SequenceShard, compiler_disabled: Callable[..., Any]) -> None:
    """Make a dropout module draw its mask for all positions, as one device would, and use this rank's positions of it."""
    inner = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return inner(x)  # type: ignore[no-any-return]
        with torch.no_grad():
            mask = sequence_shard.local_shard(inner(torch.ones(sequence_shard.full_shape(x), dtype=x.dtype, device=x.device)))
        return x * mask

    module.forward = compiler_disabled(forward)
