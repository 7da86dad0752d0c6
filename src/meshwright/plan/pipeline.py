"""Where a model can be cut into pipeline stages, and the cut that balances them. Pure reasoning over dataflow and profile."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Borrowed, Carry, Sink, Stage
from meshwright.core.strand import Flow, ModuleCall
from meshwright.core.tensor import TensorPolicy
from meshwright.plan.context import sequence_of
from meshwright.plan.reader import Reader
from meshwright.plan.sequence import shared_values
from meshwright.plan.tensor import dealt_strands

Row = list[tuple[float, tuple[int, ...]]]  # of what comes before each end: the dearest run of its best cut, and that


@dataclass(frozen=True)
class _Boundary:
    """A place between two layers, given by the module call that comes after it."""

    call: ModuleCall
    carries: tuple[Carry, ...]
    skips: tuple[str, ...]  # what is done before it, so that a stage that begins here leaves it out


def cut_stages(
    flow: Flow, profile: ModelProfile, count: int, tensor: TensorPolicy | None = None, across: TensorPolicy | None = None, cp: int = 1
) -> tuple[Stage, ...]:  # fmt: skip
    """`count` stages whose slowest is as quick as can be; a stage may hold fewer layers when its layers are dearer. What tensor
    parallelism has cut does not cross from one to the next, but for the features between layers that a grid's second axis deals out. Of
    sequences that `cp` ranks share, each sends its positions."""
    return cut_at(find_doors(flow, profile, tensor, across, cp), profile, count)


@dataclass(frozen=True)
class Doors:
    """Where a model can be cut, however many stages there are to be."""

    flow: Flow
    order: Sequence[str]  # layers by when they are needed
    found: Mapping[str, _Boundary]  # by the layer that comes after
    reads: Sequence[tuple[int, str]]  # operations that read a trainable parameter, and which, in order
    rows: list[Row] = field(default_factory=list, compare=False, repr=False)  # the best cuts into two stages, three, … so far

    @property
    def places(self) -> list[int]:
        return [i for i, name in enumerate(self.order) if name in self.found]


def find_doors(flow: Flow, profile: ModelProfile, tensor: TensorPolicy | None = None, across: TensorPolicy | None = None, cp: int = 1) -> Doors:
    order = [name for name, _ in _layers_in_order(flow, profile)]
    inner = frozenset(dealt_strands(flow, tensor))
    shared = shared_values(Reader.of(flow, profile.layer_names), tensor, inner) if tensor is not None and tensor.sequence else {}
    dealt = _Dealt(inner, dealt_strands(flow, across), shared, cp, sequence_of(flow, cp) if cp > 1 else -1)
    values = [(at, flow.values[v]) for at, op in enumerate(flow.operations) for v in op.inputs]
    reads = [(at, value.parameter) for at, value in values if value.parameter and value.needs_grad]
    return Doors(flow, order, {b.call.module: b for b in _boundaries(flow, order, dealt)}, reads)


def cut_at(doors: Doors, profile: ModelProfile, count: int) -> tuple[Stage, ...]:
    order, places = doors.order, doors.places
    if len(places) + 1 < count:
        raise RequestError(f"{count} stages: this model can be cut in {len(places)} places, so it has at most {len(places) + 1} stages")
    costs = {layer.name: layer.flops_forward + layer.flops_backward for layer in profile.layers}
    return stages_at(doors, _balanced([costs.get(name, 0.0) for name in order], places, count, doors.rows))


def stages_at(doors: Doors, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages between cuts, which are some of the doors' places."""
    flow, order, found = doors.flow, doors.order, doors.found
    edges, count = [0, *cuts, len(order)], len(cuts) + 1
    starts = [0, *(found[order[c]].call.first for c in cuts), len(flow.operations)]
    stages = []
    for index in range(count):
        names = tuple(order[edges[index] : edges[index + 1]])
        boundary = found[order[edges[index]]] if index else None
        stages.append(
            Stage(
                layers=names,
                entry=boundary.call.module if boundary else "",
                receives=boundary.carries if boundary else (),
                skips=boundary.skips if boundary else (),
                also=_also(doors, starts[index], starts[index + 1], names),
            )
        )
    return tuple(stages)


