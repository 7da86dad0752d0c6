"""Where ranks that share dealt strands meet because whole values enter cut parts of a model: meetings of gradients, in backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.core.strand import ModuleCall
from meshwright.core.tensor import Meet
from meshwright.plan.reader import Reader


class StandsInTheWayError(Exception):
    def __init__(self, strand: int, reason: str) -> None:
        self.strand, self.reason = strand, reason


@dataclass(frozen=True)
class Meets:
    """Makes meetings: what travels is a value of the flow, of which the other axis of a grid may deal out a strand."""

    reader: Reader
    names: Mapping[int, str]
    gathered: Mapping[str, str] = field(default_factory=dict)  # layers whose outputs the other axis gathers, and the strand

    def at(self, module: str, value: int, position: int = 0) -> Meet:
        noted, carried = self.reader.flow.values[value], self.reader.carried[value]
        size = math.prod(noted.shape) * noted.itemsize
        fixed = self.reader.flow.samples.isdisjoint(carried)
        across = next((self.names[s] for s in carried if s in self.names), "")
        return Meet(module, size if fixed else size / self.reader.flow.batch, position, fixed, across=across)

    def after(self, call: ModuleCall) -> Meet:
        """At a layer's output."""
        outer = [m for m in self.reader.around[call.first] if call.last <= m.last]
        final = tuple(m.module for m in outer if m.module and m.kept < call.last)
        found = self.at(call.module, call.outputs[0])
        return replace(found, final_in=final, across=self.gathered.get(call.module, found.across))


def entries(reader: Reader, meet: Meets, chosen: set[int], gathered: set[str]) -> tuple[list[Meet], list[str]]:
    """Meetings of gradients, and whole parameters whose gradients are partial."""
    met = _statistics(reader, chosen)
    edges: dict[int, set[int]] = {}
    partial: dict[str, None] = {}
    sums: dict[int, int] = {}  # values that are partial sums, and along which strand
    for index, op in enumerate(reader.flow.operations):
        for strand in chosen.intersection(op.sums):
            sums |= dict.fromkeys((reader.completion(index, strand) or (None, frozenset()))[1], strand)
        active = chosen & reader.at_work[index] or (sums and sums.keys() & set(op.inputs))
        call = reader.layer_of.get(index)
        opened = call is not None and call.module in gathered and bool(op.sums)
        if not active and not opened:
            continue
        for value in op.inputs:
            parameter = reader.origin.get(value)
            if not reader.flow.values[value].needs_grad or value in sums or value in met or chosen & reader.carried[value] or (opened and parameter):
                continue
            if parameter and chosen.intersection(op.sums):
                continue  # a bias, which the layer adds after the sum
            if parameter:
                partial[parameter] = None
            else:
                edges.setdefault(value, set()).add(index)
    lifted = _lift(reader, edges)
    return [m for value, ops in sorted(lifted.items()) for m in _place(reader, meet, value, ops, chosen, sums)], list(partial)


def _statistics(reader: Reader, chosen: set[int]) -> set[int]:
    """Values that come from dealt features through a norm's statistics alone: their gradients meet where those are made."""
    found: dict[int, int] = {}  # value → the strand
    flow = reader.flow
    for index, op in enumerate(flow.operations):
        if not found and chosen.isdisjoint(op.binds):
            continue
        made = [v for v in op.outputs if not chosen & reader.carried[v]]
        sources = [v for v in op.inputs if flow.values[v].needs_grad and v not in reader.origin]
        bound = next(iter(chosen.intersection(op.binds)), None)
        strands = [found[v] for v in sources if v in found]
        if bound is not None or (strands and len(strands) == len(sources)):
            found.update(dict.fromkeys(made, strands[0] if bound is None else bound))
        elif strands and not chosen & reader.at_work[index]:
            raise StandsInTheWayError(strands[0], f"{op.name} in {op.module or 'the loss'} uses a statistic of it")
    return set(found)


def _lift(reader: Reader, edges: dict[int, set[int]]) -> dict[int, set[int]]:
    """A gradient may be summed before an operation instead of after it (backward is linear), if all that uses its result is partial.
    So views inside a layer are passed by, until the value that the layer was given."""
    found: dict[int, set[int]] = {}
    work = dict(edges)
    while work:
        value, ops = work.popitem()
        maker = reader.producer.get(value)
        users = {i for i in reader.consumers.get(value, []) if reader.flow.values[value].needs_grad}
        if maker is not None and users <= ops and _passes(reader, maker, ops):
            source = next(v for v in reader.op(maker).inputs if reader.flow.values[v].needs_grad)
            into = work if source in work or source not in found else found
            into[source] = {maker} | into.get(source, set())
        else:
            found[value] = ops | found.get(value, set())
    return found


def _passes(reader: Reader, maker: int, ops: set[int]) -> bool:
    """An operation without parameters, on one value, inside the layer that needs the result."""
    wanted = [v for v in reader.op(maker).inputs if reader.flow.values[v].needs_grad]
    if len(wanted) != 1 or wanted[0] in reader.origin:
        return False
    return all(reader.layer_of.get(maker) is reader.layer_of.get(i) for i in ops)


def _place(reader: Reader, meet: Meets, value: int, ops: set[int], chosen: set[int], sums: Mapping[int, int]) -> list[Meet]:
    """One meeting at the smallest module that is given the value and holds all its partial uses; else one at each layer."""
    calls = reader.doors(value)
    users = set(reader.consumers.get(value, []))
    for call in calls:
        inside = {i for i in users if call.first <= i < call.last}
        if ops <= inside and inside <= ops:
            return [_entered(reader, meet, value, call)]
    found: dict[tuple[int, int], ModuleCall] = {}
    for index in ops:
        layer = next((m for m in calls if m.first <= index < m.last and {i for i in users if m.first <= i < m.last} <= ops), None)
        if layer is None:
            op = reader.op(index)
            strands = chosen & reader.at_work[index] or {sums[v] for v in op.inputs if v in sums}
            raise StandsInTheWayError(min(strands), f"a whole activation enters it inside {op.module or 'the loss'} ({op.name})")
        found[layer.first, layer.last] = layer
    outer = [m for m in found.values() if not any(o is not m and o.first <= m.first and m.last <= o.last for o in found.values())]
    return [_entered(reader, meet, value, m) for m in outer]  # once for each: a sum of sums would be too much


def _entered(reader: Reader, meet: Meets, value: int, call: ModuleCall) -> Meet:
    return replace(meet.at(call.module, value, call.inputs.index(value)), feeds=_feeds(reader, value, call))


def _feeds(reader: Reader, value: int, call: ModuleCall) -> tuple[str, ...]:
    """Layers inside a module that multiply a value that it is given by their matrix."""
    inside = (m for m in reader.takers(value) if m.kind == "linear" and call.first <= m.first and m.last <= call.last)
    return tuple(m.module for m in inside if m.inputs[0] == value)
