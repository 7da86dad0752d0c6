"""Which strands to deal out over tensor-parallel ranks, and where the ranks must meet then. Pure reasoning over a model's dataflow."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.core.errors import RequestError, unknown
from meshwright.core.strand import Flow, ModuleCall, Operation
from meshwright.core.tensor import Cut, Dealt, Meet, Rewrite, TensorPolicy
from meshwright.plan.reader import SLICES, Reader, Weight
from meshwright.plan.sizes import counted_sizes

PLACEMENTS = ("auto", "column", "whole")
_WORTH_A_GATHER = 0.02  # a layer that only a gather could cut is cut when it holds at least this share of the model


def choose_cuts(flow: Flow, ways: int, placements: Mapping[str, str] | None = None, layers: Collection[str] = ()) -> TensorPolicy:
    """The strands that cover most of the model, at most one for each parameter, and every meeting that they cause. Where a pipeline will
    cut the model between its `layers`, ranks meet inside them."""
    reader = Reader(flow, layers)
    asked = dict(placements or {})
    check_placements(flow, asked)
    blocked: dict[int, str] = {}
    for _ in range(len(flow.sizes) + 1):  # each round may find one more strand that cannot be cut after all
        chosen = _choose(reader, ways, asked, blocked)
        try:
            return _policy(reader, chosen, ways, asked, blocked)
        except _StandsInTheWayError as found:
            blocked[found.strand] = found.reason
    raise AssertionError("every round blocks a strand")


class _StandsInTheWayError(Exception):
    def __init__(self, strand: int, reason: str) -> None:
        self.strand, self.reason = strand, reason


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


def _choose(reader: Reader, ways: int, asked: Mapping[str, str], blocked: dict[int, str]) -> list[int]:
    weight: dict[int, int] = {}
    for w in reader.weights:
        for strand in reader.carried[w.value]:
            weight[strand] = weight.get(strand, 0) + w.numel
    taken: set[str] = set()
    chosen: list[int] = []
    for strand in sorted(weight, key=lambda s: (-weight[s], s)):
        if strand in blocked:
            continue
        reason = _obstacle(reader, strand, ways, asked)
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


def _obstacle(reader: Reader, strand: int, ways: int, asked: Mapping[str, str]) -> str:
    """Why a strand cannot be dealt out; empty when it can."""
    flow, size = reader.flow, reader.flow.sizes[strand]
    if size < ways:
        return f"{size} pieces do not go over {ways} ranks"
    for cut in reader.uses(strand):
        placement = _kept_whole(asked, cut.parameter)
        if placement:
            return f"placements ask for {placement} at {cut.parameter.rpartition('.')[0]}"
    for index, op in ((i, flow.operations[i]) for i in reader.touched.get(strand, [])):
        if strand in op.binds:
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


def _slices(reader: Reader, op: Operation, strand: int) -> bool:
    given, made = reader.flow.values[op.inputs[0]], reader.flow.values[op.outputs[0]]
    return any(a != b and strand in s for a, b, s in zip(given.shape, made.shape, given.strands, strict=True))


# -- consequences --


def _policy(reader: Reader, chosen: Sequence[int], ways: int, asked: Mapping[str, str], blocked: Mapping[int, str]) -> TensorPolicy:
    dealt = {s: Dealt(_strand_name(reader, s), reader.flow.sizes[s], tuple(reader.uses(s))) for s in chosen}
    cut = {c.parameter for d in dealt.values() for c in d.cuts}
    alone, gathers, lookups = _alone(reader, cut, ways, asked)
    cut |= {c.parameter for d in alone for c in d.cuts}
    enters, partial = _entries(reader, set(chosen), {m.module for m in gathers})
    policy = TensorPolicy(
        strands=(*dealt.values(), *alone),
        enters=tuple(enters),
        sums=tuple(_sums(reader, set(chosen))),
        gathers=tuple(gathers),
        lookups=tuple(lookups),
        partial=tuple(partial),
        rewrites=tuple(_rewrites(reader, {s: d.name for s, d in dealt.items()})),
    )
    return replace(policy, whole=_reasons(reader, cut, asked, blocked))


def _strand_name(reader: Reader, strand: int) -> str:
    first = reader.uses(strand)[0]
    return f"{first.parameter}:{first.dim}"


def _sums(reader: Reader, chosen: set[int]) -> Iterable[Meet]:
    found: dict[str, Meet] = {}
    for index, op in enumerate(reader.flow.operations):
        for strand in chosen.intersection(op.sums):
            done = reader.completion(index, strand)
            assert done is not None
            found.setdefault(done[0].module, _meet_after(reader, done[0]))
    yield from found.values()


def _meet(reader: Reader, module: str, value: int, position: int = 0) -> Meet:
    noted = reader.flow.values[value]
    size = math.prod(noted.shape) * noted.itemsize
    fixed = reader.flow.samples.isdisjoint(reader.carried[value])
    return Meet(module, size if fixed else size / reader.flow.batch, position, fixed)


def _meet_after(reader: Reader, call: ModuleCall) -> Meet:
    """A meeting at a layer's output."""
    outer = [m for m in reader.flow.modules if m.first <= call.first and call.last <= m.last]
    final = tuple(m.module for m in outer if m.module and m.kept < call.last)
    return replace(_meet(reader, call.module, call.outputs[0]), final_in=final)


