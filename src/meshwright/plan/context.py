"""Which positions of a sequence ranks can share, and what that takes (see [Note: positions]). Pure reasoning over a model's dataflow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from meshwright.core.context import LOSS, POSITIONS, Attended, ContextPolicy, Entered, FieldCut, Made
from meshwright.core.errors import RequestError
from meshwright.core.strand import Flow, Operation
from meshwright.core.tensor import Cut, Meet, TensorPolicy
from meshwright.core.workload import ITEM_BYTES, LOW
from meshwright.plan.reader import Reader
from meshwright.plan.reductions import LIKELIHOODS, Reductions
from meshwright.plan.tensor import dealt_strands

# Calls whose results are the same, or equally random, whatever positions they are for: their size says all.
_EVEN = frozenset(("zeros", "ones", "empty", "full", "randn", "rand", "new_zeros", "new_ones", "new_empty", "new_full", "expand", "scalar_tensor",
                   "zeros_like", "ones_like", "empty_like", "full_like", "empty_strided", "new_empty_strided", "randint"))  # fmt: skip
_CODE = {"slice": ("__getitem__", "narrow"), "arange": ("arange",)}  # how a model's code may make positions


def choose_context(flow: Flow, ways: int, tensor: TensorPolicy | None = None, precision: str = "fp32") -> ContextPolicy:
    """The policy for `ways` ranks; a model that cannot be shared out so is refused with the place and what to do."""
    return flow.memo.once("context", (), ways, lambda: _ContextPolicyBuilder(_Follower(flow, ways).followed())).build(tensor, precision)


def share_meetings(flow: Flow, policy: TensorPolicy, ways: int) -> TensorPolicy:
    """Tensor parallelism where ranks hold some positions each: what meets is so much smaller."""
    reader = Reader.of(flow)
    strand = _sequence(reader, ways)
    calls = {call.module: call for call in reversed(flow.modules)}

    def less(meet: Meet, entering: bool = False) -> Meet:
        call = calls[meet.module]
        value = call.inputs[meet.position] if entering else call.outputs[0]
        return replace(meet, bytes=meet.bytes / ways) if strand in reader.carried[value] else meet

    return replace(
        policy,
        enters=tuple(less(m, True) for m in policy.enters),
        sums=tuple(map(less, policy.sums)),
        gathers=tuple(map(less, policy.gathers)),
        lookups=tuple(map(less, policy.lookups)),
        norms=tuple(map(less, policy.norms)),
    )


def sequence_of(flow: Flow, ways: int) -> int:
    """The strand that counts positions, for `ways` ranks that share them."""
    return _sequence(Reader.of(flow), ways)


def _sequence(reader: Reader, ways: int) -> int:
    """The strand that counts positions: what attention runs over."""
    found: dict[tuple[int, ...], str] = {}
    for index, op in enumerate(reader.flow.operations):
        if op.name == "attention":
            query, key = (reader.flow.values[v].strands[-2] for v in op.inputs[:2])
            if query != key:
                raise RequestError(f"cp={ways}: {reader.place(index)} attends from one sequence to another: use --mesh dp={ways}")
            found.setdefault(query, reader.place(index))
    if not found:
        raise RequestError(f"cp={ways}: this model does not attend through F.scaled_dot_product_attention: use --mesh dp={ways}")
    if len(found) > 1:
        raise RequestError(f"cp={ways}: {' and '.join(list(found.values())[:2])} attend over different sequences: use --mesh dp={ways}")
    (strands,) = found
    if len(strands) != 1:
        raise RequestError(f"cp={ways}: the model's code takes positions apart in pieces: use --mesh dp={ways}")
    return strands[0]


class _Follower:
    """Follows positions through a forward pass and its loss, in order, and notes where they are made, cut and gathered."""

    def __init__(self, flow: Flow, ways: int) -> None:
        self.flow, self.ways, self.reader = flow, ways, Reader.of(flow)
        self.strand = _sequence(self.reader, ways)
        self.size = flow.sizes[self.strand]
        self._check_size()
        self.reductions = Reductions(self.reader, self.strand)
        self.whole = _find_whole_values(self.reader, self.strand, self.reductions)
        self.local: set[int] = set()
        self.attends: list[int] = []
        self.makes: dict[int, Made] = {}
        self.edges: dict[int, set[int]] = {}  # values that are whole, and the operations that want them cut
        self.counts: dict[str, None] = {}
        self.fields: list[FieldCut] = []
        self.held: list[Cut] = []

    def followed(self) -> _Follower:
        """To the end, which is the same whatever else is cut."""
        self._sources()
        for index, op in enumerate(self.flow.operations):
            self._follow(index, op)
        self.reductions.check(self.ways)
        return self

    # -- refusing --

    def refusal(self, index: int, what: str, advice: str = "") -> RequestError:
        return RequestError(f"cp={self.ways}: {self.reader.place(index)} {what}: {advice or f'use --mesh dp={self.ways}'}")

    def _check_size(self) -> None:
        if self.size % self.ways:
            down, up = self.size // self.ways * self.ways, -(-self.size // self.ways) * self.ways
            fits = " or ".join(str(n) for n in (down, up) if n)
            raise RequestError(f"cp={self.ways} does not divide the {self.size} positions of a sample: use a sequence (--seq) of {fits}")

    def _blocked(self, index: int, op: Operation) -> RequestError:
        """The reason why an operation cannot work on some of the positions."""
        if op.name == "slice" or op.name.startswith(("split", "constant_pad")):
            advice = "put shifted labels into the batch" if self.reader.place(index) == "the loss" else ""
            return self.refusal(index, f"slices or shifts positions ({op.name})", advice)
        attends = op.name in ("_softmax", "bmm", "mm", "multi_head_attention")
        return self.refusal(index, f"needs all positions at once ({op.name})", "attend through F.scaled_dot_product_attention" if attends else "")

    # -- following --

    def _carries(self, value: int) -> bool:
        return self.strand in self.reader.carried[value]

    def _sources(self) -> None:
        """The batch, and what the model holds for each position."""
        fields = {f.value: f for f in self.flow.fields}
        for number, value in enumerate(self.flow.values):
            if number in self.reader.producer or not self._carries(number) or number in self.whole:
                continue
            dim = next(d for d, strands in enumerate(value.strands) if self.strand in strands)
            if value.strands[dim] != (self.strand,):
                continue  # a longer table, of which a slice is taken
            if number in fields:
                self.fields.append(FieldCut(fields[number].leaf, fields[number].name, dim))
            elif value.parameter:
                self._check_owner(number, value.parameter)
                self.held.append(Cut(value.parameter, dim))
            else:
                raise self.refusal(self.reader.consumers[number][0], "uses a constant with an entry for each position", "register it as a buffer")
            self.local.add(number)

    def _check_owner(self, value: int, name: str) -> None:
        owner = name.rpartition(".")[0]
        spans = [(m.first, m.last) for m in self.flow.modules if m.module == owner]
        for index in self.reader.consumers.get(value, []):
            if not any(first <= index < last for first, last in spans):
                raise self.refusal(index, f"reads {name}, which has an entry for each position, outside its own module")

    def _follow(self, index: int, op: Operation) -> None:
        values = self.flow.values
        mine = [v for v in op.inputs if v in self.local]
        wholes = [v for v in op.inputs if v not in self.local and self._carries(v)]
        makes = [v for v in op.outputs if self._carries(v)]
        if any(sum(s == self.strand for dim in values[v].strands for s in dim) > 1 for v in op.outputs):
            raise self.refusal(index, f"compares positions with each other ({op.name})", "attend through F.scaled_dot_product_attention")
        if (mine or makes) and any(v in self.reductions.kind for v in op.inputs):
            raise RequestError(f"cp={self.ways}: {self.reductions.late(op)}: use --mesh dp={self.ways}")
        if op.name == "attention" and self.strand in op.binds:
            self._attend(index, op)
        elif _takes(self.flow, op, self.strand) or (makes and not mine and not wholes):
            if mine:
                raise self._blocked(index, op)
            self._make(index, op)
        elif self.strand in (*op.sums, *op.binds):
            self._bind(index, op, mine, wholes, makes)
        elif mine and not makes and op.name not in _EVEN:
            raise self.refusal(index, f"loses sight of positions ({op.name})")
        elif makes and not self.whole.issuperset(makes):
            for value in wholes:
                self.edges.setdefault(value, set()).add(index)
        else:
            self.reductions.passes(op)
        self.local.update(v for v in makes if v not in self.whole)

    def _attend(self, index: int, op: Operation) -> None:
        if len(op.inputs) > 3:
            raise self.refusal(index, "gives attention a mask", "leave it out (is_causal=True masks what is to come), or use another axis")
        if not self.local.issuperset(op.inputs):
            raise self.refusal(index, "attends to values that do not depend on positions")
        self.attends.append(index)

    def _bind(self, index: int, op: Operation, mine: list[int], wholes: list[int], makes: list[int]) -> None:
        """All positions at once: at the end of a loss, or on what is whole."""
        if not mine:
            if not self.whole.issuperset(makes):
                raise self.refusal(index, f"makes positions in a way that is not known ({op.name})")
            return
        for value in wholes:
            self.edges.setdefault(value, set()).add(index)
        if self.strand in op.sums or not self.reductions.starts(op):
            raise self._blocked(index, op)
        if op.name in LIKELIHOODS and op.numbers == (1,):
            if op.function not in ("cross_entropy", "nll_loss"):
                raise self.refusal(index, f"takes the mean over targets in a way that is not known ({op.function})")
            self.counts[self.reader.frame(index)] = None

    def _make(self, index: int, op: Operation) -> None:
        """Code that makes positions: it will make this rank's, or all of them where they are needed whole."""
        if op.name in _EVEN:
            return
        out = self.flow.values[op.outputs[0]]
        dim = op.numbers[0] if op.name == "slice" and op.numbers else 0
        strands = out.strands[dim] if op.numbers and op.name in _CODE else ()
        at = strands.index(self.strand) if self.strand in strands else -1
        unknown = op.function not in _CODE.get(op.name, ()) or at < 0 or (op.name == "slice" and (op.numbers[2] != 1 or len(strands) > 1))
        if unknown and any(self.flow.values[v].floating for v in op.inputs) and op.name != "slice":
            raise self._blocked(index, op)
        if unknown:
            raise self.refusal(index, f"makes positions in a way that is not known ({op.function or op.name})")
        cut, frame = op.outputs[0] not in self.whole, self.reader.frame(index)
        if op.name == "slice":
            self.makes[index] = Made(frame, "slice", op.numbers[1], 1, self.flow.values[op.inputs[0]].shape[dim], cut=cut)
        else:
            outer, inner = _dims_length(self.flow, strands[:at]), _dims_length(self.flow, strands[at + 1 :])
            self.makes[index] = Made(frame, "arange", op.numbers[0], op.numbers[1], 0, outer, inner, cut)


