"""Dynamic batching: samples of many requests go to the replicas in batches of equal shapes.

[Note: when a batch goes]
A replica has at most two batches, one that it computes and one that waits at its door. While both places are taken samples gather, so batches grow
with the load and need no clock. A replica with nothing to do takes what is there at once; with `max_wait_s` it waits so long for a fuller batch.

[Note: deadly samples]
The samples of a replica that died go to others again, each with a replica to itself, so that one that ends whoever computes it does so alone, and
gives up after some.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.core.errors import MeshwrightError, RunError
from meshwright.serve.async_replica import AsyncReplica, ReplicaDied, ReplicaJob
from meshwright.serve.input_specs import InputSpec, specs_from_data
from meshwright.serve.replica_ranks import ReplicaRanks
from meshwright.serve.replica_set import NotReadyError, OverloadedError, ReplicaSet
from meshwright.serve.service_metrics import ServiceMetrics
from meshwright.serve.tensor_messages import Array, decode_arrays

_IN_FLIGHT = 2  # batches of one replica
_MAX_BATCH_BYTES = 1 << 28
_MAX_DEATHS = 3  # of replicas that computed one sample
_TRY_OUT_S = 120.0


class SampleError(MeshwrightError):
    """The model failed on one sample of a request: the one at `place`."""

    place = 0


@dataclass(frozen=True)
class SampleOutput:
    """What one sample got: a tree in which {"$": i} stands for array i, and {"": {…}} for an object."""

    tree: Any
    arrays: tuple[Array, ...]

    def plain(self) -> Any:
        """The tree with nested lists of numbers."""
        return _filled(self.tree, self.arrays)


@dataclass(eq=False)
class Waiting:
    """A sample that waits for its output, and how many replicas have died with it."""

    kind: str
    inputs: Mapping[str, Array]
    key: tuple[Any, ...]
    arrived: float
    output: asyncio.Future[SampleOutput]
    deaths: int = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())


class PredictReplica(AsyncReplica):
    """Work is batches of samples, all of one kind and shape."""

    def __init__(self, name: str, job: ReplicaJob, ranks: ReplicaRanks) -> None:
        super().__init__(name, job, ranks)
        self._batches: dict[int, asyncio.Future[list[SampleOutput | SampleError]]] = {}
        self._sizes: dict[int, int] = {}
        self._ids = itertools.count(1)
        self.is_reserved = False  # what it has now should be all that it has

    @property
    def load(self) -> int:
        return len(self._batches)

    @property
    def specs(self) -> tuple[InputSpec, ...]:
        return specs_from_data(self.facts.get("inputs", ()))

    def submit(
        self, kind: str, samples: Sequence[Mapping[str, Array]], *, is_reserved: bool = False
    ) -> asyncio.Future[list[SampleOutput | SampleError]]:
        """The output of each sample, in time; ReplicaDied if it cannot be had here."""
        batch = next(self._ids)
        future: asyncio.Future[list[SampleOutput | SampleError]] = asyncio.get_running_loop().create_future()
        names = list(samples[0])
        self._send({"batch": batch, "kind": kind, "names": names}, [_stacked([sample[name] for sample in samples]) for name in names])
        self._batches[batch], self._sizes[batch] = future, len(samples)
        self.is_reserved = is_reserved
        return future

    async def try_out(self) -> None:
        """It has answered a made-up batch when it started, if its shapes are known; its weights must be numbers."""
        if not all(spec.is_fixed for spec in self.specs):
            return
        sample = {spec.name: np.zeros([dim or 0 for dim in spec.shape or ()], spec.dtype) for spec in self.specs}
        output = (await asyncio.wait_for(self.submit("predict", [sample]), _TRY_OUT_S))[0]
        if isinstance(output, SampleError):
            raise RunError(f"the new model does not answer: {output}")
        if any(array.dtype.kind == "f" and np.isnan(array).all() for array in output.arrays if array.size):
            raise RunError("the new model answers NaN")

    def _receive(self, message: Mapping[str, Any], payload: bytes) -> None:
        future, size = self._batches.pop(message["done"], None), self._sizes.pop(message["done"], 0)
        if future is None or future.done():
            return
        self.is_reserved = False
        arrays = decode_arrays(message, payload)
        found: list[Any] = [SampleError("the replica gave no output")] * size
        for group in message["groups"]:
            own = arrays[group["first"] : group["first"] + group["count"]]
            rows = {*group["rows"]}
            for place, sample in enumerate(group["samples"]):
                part = tuple(array[place] if i in rows else array for i, array in enumerate(own))
                found[sample] = SampleError(group["error"]) if group["error"] else SampleOutput(group["tree"], part)
        future.set_result(found)

    def _give_up(self) -> None:
        for future in self._batches.values():
            if not future.done():
                future.set_exception(ReplicaDied(self.failure))
        self._batches.clear()
        self._sizes.clear()


class Batcher:
    """Samples in, outputs out, over all replicas of a model."""

    def __init__(
        self, replicas: ReplicaSet[PredictReplica], metrics: ServiceMetrics, *, max_batch: int, max_wait_s: float, max_waiting: int
    ) -> None:  # fmt: skip
        self.set, self._metrics = replicas, metrics
        self._max_batch, self._max_wait_s, self._max_waiting = max_batch, max_wait_s, max_waiting
        self._queues: dict[tuple[Any, ...], deque[Waiting]] = {}
        self._retries: deque[Waiting] = deque()  # whose replica died: each goes alone
        self._wake = asyncio.Event()
        self._batches: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values())) + len(self._retries)

    def check_room(self, samples: int) -> None:
        """Refuse what would have to wait too long. One request with very many samples is taken while others are few."""
        self.set.check_ready()
        if self.set.accepted + min(samples, self._max_waiting) > self._max_waiting + _IN_FLIGHT * self._max_batch * len(self.set.ready):
            raise OverloadedError

    async def compute(self, kind: str, samples: Sequence[Mapping[str, Array]]) -> list[SampleOutput]:
        """The outputs of some samples. SampleError says which one the model fails on."""
        self._start()
        loop, now = asyncio.get_running_loop(), time.monotonic()
        waiting = [Waiting(kind, inputs, _key(kind, inputs), now, loop.create_future()) for inputs in samples]
        self.set.accepted += len(waiting)
        for sample in waiting:
            self._queues.setdefault(sample.key, deque()).append(sample)
        self._wake.set()
        try:
            found = await asyncio.gather(*(sample.output for sample in waiting), return_exceptions=True)
        finally:
            self.set.accepted -= len(waiting)
            for sample in waiting:  # those of a request that was given up are not computed
                if sample.output.cancelled() or sample.output.cancel():
                    self._forget(sample)
        for place, output in enumerate(found):
            if isinstance(output, SampleError):
                output.place = place
            if isinstance(output, BaseException):
                raise output
        return found  # type: ignore[return-value]

    def _start(self) -> None:
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._dispatch())

    async def _dispatch(self) -> None:
        """Give each replica that has room the batch whose first sample waits longest."""
        while True:
            try:
                ready = await self.set.wait_until_ready()
            except NotReadyError as error:
                self._fail_all(error)
                return
            most = 1 if self._retries else _IN_FLIGHT
            free = [replica for replica in ready if replica.load < most and not replica.is_reserved]
            replica = min(free, key=lambda replica: replica.load, default=None)
            wait_s = self._patience(replica)
            if replica is not None and wait_s <= 0:
                self._give(replica, self._next_batch())
                continue
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), wait_s if replica is not None and self.waiting else None)
            except TimeoutError:
                continue

    def _patience(self, replica: PredictReplica | None) -> float:
        """How long the next batch should still wait for others; for ever if there is none."""
        if self._retries:
            return 0.0
        if not self._queues:
            return float("inf")
        queue = min(self._queues.values(), key=lambda queue: queue[0].arrived)
        if replica is None or replica.load or len(queue) >= self._max_batch:
            return 0.0
        return self._max_wait_s - (time.monotonic() - queue[0].arrived)

    def _next_batch(self) -> list[Waiting]:
        if self._retries:
            return [self._retries.popleft()]
        key, queue = min(self._queues.items(), key=lambda item: item[1][0].arrived)
        most = max(1, min(self._max_batch, _MAX_BATCH_BYTES // max(queue[0].nbytes, 1)))
        batch = [queue.popleft() for _ in range(min(most, len(queue)))]
        if not queue:
            del self._queues[key]
        return batch

    def _forget(self, sample: Waiting) -> None:
        queue = self._queues.get(sample.key)
        if queue is not None and sample in queue:
            queue.remove(sample)
            if not queue:
                del self._queues[sample.key]
        elif sample in self._retries:
            self._retries.remove(sample)

    def _fail_all(self, error: Exception) -> None:
        for sample in [*itertools.chain(*self._queues.values()), *self._retries]:
            if not sample.output.done():
                sample.output.set_exception(error)
        self._queues.clear()
        self._retries.clear()

    def _give(self, replica: PredictReplica, batch: list[Waiting]) -> None:
        work = replica.submit(batch[0].kind, [sample.inputs for sample in batch], is_reserved=batch[0].deaths > 0)
        task = asyncio.create_task(self._settle(work, batch))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)
        self._metrics.predict_batch.observe(len(batch))

    async def _settle(self, work: asyncio.Future[list[SampleOutput | SampleError]], batch: list[Waiting]) -> None:
        try:
            for sample, output in zip(batch, await work, strict=True):
                if sample.output.done():
                    continue
                if isinstance(output, SampleError):
                    sample.output.set_exception(output)
                else:
                    sample.output.set_result(output)
        except ReplicaDied as error:
            self.set.log("retry", samples=len(batch), reason=str(error))
            for sample in batch:
                self._retry(sample, str(error))
            await self.set.notify()
        finally:
            self._wake.set()

    def _retry(self, sample: Waiting, reason: str) -> None:
        sample.deaths += 1
        if sample.deaths < _MAX_DEATHS:
            self._retries.append(sample)
        elif not sample.output.done():
            sample.output.set_exception(RunError(f"the sample ended {sample.deaths} replicas: {reason}"))


def _key(kind: str, inputs: Mapping[str, Array]) -> tuple[Any, ...]:
    return (kind, *((name, array.shape, array.dtype.str) for name, array in inputs.items()))


def _stacked(arrays: Sequence[Array]) -> Array:
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def _filled(tree: Any, arrays: Sequence[Array]) -> Any:
    if isinstance(tree, dict):
        return arrays[tree["$"]].tolist() if "$" in tree else {key: _filled(value, arrays) for key, value in tree[""].items()}
    return [_filled(value, arrays) for value in tree] if isinstance(tree, list) else tree
