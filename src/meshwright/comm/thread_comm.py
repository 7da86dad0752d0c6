"""`core.comm.Comm` among threads of one process, for tests: collectives on plain tensors without a process group or sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.async_comm import ChainedWork
from meshwright.comm.comm_ledger import Ledger
from meshwright.comm.work_queue import COMPLETED
from meshwright.core.comm import PeerTensors, Work

_TIMEOUT_S = 60.0


class ThreadWorld:
    """The mailbox of a world of threads. Messages are copies, so a sender never waits for a reader."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._mailbox: dict[Any, Any] = {}
        self._changed = threading.Condition()

    def run(self, job: Callable[[ThreadComm], Any]) -> list[Any]:
        """Run `job` on every rank concurrently; return the results in rank order, or raise the first error."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: job(ThreadComm(self, rank, tuple(range(self.size)))), range(self.size)))

    def post(self, key: Any, value: Any) -> None:
        with self._changed:
            self._mailbox[key] = value
            self._changed.notify_all()

    def fetch(self, key: Any, *, remove: bool) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._mailbox, _TIMEOUT_S):
                raise TimeoutError(f"no rank posted {key} within {_TIMEOUT_S:.0f} s")
            return self._mailbox.pop(key) if remove else self._mailbox[key]


class ThreadComm:
    """`core.comm.Comm` for one thread of a `ThreadWorld`; `subgroup` makes the comm of a subset of its ranks."""

    def __init__(self, world: ThreadWorld, rank: int, ranks: tuple[int, ...], ledger: Ledger | None = None) -> None:
        self._world, self._ranks = world, ranks
        self.rank, self.size = rank, len(ranks)
        self.ledger = ledger or Ledger()
        self._call_count = 0
        self._send_counts: dict[int, int] = {}
        self._receive_counts: dict[int, int] = {}

    @property
    def sync(self) -> ThreadComm:
        return self

    def subgroup(self, ranks: Sequence[int]) -> ThreadComm:
        """The comm of these ranks, which include this one."""
        return ThreadComm(self._world, list(ranks).index(self.rank), tuple(self._ranks[r] for r in ranks), self.ledger)

    def all_reduce(self, tensor: Tensor, name: str, op: str = "sum", factor: float | None = None) -> Work:
        fetch = self._count_and_post("all_reduce", name, tensor, tensor if factor is None else tensor * factor)
        return _lazy_work(lambda: tensor.copy_(_reduce_parts(fetch(), op)))

    def reduce(self, tensor: Tensor, name: str, op: str = "sum", root: int = 0) -> Work:
        fetch = self._count_and_post("reduce", name, tensor, tensor)
        return _lazy_work(lambda: tensor.copy_(_reduce_parts(fetch(), op)) if self.rank == root else fetch())

    def reduce_scatter(self, output: Tensor, tensor: Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None) -> Work:
        fetch = self._count_and_post("reduce_scatter", name, tensor, tensor)
        rows = list(sizes) if sizes is not None else [output.numel()] * self.size

        def finish() -> None:
            total = _reduce_parts(fetch(), op)
            part = (total if sizes is not None else total.reshape(-1)).split(rows)[self.rank]
            output.copy_(part.reshape(output.shape))

        return _lazy_work(finish)

    def all_gather(self, output: Tensor, tensor: Tensor, name: str, sizes: Sequence[int] | None = None) -> Work:
        fetch = self._count_and_post("all_gather", name, output, tensor)
        return _lazy_work(lambda: _copy_parts(output, fetch()))

    def all_to_all(self, output: Tensor, tensor: Tensor, name: str, recv_counts: Sequence[int], send_counts: Sequence[int]) -> Work:
        fetch = self._count_and_post("all_to_all", name, tensor, list(tensor.clone().split(list(send_counts))))
        return _lazy_work(lambda: _copy_parts(output, [parts[self.rank] for parts in fetch()]))

    def broadcast(self, tensor: Tensor, name: str, source: int = 0) -> Work:
        fetch = self._count_and_post("broadcast", name, tensor, tensor)
        return _lazy_work(lambda: tensor.copy_(fetch()[source]))

    def gather(self, output: Tensor | None, tensor: Tensor, name: str, root: int = 0) -> Work:
        fetch = self._count_and_post("gather", name, tensor, tensor, self.size)
        return _lazy_work(lambda: _copy_parts(output, fetch()) if output is not None and self.rank == root else fetch())

    def scatter(self, output: Tensor, tensor: Tensor | None, name: str, root: int = 0) -> Work:
        fetch = self._count_and_post("scatter", name, output, tensor, self.size)
        return _lazy_work(lambda: output.copy_(fetch()[root].reshape(self.size, -1)[self.rank].reshape(output.shape)))

    def exchange(self, sends: PeerTensors, receives: PeerTensors, name: str) -> Work:
        for peer, tensor in sends:
            self.ledger.add(name, "send", 2, tensor.nbytes)
            number = self._send_counts[peer] = self._send_counts.get(peer, 0) + 1
            self._world.post((self._ranks, "message", self.rank, peer, number), tensor.clone())
        keys = []
        for peer, _ in receives:
            number = self._receive_counts[peer] = self._receive_counts.get(peer, 0) + 1
            keys.append((self._ranks, "message", peer, self.rank, number))
        return _lazy_work(lambda: [t.copy_(self._world.fetch(key, remove=True)) for key, (_, t) in zip(keys, receives, strict=True)])

    def barrier(self) -> None:
        self._post_to_all(None)()

    def _count_and_post(self, op: str, name: str, counted: Tensor, value: Any, multiplier: int = 1) -> Callable[[], list[Any]]:
        self.ledger.add(name, op, self.size, counted.nbytes * multiplier)
        return self._post_to_all(value.clone() if isinstance(value, Tensor) else value)

    def _post_to_all(self, value: Any) -> Callable[[], list[Any]]:
        """Post `value` once for each rank of the group; return a function that fetches the values that all ranks posted, in rank order."""
        self._call_count += 1
        call = self._call_count
        for reader in range(self.size):
            self._world.post((self._ranks, call, self.rank, reader), value)
        return lambda: [self._world.fetch((self._ranks, call, writer, self.rank), remove=True) for writer in range(self.size)]


def _lazy_work(finish: Callable[[], object]) -> Work:
    """A call whose result is computed by `wait`."""
    return ChainedWork(COMPLETED, finish)


def _reduce_parts(parts: list[Tensor], op: str) -> Tensor:
    """Reduce in rank order; floating-point types of 16 bits and fewer in fp32."""
    dtype = parts[0].dtype
    narrow = dtype in (torch.float16, torch.bfloat16) or (dtype.is_floating_point and dtype.itemsize == 1)
    stacked = torch.stack([p.float() if narrow else p.to(torch.uint8) if dtype == torch.bool else p for p in parts])
    if dtype == torch.bool:
        op = {"sum": "max", "product": "min"}.get(op, op)
    if op in ("max", "min"):
        wide = stacked if stacked.is_floating_point() else stacked.to(torch.int64)
        result: Tensor = wide.amax(0) if op == "max" else wide.amin(0)
    else:
        result = stacked.prod(0) if op == "product" else stacked.sum(0)
    return (result / len(parts) if op == "mean" else result).to(dtype)


def _copy_parts(output: Tensor, parts: list[Tensor]) -> None:
    output.copy_(torch.cat([p.reshape(-1) for p in parts]).reshape(output.shape))