class _ContextPolicyBuilder:
    """The policy for what a follower has found. But for attention it is the same whatever tensor parallelism cuts."""

    def __init__(self, follower: _Follower) -> None:
        self.follower, self.flow, self.reader = follower, follower.flow, follower.reader
        self.position_calls = tuple(dict.fromkeys(follower.makes.values()))

    def build(self, tensor: TensorPolicy | None, precision: str) -> ContextPolicy:
        return replace(self._base_policy, attends=tuple(self._attention_sites(tensor, precision)))

    @cached_property
    def _base_policy(self) -> ContextPolicy:
        """Without attention."""
        found, ways = self.follower, self.follower.ways
        self._check_calls_distinct()
        self._check_losses_distinct()
        sizes, unclear, _ = self.reader.rewrites({found.strand: POSITIONS}, found.whole)
        kept, unclear = ([r for r in some if not r.length] for some in (sizes, unclear))  # slices of positions are dealt with one by one
        return ContextPolicy(
            positions=found.size,
            chunks=2 * ways if found.size % (2 * ways) == 0 else ways,
            fields=tuple(found.fields),
            makes=self.position_calls,
            enters=tuple(dict.fromkeys(self._split_inputs())),
            held=tuple(found.held),
            counts=tuple(found.counts),
            rewrites=tuple(r for r in kept if r not in unclear),
        )

    def _split_inputs(self) -> Iterator[Entered]:
        """Where whole positions are split: at the smallest module that is given them and wants only its own."""
        for value, ops in self.follower.edges.items():
            calls = sorted((m for m in self.flow.modules if value in m.inputs), key=lambda m: m.last - m.first)
            users = self.reader.consumers[value]
            strands = self.flow.values[value].strands
            dim = next(d for d, found in enumerate(strands) if self.follower.strand in found)
            at = strands[dim].index(self.follower.strand)
            outer, inner = _dims_length(self.flow, strands[dim][:at]), _dims_length(self.flow, strands[dim][at + 1 :])
            for index in ops:
                call = next((m for m in calls if m.first <= index < m.last and all(i in ops for i in users if m.first <= i < m.last)), None)
                if call is None:
                    raise self.follower.refusal(index, f"needs the same positions whole and cut ({self.reader.op(index).name})")
                yield Entered(call.module, call.inputs.index(value), dim, outer, inner)

    def _attention_sites(self, tensor: TensorPolicy | None, precision: str) -> Iterator[Attended]:
        """Every attention, with the bytes of a sample's keys and values, which ranks gather."""
        dealt = dealt_strands(self.flow, tensor)
        for op in map(self.reader.op, self.follower.attends):
            pair = [self.flow.values[v] for v in op.inputs[1:3]]
            item = ITEM_BYTES[LOW[precision]] if precision in LOW else max(v.itemsize for v in pair)
            size = sum(math.prod(v.shape) for v in pair) * item / self.flow.batch
            strand = next((dealt[s] for s in sorted(self.reader.carried[op.inputs[1]]) if s in dealt), "")
            yield Attended(op.module, size, strand, any(v.needs_grad for v in pair))

    @cached_property
    def _patched_modules(self) -> set[str]:
        """Modules whose code is told this rank's positions, and the code that is in none of them."""
        return {m.module for m in self.position_calls} | {self.reader.op(i).module for i in self.follower.attends} | {"", LOSS}

    def _check_calls_distinct(self) -> None:
        """A call that makes positions must not look like another one in the same code, at any length that the code may see."""
        calls, ways = self.position_calls, self.follower.ways
        known = {(m.module, m.function, m.start, m.step, m.of) for m in calls}
        if len({replace(m, cut=True) for m in calls}) < len(calls):
            raise RequestError(f"cp={ways}: {calls[0].module or 'the model'} needs the same positions whole and cut: use --mesh dp={ways}")
        for index, op in enumerate(self.flow.operations):
            if index in self.follower.makes or op.function not in _CODE.get(op.name, ()) or not op.numbers:
                continue
            frame = self.reader.frame(index, self._patched_modules)
            dim = op.numbers[0] if op.name == "slice" else 0
            of = self.flow.values[op.inputs[0]].shape[dim] if op.name == "slice" else 0
            start, step = op.numbers[1:] if op.name == "slice" else op.numbers
            length = self.flow.values[op.outputs[0]].shape[dim]
            if length in self._position_lengths(frame, op.name) and (frame, op.name, start, step, of) in known:
                raise self.follower.refusal(index, f"makes positions and other things of the length {length}", "use another sequence length (--seq)")

    def _position_lengths(self, frame: str, function: str) -> set[int]:
        mine = [m for m in self.position_calls if (m.module, m.function) == (frame, function)]
        return {m.outer * n * m.inner for m in mine for n in (self.follower.size, self.follower.size // self.follower.ways)}

    def _check_losses_distinct(self) -> None:
        """Code that averages over the targets of all ranks must do so with every cross entropy in it."""
        for index, op in enumerate(self.flow.operations):
            over_others = op.name in LIKELIHOODS and self.follower.strand not in op.binds
            if over_others and self.reader.frame(index, self._patched_modules) in self.follower.counts:
                raise self.follower.refusal(index, "takes a cross entropy over positions and one over other things")


def _find_whole_values(reader: Reader, strand: int, reductions: Reductions) -> set[int]:
    """Indices (tokens, numbers of positions) that some operation needs all of: kept whole until a module takes them."""
    flow = reader.flow

    def is_index(value: int) -> bool:
        return not flow.values[value].floating

    free: set[int] = {v for v in range(len(flow.values)) if v not in reader.producer and is_index(v)}
    for op in flow.operations:
        if all(v in free for v in op.inputs):
            free.update(v for v in op.outputs if is_index(v))
    found: set[int] = set()
    for op in reversed(flow.operations):
        mine = [v for v in op.inputs if strand in reader.carried[v]]
        binding = (strand in (*op.sums, *op.binds) and not reductions.reduces(op)) or _takes(flow, op, strand)
        if mine and all(v in free for v in mine) and (binding or found.intersection(op.outputs)):
            found.update(mine)
    for op in reversed(flow.operations):  # the makers of what is whole are whole
        if found.intersection(op.outputs):
            found.update(v for v in op.inputs if strand in reader.carried[v])
    return found


def _dims_length(flow: Flow, logical_dims: Iterable[int]) -> int:
    return math.prod(flow.sizes[s] for s in logical_dims)


def _takes(flow: Flow, op: Operation, strand: int) -> bool:
    """Is it a slice, of something longer, that gives positions?"""
    if op.name != "slice" or not op.numbers:
        return False
    before, after = flow.values[op.inputs[0]], flow.values[op.outputs[0]]
    dim = op.numbers[0]
    return before.shape[dim] != after.shape[dim] and strand in after.strands[dim]
