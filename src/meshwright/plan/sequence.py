"""Which positions tensor-parallel ranks can share outside of cut parts, and what that takes (see [Note: sequence]). Pure reasoning over dataflow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from meshwright.core.errors import RequestError
from meshwright.core.strand import ModuleCall, Operation
from meshwright.core.tensor import Along, Dealt, Masked, Meet, TensorPolicy
from meshwright.plan.entries import Meets
from meshwright.plan.reader import Reader
from meshwright.plan.sizes import counted_sizes

_NAME = "sequence"
_MASKING = frozenset(("mul", "mul_", "div", "div_", "where", "_to_copy", "clone", "native_dropout"))  # a product with what is no input
_LIKE = frozenset(("empty_like", "zeros_like", "ones_like", "rand_like", "full_like", "new_empty", "new_zeros", "new_ones"))


class NotSharedError(Exception):
    """Why ranks cannot share positions."""


def share_sequence(reader: Reader, policy: TensorPolicy, dealt: frozenset[int], ways: int) -> TensorPolicy:
    """The same cuts, with positions shared out between them; a model in which that cannot be is refused with the reason."""
    reason = "no cut part is followed by one that takes the same positions"
    for strand in _candidates(reader, policy, dealt, ways):
        try:
            policy = _Region(reader, policy, strand, dealt).settled()
        except NotSharedError as error:
            reason = str(error)
    if not policy.sequence:
        raise RequestError(f"sequence=true: {reason}: leave it out")
    return policy


def shared_values(reader: Reader, policy: TensorPolicy, dealt: frozenset[int]) -> dict[int, tuple[str, int]]:
    """Values of which ranks have some positions each wherever they are used: the strand's name, and the dim; -1 for one that it shares."""
    found: dict[int, tuple[str, int]] = {}
    for strand in {s for m in (*policy.sums, *policy.deals) if m.along for s in [_strand_of(reader, policy, m)]}:
        region = _Region(reader, policy, strand, dealt)
        region.recall()
        region.follow()
        for value in region.local - region.closed:
            along = region.along(value)
            found[value] = (along.strand, -1 if along.mixed or along.inner > 1 else along.dim)
    return found


def _strand_of(reader: Reader, policy: TensorPolicy, meet: Meet) -> int:
    call = reader.calls_of[meet.module][0]
    assert meet.along is not None
    value = call.outputs[0] if meet in policy.sums else call.inputs[meet.position]
    names = {s.name: s.size for s in policy.strands}
    dim = reader.flow.values[value].strands[meet.along.dim]
    inner = 1
    for strand in reversed(dim):
        if inner == meet.along.inner and reader.flow.sizes[strand] == names[meet.along.strand]:
            return strand
        inner *= reader.flow.sizes[strand]
    raise RequestError(f"plan: tensor.sums says that positions lie in dim {meet.along.dim} of {meet.module}'s output, and they do not: plan again")


def _candidates(reader: Reader, policy: TensorPolicy, dealt: frozenset[int], ways: int) -> list[int]:
    """Strands of the sums that count neither samples nor, as a layer's own parameters do, features; the most frequent first."""
    count: dict[int, int] = {}
    for meet in policy.sums:
        for call in reader.calls_of[meet.module]:
            read = {v for i in range(call.first, call.last) for v in reader.op(i).inputs if v in reader.origin}
            features = {s for v in read for s in reader.carried[v]}
            for strand in reader.carried[call.outputs[0]] - features - reader.flow.samples - dealt:
                if reader.flow.sizes[strand] >= ways:
                    count[strand] = count.get(strand, 0) + 1
    return sorted(count, key=lambda s: (-count[s], s))


