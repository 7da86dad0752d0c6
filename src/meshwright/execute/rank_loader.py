"""A single-device script's loader for one rank: the script's batch is the global batch, and each rank gets its share of it."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from meshwright.core.backends import backend_traits
from meshwright.core.errors import RequestError
from meshwright.core.plan import Plan
from meshwright.core.task import Batch
from meshwright.execute.batch_share import Share, split_batch
from meshwright.execute.process_groups import ProcessGroups
from meshwright.execute.random_state import state_from_text, state_to_text
from meshwright.execute.session import Session, find_sample_count, sample_count

_LOADER_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "generator")

_loaders: weakref.WeakSet[RankLoader] = weakref.WeakSet()  # of this process, for functions that torch's users call without naming a loader
_clock = itertools.count(1)


class RandomStream:
    """A state of torch's global generator that is the same on all ranks. Samplers draw from it, so that every rank has the same order of samples;
    the rank's own state, from which dropout draws, stays as it is."""

    def __init__(self, state: Tensor) -> None:
        self._state, self._is_drawing = state, False

    def get_state(self) -> Tensor:
        return self._state

    def set_state(self, state: Tensor) -> None:
        self._state = state

    @contextmanager
    def drawing(self) -> Iterator[None]:
        if self._is_drawing:  # a loader's prefetching asks its sampler while the loader itself is being made
            yield
            return
        before = torch.get_rng_state()
        torch.set_rng_state(self._state)
        self._is_drawing = True
        try:
            yield
        finally:
            self._state, self._is_drawing = torch.get_rng_state(), False
            torch.set_rng_state(before)


class OneShotLoader:
    """A loader whose batches can be read only once, such as a generator: the one that planning looks at is yielded again."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        self._loader = loader
        self._iterator: Iterator[Batch] | None = None
        self._peeked: list[Batch] = []

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def peek(self) -> Batch:
        """The first batch; StopIteration if there is none."""
        if not self._peeked:
            self._iterator = self._iterator if self._iterator is not None else iter(self._loader)
            self._peeked.append(next(self._iterator))
        return self._peeked[0]

    def __iter__(self) -> Iterator[Batch]:
        iterator, self._iterator = self._iterator if self._iterator is not None else iter(self._loader), None
        while True:
            try:
                batch = self._peeked.pop() if self._peeked else next(iterator)
            except StopIteration:
                return
            yield batch


def keep_first_batch(loader: Iterable[Batch]) -> Iterable[Batch]:
    """The loader, or one that can be looked into, if reading its first batch would lose it: a generator, or a stream of samples that is one."""
    if isinstance(loader, DataLoader):
        dataset = loader.dataset
        is_one_shot = isinstance(dataset, IterableDataset) and iter(dataset) is iter(dataset)
    else:
        is_one_shot = isinstance(loader, Iterator)
    return OneShotLoader(loader) if is_one_shot else loader


@dataclass
class _Pass:
    """A pass over a loader: batches that it has yielded, and the generators' states at its begin."""

    num_yielded: int = 0
    generators: tuple[str, ...] = ()