@dataclass(frozen=True)
class _Dealt:
    """Strands that may not cross from stage to stage, those that may, with their names, and values of which ranks share the positions."""

    avoid: frozenset[int]
    across: Mapping[int, str]
    shared: Mapping[int, tuple[str, int]]
    cp: int = 1
    positions: int = -1  # the strand that cp ranks share

    def of(self, value: int, strands: tuple[tuple[int, ...], ...]) -> tuple[str, int] | None:
        """(the strand of a value that is dealt out, along which dim), or None if the value cannot cross."""
        if value in self.shared:
            return self.shared[value] if self.shared[value][1] >= 0 else None
        carried = {s for dim in strands for s in dim}
        places = [(self.across[dim[0]], at) for at, dim in enumerate(strands) if len(dim) == 1 and dim[0] in self.across]
        if self.avoid & carried or len(places) != sum(s in self.across for s in carried):
            return None
        return places[0] if places else ("", 0)


def _layers_in_order(flow: Flow, profile: ModelProfile) -> list[tuple[str, int]]:
    """Layers by when they are first needed: when their module is called, or a parameter of theirs is read."""
    first: dict[str, int] = {}
    for call in flow.modules:
        first[call.module] = min(first.get(call.module, call.first), call.first)
    reads: dict[str, int] = {}
    for index, op in enumerate(flow.operations):
        for value in op.inputs:
            if flow.values[value].parameter:
                reads.setdefault(flow.values[value].parameter, index)
    end = len(flow.operations)
    placed = []
    for layer in profile.layers:
        at = first.get(layer.name, min((reads.get(t.name, end) for t in layer.tensors), default=end))
        placed.append((layer.name, end if layer.name == "(model)" else at))
    return sorted(placed, key=lambda item: item[1])


def _boundaries(flow: Flow, layers: Sequence[str], dealt: _Dealt) -> list[_Boundary]:
    """Places where everything that goes on can be sent: made by modules before, taken in by modules after."""
    index: _Index = flow.memo.once("boundaries", (), (), lambda: _Index(flow))
    found = []
    for name in layers[1:]:
        mine = index.calls.get(name, [])
        if len(mine) == 1 and mine[0].first > 0:
            carries = _crossing(index, mine[0], dealt)
            if carries:
                found.append(_Boundary(mine[0], carries, tuple(dict.fromkeys(m.module for m in index.done(mine[0].first)))))
    return found


class _Index:
    """A flow with what is asked of it at every boundary, however the model's layers are cut."""

    def __init__(self, flow: Flow) -> None:
        self.flow, self.learned = flow, _learned(flow)
        self.trained = _trained(flow, _reads(flow, self.learned))
        self.calls: dict[str, list[ModuleCall]] = {}
        self.takes: dict[int, list[ModuleCall]] = {}  # by value: the calls that are given it
        self.gives: dict[int, list[ModuleCall]] = {}  # and those that give it
        for call in flow.modules:
            self.calls.setdefault(call.module, []).append(call)
            for calls, values in ((self.takes, call.inputs), (self.gives, call.outputs)):
                for value in dict.fromkeys(values):
                    calls.setdefault(value, []).append(call)
        self.makers: dict[int, list[int]] = {}  # by value: the operations that make it
        self.uses: dict[int, list[int]] = {}
        for at, op in enumerate(flow.operations):
            for value in op.outputs:
                self.makers.setdefault(value, []).append(at)
            for value in op.inputs:
                self.uses.setdefault(value, []).append(at)
        self._spans = sorted((self.makers[v][0], uses[-1], v) for v, uses in self.uses.items() if v in self.makers)
        self.done, self.crossing = cache(lambda start: _done(self.trained, start)), cache(self._crossing)

    def _crossing(self, start: int) -> dict[int, list[int]]:
        """Values that are made before an operation and used from there on, and by whom."""
        found, done = {}, self.done(start)
        for made, last, value in self._spans:
            if made >= start:
                break
            if last >= start and (self.learned[value] or any(m.first <= at < m.last for m in done for at in self.makers[value])):
                found[value] = self.uses[value][bisect_left(self.uses[value], start) :]
        return found


def _learned(flow: Flow) -> list[bool]:
    """Values that depend on parameters. All others (masks, position tables) every stage makes for itself."""
    found = [bool(v.parameter) and v.needs_grad for v in flow.values]
    for op in flow.operations:
        if any(found[v] for v in op.inputs):
            for value in op.outputs:
                found[value] = True
    return found