@dataclass
class _Region:
    """Follows one strand of positions from the sums that begin the region to the cut parts that end it."""

    reader: Reader
    policy: TensorPolicy
    strand: int
    dealt: frozenset[int]
    deals: dict[tuple[int, int], ModuleCall] = field(default_factory=dict)  # (value, where the call begins): whole outside, shared inside
    collects: dict[tuple[int, int], ModuleCall] = field(default_factory=dict)  # the other way round
    closed: set[int] = field(default_factory=set)  # collected where they are made
    stops: set[int] = field(default_factory=set)  # operations that could go on with some positions, but what they make is needed whole

    def __post_init__(self) -> None:
        flow = self.reader.flow
        self.name = next((s.name for s in self.policy.strands if not s.cuts and self._named(s)), "")
        taken = sum(not s.cuts for s in self.policy.strands)
        self.name = self.name or (f"{_NAME}.{taken}" if taken else _NAME)
        sums = {m.module for m in self.policy.sums if m.along is None or m.along.strand == self.name}
        self.seeds = {c.outputs[0]: c for c in flow.modules if c.module in sums and self._carries(c.outputs[0])}
        self.entered: dict[int, list[ModuleCall]] = {}
        self.lifted: dict[tuple[str, int], tuple[str, int]] = {}  # where a value entered before → where it enters now
        positions = {(m.module, m.position) for m in self.policy.enters}
        for call in flow.modules:
            for at, value in enumerate(call.inputs):
                if (call.module, at) in positions and self._carries(value):
                    outer = self._outermost(call, value)
                    self.lifted[call.module, at] = (outer.module, outer.inputs.index(value))
                    self.entered.setdefault(value, []).append(outer)

    def _outermost(self, call: ModuleCall, value: int) -> ModuleCall:
        """The largest module around a cut part that is given the same value for nothing else: code in it that asks for the value's sizes
        is told those of the whole."""
        users = self.reader.consumers.get(value, [])
        mine = [i for i in users if call.first <= i < call.last]
        around = [c for c in self.reader.doors(value) if c.first <= call.first and call.last <= c.last]
        return [c for c in (call, *around) if [i for i in users if c.first <= i < c.last] == mine][-1]

    def _named(self, strand: Dealt) -> bool:
        """Is it this one, in a policy that has been settled?"""
        marked = [m for m in (*self.policy.sums, *self.policy.deals) if m.along is not None and m.along.strand == strand.name]
        return any(_strand_of(self.reader, self.policy, m) == self.strand for m in marked)

    def _carries(self, value: int) -> bool:
        return self.strand in self.reader.carried[value]

    def recall(self) -> None:
        """What an earlier reading has settled, from the policy itself."""
        for meet in (m for m in (*self.policy.deals, *self.policy.collects) if m.along is not None and m.along.strand == self.name):
            for call in self.reader.calls_of[meet.module]:
                if meet.at_output:
                    self.closed.add(call.outputs[meet.position])
                else:
                    (self.deals if meet in self.policy.deals else self.collects)[call.inputs[meet.position], call.first] = call

    # -- following --

    def is_local(self, value: int, index: int) -> bool:
        """Does a rank have some positions of the value where operation `index` uses it? The innermost door on the way decides."""
        return self._shared_in(value, index, index + 1)

    def _shared_in(self, value: int, first: int, last: int) -> bool:
        doors = [(c, True) for (v, _), c in self.deals.items() if v == value]
        doors += [(c, False) for (v, _), c in self.collects.items() if v == value]
        doors += [(c, False) for c in self.entered.get(value, [])]
        inside = [(c.last - c.first, shared) for c, shared in doors if c.first <= first and last <= c.last and (c.first, c.last) != (first, last)]
        if inside:
            return min(inside)[1]
        return value in self.local and value not in self.closed

    def follow(self) -> None:
        flow = self.reader.flow
        self.local: set[int] = set(self.seeds)
        self.masks: dict[str, int] = {}  # modules that multiply by random numbers, and what they give
        self.partial: dict[str, None] = {}
        self.wants: dict[int, set[int]] = {}  # shared values, and operations that need them whole
        self.lacks: dict[int, set[int]] = {}  # whole values, and operations that need their positions alone
        calls = {c.first: c for c in sorted(flow.modules, key=lambda c: c.first - c.last) if len(c.inputs) == len(c.outputs) == 1}
        skip = 0
        for index, op in enumerate(flow.operations):
            call = calls.get(index)
            if index >= skip and call is not None and self.is_local(call.inputs[0], index) and self._masks(call):
                self.local.add(call.outputs[0])
                self.masks[call.module] = call.outputs[0]
                skip = call.last
            if index >= skip:
                self._follow(index, op)
        for value in self.local.intersection(flow.outputs) - self.closed:
            self.wants.setdefault(value, set())

    def _follow(self, index: int, op: Operation) -> None:
        mine = [v for v in op.inputs if self.is_local(v, index)]
        if not mine:
            return
        held = [self.reader.origin[v] for v in op.inputs if v in self.reader.origin]
        if index in self.stops or not self._passes(op) or any(self._carries(v) for v in op.inputs if v in self.reader.origin):
            for value in mine:
                self.wants.setdefault(value, set()).add(index)
            return
        if op.name in ("bernoulli_", "native_dropout"):
            raise NotSharedError(
                f"the code of {self.reader.place(index)} draws random numbers itself ({op.name}), not through a module such as nn.Dropout"
            )
        for value in op.inputs:
            if self._carries(value) and value not in mine:
                self.lacks.setdefault(value, set()).add(index)
        self.local.update(v for v in op.outputs if self._carries(v))
        self.partial.update(dict.fromkeys(held))

    def _passes(self, op: Operation) -> bool:
        """Does an operation treat positions alike, outside of what is cut?"""
        touched = [*op.inputs, *op.outputs]
        if self.strand in (*op.sums, *op.binds) or any(self.dealt & self.reader.carried[v] for v in touched):
            return False
        return all(map(self._carries, op.outputs))

    def _masks(self, call: ModuleCall) -> bool:
        """Does a module multiply what it is given by random numbers of its own, and do nothing else? Then its output for ones is those."""
        flow, (given,), (made,) = self.reader.flow, call.inputs, call.outputs
        if given == made or flow.values[given].strands != flow.values[made].strands:
            return False
        on_the_way = {given}
        draws = False
        for op in flow.operations[call.first : call.last]:
            met = on_the_way.intersection(op.inputs)
            draws |= op.name in ("bernoulli_", "native_dropout", "arange") or op.name in _LIKE
            if not met or op.name in _LIKE:
                continue
            if len([v for v in op.inputs if v in on_the_way]) > 1 or op.name not in _MASKING or any(v in self.reader.origin for v in op.inputs):
                return False
            on_the_way.update(op.outputs)
        return draws and made in on_the_way

    # -- settling --

    def settled(self) -> TensorPolicy:
        for _ in range(len(self.reader.flow.values)):
            self.follow()
            if not self._place_deals() and not self._place_collects():
                break
        self._check_calls()
        self._check_reads()
        return self._policy()

    def _place_deals(self) -> bool:
        """Whole values that meet shared ones are cut at the door of the smallest module in which they do; what else is in there follows."""
        for value, ops in self.lacks.items():
            call = next((c for c in self.reader.doors(value) if any(c.first <= i < c.last for i in ops)), None)
            if call is None:
                index = min(ops)
                raise NotSharedError(
                    f"{self.reader.place(index)} combines positions with a value that every rank has whole ({self.reader.op(index).name})"
                )
            self.deals[value, call.first] = call
        return bool(self.lacks)

    def _place_collects(self) -> bool:
        for value, ops in self.wants.items():
            left = set(ops)
            for call in self.reader.doors(value):
                inside = {i for i in self.reader.consumers.get(value, []) if call.first <= i < call.last}
                if left & inside and inside <= ops:
                    self.collects[value, call.first] = call
                    left -= inside
            if left or not ops:
                self._close(value)
        return bool(self.wants)

    def _close(self, value: int) -> None:
        for key in [k for k in self.collects if k[0] == value]:
            del self.collects[key]
        made = self.reader.producer.get(value)
        if value in self.local and self._maker(value) is not None:
            self.closed.add(value)
        elif made is not None and made not in self.stops:
            self.stops.add(made)  # then what it is made from is needed whole, and may be had
        else:
            index = min(self.wants[value], default=0)
            raise NotSharedError(f"{self.reader.place(index)} needs all positions of what no module gives out ({self.reader.op(index).name})")

    def _maker(self, value: int) -> ModuleCall | None:
        """The smallest module that gives a value out and has made it."""
        made = self.reader.producer.get(value, -1)
        return min((c for c in self.reader.givers(value) if c.first <= made < c.last), key=lambda c: c.last - c.first, default=None)

    def _check_calls(self) -> None:
        """A module that is called several times must be so with the same kind of values: what is done at its door is done each time."""
        entering = {(v, c.first) for v, calls in self.entered.items() for c in calls if self._shared_in(v, c.first, c.last)}
        sites = {(c.module, c.inputs.index(v), "enters") for v, calls in self.entered.items() for c in calls if (v, c.first) in entering}
        sites |= {(c.module, c.inputs.index(v), "deals") for (v, _), c in self.deals.items()}
        sites |= {(c.module, c.inputs.index(v), "collects") for (v, _), c in self.collects.items()}
        known = {"enters": entering, "deals": set(self.deals), "collects": set(self.collects)}
        for module, position, kind in sorted(sites):
            for call in self.reader.calls_of[module]:
                if (call.inputs[position], call.first) not in known[kind]:
                    raise NotSharedError(f"{module} is called several times, with positions of all ranks and of one")
        for module in {c.module for c in self.seeds.values()} | set(self.masks):
            if any(c.outputs[0] not in self.local for c in self.reader.calls_of[module]):
                raise NotSharedError(f"{module} is called several times, with positions of all ranks and of one")

    def _check_reads(self) -> None:
        """Code that asks a shared value for the number of positions is told this rank's: it must not use it for what is whole."""
        flow = self.reader.flow
        for read in flow.reads:
            if self.strand not in flow.values[read.value].strands[read.dim] or not self._shared_in(read.value, read.at, read.at):
                continue
            frames = {c.module for c in flow.modules if c.first <= read.at <= c.last}
            if not frames.isdisjoint(self.masks):
                continue  # these are run on all positions
            for op in (o for o in flow.operations[read.at :] if o.call >= 0 and flow.calls[o.call].module in frames):
                made = flow.values[op.outputs[0]]
                counts = any(self.strand in made.strands[at] for _, _, at, _ in counted_sizes(flow, op))
                if counts and op.outputs[0] not in self.local:
                    frame = flow.calls[op.call].module or "the model"
                    raise NotSharedError(f"the code of {frame} takes the number of positions from one value and uses it for another")

    # -- what follows --

    def along(self, value: int) -> Along:
        strands = self.reader.flow.values[value].strands
        dim = next(d for d, found in enumerate(strands) if self.strand in found)
        at = strands[dim].index(self.strand)
        sizes = self.reader.flow.sizes
        return Along(self.name, dim, math.prod(sizes[s] for s in strands[dim][at + 1 :]), mixed=math.prod(sizes[s] for s in strands[dim][:at]) > 1)

    def _policy(self) -> TensorPolicy:
        old, flow = self.policy, self.reader.flow
        meets = Meets(self.reader, {})
        outputs = {c.module: v for v, c in self.seeds.items()}
        doors = {(c.module, c.inputs.index(v)): v for v, calls in self.entered.items() for c in calls if self._shared_in(v, c.first, c.last)}
        if len(doors) <= len(self.collects) + len(self.closed):
            raise NotSharedError("no cut part is followed by one that takes the same positions")
        whole = set(range(len(flow.values))) - {v for v in self.local if v not in self.closed}
        sizes, unclear, uneven = self.reader.rewrites({self.strand: self.name}, whole)
        for rewrite in (*unclear, *uneven):
            raise NotSharedError(f"the code of {rewrite.module or 'the model'} uses the number of positions, {rewrite.number}, for other things too")

        def entering(meet: Meet) -> Meet:
            place = self.lifted.get((meet.module, meet.position))
            if place is None or place not in doors:
                return meet
            return replace(meet, module=place[0], position=place[1], along=self.along(doors[place]))

        def placed(calls: dict[tuple[int, int], ModuleCall]) -> Iterator[Meet]:
            for module, position, value in dict.fromkeys((c.module, c.inputs.index(v), v) for (v, _), c in calls.items()):
                yield replace(meets.at(module, value, position), along=self.along(value), trained=flow.values[value].needs_grad)

        def made() -> Iterator[Meet]:
            for value in sorted(self.closed):
                call = self._maker(value)
                assert call is not None
                found = meets.at(call.module, value, call.outputs.index(value))
                yield replace(found, along=self.along(value), at_output=True, trained=flow.values[value].needs_grad)

        return replace(
            old,
            strands=(*old.strands, Dealt(self.name, flow.sizes[self.strand], ())),
            sums=tuple(replace(m, along=self.along(outputs[m.module])) if m.module in outputs else m for m in old.sums),
            enters=tuple(dict.fromkeys(map(entering, old.enters))),
            deals=(*old.deals, *placed(self.deals)),
            collects=(*old.collects, *placed(self.collects), *made()),
            masks=(*old.masks, *(Masked(module, self.along(value)) for module, value in self.masks.items())),
            partial=tuple(dict.fromkeys((*old.partial, *self.partial, *self._biases()))),
            rewrites=(*old.rewrites, *sizes),
        )

    def _biases(self) -> Iterator[str]:
        """Of layers whose product a sum completes: added to the positions of one rank."""
        for call in self.seeds.values():
            for index in range(call.first, call.last):
                op = self.reader.op(index)
                for value in op.inputs if self.dealt.intersection(op.sums) else ():
                    if value in self.reader.origin and not self.dealt & self.reader.carried[value]:
                        yield self.reader.origin[value]