class RankLoader:
    """Iterates over this rank's shares of the batches of a user's loader; `share` describes the one that was yielded last.

    A plan of one rank reads the loader as it is. `groups` are the ranks that the shares are split over, for `gather` and `mean`. In a pipeline a
    share is split into `num_micro_batches` of one size: the plan's number, or one when not training.
    """

    def __init__(
        self, loader: Iterable[Batch], plan: Plan, rank: int, *, device: torch.device, stream: RandomStream | None = None,
        groups: ProcessGroups | None = None, num_micro_batches: int | None = None,
    ) -> None:  # fmt: skip
        check_loader(loader)
        self.plan, self.device, self.groups = plan, device, groups
        self.rank, self.data_rank = rank, plan.mesh.data_rank(rank)
        self.share: Share | None = None
        self.yielded_at = 0  # by a clock that counts the items of all loaders
        self.num_yielded = 0
        self.is_open = False  # a pass over it is under way
        self.pass_callbacks: list[Callable[[], None]] = []  # called where a pass begins or ends, which all ranks do together
        self.batch_callbacks: list[Callable[[], None]] = []  # called when the script asks for the next batch, before that is read
        self._loader = loader
        self._stream = stream or RandomStream(torch.Generator().manual_seed(0).get_state())
        self._num_micro_batches = num_micro_batches or plan.micro_batches
        self._has_said_copies, self._num_skipped = False, 0
        self.passes_done = 0
        self._pass = _Pass()
        self._global_state: Tensor | None = None  # torch's generator as the checkpoint had it
        self._follows_stream = False  # torch's global generator goes on as the one that ranks drew the order from
        self._next_pass: _Pass | None = None  # to go on with, after a checkpoint was loaded
        self.world_group = _world_group()  # a process may join another one later
        _loaders.add(self)

    def __getattr__(self, name: str) -> Any:
        """What a script reads of its own loader: `dataset`, `batch_size`, `sampler`, …"""
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        self._notify()
        num_before = self.num_yielded
        self._num_skipped = 0
        to_skip = self._begin_pass()
        try:
            for share, batch in self._skipped(self._shares(), to_skip):
                self.share, self.yielded_at, self.is_open = share, next(_clock), True
                self.num_yielded += 1
                self._pass.num_yielded += 1
                yield pytree.tree_map(lambda t: t.to(self.device, non_blocking=True) if torch.is_tensor(t) else t, batch)
                for callback in self.batch_callbacks:
                    callback()
            self.passes_done, self._pass = self.passes_done + 1, _Pass()
        finally:
            self.is_open = False
        if self.num_yielded == num_before and not to_skip:
            raise self._nothing_error()
        self._notify()

    # -- the position, for checkpoints --

    def state_dict(self) -> dict[str, Any]:
        """Passes that are over, and how far the current one is: what its generators were when it began, and the batches that it has yielded."""
        position = {"passes": self.passes_done, "yielded": self._pass.num_yielded, "generators": list(self._pass.generators)}
        return {**position, "ranks": self.plan.world, "sizes": self._sizes()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes effect where the next pass begins: it goes on with the one that was saved. Another data set or batch would give it other samples."""
        if state["yielded"] and state.get("sizes", self._sizes()) != self._sizes():
            was, now = (f"{samples} samples in batches of {batch}" for samples, batch in (state["sizes"], self._sizes()))
            line = f"the checkpoint is from the middle of a pass over {was}, and the loader has {now}"
            raise RequestError(f"{line}: use the same loader, or a checkpoint from between two passes")
        self.passes_done = state["passes"]
        generators = list(state["generators"])
        self._follows_stream = False
        if generators and (state["ranks"] == 1) != (self.plan.world == 1):  # one device draws the order from the global generator, ranks from theirs
            generators[:2] = reversed(generators[:2])
            self._follows_stream = self.plan.world == 1
        self._next_pass = _Pass(state["yielded"], tuple(generators)) if state["yielded"] else None

    def _sizes(self) -> list[int | None]:
        """Samples of the data set and of a batch, where the loader knows them."""
        dataset = getattr(self._loader, "dataset", None)
        length = len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset) else None
        batch = getattr(self._loader, "batch_size", None)
        return [length, batch if isinstance(batch, int) else None]

    def _begin_pass(self) -> int:
        """Note what the pass begins with; returns how many of its batches an earlier run has had."""
        if self._next_pass is None:
            self._pass = _Pass(0, tuple(state_to_text(generator.get_state()) for generator in self._generators()))
            return 0
        self._pass, self._next_pass = self._next_pass, None
        self._global_state = torch.get_rng_state()
        for generator, state in zip(self._generators(), self._pass.generators, strict=True):
            generator.set_state(state_from_text(state))
        return self._pass.num_yielded

    def _generators(self) -> list[Any]:
        """What an order of samples is drawn from: torch's global generator, the stream that ranks share, and generators of the loader's own."""
        owners = (self._loader, getattr(self._loader, "sampler", None))
        own = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
        return [torch.default_generator, self._stream, *dict.fromkeys(own)]

    def _skipped(self, shares: Iterator[tuple[Share, Batch]], count: int) -> Iterator[tuple[Share, Batch]]:
        """Without the first `count` batches; the global generator is then as it was, since the checkpoint has its state."""
        if not count:
            yield from shares
            return
        before = self._global_state
        for _ in itertools.islice(shares, count):
            pass
        if before is not None and not self._follows_stream:
            torch.set_rng_state(before)
        yield from shares

    @property
    def raw_loader(self) -> Iterable[Batch]:
        return self._loader

    @property
    def global_batch(self) -> int:
        """Samples in the global batch of the item that was yielded last."""
        return self.share.global_batch if self.share is not None else self.plan.global_batch

    def split_also(self, loader: Iterable[Batch], num_micro_batches: int | None = None) -> RankLoader:
        """Another loader for the same ranks; their samplers draw from one stream, as on one device."""
        return RankLoader(
            loader, self.plan, self.rank, device=self.device, stream=self._stream, groups=self.groups, num_micro_batches=num_micro_batches
        )

    def split_for(self, data_rank: int) -> Share:
        """Another data rank's share of the item that was yielded last."""
        return split_batch(self.plan, data_rank, self.global_batch)

    def splits(self, plan: Plan) -> bool:
        """Whether the plan gives every rank the samples that it has here."""
        mine, theirs = ([p.mesh.data_rank(rank) for rank in range(p.world)] for p in (self.plan, plan))
        return mine == theirs and self.plan.balance.shares == plan.balance.shares

    def _notify(self) -> None:
        for callback in self.pass_callbacks:
            callback()

    def _nothing_error(self) -> RequestError:
        if self._num_skipped:
            return RequestError("no batch of the loader fits the pipeline: choose a batch size that its data ranks and micro-batches divide")
        return RequestError("the loader yields nothing: its data set is empty, drop_last leaves out its only batch, or it is a generator at its end")

    # -- shares --

    def _shares(self) -> Iterator[tuple[Share, Batch]]:
        loader = self._loader
        if self.plan.world == 1:
            for batch in _begin(loader):
                size = find_sample_count(batch) or self.plan.global_batch
                yield Share(0, size, size, min_samples=size), batch
        elif isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
            yield from self._split_indices(loader)
        else:
            yield from self._split_batches(loader)

    def _split_indices(self, loader: DataLoader[Any]) -> Iterator[tuple[Share, Batch]]:
        """Read only this rank's samples: batches of indices are the same on every rank, and are split before anything is loaded."""
        sampler = _RankBatchSampler(self, loader.batch_sampler)
        options: dict[str, Any] = {option: getattr(loader, option) for option in _LOADER_OPTIONS}
        with self._stream.drawing():  # torch's iterators draw a seed for their workers
            batches = _begin(DataLoader(loader.dataset, batch_sampler=sampler, **options))
        for batch in batches:
            yield sampler.shares.popleft(), batch

    def _split_batches(self, loader: Iterable[Batch]) -> Iterator[tuple[Share, Batch]]:
        """A stream has no indices: every rank reads the global batch and keeps its share."""
        for batch in _begin(loader):
            if (share := self.split(sample_count(batch))) is not None:
                yield share, _take(batch, share)

    def split(self, global_batch: int) -> Share | None:
        """This rank's share of a batch; None if a pipeline, whose micro-batches have one size, cannot split it: then every rank skips it."""
        degree, num_micro_batches = self.plan.mesh.data_parallel_size, self._num_micro_batches
        share = split_batch(self.plan, self.data_rank, global_batch)
        if self.plan.mesh.pp > 1 and num_micro_batches > 1:
            counts = {split_batch(self.plan, rank, global_batch).num_samples for rank in range(degree)}
            if any(count % num_micro_batches for count in counts):
                split = f"{degree} data ranks with {num_micro_batches} equal micro-batches each"
                self._say(f"a batch of {global_batch} samples is skipped: it cannot be split over {split}")
                self._num_skipped += 1
                return None
        if global_batch < degree and not self._has_said_copies:
            self._has_said_copies = True
            what = "several ranks compute the same sample, which counts once in gradients, mw.gather and mw.mean"
            self._say(f"a batch of {global_batch} {'sample' if global_batch == 1 else 'samples'} for {degree} data ranks: {what}")
        return share

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(f"meshwright: {text}", file=sys.stderr)


class _RankBatchSampler:
    """The user's own batch sampler, in the same order on every rank, restricted to this rank's share."""

    def __init__(self, loader: RankLoader, batch_sampler: Iterable[list[Any]] | None) -> None:
        assert batch_sampler is not None
        self.loader, self.batch_sampler = loader, batch_sampler
        self.shares: deque[Share] = deque()  # of batches that are being loaded

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        iterator = iter(self.batch_sampler)
        while True:
            with self.loader._stream.drawing():
                try:
                    indices = list(next(iterator))
                except StopIteration:
                    return
            if (share := self.loader.split(len(indices))) is not None:
                self.shares.append(share)
                yield indices[share.first_sample : share.first_sample + share.num_samples]


def _begin(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Iterate a loader. Its workers are forked from this process: garbage that refers to process groups must be gone before, and a worker's own
    collections must leave alone what it has inherited, since the threads that would be ended are not in the worker."""
    if not getattr(loader, "num_workers", 0):
        return iter(loader)
    gc.collect()
    gc.freeze()
    try:
        return iter(loader)
    finally:
        gc.unfreeze()


def _take(batch: Batch, share: Share) -> Batch:
    first, last = share.first_sample, share.first_sample + share.num_samples
    return pytree.tree_map(lambda t: t[first:last] if torch.is_tensor(t) and t.dim() else t, batch)


def check_loader(loader: object) -> None:
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise RequestError(
            "the loader has a DistributedSampler, and prepare splits batches over ranks itself: use the loader of a single-device script"
        )


def prepare_loaders(loaders: Sequence[Iterable[Batch]], session: Session, device: torch.device) -> list[RankLoader]:
    """A loader of this rank for each of a script's; one that was prepared with another model serves this one too. Collective: generators of all ranks
    are set to the first rank's state, whatever seeds their scripts have used."""
    groups, plan, prepared = session.applied.groups, session.plan, []
    stream = RandomStream(_broadcast_state(torch.get_rng_state(), groups))
    for loader in loaders:
        if isinstance(loader, RankLoader):
            prepared.append(loader)
            continue
        for owner in (loader, getattr(loader, "sampler", None)):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator) and generator.device.type == "cpu":
                generator.set_state(_broadcast_state(generator.get_state(), groups))
        prepared.append(RankLoader(loader, plan, groups.rank, device=device, stream=stream, groups=groups))
    for given in prepared:
        if not given.splits(plan):
            raise RequestError(
                f"the loader was prepared for mesh {given.plan.mesh}, and this model's mesh {plan.mesh} splits a batch differently: "
                "give both models one mesh, or give prepare the loader of a single-device script"
            )
    return prepared


def _broadcast_state(state: Tensor, groups: ProcessGroups) -> Tensor:
    on_host = groups.world.size == 1 or "cpu" in backend_traits(dist.get_backend()).devices
    device = "cpu" if on_host else "cuda"
    state = state.to(device)
    groups.world.broadcast(state, "init/rng").wait()
    return state.cpu()


def current_loader(own: Collection[RankLoader] = ()) -> RankLoader | None:
    """The loader whose item a script works on: the one that yielded last, among passes that are under way before those that are over, and among a
    model's `own` loaders before others. None if no loader has yielded anything."""
    return max(used_loaders(), key=lambda loader: (loader.is_open, loader in own, loader.yielded_at), default=None)


def latest_loader() -> RankLoader | None:
    """A loader that was prepared, if possible one that was used."""
    current = current_loader()
    return current if current is not None else next((loader for loader in _loaders if loader.world_group is _world_group()), None)


def used_loaders() -> list[RankLoader]:
    return [loader for loader in _loaders if loader.share is not None and loader.world_group is _world_group()]


def _world_group() -> object:
    return dist.group.WORLD if dist.is_initialized() else None
