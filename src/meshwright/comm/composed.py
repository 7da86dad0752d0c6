"""Collectives that are composed of a backend's messages instead of its own collectives: `algorithms.py` as calls of `core.comm.Comm`.

A composed call is counted as the one operation that it is, with its bytes, as the backend's own would be: the ledger says what a plan asks for,
and a plan's routes say which way it goes. Its messages are counted nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from meshwright.comm import algorithms, shared
from meshwright.comm.lane import DONE, Lane
from meshwright.comm.ledger import Ledger
from meshwright.comm.pending import PutOff, Then
from meshwright.comm.window import Window
from meshwright.comm.wire import Finish, Wire
from meshwright.core.comm import Comm, Pending

_COMBINES: dict[str, algorithms.Combine] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
_WORKED = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
           torch.complex64, torch.complex128}  # fmt: skip


class Mail:
    """What all algorithms of one group and backend share: a group for messages alone, a lane in which calls are made one after the other,
    scratch memory, which is kept from call to call since fresh pages cost as much as the messages, and memory that ranks share if they do:
    all of the group (`window`), or those of this rank's node (`near`)."""

    def __init__(self, messages: Comm, name: str, window: Window | None = None, near: Window | None = None) -> None:
        self.comm, self.name, self.window, self.near = messages, name, window, near
        self.lane = Lane(name, kind="composed")
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def room(self, like: torch.Tensor) -> Callable[[int], torch.Tensor]:
        def found(numel: int) -> torch.Tensor:
            size = numel * like.element_size()
            if self._scratch.numel() < size or self._scratch.device != like.device:
                self._scratch = torch.empty(size, dtype=torch.uint8, device=like.device)
            return self._scratch[:size].view(like.dtype)

        return found


