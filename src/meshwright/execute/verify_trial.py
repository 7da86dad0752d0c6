"""The few samples that a plan is verified with, and the plan for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from meshwright.core.plan import Plan
from meshwright.core.task import Batch
from meshwright.execute.session import sample_count
from meshwright.execute.verify_reference import NotVerifiableError

_SAMPLES = 2  # in a micro-batch, if there are so many: a dim of size one may be broadcast where a larger one fails


@dataclass(frozen=True)
class Trial:
    """A plan for a few samples, and the samples. If they are `repeated`, every micro-batch has the same, and one device runs only those."""

    plan: Plan
    batch: Batch
    repeated: bool = False

    @property
    def splits_batch(self) -> bool:
        return self.plan.mesh.data_parallel_size * self.plan.micro_batches > 1

    @property
    def plain_batch(self) -> Batch:
        """What one device runs."""
        count = self.plan.global_batch // (self.plan.mesh.data_parallel_size * self.plan.micro_batches)
        return slice_batch(self.batch, 0, count) if self.repeated else self.batch

    def repeat_samples(self) -> Trial:
        """The trial with equal shares, in which every micro-batch has the same samples."""
        parts = self.plan.mesh.data_parallel_size * self.plan.micro_batches
        count = min(_SAMPLES, self.plan.global_batch)
        plan = replace(self.plan, global_batch=parts * count, balance=replace(self.plan.balance, shares=()))
        first = slice_batch(self.batch, 0, count)
        batch = pytree.tree_map(lambda t: torch.cat([t] * parts) if torch.is_tensor(t) and t.dim() else t, first)
        return Trial(plan, batch, repeated=True)


def make_trial(plan: Plan, batch: Batch) -> Trial:
    """The plan for as few samples of the batch as it can split, with shares in the same proportion."""
    parts, micro_batches, available = plan.mesh.data_parallel_size, plan.micro_batches, sample_count(batch)
    shares = plan.balance.shares
    if shares:
        divisor = math.gcd(*shares)
        factor = next((f for f in range(1, divisor) if _can_split([s // divisor * f for s in shares], plan)), divisor)
        shares = tuple(s // divisor * factor for s in shares)
        count = sum(shares)
    else:
        count = max(n for n in (parts * micro_batches, parts * micro_batches * _SAMPLES) if n <= available or n == parts * micro_batches)
    if count > available:
        raise NotVerifiableError(f"a batch of {available} samples cannot be split over {parts} data ranks with {micro_batches} micro-batches each")
    sync = replace(plan.sync, routes=(), compression="none")
    small = replace(plan, global_batch=count, balance=replace(plan.balance, shares=shares), compile="none", sync=sync)
    samples = pytree.tree_map(lambda t: t.detach().cpu() if torch.is_tensor(t) else t, slice_batch(batch, 0, count))
    return Trial(small, samples)


def _can_split(shares: list[int], plan: Plan) -> bool:
    return min(shares) >= plan.micro_batches and not (plan.mesh.pp > 1 and any(share % plan.micro_batches for share in shares))


def slice_batch(batch: Batch, first: int, count: int) -> Batch:
    return pytree.tree_map(lambda t: t[first : first + count] if torch.is_tensor(t) and t.dim() else t, batch)
