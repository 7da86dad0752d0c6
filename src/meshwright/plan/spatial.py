"""Spatial parallelism, deciding half: follow the positions of a sample through the dataflow, and say of each layer whether it can work
on a block of them, which neighbours' borders it needs for that, and where blocks must become whole again.

The walk goes through the operations once. What has no way to work on blocks sends it back: the blocks are gathered at the output of the
last module before it, and the walk begins again. After a gather every rank does the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.core.errors import RequestError
from meshwright.core.spatial import (
    Door,
    Norm,
    Regather,
    Slide,
    SpatialPolicy,
    block,
    choose_grid,
    halo_widths,
    is_local,
    lengths,
    obstacle,
    show_grid,
    widest,
)
from meshwright.core.strand import Flow, ModuleCall, Operation
from meshwright.plan.reader import Reader

_RANDOM = frozenset(("native_dropout", "dropout", "bernoulli", "bernoulli_", "rand_like", "randn_like", "uniform_", "normal_", "exponential_"))
_FUNCTIONS = {"conv": "conv{}d", "max": "max_pool{}d", "mean": "avg_pool{}d"}  # the calls that the run can give a halo
_NORMS = ("batch_norm", "group_norm")
_SHARE = 0.1  # of all activations: with less of them cut, ranks would mostly do the same work
Axes = tuple[int, ...]  # for each dim of a value, the grid's dim that it is cut along, or -1


def choose_spatial(flow: Flow, ways: int, grid: tuple[int, ...] = ()) -> SpatialPolicy:
    """How `ways` ranks share the positions of a model's samples. Raises a RequestError with the reason if they cannot."""
    dims = next((len(op.window.kernel) for op in flow.operations if op.window is not None and op.window.kind == "conv"), 0)
    instead = f"use --mesh dp={ways}"
    if not dims:
        raise RequestError(f"cp={ways}: no convolution here whose positions could be cut: use context parallelism of sequences, or --mesh dp={ways}")
    grid = _fitted(grid, ways, dims) if grid else choose_grid(ways, dims)
    reader = Reader.of(flow)
    roots = [call for call in flow.modules if not call.module]
    doors = {p for p, v in enumerate(roots[0].inputs) if _is_field(flow, v, grid)} if roots else set()
    gathers: dict[tuple[str, int], str] = {}
    reason = "its input has too few positions, or none"
    while doors:
        walk = _Walk(reader, grid, doors, gathers)
        try:
            walk.run()
        except _NeedsWholeError as need:
            reason = need.reason
            found = walk.gather_sites().before(need.values, need.at)
            doors -= {place for place in found if isinstance(place, int)}
            gathers.update({place: need.reason for place in found if not isinstance(place, int) and place not in gathers})
            continue
        if walk.seen.share < _SHARE:
            raise RequestError(f"cp={ways}: blocks would hold {walk.seen.share:.0%} of this model's activations ({reason}): {instead}")
        return walk.policy()
    raise RequestError(f"cp={ways}: nothing in this model can be cut over positions ({reason}): {instead}")


def _fitted(grid: tuple[int, ...], ways: int, dims: int) -> tuple[int, ...]:
    """A grid that was asked for, over the last dims."""
    if math.prod(grid) != ways or len(grid) > dims:
        better = show_grid(choose_grid(ways, dims)[-2:])
        raise RequestError(f"spatial={show_grid(grid)} is not a grid of cp={ways} ranks over at most {dims} dims: use {better}")
    return (1,) * (dims - len(grid)) + grid


def _is_field(flow: Flow, value: int, grid: tuple[int, ...]) -> bool:
    noted = flow.values[value]
    sizes = noted.shape[2:]
    return noted.floating and len(sizes) == len(grid) and all(n >= ways for n, ways in zip(sizes, grid, strict=True))


def _is_norm(op: Operation) -> bool:
    """The operation that a norm of torch's comes down to; it may cast and count beside it."""
    return op.function in _NORMS and op.function in op.name


class _NeedsWholeError(Exception):
    """An operation cannot work on blocks of these values."""

    def __init__(self, values: Iterable[int], at: int, reason: str) -> None:
        super().__init__(reason)
        self.values, self.at, self.reason = tuple(values), at, reason


