"""A single-device script's loader, cut for one rank: its batch is the global batch, and each rank gets its share of the same one."""

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


def share_of(plan: Plan, data_rank: int, total: int) -> tuple[int, int]:
    """(first sample, count) of a global batch of `total` samples; a short last batch is cut in proportion."""
    first, count = plan.share(data_rank)
    if total == plan.global_batch:
        return first, count
    start, end = first * total // plan.global_batch, (first + count) * total // plan.global_batch
    return start, end - start


class RankLoader:
    """Iterates this rank's share. `total` says how many samples the global batch of the current item has.

    A share will be taken in `pieces`: as many as the plan has micro-batches, or one where nothing is trained.
    """

    def __init__(self, loader: Iterable[Batch], plan: Plan, rank: int, *, seed: int, device: torch.device, pieces: int | None = None) -> None:
        self.plan, self.seed, self.device = plan, seed, device
        self.pieces = pieces or plan.micro_batches
        self.rank, self.data_rank = rank, plan.mesh.data_rank(rank)
        self.total = plan.global_batch
        self.epoch = 0
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        loader = self._loader
        by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
        for total, batch in self._by_index(loader) if by_index else self._by_slice(loader):  # type: ignore[arg-type]
            self.total = total
            yield pytree.tree_map(lambda t: t.to(self.device, non_blocking=True) if torch.is_tensor(t) else t, batch)
        self.epoch += 1

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def _enough(self, total: int) -> bool:
        """A last batch too small to give every rank a micro-batch is left out, on every rank alike; so is one that a pipeline, whose
        micro-batches are of one size, cannot cut evenly."""
        width, pieces = self.plan.mesh.data_width, self.pieces
        shares = [share_of(self.plan, r, total)[1] for r in range(width)]
        uneven = self.plan.mesh.pp > 1 and any(share % pieces for share in shares)
        enough = min(shares) >= pieces and not uneven
        if not enough and self.rank == 0:
            parts = f"{pieces} equal micro-batches each" if uneven else f"{pieces} micro-batches each"
            print(f"meshwright: a batch of {total} samples is left out: it cannot be cut for {width} ranks, {parts}", file=sys.stderr)
        return enough

    def _by_index(self, loader: DataLoader[Any]) -> Iterator[tuple[int, Batch]]:
        """Only this rank's samples are read: the same batches of indices, cut before anything is loaded."""
        sampler = _Sliced(self, loader.batch_sampler)
        cut: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )
        for batch in cut:
            yield sampler.totals.popleft(), batch

    def _by_slice(self, loader: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
        """A stream has no indices: every rank reads the whole batch and keeps its part."""
        for batch in loader:
            total = sample_count(batch)
            if self._enough(total):
                first, count = share_of(self.plan, self.data_rank, total)
                yield total, pytree.tree_map(lambda t, a=first, n=count: t[a : a + n] if torch.is_tensor(t) and t.dim() else t, batch)


class _Sliced:
    """The user's own batch sampler, in the same order on every rank, cut to this rank's part."""

    def __init__(self, owner: RankLoader, batches: Iterable[list[Any]] | None) -> None:
        assert batches is not None
        self.owner, self.batches = owner, batches
        self.totals: deque[int] = deque()

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        iterator = iter(self.batches)
        while True:
            # torch's samplers draw their order from the global generator: give every rank the same one for a moment.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.owner.seed * 1_000_003 + self.owner.epoch)
                try:
                    indices = list(next(iterator))
                except StopIteration:
                    return
            if self.owner._enough(len(indices)):
                first, count = share_of(self.owner.plan, self.owner.data_rank, len(indices))
                self.totals.append(len(indices))
                yield indices[first : first + count]