def _alone(reader: Reader, cut: set[str], ways: int, asked: Mapping[str, str]) -> tuple[list[Dealt], list[Meet], list[Meet]]:
    """Layers that no strand covers but that are large, or asked for: cut by their own outputs, which are gathered at once."""
    strands: dict[str, Dealt] = {}
    gathers: list[Meet] = []
    lookups: list[Meet] = []
    for call in reader.flow.modules:
        if call.kind not in ("linear", "embedding"):
            continue
        weight, bias = _parameters(reader, call)
        if weight is None or weight.name in cut or not _worth(reader, call, weight, asked):
            continue
        dim = _feature_dim(reader, call, weight)
        size = reader.flow.values[weight.value].shape[dim]
        if size < ways:
            continue
        extra = (Cut(bias.name, 0),) if bias is not None else ()
        before = strands.get(weight.name, Dealt(f"{weight.name}:{dim}", size, (Cut(weight.name, dim),)))  # a tied matrix has several layers
        strands[weight.name] = replace(before, cuts=(*before.cuts, *(c for c in extra if c not in before.cuts)))
        meet = replace(_meet_after(reader, call), strand=strands[weight.name].name)
        (lookups if call.kind == "embedding" else gathers).append(meet)
    return list(strands.values()), gathers, lookups


def _worth(reader: Reader, call: ModuleCall, weight: Weight, asked: Mapping[str, str]) -> bool:
    placement = asked.get(call.module) or _kept_whole(asked, weight.name)
    if placement in ("whole", "column"):
        return placement == "column"
    return weight.numel >= _WORTH_A_GATHER * reader.total


def _parameters(reader: Reader, call: ModuleCall) -> tuple[Weight | None, Weight | None]:
    """The matrix and the bias that a layer's own operations read; a tied matrix has the name of its first owner."""
    read = {v for op in range(call.first, call.last) for v in reader.op(op).inputs}
    mine = [w for w in reader.weights if w.value in read]
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


# -- where whole activations enter cut parts --


def _entries(reader: Reader, chosen: set[int], gathered: set[str]) -> tuple[list[Meet], list[str]]:
    """Meetings of gradients, and whole parameters whose gradients are partial."""
    edges: dict[int, set[int]] = {}
    partial: dict[str, None] = {}
    sums: set[int] = set()  # values that are partial sums
    for index, op in enumerate(reader.flow.operations):
        for strand in chosen.intersection(op.sums):
            sums |= (reader.completion(index, strand) or (None, frozenset()))[1]
        active = chosen & set().union(*(reader.carried[v] for v in (*op.inputs, *op.outputs))) or sums.intersection(op.inputs)
        call = reader.layer_of.get(index)
        opened = call is not None and call.module in gathered and bool(op.sums)
        if not active and not opened:
            continue
        for value in op.inputs:
            parameter = reader.origin.get(value)
            if not reader.flow.values[value].needs_grad or value in sums or chosen & reader.carried[value] or (opened and parameter):
                continue
            if parameter and chosen.intersection(op.sums):
                continue  # a bias, which the layer adds after the sum
            if parameter:
                partial[parameter] = None
            else:
                edges.setdefault(value, set()).add(index)
    lifted = _lift(reader, edges)
    return [meet for value, ops in sorted(lifted.items()) for meet in _place(reader, value, ops, chosen)], list(partial)


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


