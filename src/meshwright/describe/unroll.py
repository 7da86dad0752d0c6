"""Folding the dataflow: of a run of equal blocks the first two are traced; of the others the second's entries are copied, with their own
parameters, values and strands.

A block is copied only if its inputs have the shapes and carry the strands that its representative's had, and if all that the representative
gave out carries strands which something outside of it carries too. Then tracing it would have written exactly the copy: what it shares with
the rest of the model it shares through its inputs, and everything else is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.core.strand import Read
from meshwright.describe.book import Book, Dims, Frame, Noted, Op
from meshwright.describe.layers import Layer, behaviour, find_layers
from meshwright.describe.strands import Strand, leaves, tie


class Writer(Protocol):
    """Who writes the book."""

    book: Book
    frames: list[Frame]
    muted: bool

    def number(self, tensor: torch.Tensor) -> int: ...

    def adopt(self, tensor: torch.Tensor, value: int) -> None: ...


@dataclass(frozen=True)
class _Marks:
    """How far the book had got."""

    values: int
    ops: int
    modules: int
    calls: int

    @staticmethod
    def of(book: Book) -> _Marks:
        return _Marks(len(book.values), len(book.ops), len(book.modules), len(book.calls))


@dataclass
class _Seen:
    """A representative: what it was given and gave, and its entries in the book."""

    name: str
    shapes: tuple[Any, ...]
    inputs: list[int]
    outputs: list[Any]  # a leaf each: the number of a tensor with the tensor itself, or any other value
    spec: Any
    first: _Marks
    last: _Marks
    reads: set[Read]
    kept: int
    own: dict[str, int]  # its parameters and buffers, by their names inside of it
    local: set[int] | None = None  # strands that nothing outside of it carries, once that was asked


@contextmanager
def unrolled(model: nn.Module, writer: Writer) -> Iterator[None]:
    """While active, blocks from the third of their kind on are copied."""
    kinds: dict[str, list[Layer]] = {}
    for layer in find_layers(model):
        if not layer.owner and list(layer.module.children()):
            kinds.setdefault(behaviour(layer.module), []).append(layer)
    changed: list[tuple[nn.Module, Any]] = []
    named = {value.parameter: number for number, value in enumerate(writer.book.values) if value.parameter}
    for blocks in kinds.values():
        if len(blocks) > 2 and _apart(blocks, named):
            seen: list[_Seen] = []
            for layer in blocks[1:]:
                changed.append((layer.module, vars(layer.module).get("forward")))
                layer.module.forward = _stand_in(writer, layer, layer.module.forward, seen, _own(named, layer.name))
    try:
        yield
    finally:
        for module, own in reversed(changed):
            del module.forward
            if own is not None:
                module.forward = own


def _own(named: dict[str, int], block: str) -> dict[str, int]:
    return {name.removeprefix(f"{block}."): number for name, number in named.items() if name.startswith(f"{block}.")}


def _apart(blocks: Sequence[Layer], named: dict[str, int]) -> bool:
    """Each block has every one of its parameters to itself: a tied one is noted under its first name."""
    return all(f"{b.name}.{name}" in named for b in blocks for name, _ in (*b.module.named_parameters(), *b.module.named_buffers()))


def _stand_in(
    writer: Writer, layer: Layer, forward: Callable[..., Any], seen: list[_Seen], own: dict[str, int]
) -> Callable[..., Any]:  # fmt: skip
    def call(*args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        shapes = _shapes(given)
        numbers = [writer.number(t) for t in given if torch.is_tensor(t)]
        if seen and _alike(writer.book, seen[0], layer.name, shapes, numbers, own):
            return _copied(writer, seen[0], layer.name, numbers, own)
        if seen:
            return forward(*args, **kwargs)
        return _watch(writer, layer, lambda: forward(*args, **kwargs), seen, own, (shapes, numbers))

    return call


def _watch(
    writer: Writer, layer: Layer, run: Callable[[], Any], seen: list[_Seen], own: dict[str, int], given: tuple[tuple[Any, ...], list[int]]
) -> Any:  # fmt: skip
    """Run the representative, and remember which entries are its own."""
    book, first = writer.book, _Marks.of(writer.book)
    before, book.reads = book.reads, set()
    try:
        output = run()
    finally:
        reads, book.reads = book.reads, before | book.reads
    found, spec = pytree.tree_flatten(output)
    outputs = [(writer.number(leaf), leaf) if torch.is_tensor(leaf) else leaf for leaf in found]
    seen.append(_Seen(layer.name, given[0], given[1], outputs, spec, first, _Marks.of(book), reads, writer.frames[-1].kept, own))
    return output


def _shapes(given: Sequence[Any]) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():  # what is asked here is not what the model's code asks
        return tuple((tuple(t.shape), t.dtype, t.requires_grad) if torch.is_tensor(t) else repr(t)[:80] for t in given)


def _strands(dims: Dims) -> list[list[int]]:
    return [[id(s) for s in leaves(dim)] for dim in dims]


def _alike(book: Book, seen: _Seen, name: str, shapes: tuple[Any, ...], numbers: list[int], own: dict[str, int]) -> bool:
    """Whether copying says what tracing would."""
    if name == seen.name or shapes != seen.shapes or own.keys() != seen.own.keys():
        return False
    if any(_strands(book.values[a].dims) != _strands(book.values[b].dims) for a, b in zip(seen.inputs, numbers, strict=True)):
        return False
    if [seen.inputs.index(n) for n in seen.inputs] != [numbers.index(n) for n in numbers]:
        return False  # what was one tensor for it is two for this one, or the other way round
    if seen.local is None:
        seen.local = _local(book, seen, own)
    out = {s for leaf in seen.outputs if isinstance(leaf, tuple) for s in _carried(book, (leaf[0],))}
    return out <= _carried(book, seen.inputs)


def _local(book: Book, seen: _Seen, own: dict[str, int]) -> set[int]:
    """The strands that nothing outside of the representative carries. That stays so: who does not have a strand cannot tie it later."""
    theirs = {*seen.own.values(), *own.values(), *range(seen.first.values, seen.last.values)}
    inside = (*range(seen.first.values, seen.last.values), *seen.own.values())
    return _carried(book, inside) - _carried(book, (n for n in range(len(book.values)) if n not in theirs))


def _carried(book: Book, numbers: Iterable[int]) -> set[int]:
    return {id(s) for number in numbers for dim in book.values[number].dims for s in leaves(dim)}


def _copied(writer: Writer, seen: _Seen, name: str, numbers: list[int], own: dict[str, int]) -> Any:
    """Write the block's entries, and give what it gives."""
    copy = _Copy(writer.book, seen, name, numbers, own)
    copy.write()
    for frame in writer.frames:
        frame.kept = copy.op(seen.kept) if seen.kept > seen.first.ops else frame.kept
    writer.muted = True
    try:
        leaves_out = [_like(writer, copy.value(leaf[0]), leaf[1]) if isinstance(leaf, tuple) else leaf for leaf in seen.outputs]
    finally:
        writer.muted = False
    return pytree.tree_unflatten(leaves_out, seen.spec)