@dataclass
class _Seen:
    """What one walk has found."""

    slides: list[Slide] = field(default_factory=list)  # one for each call
    norms: list[Norm] = field(default_factory=list)
    gathers: list[Regather] = field(default_factory=list)
    cut: dict[str, str] = field(default_factory=dict)  # module → how its window or norm works on blocks
    worked: dict[str, None] = field(default_factory=dict)  # all modules that do
    whole: dict[tuple[str, str], set[tuple[int, ...]]] = field(default_factory=dict)  # (module, function) → sizes it is called with, whole
    parts: dict[int, list[int]] = field(default_factory=dict)  # operation → its inputs that were blocks
    made: float = 0.0  # elements made in blocks, and in all
    total: float = 0.0

    @property
    def share(self) -> float:
        return self.made / max(self.total, 1.0)


class _Walk:
    """One pass over the operations, with blocks made at the doors and gathered where earlier passes found that they must be."""

    def __init__(self, reader: Reader, grid: tuple[int, ...], doors: set[int], gathers: Mapping[tuple[str, int], str]) -> None:
        self.reader, self.flow, self.grid, self.doors, self.asked = reader, reader.flow, grid, doors, gathers
        self.roots = [call for call in self.flow.modules if not call.module]
        self.axes: dict[int, Axes] = {}  # values that are blocks
        self.seen = _Seen()

    def run(self) -> None:
        reads, ends = list(self.flow.reads), list(self.flow.modules)
        for index, op in enumerate(self.flow.operations):
            self._open(index)
            while ends and ends[0].last <= index:
                self._leave(ends.pop(0))
            while reads and reads[0].at <= index:
                read = reads.pop(0)
                if self.axes.get(read.value, (-1,) * (read.dim + 1))[read.dim] >= 0:
                    raise _NeedsWholeError([read.value], index, f"the code of {op.module or 'the model'} reads the size of a block")
            self._do(index, op)
        for call in ends:
            self._leave(call)
        self._check_calls()

    def _open(self, index: int) -> None:
        whole = (-1, -1, *range(len(self.grid)))
        for root in self.roots:
            if root.first == index:
                self.axes.update({root.inputs[p]: whole for p in self.doors})

    def _leave(self, call: ModuleCall) -> None:
        """At a module's end some of its outputs become whole; at the model's end all of them, since the loss is everybody's."""
        for position, value in enumerate(call.outputs):
            if value not in self.axes:
                continue
            if (call.module, position) in self.asked:
                self._gather(call, position, value)
            elif not call.module:
                raise _NeedsWholeError([value], call.last, "the loss needs all positions")
        if not call.module:
            for position in self.doors:
                self.axes.pop(call.inputs[position], None)

    def _gather(self, call: ModuleCall, position: int, value: int) -> None:
        axes, noted = self.axes.pop(value), self.flow.values[value]
        dims = tuple(axes.index(a) for a in range(len(self.grid)))
        sizes = tuple(noted.shape[d] for d in dims)
        around = [m for m in self.flow.modules if m.first <= call.first and call.last <= m.last]
        final = tuple(m.module for m in around if m.module and m.kept < call.last)
        size = math.prod(noted.shape) * noted.itemsize / math.prod(sizes) / self.flow.batch
        self.seen.gathers.append(Regather(call.module, position, dims, sizes, size, final))

    # -- operations --

    def _do(self, index: int, op: Operation) -> None:
        made = sum(math.prod(self.flow.values[v].shape) for v in op.outputs)
        self.seen.total += made
        parts = [v for v in op.inputs if v in self.axes]
        if not parts:
            if op.window is not None or _is_norm(op):
                self.seen.whole.setdefault((op.module, op.function), set()).add(self.flow.values[op.inputs[0]].shape[2:])
            return
        self.seen.made += made
        self.seen.parts[index] = parts
        self.seen.worked[op.module or "(model)"] = None
        if op.name in _RANDOM:
            raise self._stop(index, "draws random numbers, which depend on the layout")
        if op.window is not None:
            self._slide(index, op)
        elif _is_norm(op):
            self._norm(index, op)
        else:
            self._pass(index, op)

    def _stop(self, index: int, why: str) -> _NeedsWholeError:
        op = self.flow.operations[index]
        return _NeedsWholeError(self.seen.parts[index], index, f"{op.name} in {op.module or 'the model'} {why}")

    def _plain(self, index: int, op: Operation) -> tuple[int, ...]:
        """The spatial sizes of an input laid out as (sample, channel, positions …), cut along the positions."""
        axes = self.axes.get(op.inputs[0], ())
        if axes != (-1, -1, *range(len(self.grid))) or any(v in self.axes for v in op.inputs[1:]):
            raise self._stop(index, "takes positions in another order")
        return self.flow.values[op.inputs[0]].shape[2:]

    def _slide(self, index: int, op: Operation) -> None:
        sizes, window = self._plain(index, op), op.window
        assert window is not None
        given, out = self.flow.values[op.inputs[0]], op.outputs[0]
        if len(op.outputs) > 1 and self._is_used(op.outputs[1]):
            raise self._stop(index, "gives indices into all positions")
        made = self.flow.values[out].shape[2:]
        slide = Slide(op.module, op.function, window, sizes, made, given.shape[1] * given.itemsize, given.needs_grad)
        if window.kind == "grow":
            if any(n % ways for n, ways in zip(sizes, self.grid, strict=True)):
                raise self._stop(index, f"grows {show_grid(sizes)} positions, which {show_grid(self.grid)} ranks do not share evenly")
        elif obstacle(slide, self.grid):
            raise self._stop(index, f"cannot work on blocks: {obstacle(slide, self.grid)}")
        elif not is_local(slide, self.grid):
            if op.function != _FUNCTIONS[window.kind].format(len(window.kernel)):
                raise self._stop(index, f"is called by {op.function}, which cannot be given a halo")
            self.seen.slides.append(slide)
        self.axes[out] = self.axes[op.inputs[0]]
        self._note(op.module, sizes, slide)

    def _is_used(self, value: int) -> bool:
        return bool(self.reader.consumers.get(value)) or any(value in call.outputs for call in self.flow.modules)

    def _norm(self, index: int, op: Operation) -> None:
        sizes, given = self._plain(index, op), self.flow.values[op.inputs[0]]
        fixed = op.function == "batch_norm"
        # A group norm's statistics come out of the operation too, a number for each sample and group.
        numbers = given.shape[1] if fixed else math.prod(self.flow.values[op.outputs[1]].shape) // self.flow.batch
        self.seen.norms.append(Norm(op.module, op.function, sizes, numbers, max(given.itemsize, 4), fixed, given.needs_grad))
        self.axes[op.outputs[0]] = self.axes[op.inputs[0]]
        self._note(op.module, sizes)

    def _note(self, module: str, sizes: tuple[int, ...], slide: Slide | None = None) -> None:
        halo = f", halo {show_grid(halo_widths(slide, self.grid))}" if slide in self.seen.slides else ""
        self.seen.cut[module or "(model)"] = f"{show_grid(sizes)} positions in blocks of {show_grid(widest(sizes, self.grid))}{halo}"

    def _pass(self, index: int, op: Operation) -> None:
        """Whatever treats all positions alike: the dims that are cut come out as they went in, and nothing is needed whole."""
        kept: dict[tuple[int, ...], int] = {}
        for value in self.seen.parts[index]:
            for strands, axis in zip(self.flow.values[value].strands, self.axes[value], strict=True):
                if axis >= 0 and kept.setdefault(strands, axis) != axis:
                    raise self._stop(index, "mixes one spatial dim with another")
        touched = {s for strands in kept for s in strands}
        if touched.intersection(op.sums) or touched.intersection(op.binds):
            raise self._stop(index, "needs all positions")
        if op.call >= 0 and not self._elsewhere(op, kept):
            raise self._stop(index, "is given sizes by the code")
        for value in op.inputs:
            if value not in self.axes and any(strands in kept for strands in self.flow.values[value].strands):
                raise self._stop(index, "takes in something whole, position by position")
        for value in op.outputs:
            axes = tuple(kept.get(strands, -1) for strands in self.flow.values[value].strands)
            if sorted(a for a in axes if a >= 0) != list(range(len(self.grid))):
                raise self._stop(index, "lays positions out anew")
            self.axes[value] = axes

    def _elsewhere(self, op: Operation, kept: Mapping[tuple[int, ...], int]) -> bool:
        """A split by sizes along a dim that is not cut."""
        call = self.flow.calls[op.call]
        return call.function.startswith("split") and self.flow.values[op.inputs[0]].strands[call.dim] not in kept

    def _check_calls(self) -> None:
        """The run tells calls inside a module apart by function, kernel and the block's sizes; where those do not tell, all is whole."""
        told: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], Slide | Norm] = {}
        every: list[Slide | Norm] = [*self.seen.slides, *self.seen.norms]
        for found in every:
            kernel = found.window.kernel if isinstance(found, Slide) else ()
            for rank in range(math.prod(self.grid)):
                local = lengths(block(found.sizes, self.grid, rank))
                alike = told.setdefault((found.module, found.function, kernel, local), found) != found
                inside = (m for (m, f), sizes in self.seen.whole.items() if f == found.function and local in sizes)
                if alike or any(m == found.module or not found.module or m.startswith(f"{found.module}.") for m in inside):
                    index = next(i for i in self.seen.parts if self.flow.operations[i].module == found.module)
                    raise self._stop(index, "is called on blocks and on other tensors of a block's size")

    # -- what came of it --

    def gather_sites(self) -> _GatherSites:
        return _GatherSites(self.flow, self.roots, self.doors, self.asked, self.seen.parts)

    def policy(self) -> SpatialPolicy:
        seen, roots = self.seen, self.roots
        doors = tuple(Door(p, self.flow.values[roots[0].inputs[p]].shape[2:]) for p in sorted(self.doors))
        after = next((f"{self.asked[g.module, g.position]}; gathered after {g.module or 'the model'}" for g in seen.gathers), "")
        owners = [w.name.rpartition(".")[0] for w in self.reader.weights]
        layers = dict.fromkeys([*(op.module for op in self.flow.operations if op.window is not None), *owners])
        fates = {n: seen.cut.get(n, "on blocks" if n in seen.worked else f"whole: {after}") for n in (name or "(model)" for name in layers)}
        return SpatialPolicy(self.grid, doors, tuple(seen.slides), tuple(seen.norms), tuple(seen.gathers), tuple(seen.worked), fates)