class Composed(PutOff):
    """The collectives of one group by one algorithm. `nodes` holds the places of each node's ranks, for two levels."""

    def __init__(self, mail: Mail, algorithm: str, ledger: Ledger, nodes: Sequence[Sequence[int]] = ()) -> None:
        self._mail, self._algorithm, self.ledger = mail, algorithm, ledger
        self.rank, self.size = mail.comm.rank, mail.comm.size
        self._nodes = nodes
        self._wire = Wire(f"{mail.name} {algorithm}", self.rank, _WORKED)

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum", factor: float | None = None) -> Pending:
        if self._away(tensor):
            here = tensor.cpu()
            return Then(self.all_reduce(here, name, op, factor), lambda: tensor.copy_(here))
        work, op, finish = self._wire.reduced(tensor, op)
        combine, scale = _reduction(work, op, factor, self.size)
        before, then = _scaling(work, scale)

        def run(talk: algorithms.Talk) -> None:
            before(work)
            whole, room = work.view(-1), self._mail.room(work)
            if self._algorithm == "shared":
                shared.all_reduce(self._window, whole, combine, then, name)
            elif self._algorithm == "tree":
                algorithms.by_tree(talk, whole, combine, room)
                then(whole)
            elif self._algorithm == "two-level":
                near = shared.Near(self._mail.near, name) if self._mail.near is not None and work.device.type == "cpu" else None
                algorithms.by_levels(talk, whole, combine, room, self._nodes, then, near)
            else:
                algorithms.by_halves(talk, whole, combine, room, self._algorithm, then)

        return self._put(name, "all_reduce", tensor, run, finish)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str = "sum", sizes: Sequence[int] | None = None
    ) -> Pending:  # fmt: skip
        if self._algorithm == "whole":
            return self._scatter_whole(output, tensor, name, op, sizes)
        if self._away(tensor):
            here = torch.empty(output.shape, dtype=output.dtype)
            return Then(self.reduce_scatter(here, tensor.cpu(), name, op, sizes), lambda: output.copy_(here))
        work, op, _ = self._wire.reduced(tensor, op)
        own = output if output.is_contiguous() and output.dtype == work.dtype else work.new_empty(output.shape)
        combine, scale = _reduction(work, op, None, self.size)
        before, then = _scaling(work, scale)

        def run(talk: algorithms.Talk) -> None:
            before(work)
            parts = work.view(-1).split(_lengths(work, sizes, self.size))
            if self._algorithm == "shared":
                shared.scatter(self._window, shared.spans_of(parts), parts[self.rank], own.view(-1), combine, name)
            else:
                algorithms.scatter(self._algorithm, talk, parts, own.view(-1), combine, self._mail.room(work))
            then(own)

        return self._put(name, "reduce_scatter", tensor, run, None if own is output else lambda: output.copy_(own))

    def _scatter_whole(self, output: torch.Tensor, tensor: torch.Tensor, name: str, op: str, sizes: Sequence[int] | None) -> Pending:
        self.ledger.add(name, "reduce_scatter", self.size, tensor.numel() * tensor.element_size())
        whole = tensor.contiguous()
        mine = whole.view(-1).split(_lengths(whole, sizes, self.size))[self.rank].view(output.shape)
        same = mine.data_ptr() == output.data_ptr()
        return Then(self._mail.comm.all_reduce(whole, name, op), lambda: output if same else output.copy_(mine))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, name: str, sizes: Sequence[int] | None = None) -> Pending:
        if self._away(tensor):
            here = torch.empty(output.shape, dtype=output.dtype)
            return Then(self.all_gather(here, tensor.cpu(), name, sizes), lambda: output.copy_(here))
        whole = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype, device=output.device)

        def run(talk: algorithms.Talk) -> None:
            parts = whole.view(-1).split(_lengths(whole, sizes, self.size))
            if parts[self.rank].data_ptr() != tensor.data_ptr():
                parts[self.rank].copy_(tensor.reshape(-1))
            if self._algorithm == "shared":
                shared.gather(self._window, shared.spans_of(parts), parts[self.rank].data_ptr(), name)
            else:
                algorithms.gather(self._algorithm, talk, parts)

        return self._put(name, "all_gather", output, run, None if whole is output else lambda: output.copy_(whole))

    @property
    def _window(self) -> Window:
        assert self._mail.window is not None, "memory is shared only where a window could be opened"
        return self._mail.window

    def _away(self, tensor: torch.Tensor) -> bool:
        """Memory is shared between processors' own: what lies elsewhere goes through it by a copy."""
        return self._algorithm == "shared" and tensor.device.type != "cpu"

    def _put(self, name: str, op: str, counted: torch.Tensor, run: Callable[[algorithms.Talk], None], finish: Finish | None) -> Pending:
        self.ledger.add(name, op, self.size, counted.numel() * counted.element_size())

        def job() -> None:
            with torch.no_grad():
                run(algorithms.Talk(self._mail.comm, name, tuple(range(self.size)), self.rank))
                if finish is not None:
                    finish()

        return self._mail.lane.put(name, [counted], counted, self._later, job) or DONE


def _reduction(work: torch.Tensor, op: str, factor: float | None, ranks: int) -> tuple[algorithms.Combine, float | None]:
    """How two values become one, and by what the result is multiplied."""
    if op == "mean" and not (work.is_floating_point() or work.is_complex()):
        raise ValueError(f"the mean of {work.dtype} is not a whole number: convert it, or take the sum")
    if op == "mean":
        return torch.add, (1.0 if factor is None else factor) / ranks
    return _COMBINES[op], factor


def _scaling(work: torch.Tensor, scale: float | None) -> tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]:
    """What is done before and after a sum. A sum's parts are scaled where they were summed, which costs least; in half precision the sum may
    be too large where the scaled one is not, so there everyone scales first."""
    scaled: Callable[[torch.Tensor], object] = (lambda t: t) if scale is None else (lambda t: t.mul_(scale))
    nothing: Callable[[torch.Tensor], object] = lambda t: t  # noqa: E731
    return (scaled, nothing) if work.dtype == torch.float16 else (nothing, scaled)


def _lengths(whole: torch.Tensor, sizes: Sequence[int] | None, ranks: int) -> list[int]:
    """Elements for each rank."""
    if sizes is None:
        return [whole.numel() // ranks] * ranks
    rows = sum(sizes)
    return [n * (whole.numel() // rows if rows else 0) for n in sizes]