def _like(writer: Writer, value: int, known: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        made = torch.empty_like(known).requires_grad_(known.requires_grad)
    writer.adopt(made, value)
    return made


class _Copy:
    """One block's entries, made of its representative's."""

    def __init__(self, book: Book, seen: _Seen, name: str, numbers: list[int], own: dict[str, int]) -> None:
        self.book, self.seen, self.name = book, seen, name
        self.begin = _Marks.of(book)
        self._values = dict(zip(seen.inputs, numbers, strict=True)) | {number: own[key] for key, number in seen.own.items()}
        self._local = seen.local or set()
        self._strand: dict[int, Strand] = {}

    def value(self, number: int) -> int:
        if self.seen.first.values <= number < self.seen.last.values:
            return number - self.seen.first.values + self.begin.values
        return self._values.get(number, number)

    def _all(self, numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self.value, numbers))

    def op(self, number: int) -> int:
        return number - self.seen.first.ops + self.begin.ops

    def _call(self, number: int) -> int:
        return number - self.seen.first.calls + self.begin.calls if number >= self.seen.first.calls else number

    def _named(self, module: str) -> str:
        inside = module == self.seen.name or module.startswith(f"{self.seen.name}.")
        return self.name + module[len(self.seen.name) :] if inside else module

    def _own(self, strands: Sequence[Strand]) -> list[Strand]:
        """The strands as this block has them: its own where they are its representative's own."""
        found = []
        for strand in leaves(strands):
            if id(strand) in self._local:
                strand = self._strand.setdefault(id(strand), Strand(strand.size))
            found.append(strand)
        return found

    def write(self) -> None:
        book, first, last = self.book, self.seen.first, self.seen.last
        for number in self.seen.own.values():
            for mine, theirs in zip(book.values[self._values[number]].dims, book.values[number].dims, strict=True):
                tie(mine, self._own(theirs))
            book.values[self._values[number]].needs_grad |= book.values[number].needs_grad
        book.values += [self._noted(value) for value in book.values[first.values : last.values]]
        book.ops += [self._operation(op) for op in book.ops[first.ops : last.ops]]
        for call in book.modules[first.modules : last.modules]:
            copy = replace(call, module=self._named(call.module), first=self.op(call.first), last=self.op(call.last))
            kept = self.op(call.kept) if call.kept >= 0 else -1
            book.modules.append(replace(copy, inputs=self._all(call.inputs), outputs=self._all(call.outputs), kept=kept))
        book.calls += [replace(call, module=self._named(call.module)) for call in book.calls[first.calls : last.calls]]
        book.reads |= {Read(self.value(r.value), r.dim, self.op(r.at)) for r in self.seen.reads}

    def _noted(self, value: Noted) -> Noted:
        return replace(value, dims=[self._own(dim) for dim in value.dims])

    def _operation(self, op: Op) -> Op:
        call, function, numbers = op.source
        return Op(
            op.name,
            self._named(op.module),
            list(self._all(op.inputs)),
            list(self._all(op.outputs)),
            self._own(op.sums),
            self._own(op.binds),
            (self._call(call) if call >= 0 else call, function, numbers),
            op.window,
        )