def _place(reader: Reader, value: int, ops: set[int], chosen: set[int]) -> list[Meet]:
    """One meeting at the smallest module that is given the value and holds all its partial uses; else one at each layer."""
    calls = reader.doors(value)
    users = set(reader.consumers.get(value, []))
    for call in calls:
        inside = {i for i in users if call.first <= i < call.last}
        if ops <= inside and inside <= ops:
            return [_meet(reader, call.module, value, call.inputs.index(value))]
    found: dict[tuple[int, int], ModuleCall] = {}
    for index in ops:
        layer = next((m for m in calls if m.first <= index < m.last and {i for i in users if m.first <= i < m.last} <= ops), None)
        if layer is None:
            op = reader.op(index)
            strands = chosen & set().union(*(reader.carried[v] for v in (*op.inputs, *op.outputs)))
            raise _StandsInTheWayError(min(strands), f"a whole activation enters it inside {op.module or 'the loss'} ({op.name})")
        found[layer.first, layer.last] = layer
    outer = [m for m in found.values() if not any(o is not m and o.first <= m.first and m.last <= o.last for o in found.values())]
    return [_meet(reader, m.module, value, m.inputs.index(value)) for m in outer]  # once for each: a sum of sums would be too much


# -- sizes in the model's code --


def _rewrites(reader: Reader, names: Mapping[int, str]) -> list[Rewrite]:
    found: dict[Rewrite, None] = {}
    spared: set[tuple[str, str, int, int, int]] = set()
    for op in reader.flow.operations:
        if op.call < 0:
            continue
        call = reader.flow.calls[op.call]
        made = reader.flow.values[op.outputs[0]]
        for position, number, at, length in counted_sizes(reader.flow, op):
            strand = next((s for s in made.strands[at] if s in names), None)
            key = (call.module, call.function, len(call.sizes), position, number)
            if strand is None:
                spared.add(key)
            elif length and number % made.shape[at]:
                raise _StandsInTheWayError(strand, f"the code of {call.module or 'the model'} slices it by number ({number} of {length})")
            else:
                found[Rewrite(*key, names[strand], call.dim, length)] = None
    for rewrite in found:
        if (rewrite.module, rewrite.function, rewrite.rank, rewrite.position, rewrite.number) in spared:
            strand = next(s for s, name in names.items() if name == rewrite.strand)
            raise _StandsInTheWayError(strand, f"the code of {rewrite.module} uses the size {rewrite.number} for other things too")
    return list(found)


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


def coverage(policy: TensorPolicy, flow: Flow) -> float:
    """The share of trainable parameters that is cut."""
    cut = {c.parameter for s in policy.strands for c in s.cuts}
    sizes = {v.parameter: math.prod(v.shape) for v in flow.values if v.parameter and v.needs_grad}
    return sum(n for name, n in sizes.items() if name in cut) / max(sum(sizes.values()), 1)


def refuse_if_nothing(policy: TensorPolicy, ways: int) -> None:
    if not policy.strands:
        reason = next(iter(policy.whole.values()), "it has no parameters")
        raise RequestError(f"tp={ways}: nothing in this model can be cut ({reason}): use --mesh dp={ways}")


def dealt_strands(flow: Flow, policy: TensorPolicy | None) -> frozenset[int]:
    """The strands of a flow that a policy deals out; not those that are gathered where they are made."""
    if policy is None:
        return frozenset()
    values = {v.parameter: v for v in flow.values if v.parameter}
    at_once = {m.strand for m in (*policy.gathers, *policy.lookups)}
    found = set()
    for dealt in policy.strands:
        if dealt.name not in at_once:
            strands = values[dealt.cuts[0].parameter].strands[dealt.cuts[0].dim]
            outer = 1
            for strand in strands:
                if outer == dealt.cuts[0].outer and flow.sizes[strand] == dealt.size:
                    found.add(strand)
                outer *= flow.sizes[strand]
    return frozenset(found)
