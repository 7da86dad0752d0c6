"""Which strands to deal out over tensor-parallel ranks, and where the ranks must meet then. Pure reasoning over a model's dataflow."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.core.errors import RequestError, unknown
from meshwright.core.strand import Flow, ModuleCall, Operation
from meshwright.core.tensor import Cut, Dealt, Meet, Rewrite, TensorPolicy
from meshwright.plan.entries import Meets, StandsInTheWayError, entries
from meshwright.plan.reader import Reader, Weight
from meshwright.plan.sequence import share_sequence
from meshwright.plan.sizes import SLICES

PLACEMENTS = ("auto", "column", "whole")
NORMS = ("native_layer_norm", "_fused_rms_norm", "rms_norm", "mean")
# A layer that only a gather could cut is cut when it holds at least the first share of the model, or the second of the largest matrix that is cut
# without one: the vocabulary of a deep model is little of it, and yet the most that a stage has.
_WORTH_A_GATHER, _AS_LARGE = 0.02, 0.3


def choose_grid(
    flow: Flow, ways: Sequence[int], placements: Mapping[str, str] | None = None, layers: Collection[str] = (), *, sequence: bool = False
) -> tuple[TensorPolicy, TensorPolicy]:  # fmt: skip
    """Along each axis of a grid of one or two: the strands that cover most of the model, at most one for each parameter, and every meeting that
    they cause. Where a pipeline will cut the model between its `layers`, ranks meet inside them; with `sequence`, positions are shared out.

    [Note: a grid]
    A product of two matrices sums over one strand and keeps two. On a line of ranks one of a matrix's two strands is dealt out. On a grid
    the first axis deals out the same strands, and the second one their partners: the features between layers, that all blocks share.
    Every activation is then cut, layers swap the roles of rows and columns by themselves, and norms, which need all features, meet over
    their statistics. The two axes know nothing of each other: what either must complete, it completes among its own ranks.
    """
    reader = Reader.of(flow, layers)
    asked = dict(placements or {})
    check_placements(flow, asked)
    first = _Axis(ways[0])
    policy = _settled(reader, first, asked)
    if len(ways) == 1:
        shared = share_sequence(reader, policy, frozenset(first.chosen), ways[0]) if sequence and policy.strands else policy
        return shared, TensorPolicy()
    if sequence:
        raise RequestError(f"sequence=true goes with one dimension of tensor parallelism, not with tp={ways[0]}x{ways[1]}: leave it out")
    taken = {c.parameter: c.dim for s in policy.strands for c in s.cuts}
    second = _Axis(ways[1], first.dealt(reader), taken, {m.module: m.strand for m in policy.gathers})
    across = _settled(reader, second, asked)
    first.names = second.dealt(reader)
    return _policy(reader, first, asked), across


@dataclass
class _Axis:
    """One axis of the grid: over how many ranks, what cannot be dealt out along it and why, what is, and what the other axis deals out."""

    ways: int
    names: Mapping[int, str] = field(default_factory=dict)  # strands of the other axis
    taken: Mapping[str, int] | None = None  # the second axis: parameters that the first has cut, and along which dim
    gathered: Mapping[str, str] = field(default_factory=dict)  # and layers whose outputs it gathers
    blocked: dict[int, str] = field(default_factory=dict)
    chosen: list[int] = field(default_factory=list)

    def dealt(self, reader: Reader) -> dict[int, str]:
        return {s: _strand_name(reader, s) for s in self.chosen}


def _settled(reader: Reader, axis: _Axis, asked: Mapping[str, str]) -> TensorPolicy:
    for _ in range(len(reader.flow.sizes) + 1):  # each round may find one more strand that cannot be cut after all
        axis.chosen = _choose(reader, axis, asked)
        try:
            return _policy(reader, axis, asked)
        except StandsInTheWayError as found:
            axis.blocked[found.strand] = found.reason
    raise AssertionError("every round blocks a strand")


def check_placements(flow: Flow, placements: Mapping[str, str]) -> None:
    """Every name must be a module of the model, every word one that is known here."""
    names = {call.module for call in flow.modules}
    for name, placement in placements.items():
        if name not in names:
            raise unknown("layer", name, names, "placements")
        if placement not in PLACEMENTS:
            raise unknown("placement", placement, PLACEMENTS, f"placements: {name}")


def _kept_whole(asked: Mapping[str, str], parameter: str) -> str | None:
    """The override that keeps a parameter out of every strand, if there is one."""
    for name, placement in asked.items():
        if placement != "auto" and parameter.startswith(f"{name}."):
            return placement
    return None


# -- choosing --


def _choose(reader: Reader, axis: _Axis, asked: Mapping[str, str]) -> list[int]:
    weight: dict[int, int] = {}
    for w in reader.weights:
        for strand in reader.carried[w.value]:
            weight[strand] = weight.get(strand, 0) + w.numel
    taken: set[str] = set()
    chosen: list[int] = []
    blocked = axis.blocked
    for strand in sorted(weight, key=lambda s: (-weight[s], s)):
        if strand in blocked:
            continue
        reason = _obstacle(reader, strand, axis, asked)
        if reason:
            blocked[strand] = reason
            continue
        names = [cut.parameter for cut in reader.uses(strand)]
        if len(names) != len(set(names)):
            blocked[strand] = "runs through one parameter twice"
        elif taken.isdisjoint(names):
            chosen.append(strand)
            taken.update(names)
    return chosen


def _obstacle(reader: Reader, strand: int, axis: _Axis, asked: Mapping[str, str]) -> str:
    """Why a strand cannot be dealt out; empty when it can."""
    flow, size = reader.flow, reader.flow.sizes[strand]
    if size < axis.ways:
        return f"{size} pieces do not go over {axis.ways} ranks"
    if strand in axis.names or any((axis.taken or {}).get(cut.parameter) == cut.dim for cut in reader.uses(strand)):
        return "the grid's other dimension deals it out"
    for cut in reader.uses(strand):
        placement = _kept_whole(asked, cut.parameter)
        if placement:
            return f"placements ask for {placement} at {cut.parameter.rpartition('.')[0]}"
    for index, op in ((i, flow.operations[i]) for i in reader.touched.get(strand, [])):
        if strand in op.binds and not (axis.taken is not None and _is_norm(reader, op, strand)):
            return f"{op.name} in {op.module or 'the loss'} needs all of it"
        if strand in op.sums and reader.completion(index, strand) is None:
            return f"{op.name} in {op.module or 'the loss'} sums over it outside a layer"
        if op.name in SLICES and op.call < 0 and _slices(reader, op, strand):
            return f"the code of {op.module or 'the model'} slices it by number"
    if any(strand in reader.carried[v] for v in flow.outputs):
        return "the model returns it"
    if strand in reader.given:
        return "the data carries it"
    return ""


def _is_norm(reader: Reader, op: Operation, strand: int) -> bool:
    """A norm over this strand alone, inside a module: ranks that hold pieces of it can meet over its statistics."""
    given = reader.flow.values[op.inputs[0]]
    return op.name in NORMS and bool(op.module) and set(op.binds) == {strand} and given.strands[-1] == (strand,)


def _slices(reader: Reader, op: Operation, strand: int) -> bool:
    given, made = reader.flow.values[op.inputs[0]], reader.flow.values[op.outputs[0]]
    return any(a != b and strand in s for a, b, s in zip(given.shape, made.shape, given.strands, strict=True))


# -- consequences --


def _policy(reader: Reader, axis: _Axis, asked: Mapping[str, str]) -> TensorPolicy:
    chosen, blocked, meet = axis.chosen, axis.blocked, Meets(reader, axis.names, axis.gathered)
    dealt = {s: Dealt(_strand_name(reader, s), reader.flow.sizes[s], tuple(reader.uses(s))) for s in chosen}
    cut = {c.parameter for d in dealt.values() for c in d.cuts}
    alone, gathers, lookups = _alone(reader, meet, cut, axis.ways, asked) if axis.taken is None else ([], [], [])
    cut |= {c.parameter for d in alone for c in d.cuts}
    enters, partial = entries(reader, meet, set(chosen), {m.module for m in gathers})
    policy = TensorPolicy(
        strands=(*dealt.values(), *alone),
        enters=tuple(enters),
        sums=tuple(_sums(reader, meet, set(chosen))),
        gathers=tuple(gathers),
        lookups=tuple(lookups),
        norms=tuple(_norms(reader, meet, set(chosen))),
        partial=tuple(partial),
        rewrites=tuple(_rewrites(reader, {s: d.name for s, d in dealt.items()})),
    )
    return replace(policy, whole=_reasons(reader, cut, asked, blocked))


def _strand_name(reader: Reader, strand: int) -> str:
    first = reader.uses(strand)[0]
    return f"{first.parameter}:{first.dim}"


def _sums(reader: Reader, meet: Meets, chosen: set[int]) -> Iterable[Meet]:
    found: dict[str, Meet] = {}
    for index, op in enumerate(reader.flow.operations):
        for strand in chosen.intersection(op.sums):
            done = reader.completion(index, strand)
            assert done is not None
            found.setdefault(done[0].module, meet.after(done[0]))
    yield from found.values()


def _norms(reader: Reader, meet: Meets, chosen: set[int]) -> Iterable[Meet]:
    """One number for each row that is normed, at least in single precision; a layer norm has two of them."""
    for op in reader.flow.operations:
        for strand in chosen.intersection(op.binds):
            found = meet.at(op.module, op.inputs[0])
            width = max(reader.flow.values[op.inputs[0]].itemsize, 4) / reader.flow.values[op.inputs[0]].itemsize
            size = found.bytes / reader.flow.sizes[strand] * width
            yield replace(found, bytes=size, numbers=2 if op.name == "native_layer_norm" else 1, strand=_strand_name(reader, strand), across="")


def _alone(reader: Reader, meets: Meets, cut: set[str], ways: int, asked: Mapping[str, str]) -> tuple[list[Dealt], list[Meet], list[Meet]]:
    """Layers that no strand covers but that are large, or asked for: cut by their own outputs, which are gathered at once."""
    strands: dict[str, Dealt] = {}
    gathers: list[Meet] = []
    lookups: list[Meet] = []
    usual = max((w.numel for w in reader.weights if w.name in cut), default=reader.total)
    for call in reader.flow.modules:
        if call.kind not in ("linear", "embedding"):
            continue
        weight, bias = _parameters(reader, call)
        if weight is None or weight.name in cut or not _worth(reader, call, weight, asked, usual):
            continue
        dim = _feature_dim(reader, call, weight)
        size = reader.flow.values[weight.value].shape[dim]
        if size < ways:
            continue
        extra = (Cut(bias.name, 0),) if bias is not None else ()
        before = strands.get(weight.name, Dealt(f"{weight.name}:{dim}", size, (Cut(weight.name, dim),)))  # a tied matrix has several layers
        strands[weight.name] = replace(before, cuts=(*before.cuts, *(c for c in extra if c not in before.cuts)))
        meet = replace(meets.after(call), strand=strands[weight.name].name)
        (lookups if call.kind == "embedding" else gathers).append(meet)
    return list(strands.values()), gathers, lookups


def _worth(reader: Reader, call: ModuleCall, weight: Weight, asked: Mapping[str, str], usual: int) -> bool:
    placement = asked.get(call.module) or _kept_whole(asked, weight.name)
    if placement in ("whole", "column"):
        return placement == "column"
    return weight.numel >= min(_WORTH_A_GATHER * reader.total, _AS_LARGE * usual)


def _parameters(reader: Reader, call: ModuleCall) -> tuple[Weight | None, Weight | None]:
    """The matrix and the bias that a layer's own operations read; a tied matrix has the name of its first owner."""
    read = {v for op in range(call.first, call.last) for v in reader.op(op).inputs}
    mine = [reader.weights[at] for at in sorted(reader.weight_at[v] for v in read if v in reader.weight_at)]
    matrix = next((w for w in mine if len(reader.flow.values[w.value].shape) == 2), None)
    bias = next((w for w in mine if len(reader.flow.values[w.value].shape) == 1), None)
    return matrix, bias