def _crossing(index: _Index, entry: ModuleCall, dealt: _Dealt) -> tuple[Carry, ...]:
    """What is made before `entry` and used from there on; empty if some of it cannot be caught at a module's door."""
    flow = index.flow
    used = index.crossing(entry.first)
    carries = []
    for value, ops in sorted(used.items()):
        after = [m for m in index.takes.get(value, ()) if m.first >= entry.first]
        outer = [m for m in after if not any(o is not m and o.first <= m.first and m.last <= o.last for o in after)]
        noted = flow.values[value]
        cut = dealt.of(value, noted.strands)
        if cut is None or not all(any(m.first <= i < m.last for m in outer) for i in ops):
            return ()
        fixed = flow.samples.isdisjoint(s for dim in noted.strands for s in dim)
        size = math.prod(noted.shape) * noted.itemsize / (1 if fixed else flow.batch)
        size /= dealt.cp if any(dealt.positions in dim for dim in noted.strands) else 1
        sinks = tuple(Sink(m.module, m.inputs.index(value)) for m in outer)
        before = (m for m in index.gives.get(value, ()) if m.last <= entry.first and m is not entry)  # dropout of nothing takes no operation
        sources = [m for m in before if len(index.calls[m.module]) == 1]
        if sources:
            source = max(sources, key=lambda m: m.last - m.first)
            carries.append(Carry(source.module, source.outputs.index(value), sinks, size, False, *cut, fixed, noted.needs_grad))
        elif value in entry.inputs:
            carries.append(Carry(entry.module, entry.inputs.index(value), sinks, size, True, *cut, fixed, noted.needs_grad))
        else:
            return ()
    return tuple(carries)


Trained = list[tuple[ModuleCall, int]]


def _trained(flow: Flow, reads: Sequence[int]) -> Trained:
    """The calls of modules with parameters of their own, outer ones first, and where the last call of the same module ends."""
    last: dict[str, int] = {}
    for call in flow.modules:
        last[call.module] = max(last.get(call.module, 0), call.last)
    found = [(m, last[m.module]) for m in flow.modules if m.module and reads[m.last] > reads[m.first]]
    return sorted(found, key=lambda item: (item[0].first, -item[0].last))  # what lies inside another comes after it


def _done(trained: Trained, start: int) -> list[ModuleCall]:
    """The outermost modules with parameters of their own that are done before a stage begins."""
    found: list[ModuleCall] = []
    for call, last in trained:
        if last <= start and (not found or call.last > found[-1].last):
            found.append(call)
    return found


def _reads(flow: Flow, learned: Sequence[bool]) -> list[int]:
    """How many of the first n operations read a trainable parameter, for every n."""
    sums = [0]
    for op in flow.operations:
        sums.append(sums[-1] + any(learned[v] and bool(flow.values[v].parameter) for v in op.inputs))
    return sums


def _also(doors: Doors, start: int, end: int, layers: tuple[str, ...]) -> tuple[Borrowed, ...]:
    """Parameters that this stage's operations read although another stage's layer holds them."""
    found: dict[str, str] = {}
    here = frozenset(layers) - {"(model)"}
    first, last = (bisect_left(doors.reads, (at, "")) for at in (start, end))
    for index, name in doors.reads[first:last]:
        if name not in found and not _holds(here, name):
            inside = [m.module for m in doors.flow.modules if m.module in layers and m.first <= index < m.last]
            found[name] = max(inside, key=len, default=layers[0])
    return tuple(Borrowed(name, layer) for name, layer in sorted(found.items()))


def _holds(layers: frozenset[str], parameter: str) -> bool:
    while parameter := parameter.rpartition(".")[0]:
        if parameter in layers:
            return True
    return False


def _balanced(costs: Sequence[float], places: Sequence[int], count: int, rows: list[Row]) -> list[int]:
    """Dynamic programming over the places: the cut into `count` runs whose dearest run is cheapest. `rows` has what was found for fewer."""
    ends = [*places, len(costs)]
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    if not rows:
        rows.append([(sums[end], ()) for end in ends])
    for pieces in range(len(rows) + 1, count + 1):
        rows.append([_joined(rows[-1], sums, ends, pieces - 2, end) for end in range(len(ends))])
    return list(rows[count - 1][-1][1])


def _joined(
    row: Row, sums: Sequence[float], ends: Sequence[int], first: int, end: int
) -> tuple[float, tuple[int, ...]]:  # fmt: skip
    """One piece more: what lies before grows from cut to cut and the last piece shrinks, so the best cut is where they meet."""
    if end <= first:
        return math.inf, ()
    last = sums[ends[end]]
    meet = bisect_left(range(first, end), True, key=lambda cut: row[cut][0] >= last - sums[ends[cut]]) + first
    near = [max(row[cut][0], last - sums[ends[cut]]) for cut in (meet - 1, meet) if first <= cut < end]
    best = min(near)
    low, high = meet, meet
    while low > first and max(row[low - 1][0], last - sums[ends[low - 1]]) <= best:
        low -= 1
    while high < end and max(row[high][0], last - sums[ends[high]]) <= best:
        high += 1
    return min((best, (*row[cut][1], ends[cut])) for cut in range(low, high))
