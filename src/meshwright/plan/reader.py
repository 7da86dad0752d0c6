"""A model's dataflow with the questions that planners ask of it: who carries a strand, who uses a value, where partial sums are completed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.core.context import LOSS
from meshwright.core.strand import Flow, ModuleCall, Operation
from meshwright.core.tensor import Cut, Rewrite
from meshwright.plan.sizes import SLICES, counted_sizes

# What may happen to a partial sum before it is completed: a sum of results is the result of the sum.
_VIEWS = ("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "clone", "_to_copy", "expand", "squeeze", "unsqueeze", "unbind", "split")
_LINEAR = frozenset((*_VIEWS, "mul", "mul_", "div", "div_", "neg", "sum", "mean", "slice", "select", "index", "index_select"))
_ADDING = frozenset(("add", "add_", "sub", "sub_", "index_add", "index_add_", "scatter_add", "scatter_add_"))
_ZEROS = frozenset(("zeros", "zeros_like", "new_zeros"))


@dataclass(frozen=True)
class Weight:
    """A parameter and the strands of its dims."""

    name: str
    value: int
    numel: int


class Reader:
    """A flow with the questions that choosing asks of it."""

    @classmethod
    def of(cls, flow: Flow, layers: Collection[str] = ()) -> Reader:
        """The one for this flow, which many ask."""
        return flow.memo.once("reader", (), tuple(layers), lambda: cls(flow, layers))

    def __init__(self, flow: Flow, layers: Collection[str] = ()) -> None:
        self.flow = flow
        self._layers = frozenset(name for name in layers if not any(other.startswith(f"{name}.") for other in layers))
        self.weights = [Weight(v.parameter, i, math.prod(v.shape)) for i, v in enumerate(flow.values) if v.parameter and v.needs_grad]
        self.weight_at = {weight.value: at for at, weight in enumerate(self.weights)}
        self.carried = [frozenset(s for dim in v.strands for s in dim) for v in flow.values]
        self.at_work = [frozenset().union(*(self.carried[v] for v in (*op.inputs, *op.outputs))) for op in flow.operations]  # strands, by operation
        self.consumers: dict[int, list[int]] = {}
        self.producer: dict[int, int] = {}
        for index, op in enumerate(flow.operations):
            for value in op.inputs:
                self.consumers.setdefault(value, []).append(index)
            for value in op.outputs:
                self.producer.setdefault(value, index)
        self.layer_of = {op: call for call in sorted(flow.modules, key=lambda m: m.first - m.last) for op in range(call.first, call.last)}
        self.calls_of: dict[str, list[ModuleCall]] = {}  # by the module's name
        self.around: list[list[ModuleCall]] = [[] for _ in flow.operations]  # by operation
        self._takers: dict[int, list[ModuleCall]] = {}  # by value: the calls that are given it
        self._givers: dict[int, list[ModuleCall]] = {}  # and those that give it
        for call in flow.modules:
            self.calls_of.setdefault(call.module, []).append(call)
            for index in range(call.first, call.last):
                self.around[index].append(call)
            for calls, values in ((self._takers, call.inputs), (self._givers, call.outputs)):
                for value in dict.fromkeys(values):
                    calls.setdefault(value, []).append(call)
        self.given = frozenset().union(*(self.carried[v] for v in flow.inputs))
        self._uses = self._index_uses()
        self.touched: dict[int, list[int]] = {}  # strand → operations that sum over it, need it whole or slice it
        for index, op in enumerate(flow.operations):
            sliced = self.carried[op.inputs[0]] if op.name in SLICES and op.call < 0 and op.inputs else ()
            for strand in {*op.sums, *op.binds, *sliced}:
                self.touched.setdefault(strand, []).append(index)
        self.total = sum(w.numel for w in self.weights)
        self.origin: dict[int, str] = {w.value: w.name for w in self.weights}  # values that are a parameter, or a view of one
        for op in flow.operations:
            if len(op.inputs) == 1 and op.inputs[0] in self.origin:
                self.origin.update(dict.fromkeys(op.outputs, self.origin[op.inputs[0]]))

    def op(self, index: int) -> Operation:
        return self.flow.operations[index]

    def doors(self, value: int) -> list[ModuleCall]:
        """The modules that are given a value, smallest first. Where `layers` may lie on several pipeline stages, those inside one of
        them: of a larger module a stage may run the end alone, on a value that it has received behind the module's door."""
        kept = (m for m in self._takers.get(value, ()) if not self._layers or self._in_layer(m.module))
        return sorted(kept, key=lambda m: m.last - m.first)

    def takers(self, value: int) -> Sequence[ModuleCall]:
        """All the modules that are given a value."""
        return self._takers.get(value, ())

    def givers(self, value: int) -> Sequence[ModuleCall]:
        """The modules that give a value out."""
        return self._givers.get(value, ())

    def _in_layer(self, module: str) -> bool:
        """Whether it is one of the layers, or inside one."""
        while module and module not in self._layers:
            module = module.rpartition(".")[0]
        return module in self._layers

    def uses(self, strand: int) -> list[Cut]:
        """The parameters and buffers that carry a strand."""
        return self._uses.get(strand, [])

    def _index_uses(self) -> dict[int, list[Cut]]:
        found: dict[int, list[Cut]] = {}
        for value in self.flow.values:
            if value.parameter:
                for dim, strands in enumerate(value.strands):
                    for at, strand in enumerate(strands):
                        cut = Cut(value.parameter, dim, self._prod(strands[:at]), self._prod(strands[at + 1 :]))
                        found.setdefault(strand, []).append(cut)
        return found

    def _prod(self, strands: Iterable[int]) -> int:
        return math.prod(self.flow.sizes[s] for s in strands)

    def completion(self, index: int, strand: int) -> tuple[ModuleCall, frozenset[int]] | None:
        """Where the partial sums of one product are completed: the module at whose output, and the values on the way that are partial.
        Layers add their bias afterwards; any other module may only do to partial sums what commutes with adding them up."""
        op, call = self.op(index), self.layer_of.get(index)
        if call is None or sum(strand in self.carried[v] for v in op.inputs) < 2:
            return None
        if call.kind in ("linear", "conv"):
            return call, frozenset()
        partial = set(op.outputs)
        for later in range(index + 1, len(self.flow.operations)):
            then = self.op(later)
            met = partial.intersection(then.inputs)
            if not met or later >= call.last:
                if met and not met.issubset(call.outputs):
                    return None
                continue
            if not self._commutes(then, partial):
                return None
            partial.update(then.outputs)
        return (call, frozenset(partial)) if partial.intersection(call.outputs) else None

    def _commutes(self, op: Operation, partial: set[int]) -> bool:
        """Whether doing it to partial sums and adding up gives the same as adding up first."""
        places = [i for i, v in enumerate(op.inputs) if v in partial]
        if op.name in _LINEAR:
            return len(places) == 1 and (places == [0] or op.name in ("mul", "mul_"))  # a square or a divisor does not
        started = [v for v in op.inputs if v not in partial and self.flow.values[v].floating]
        return op.name in _ADDING and all(v in self.producer and self.op(self.producer[v]).name in _ZEROS for v in started)

    def frame(self, index: int, among: Iterable[str] | None = None) -> str:
        """The module (of some, if given) in whose code an operation is; what is in none is the loss's own."""
        if among is None:
            call = self.layer_of.get(index)
            return LOSS if call is None else call.module
        around = [c for c in self.around[index] if c.module in among]
        return min(around, key=lambda c: c.last - c.first).module if around else LOSS

    def place(self, index: int) -> str:
        """The same in words."""
        found = self.frame(index)
        return "the loss" if found == LOSS else found or "the model"

    def rewrites(self, names: Mapping[int, str], whole: Collection[int] = ()) -> tuple[list[Rewrite], list[Rewrite], list[Rewrite]]:
        """Numbers in the model's code that count one of some strands, and not for values that stay whole; those of them that count other
        things too; and those that cut a strand at a place where it does not divide."""
        found: dict[Rewrite, None] = {}
        spared: set[tuple[str, str, int, int, int]] = set()
        uneven = []
        for op in (o for o in self.flow.operations if o.call >= 0):
            call, made = self.flow.calls[op.call], self.flow.values[op.outputs[0]]
            for position, number, at, length in counted_sizes(self.flow, op):
                strand = next((s for s in made.strands[at] if s in names and op.outputs[0] not in whole), None)
                key = (call.module, call.function, len(call.sizes), position, number)
                if strand is None:
                    spared.add(key)
                    continue
                rewrite = Rewrite(*key, names[strand], call.dim, length)
                uneven += [rewrite] if length and number % made.shape[at] else []
                found[rewrite] = None
        unclear = [r for r in found if (r.module, r.function, r.rank, r.position, r.number) in spared]
        return list(found), unclear, uneven
