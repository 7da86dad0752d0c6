"""A single-device script's loader for one rank: the script's batch is the global batch, and each rank gets its share of it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from meshwright.core.plan import Plan
from meshwright.core.task import Batch
from meshwright.execute.session import sample_count

_LOADER_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


def sample_range(plan: Plan, data_rank: int, global_batch: int) -> tuple[int, int]:
    """(first sample, count) of a data rank in a global batch of `global_batch` samples; a short last batch is split in proportion."""
    first, count = plan.sample_range(data_rank)
    if global_batch == plan.global_batch:
        return first, count
    start, end = first * global_batch // plan.global_batch, (first + count) * global_batch // plan.global_batch
    return start, end - start


class RankLoader:
    """Iterates over this rank's share. `global_batch` is the number of samples in the current item's global batch.

    A share will be split into `num_micro_batches`: the plan's number, or one when not training.
    """

    def __init__(
        self, loader: Iterable[Batch], plan: Plan, rank: int, *, seed: int, device: torch.device, num_micro_batches: int | None = None
    ) -> None:
        self.plan, self.seed, self.device = plan, seed, device
        self.num_micro_batches = num_micro_batches or plan.micro_batches
        self.rank, self.data_rank = rank, plan.mesh.data_rank(rank)
        self.global_batch = plan.global_batch
        self.epoch = 0
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        loader = self._loader
        by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
        for total, batch in self._iter_by_index(loader) if by_index else self._iter_by_slice(loader):  # type: ignore[arg-type]
            self.global_batch = total
            yield pytree.tree_map(lambda t: t.to(self.device, non_blocking=True) if torch.is_tensor(t) else t, batch)
        self.epoch += 1

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def _can_split(self, global_batch: int) -> bool:
        """Whether a batch is used. A last batch too small to give every rank its micro-batches is skipped on every rank; so is one that a
        pipeline, whose micro-batches have one size, cannot split evenly."""
        degree, num_micro_batches = self.plan.mesh.data_parallel_size, self.num_micro_batches
        shares = [sample_range(self.plan, rank, global_batch)[1] for rank in range(degree)]
        uneven = self.plan.mesh.pp > 1 and any(share % num_micro_batches for share in shares)
        can_split = min(shares) >= num_micro_batches and not uneven
        if not can_split and self.rank == 0:
            split = f"{degree} data ranks with {num_micro_batches} {'equal ' * uneven}micro-batches each"
            print(f"meshwright: a batch of {global_batch} samples is skipped: it cannot be split over {split}", file=sys.stderr)
        return can_split

    def _iter_by_index(self, loader: DataLoader[Any]) -> Iterator[tuple[int, Batch]]:
        """Read only this rank's samples: batches of indices are the same on every rank, and are split before anything is loaded."""
        sampler = _RankBatchSampler(self, loader.batch_sampler)
        options: dict[str, Any] = {option: getattr(loader, option) for option in _LOADER_OPTIONS}
        for batch in DataLoader(loader.dataset, batch_sampler=sampler, **options):
            yield sampler.global_batches.popleft(), batch

    def _iter_by_slice(self, loader: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
        """A stream has no indices: every rank reads the global batch and keeps its share."""
        for batch in loader:
            total = sample_count(batch)
            if self._can_split(total):
                first, count = sample_range(self.plan, self.data_rank, total)
                yield total, pytree.tree_map(lambda t, a=first, n=count: t[a : a + n] if torch.is_tensor(t) and t.dim() else t, batch)


class _RankBatchSampler:
    """The user's own batch sampler, in the same order on every rank, restricted to this rank's share."""

    def __init__(self, loader: RankLoader, batch_sampler: Iterable[list[Any]] | None) -> None:
        assert batch_sampler is not None
        self.loader, self.batch_sampler = loader, batch_sampler
        self.global_batches: deque[int] = deque()

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        iterator = iter(self.batch_sampler)
        while True:
            # torch's samplers draw their order from the global generator: seed it the same way on every rank while they do.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.loader.seed * 1_000_003 + self.loader.epoch)
                try:
                    indices = list(next(iterator))
                except StopIteration:
                    return
            if self.loader._can_split(len(indices)):
                first, count = sample_range(self.loader.plan, self.loader.data_rank, len(indices))
                self.global_batches.append(len(indices))
                yield indices[first : first + count]
