"""Who owns what along the `ep` axis: mixtures of experts and embedding tables, found in a model's dataflow, and dealt out over owners."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from meshwright.core.errors import RequestError
from meshwright.core.owners import Lookup, Mixture, OwnerPolicy, Table
from meshwright.core.strand import Flow, ModuleCall
from meshwright.core.tensor import Dealt
from meshwright.plan.reader import Reader

_SELECTS = ("index", "index_select", "embedding")  # operations that pick entries of dim 0


def choose_owners(flow: Flow, owners: int) -> OwnerPolicy:
    """Experts dealt out by number, tables by bytes; refused where there is too little to own."""
    reader = Reader.of(flow)
    calls = list(_mixtures(reader))
    mixtures = [_mixture(reader, call, size, owners) for call, size in calls]
    tables = _tables(reader, {name for m in mixtures for name in m.parameters})
    if not mixtures and not tables:
        raise RequestError(f"ep={owners}: this model has neither experts nor embedding tables {_why_no_tables(reader)}: use --mesh dp={owners}")
    most = min((m.experts for m in mixtures), default=len(tables))
    if most < owners:
        what = f"{most} experts in {mixtures[0].module}" if mixtures else f"{most} embedding tables" if most > 1 else "one embedding table"
        instead = f"use --mesh ep={most} or less" if most > 1 else f"use --mesh dp={owners}"
        raise RequestError(f"ep={owners}: this model has {what}, and an owner holds at least one: {instead}")
    last = max((c.last for _, calls in tables for c in calls), default=0)
    early = any(call.first < last for call, _ in calls)  # its tokens would travel in the dry run that asks for the lookups, too
    owned = _dealt_tables(reader, tables, owners) if len(tables) >= owners and not early else ()
    return OwnerPolicy(tuple(mixtures), owned, *_container(reader, owned))


# -- mixtures --


def _mixtures(reader: Reader) -> Iterator[tuple[ModuleCall, int]]:
    """Calls of modules whose every parameter is picked from by the choices that the call is given; with the number of experts.
    Modules are noted when their calls end, so of two around the same parameters the inner one is found."""
    called = Counter(call.module for call in reader.flow.modules)
    taken: set[int] = set()
    for call in reader.flow.modules:
        if not call.module or called[call.module] > 1 or _roles(reader, call) is None:
            continue
        values = {w.value for w in reader.weights if w.name.startswith(f"{call.module}.")}
        sizes = {reader.flow.values[v].shape[:1] for v in values}
        if len(sizes) == 1 and taken.isdisjoint(values) and _is_mixture(reader, call, values):
            taken |= values
            yield call, sizes.pop()[0]


def _is_mixture(reader: Reader, call: ModuleCall, weights: set[int]) -> bool:
    """Tokens [T, d] and integer choices [T, k] in, [T, d] out, and all parameters picked from by choice."""
    roles = _roles(reader, call)
    if roles is None or len(call.outputs) != 1:
        return False
    values = reader.flow.values
    if values[call.outputs[0]].shape != values[call.inputs[roles[0]]].shape:
        return False
    chosen = _derived(reader, call, call.inputs[roles[1]])

    def picked(index: int) -> bool:
        op = reader.op(index)
        return call.first <= index < call.last and op.name in _SELECTS and len(op.inputs) == 2 and op.inputs[1] in chosen

    return all(reader.consumers.get(w) and all(map(picked, reader.consumers[w])) for w in weights)


def _roles(reader: Reader, call: ModuleCall) -> tuple[int, int, int | None] | None:
    """Which of the given tensors are tokens, choices and weights; None where that is not clear."""
    given = [reader.flow.values[v] for v in call.inputs]
    choices = [i for i, v in enumerate(given) if not v.floating and len(v.shape) == 2]
    if len(choices) != 1 or not 2 <= len(given) <= 3:
        return None
    shape = given[choices[0]].shape
    floats = [i for i, v in enumerate(given) if v.floating and len(v.shape) == 2 and v.shape[0] == shape[0]]
    if len(floats) != len(given) - 1:
        return None
    if len(floats) == 1:
        return floats[0], choices[0], None
    weights = [i for i in floats if given[i].shape == shape]
    if len(weights) != 1:  # as many features as choices: tokens come first, as everywhere
        weights = floats[1:]
    return next(i for i in floats if i not in weights), choices[0], weights[0]


def _derived(reader: Reader, call: ModuleCall, value: int) -> set[int]:
    """A value, and what is made of it alone, inside a call."""
    found = {value}
    for op in reader.flow.operations[call.first : call.last]:
        if op.inputs and found.issuperset(op.inputs):
            found.update(op.outputs)
    return found


def _mixture(reader: Reader, call: ModuleCall, experts: int, owners: int) -> Mixture:
    roles = _roles(reader, call)
    assert roles is not None
    tokens, choices = (reader.flow.values[call.inputs[i]] for i in roles[:2])
    dealt = Dealt(call.module, experts, ())
    return Mixture(
        call.module,
        tuple(w.name for w in reader.weights if w.name.startswith(f"{call.module}.")),
        tuple(dealt.piece(owner, owners)[1] for owner in range(owners)),
        math.prod(choices.shape) / reader.flow.batch,
        tokens.shape[1],
        tokens.shape[1] * tokens.itemsize,
        *roles,
    )


# -- tables --


def _tables(reader: Reader, experts: set[str]) -> list[tuple[int, list[ModuleCall]]]:
    """Tables (the parameter's value, and its calls) that only their own module reads, at places that the samples give; none unless they
    outweigh the rest of the model."""
    known = _known_beforehand(reader)
    found = []
    for weight in reader.weights:
        readers = [reader.layer_of.get(i) for i in reader.consumers.get(weight.value, [])]
        calls = [c for c in readers if c is not None and c.kind in ("embedding", "bag") and weight.name.startswith(f"{c.module}.")]
        if calls and len(calls) == len(readers) and all(_looks_up(reader, c, known) for c in calls):
            found.append((weight.value, calls))
    tables = {v for v, _ in found}
    kinds = {reader.flow.values[v].itemsize for v in tables}
    rest = sum(w.numel for w in reader.weights if w.value not in tables and w.name not in experts)
    return found if len(kinds) == 1 and sum(w.numel for w in reader.weights if w.value in tables) > rest else []


def _why_no_tables(reader: Reader) -> str:
    bag = next((c.module for c in reader.flow.modules if c.kind == "bag" and not _is_plain(reader, c)), None)
    if bag is not None:
        return f"that can be owned ({bag} takes offsets or weights: give it indices of shape [samples, n] alone)"
    return "that outweigh the rest of it"


def _known_beforehand(reader: Reader) -> set[int]:
    """Values that depend on samples and on no parameter: they can be had before anything is looked up."""
    values = reader.flow.values
    learned = {v for v, value in enumerate(values) if value.parameter and value.needs_grad}
    known = {v for v, value in enumerate(values) if v not in reader.producer and reader.flow.samples & reader.carried[v] and not value.parameter}
    for op in reader.flow.operations:
        if learned.intersection(op.inputs):
            learned.update(op.outputs)
        elif known.intersection(op.inputs):
            known.update(op.outputs)
    return known - learned


def _looks_up(reader: Reader, call: ModuleCall, known: set[int]) -> bool:
    """One tensor of indices, of which every sample gives as many; bags are whole rows of it, without offsets or weights."""
    return _is_plain(reader, call) and call.inputs[0] in known and math.prod(reader.flow.values[call.inputs[0]].shape) % reader.flow.batch == 0


def _is_plain(reader: Reader, call: ModuleCall) -> bool:
    shape = reader.flow.values[call.inputs[0]].shape
    return len(call.inputs) == len(call.outputs) == 1 and (call.kind == "embedding" or len(shape) == 2)


def _dealt_tables(reader: Reader, tables: list[tuple[int, list[ModuleCall]]], owners: int) -> tuple[Table, ...]:
    """The largest first, each to the owner that has least."""
    held = [0] * owners
    made = {}
    for value, calls in sorted(tables, key=lambda item: -math.prod(reader.flow.values[item[0]].shape)):
        noted = reader.flow.values[value]
        owner = min(range(owners), key=lambda i: held[i])
        held[owner] += math.prod(noted.shape) * noted.itemsize
        made[value] = Table(calls[0].module, noted.parameter, noted.shape[0], owner)
    return tuple(made[value] for value, _ in tables)


def _container(reader: Reader, tables: tuple[Table, ...]) -> tuple[str, tuple[Lookup, ...]]:
    """The smallest module whose one call holds all lookups, and these in order."""
    if not tables:
        return "", ()
    names = {t.module for t in tables}
    calls = sorted((c for c in reader.flow.modules if c.module in names), key=lambda c: c.first)
    modules = [c.module for c in reader.flow.modules]
    around = [c for c in reader.flow.modules if c.first <= calls[0].first and calls[-1].last <= c.last and modules.count(c.module) == 1]
    around = [c for c in around if c.module not in names]
    if not around:
        raise RequestError("ep: the embedding tables are looked up outside any one module's forward, so their lookups cannot travel together: use dp")
    return min(around, key=lambda c: (c.last - c.first, -len(c.module))).module, tuple(_lookup(reader, c) for c in calls)


def _lookup(reader: Reader, call: ModuleCall) -> Lookup:
    given, made = reader.flow.values[call.inputs[0]], reader.flow.values[call.outputs[0]]
    return Lookup(call.module, math.prod(given.shape) / reader.flow.batch, math.prod(made.shape) * made.itemsize / reader.flow.batch)
