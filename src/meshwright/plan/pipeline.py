"""Where a model can be cut into pipeline stages, and the cut that balances them. Pure reasoning over dataflow and profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Borrowed, Carry, Sink, Stage
from meshwright.core.strand import Flow, ModuleCall
from meshwright.core.tensor import TensorPolicy
from meshwright.plan.tensor import dealt_strands


@dataclass(frozen=True)
class _Boundary:
    """A place between two layers, given by the module call that comes after it."""

    call: ModuleCall
    carries: tuple[Carry, ...]


def cut_stages(flow: Flow, profile: ModelProfile, count: int, tensor: TensorPolicy | None = None) -> tuple[Stage, ...]:
    """`count` stages whose slowest is as quick as can be; a stage may hold fewer layers when its layers are dearer. Nothing that tensor
    parallelism has cut crosses from one to the next."""
    order, reads = _layers_in_order(flow, profile), _reads(flow, _learned(flow))
    found = {b.call.module: b for b in _boundaries(flow, [name for name, _ in order], frozenset(dealt_strands(flow, tensor)))}
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


def _boundaries(flow: Flow, layers: Sequence[str], avoid: frozenset[int]) -> list[_Boundary]:
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
            carries = _crossing(flow, mine[0], learned, reads, avoid)
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


def _crossing(flow: Flow, entry: ModuleCall, learned: Sequence[bool], reads: Sequence[int], avoid: frozenset[int]) -> tuple[Carry, ...]:
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
        if not all(any(m.first <= i < m.last for m in outer) for i in ops) or avoid.intersection(s for dim in noted.strands for s in dim):
            return ()
        size = math.prod(noted.shape) * noted.itemsize / flow.batch
        sinks = tuple(Sink(m.module, m.inputs.index(value)) for m in outer)
        sources = [m for m in flow.modules if m.last <= entry.first and value in m.outputs and sum(o.module == m.module for o in flow.modules) == 1]
        if sources:
            source = max(sources, key=lambda m: m.last - m.first)
            carries.append(Carry(source.module, source.outputs.index(value), sinks, size))
        elif value in entry.inputs:
            carries.append(Carry(entry.module, entry.inputs.index(value), sinks, size, at_door=True))
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
