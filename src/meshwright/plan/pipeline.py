"""Where a model can be cut into pipeline stages, and the cut that balances them. Pure reasoning over dataflow and profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Boundary:
    """A place between two layers, given by the module call that comes after it."""

    call: ModuleCall
    carries: tuple[Carry, ...]


def cut_stages(
    flow: Flow, profile: ModelProfile, count: int, tensor: TensorPolicy | None = None, across: TensorPolicy | None = None, cp: int = 1
) -> tuple[Stage, ...]:  # fmt: skip
    """`count` stages whose slowest is as quick as can be; a stage may hold fewer layers when its layers are dearer. What tensor
    parallelism has cut does not cross from one to the next, but for the features between layers that a grid's second axis deals out. Of
    sequences that `cp` ranks share, each sends its positions."""
    order, reads = _layers_in_order(flow, profile), _reads(flow, _learned(flow))
    inner = frozenset(dealt_strands(flow, tensor))
    shared = shared_values(Reader(flow, profile.layer_names), tensor, inner) if tensor is not None and tensor.sequence else {}
    dealt = _Dealt(inner, dealt_strands(flow, across), shared, cp, sequence_of(flow, cp) if cp > 1 else -1)
    found = {b.call.module: b for b in _boundaries(flow, [name for name, _ in order], dealt)}
    places = [i for i, (name, _) in enumerate(order) if name in found]
    if len(places) + 1 < count:
        raise RequestError(f"{count} stages: this model can be cut in {len(places)} places, so it has at most {len(places) + 1} stages")
    costs = {layer.name: layer.flops_forward + layer.flops_backward for layer in profile.layers}
    cuts = _balanced([costs.get(name, 0.0) for name, _ in order], places, count)
    edges = [0, *cuts, len(order)]
    starts = [0, *(found[order[c][0]].call.first for c in cuts), len(flow.operations)]
    stages = []
    for index in range(count):
        names = tuple(name for name, _ in order[edges[index] : edges[index + 1]])
        boundary = found[order[edges[index]][0]] if index else None
        stages.append(
            Stage(
                layers=names,
                entry=boundary.call.module if boundary else "",
                receives=boundary.carries if boundary else (),
                skips=tuple(dict.fromkeys(m.module for m in _done(flow, boundary.call.first, reads))) if boundary else (),
                also=_also(flow, starts[index], starts[index + 1], names),
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
    calls: dict[str, list[ModuleCall]] = {}
    for call in flow.modules:
        calls.setdefault(call.module, []).append(call)
    learned = _learned(flow)
    reads = _reads(flow, learned)
    found = []
    for name in layers[1:]:
        mine = calls.get(name, [])
        if len(mine) == 1 and mine[0].first > 0:
            carries = _crossing(flow, mine[0], learned, reads, dealt)
            if carries:
                found.append(_Boundary(mine[0], carries))
    return found


def _learned(flow: Flow) -> list[bool]:
    """Values that depend on parameters. All others (masks, position tables) every stage makes for itself."""
    found = [bool(v.parameter) and v.needs_grad for v in flow.values]
    for op in flow.operations:
        if any(found[v] for v in op.inputs):
            for value in op.outputs:
                found[value] = True
    return found


def _crossing(flow: Flow, entry: ModuleCall, learned: Sequence[bool], reads: Sequence[int], dealt: _Dealt) -> tuple[Carry, ...]:
    """What is made before `entry` and used from there on; empty if some of it cannot be caught at a module's door."""
    done = _done(flow, entry.first, reads)
    made = {v for op in flow.operations[: entry.first] for v in op.outputs if learned[v]}
    made |= {v for m in done for op in flow.operations[m.first : m.last] for v in op.outputs}
    used: dict[int, list[int]] = {}
    for index in range(entry.first, len(flow.operations)):
        for value in flow.operations[index].inputs:
            if value in made:
                used.setdefault(value, []).append(index)
    carries = []
    for value, ops in sorted(used.items()):
        after = [m for m in flow.modules if m.first >= entry.first and value in m.inputs]
        outer = [m for m in after if not any(o is not m and o.first <= m.first and m.last <= o.last for o in after)]
        noted = flow.values[value]
        cut = dealt.of(value, noted.strands)
        if cut is None or not all(any(m.first <= i < m.last for m in outer) for i in ops):
            return ()
        fixed = flow.samples.isdisjoint(s for dim in noted.strands for s in dim)
        size = math.prod(noted.shape) * noted.itemsize / (1 if fixed else flow.batch)
        size /= dealt.cp if any(dealt.positions in dim for dim in noted.strands) else 1
        sinks = tuple(Sink(m.module, m.inputs.index(value)) for m in outer)
        before = (m for m in flow.modules if m.last <= entry.first and m is not entry)  # dropout of nothing takes no operation at all
        sources = [m for m in before if value in m.outputs and sum(o.module == m.module for o in flow.modules) == 1]
        if sources:
            source = max(sources, key=lambda m: m.last - m.first)
            carries.append(Carry(source.module, source.outputs.index(value), sinks, size, False, *cut, fixed, noted.needs_grad))
        elif value in entry.inputs:
            carries.append(Carry(entry.module, entry.inputs.index(value), sinks, size, True, *cut, fixed, noted.needs_grad))
        else:
            return ()
    return tuple(carries)


def _done(flow: Flow, start: int, reads: Sequence[int]) -> list[ModuleCall]:
    """The outermost modules with parameters of their own that are done before a stage begins."""
    later = {m.module for m in flow.modules if m.last > start}
    done = [m for m in flow.modules if m.module and m.last <= start and m.module not in later and reads[m.last] > reads[m.first]]
    found: list[ModuleCall] = []
    for call in sorted(done, key=lambda m: (m.first, -m.last)):  # what lies inside another comes after it
        if not found or call.last > found[-1].last:
            found.append(call)
    return found


def _reads(flow: Flow, learned: Sequence[bool]) -> list[int]:
    """How many of the first n operations read a trainable parameter, for every n."""
    sums = [0]
    for op in flow.operations:
        sums.append(sums[-1] + any(learned[v] and bool(flow.values[v].parameter) for v in op.inputs))
    return sums


def _also(flow: Flow, start: int, end: int, layers: tuple[str, ...]) -> tuple[Borrowed, ...]:
    """Parameters that this stage's operations read although another stage's layer holds them."""
    found: dict[str, str] = {}
    calls = [m for m in flow.modules if m.module in layers]
    for index in range(start, end):
        for value in (flow.values[v] for v in flow.operations[index].inputs):
            name = value.parameter
            if name and value.needs_grad and not any(name.startswith(f"{layer}.") for layer in layers if layer != "(model)"):
                inside = [m.module for m in calls if m.first <= index < m.last]
                found.setdefault(name, max(inside, key=len, default=layers[0]))
    return tuple(Borrowed(name, layer) for name, layer in sorted(found.items()))


def _balanced(costs: Sequence[float], places: Sequence[int], count: int) -> list[int]:
    """Dynamic programming over the places: the cut into `count` runs whose dearest run is cheapest."""
    ends = [*places, len(costs)]
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(pieces: int, end: int) -> tuple[float, tuple[int, ...]]:
        """The best cut of what comes before ends[end] into `pieces`."""
        if pieces == 1:
            return sums[ends[end]], ()
        options = []
        for cut in range(pieces - 2, end):
            before, cuts = best(pieces - 1, cut)
            options.append((max(before, sums[ends[end]] - sums[ends[cut]]), (*cuts, ends[cut])))
        return min(options)

    return list(best(count, len(ends) - 1)[1])
