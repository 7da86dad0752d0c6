"""Sequence parallelism: autograd functions and hooks that shard positions over tensor-parallel ranks outside of tensor-parallel regions (see
[Note: sequence] in core/tensor_policy.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.comm import Comm, Work
from meshwright.core.tensor_policy import SequenceLayout, TensorPolicy, shard_range
from meshwright.execute.autograd_collectives import all_gather_uneven
from meshwright.execute.module_hooks import Decorator, at_module_input, at_module_output
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

    def __init__(self, sequence: SequenceLength, layout: SequenceLayout, name: str) -> None:
        self.sequence, self.comm, self.layout, self.name = sequence, sequence.comm, layout, name

    def record_length(self, full: Tensor) -> None:
        """Take the current sequence length from a full tensor."""
        if not self.layout.has_outer_dims:
            self.sequence.length = full.shape[self.layout.dim] // self.layout.inner

    def snapshot(self) -> SequenceShard:
        """A copy that keeps the current sequence length for backward, whatever runs in between."""
        return SequenceShard(SequenceLength(self.comm, self.sequence.length), self.layout, self.name)

    def local_shard(self, full: Tensor) -> Tensor:
        """This rank's positions of a full tensor."""
        first, count = shard_range(self.sequence.length, self.comm.rank, self.comm.size)
        positions = self._unflatten_positions(full, self.sequence.length).narrow(self.layout.dim + 1, first, count)
        return self._flatten_positions(positions).contiguous()

    def full_shape(self, shard: Tensor) -> list[int]:
        length = self.sequence.shard_lengths[self.comm.rank]
        return [n // length * self.sequence.length if d == self.layout.dim else n for d, n in enumerate(shard.shape)]

    def all_gather(self, shard: Tensor) -> Tensor:
        """Gather all positions from all ranks."""
        lengths, dim = self.sequence.shard_lengths, self.layout.dim + 1
        shards = all_gather_uneven(self._unflatten_positions(shard, lengths[self.comm.rank]), self.comm, dim, lengths, self.name)
        return self._flatten_positions(torch.cat(shards, dim))

    def reduce_scatter(self, partial: Tensor, comm: Comm | None = None) -> PendingReduceScatter:
        """Start summing partial sums over ranks; the result is this rank's positions. `comm` may be another communicator of the group."""
        lengths = self.sequence.shard_lengths
        longest, rows = max(lengths), self._unflatten_positions(partial, self.sequence.length).movedim(self.layout.dim + 1, 0)
        if min(lengths) < longest:  # backends scatter equal sizes only
            padded = rows.new_zeros((len(lengths) * longest, *rows.shape[1:]))
            for rank, shard in enumerate(rows.split(lengths)):
                padded[rank * longest : rank * longest + len(shard)] = shard
            rows = padded
        out, sent = rows.new_empty((longest, *rows.shape[1:])), rows.contiguous()
        sent = sent.clone() if sent.data_ptr() == partial.data_ptr() else sent  # `partial` may still be used elsewhere
        return PendingReduceScatter(self, out, sent, (comm or self.comm).reduce_scatter(out, sent, self.name))

    def _unflatten_positions(self, x: Tensor, length: int) -> Tensor:
        return x.unflatten(self.layout.dim, (-1, length, self.layout.inner))

    def _flatten_positions(self, x: Tensor) -> Tensor:
        return x.flatten(self.layout.dim, self.layout.dim + 2)

    def unpad(self, padded: Tensor) -> Tensor:
        rows = padded.narrow(0, 0, self.sequence.shard_lengths[self.comm.rank])
        return self._flatten_positions(rows.movedim(0, self.layout.dim + 1)).contiguous()


class PendingReduceScatter:
    """A reduce-scatter in flight; it keeps the input buffer alive."""

    def __init__(self, shard: SequenceShard, out: Tensor, sent_buffer: Tensor, pending: Work) -> None:
        self._shard, self._out, self._sent_buffer, self._pending = shard, out, sent_buffer, pending

    def wait(self) -> Tensor:
        self._pending.wait()
        return self._shard.unpad(self._out)


class ReduceScatterToSequence(torch.autograd.Function):
    """Forward reduce-scatters partial sums of all positions to this rank's positions; backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard, cache: RecomputeCache) -> Tensor:
        shard.record_length(x)
        ctx.shard = shard.snapshot()
        return cache.run_or_replay(lambda: shard.reduce_scatter(x, shard.comm.sync).wait())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.shard.all_gather(grad), None, None


class GatherFromSequence(torch.autograd.Function):
    """Forward all-gathers positions for a tensor-parallel region; backward reduce-scatters the partial gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard, cache: RecomputeCache) -> Tensor:
        ctx.shard = shard.snapshot()
        return cache.run_or_replay(lambda: shard.all_gather(x)).data  # no view: code may write into it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.shard.reduce_scatter(grad, ctx.shard.comm.sync).wait(), None, None


class ScatterToSequence(torch.autograd.Function):
    """Forward keeps this rank's positions of a full tensor; backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard) -> Tensor:
        shard.record_length(x)
        ctx.shard = shard.snapshot()
        return shard.local_shard(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.shard.all_gather(grad), None


class GatherToReplicated(GatherFromSequence):
    """Forward all-gathers positions for code that every rank runs identically; backward keeps this rank's positions of the gradient."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return ctx.shard.local_shard(grad), None, None


class ShardedSequences:
    """The logical dims of positions that one tensor-parallel axis shards, with their current lengths."""

    def __init__(self, policy: TensorPolicy, comm: Comm) -> None:
        self._sequences = {s.name: SequenceLength(comm, s.size) for s in policy.sharded_dims if not s.parameter_shards}

    def shard(self, layout: SequenceLayout, name: str) -> SequenceShard:
        return SequenceShard(self._sequences[layout.logical_dim], layout, name)

    def install(self, modules: dict[str, nn.Module], policy: TensorPolicy, eager: Decorator, cache: RecomputeCache) -> None:
        """Install scatters and gathers at module inputs and outputs, and dropout masks that do not depend on the rank."""
        for site in policy.sequence_scatter_sites:
            assert site.sequence_layout is not None
            shard = self.shard(site.sequence_layout, f"seq_scatter/{site.module}")
            at_module_input(modules[site.module], site.position, lambda x, shard=shard: ScatterToSequence.apply(x, shard), eager)  # type: ignore[misc]
        for site in policy.sequence_gather_sites:
            assert site.sequence_layout is not None
            shard = self.shard(site.sequence_layout, f"seq_gather/{site.module}")
            install = at_module_output if site.at_output else at_module_input
            install(modules[site.module], site.position, lambda x, shard=shard: GatherToReplicated.apply(x, shard, cache), eager)  # type: ignore[misc]
        for dropout in policy.dropout_sites:
            _shard_dropout_mask(modules[dropout.module], self.shard(dropout.sequence_layout, dropout.module), eager)


def _shard_dropout_mask(module: nn.Module, shard: SequenceShard, eager: Decorator) -> None:
    """Make a dropout module draw its mask for all positions, as one device would, and use this rank's positions of it."""
    inner = module.forward

    def forward(x: Tensor) -> Tensor:
        if not module.training:
            return inner(x)
        with torch.no_grad():
            mask = shard.local_shard(inner(torch.ones(shard.full_shape(x), dtype=x.dtype, device=x.device)))
        return x * mask

    module.forward = eager(forward)
