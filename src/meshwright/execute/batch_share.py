"""How one batch of a single-device script is split over data ranks: a rank's samples, and their weight in the mean over the batch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.plan import Plan


@dataclass(frozen=True)
class Share:
    """One data rank's samples of a global batch.

    A batch of fewer samples than data ranks gives every rank one sample, so that no rank is left without: all of them call the model equally often,
    and none calls it with nothing. Several ranks then hold copies of one sample, and each copy has its part of the sample's weight.
    """

    first_sample: int
    num_samples: int
    global_batch: int
    copies: int = 1  # data ranks that hold these samples
    is_first_copy: bool = True
    is_even: bool = True  # every data rank has as many samples, none of them copies
    min_samples: int = 1  # the fewest that a data rank has

    @property
    def weight(self) -> float:
        """What this rank's mean counts for in the mean over the global batch."""
        return self.num_samples / (self.global_batch * self.copies)


def split_batch(plan: Plan, data_rank: int, global_batch: int) -> Share:
    """A data rank's share: by the plan's shares, in proportion for a batch of another size; evenly where that would leave a rank with nothing."""
    degree = plan.mesh.data_parallel_size
    if global_batch < degree:
        sample = data_rank * global_batch // degree
        holders = [rank for rank in range(degree) if rank * global_batch // degree == sample]
        return Share(sample, 1, global_batch, len(holders), data_rank == holders[0], is_even=False)
    if not plan.balance.shares and not global_batch % degree:
        count = global_batch // degree
        return Share(data_rank * count, count, global_batch, min_samples=count)
    ends = [_end(plan, rank, global_batch) for rank in range(degree)]
    starts = [0, *ends[:-1]]
    if any(start == end for start, end in zip(starts, ends, strict=True)):
        starts, ends = ([(rank + i) * global_batch // degree for rank in range(degree)] for i in (0, 1))
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    is_even = min(counts) == max(counts)
    return Share(starts[data_rank], counts[data_rank], global_batch, is_even=is_even, min_samples=min(counts))


def _end(plan: Plan, data_rank: int, global_batch: int) -> int:
    first, count = plan.sample_range(data_rank)
    return (first + count) * global_batch // plan.global_batch