def _feature_dim(reader: Reader, call: ModuleCall, weight: Weight) -> int:
    """The dim of a matrix that becomes the layer's output; for an embedding the dim of its rows."""
    shape, out = reader.flow.values[weight.value].shape, reader.flow.values[call.outputs[0]].shape[-1]
    if call.kind == "embedding":
        return 0
    strands = reader.flow.values[call.outputs[0]].strands[-1]
    return next((d for d in (0, 1) if reader.flow.values[weight.value].strands[d] == strands and shape[d] == out), 0)


# -- sizes in the model's code --


def _rewrites(reader: Reader, names: Mapping[int, str]) -> list[Rewrite]:
    found, unclear, uneven = reader.rewrites(names)
    strands = {name: strand for strand, name in names.items()}
    for rewrite in uneven:
        where = f"the code of {rewrite.module or 'the model'} slices it by number ({rewrite.number} of {rewrite.length})"
        raise StandsInTheWayError(strands[rewrite.strand], where)
    for rewrite in unclear:
        raise StandsInTheWayError(strands[rewrite.strand], f"the code of {rewrite.module} uses the size {rewrite.number} for other things too")
    return found


def _reasons(reader: Reader, cut: set[str], asked: Mapping[str, str], blocked: Mapping[int, str]) -> dict[str, str]:
    """For every parameter left whole, why: what was asked, what its own module does, or what stands in the way elsewhere."""
    binds: dict[str, list[tuple[str, frozenset[int]]]] = {}
    for op in reader.flow.operations:
        if op.binds:
            binds.setdefault(op.module, []).append((op.name, frozenset(op.binds)))
    found = {}
    for w in reader.weights:
        if w.name in cut:
            continue
        module, carried = w.name.rpartition(".")[0], reader.carried[w.value]
        placement = _kept_whole(asked, w.name)
        here = [f"{name} in {module} needs all of it" for name, strands in binds.get(module, []) if strands & carried]
        there = [blocked[s] for s in sorted(carried) if s in blocked]
        asked_for = [f"placements ask for {placement}"] if placement else []
        found[w.name] = [*asked_for, *here, *there, "its partner is cut along the other dim"][0]
    return found


