"""One rank's part of each global batch, with the next batches prepared in a background thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import RequestError
from meshwright.data.sampler import GlobalSampler

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.data.dataset import Dataset

_PREFETCH_BATCHES = 2  # batches prepared ahead: one may be late without a stall


class Loader:
    """Batches of samples [first, first + count) of each global batch, from the sampler's position on.

    The state counts batches yielded, not those prefetched: after a batch is yielded, `state_dict` points to the next one.
    `steps` limits one iteration; the next iteration continues where it stopped.
    """

    def __init__(
        self, dataset: Dataset, sampler: GlobalSampler, first_sample: int, count: int, steps: int | None = None, pin_memory: bool = False
    ) -> None:
        if first_sample < 0 or count < 1 or first_sample + count > sampler.global_batch:
            raise RequestError(f"samples {first_sample}…{first_sample + count - 1} are not a part of a global batch of {sampler.global_batch}")
        self.dataset, self.sampler = dataset, sampler
        self.samples = slice(first_sample, first_sample + count)
        self.steps, self.pin_memory = steps, pin_memory

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        # An executor rather than a queue: no thread blocks on a full queue, so stopping early needs no signal, and a
        # future passes the thread's exception to the consumer.
        pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        pending: deque[tuple[int, Future[dict[str, Tensor]]]] = deque()
        position, submitted, yielded = self.sampler.position, 0, 0
        try:
            while self.steps is None or yielded < self.steps:
                while len(pending) <= _PREFETCH_BATCHES and (self.steps is None or submitted < self.steps):
                    batch_end = self.sampler.position_after(position, self.sampler.global_batch)
                    pending.append((batch_end, pool.submit(self._fetch, position)))
                    position, submitted = batch_end, submitted + 1
                batch_end, future = pending.popleft()
                batch = future.result()
                self.sampler.position, yielded = batch_end, yielded + 1
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes effect at the next `iter`."""
        self.sampler.load_state_dict(state)

    def _fetch(self, position: int) -> dict[str, Tensor]:
        batch = self.dataset.batch(self.sampler.indices_from(position, self.sampler.global_batch)[self.samples])
        return {name: values.pin_memory() for name, values in batch.items()} if self.pin_memory else batch