@dataclass(frozen=True)
class _GatherSites:
    """Where blocks may become whole again: at the outputs of modules, or nowhere, so that an input of the model is not split."""

    flow: Flow
    model_calls: Sequence[ModuleCall]
    split_inputs: Collection[int]
    known: Collection[tuple[str, int]]  # gathers that earlier passes have asked for
    block_inputs: Mapping[int, Sequence[int]]  # by operation: its inputs that are blocks

    def before(self, values: Iterable[int], op_index: int) -> set[tuple[str, int] | int]:
        """Where to gather so that these values are whole at an operation: (module, output), or the number of an input that is not to be split."""
        found: set[tuple[str, int] | int] = set()
        for value in values:
            site = self._last_output(value, op_index)
            maker = max((i for i in range(op_index) if value in self.flow.operations[i].outputs), default=-1)
            if site is not None:
                found.add(site)
            elif maker >= 0 and maker in self.block_inputs:
                found |= self.before(self.block_inputs[maker], maker)
            else:
                found |= {p for call in self.model_calls for p in self.split_inputs if call.inputs[p] == value} or set(self.split_inputs)
        return found

    def _last_output(self, value: int, op_index: int) -> tuple[str, int] | None:
        """The last module to have given the value out, the outermost of those; one that is called once, so that its other calls stay cut."""
        calls = [c for c in self.flow.modules if value in c.outputs and c.last <= op_index and self._is_inside_model(c)]
        often = {c.module: sum(m.module == c.module for m in self.flow.modules) > len(self.model_calls) for c in calls}
        fresh = [c for c in calls if not often[c.module] and (c.module, c.outputs.index(value)) not in self.known]
        if not fresh:
            return None
        last = max(fresh, key=lambda c: (c.last, c.last - c.first))
        return last.module, last.outputs.index(value)

    def _is_inside_model(self, call: ModuleCall) -> bool:
        return any(model.first <= call.first and call.last <= model.last for model in self.model_calls)