def refuse_if_nothing(grid: tuple[TensorPolicy, TensorPolicy], ways: tuple[int, ...]) -> None:
    asked = "x".join(map(str, ways))
    for policy, line in zip(grid, ("", " along the second dimension"), strict=False):
        if not policy.strands and (len(ways) > 1 or not line):
            reason = next(iter(policy.whole.values()), "it has no parameters")
            other = f"dp={math.prod(ways)}" if not line else f"tp={math.prod(ways)}"
            raise RequestError(f"tp={asked}: nothing in this model can be cut{line} ({reason}): use --mesh {other}")


def dealt_strands(flow: Flow, policy: TensorPolicy | None) -> dict[int, str]:
    """The strands of a flow that a policy deals out, and their names; not those that are gathered where they are made."""
    if policy is None:
        return {}
    values = {v.parameter: v for v in flow.values if v.parameter}
    at_once = {m.strand for m in (*policy.gathers, *policy.lookups)}
    found = {}
    for dealt in policy.strands:
        if dealt.name not in at_once and dealt.cuts:
            strands = values[dealt.cuts[0].parameter].strands[dealt.cuts[0].dim]
            outer = 1
            for strand in strands:
                if outer == dealt.cuts[0].outer and flow.sizes[strand] == dealt.size:
                    found[strand] = dealt.name
                outer *= flow.sizes[strand]
    return found
