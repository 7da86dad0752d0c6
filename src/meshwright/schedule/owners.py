"""What owning costs a rank: the parameters it keeps, and the exchanges with the other owners, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.owners import Mixture
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action

_INDEX = 8  # bytes of a number that travels: an index, a count


def owned_profile(plan: Plan, profile: ModelProfile, owner: int) -> ModelProfile:
    """The profile with this owner's part of what is owned. Its experts get the tokens of all ranks, so their work stays; a table that
    another rank owns is no work at all."""
    rows = plan.owners.rows(plan.mesh.ep)

    def part(layer: LayerProfile) -> LayerProfile:
        tensors = tuple(replace(t, shape=(rows[t.name][owner], *t.shape[1:])) if t.name in rows else t for t in layer.tensors)
        held = sum(t.numel for t in tensors)
        layer = replace(layer, tensors=tensors, parameters=held) if held != layer.parameters else layer
        return layer if held or not tensors or not all(t.name in rows for t in tensors) else _idle(layer)

    return replace(profile, layers=tuple(part(layer) for layer in profile.layers))


def _idle(layer: LayerProfile) -> LayerProfile:
    return replace(layer, flops_forward=0.0, flops_backward=0.0, activation_bytes=0.0, transient_bytes=0.0, product_bytes=0.0, kernels=())


def exchanges(plan: Plan, batch: int, owner: int) -> Iterator[tuple[str, str, Action, bool]]:
    """(module, phase, action, whether recomputing repeats it) for a micro-batch of `batch` samples on the rank of one owner.

    A call counts what a rank hands in: at home all of its tokens, at the owner what came from every rank. The latter depends on the
    routing, so its bytes are the most that it can be.
    """
    for mixture in plan.owners.mixtures:
        yield from _mixture(plan, mixture, batch, owner)
    if plan.owners.tables:
        yield from _lookups(plan, batch, owner)


def _mixture(plan: Plan, mixture: Mixture, batch: int, owner: int) -> Iterator[tuple[str, str, Action, bool]]:
    where, ranks = mixture.module, plan.mesh.ep
    home = round(mixture.pairs * batch * mixture.row_bytes)
    even = round(home * ranks * mixture.counts[owner] / mixture.experts)
    yield where, "forward", _exchange(f"counts/{where}", mixture.experts * _INDEX), True
    yield where, "forward", _exchange(f"tokens/{where}", home, home), True
    yield where, "forward", _exchange(f"results/{where}", home * ranks, even), True
    yield where, "backward", _exchange(f"results/{where}", home, home), False
    yield where, "backward", _exchange(f"tokens/{where}", home * ranks, even), False


def _lookups(plan: Plan, batch: int, owner: int) -> Iterator[tuple[str, str, Action, bool]]:
    policy, ranks = plan.owners, plan.mesh.ep
    name, where = policy.container or "model", policy.lookups[0].module
    indices = round(sum(lookup.indices for lookup in policy.lookups) * batch) * _INDEX
    home = round(sum(lookup.result_bytes for lookup in policy.lookups) * batch)
    mine = round(sum(lookup.result_bytes for lookup in policy.lookups_of(owner)) * batch) * ranks
    uneven = bool(plan.balance.shares)  # then other ranks' batches may be smaller
    sizes = (("counts", 2 * len(policy.lookups) * _INDEX, False), ("indices", indices, uneven), ("results", mine, uneven))
    for kind, size, bound in sizes:
        yield where, "forward", _exchange(f"{kind}/{name}", size, size if bound else None), False
    yield where, "backward", _exchange(f"results/{name}", home, home if uneven else None), False


def _exchange(name: str, size: int, likely: int | None = None) -> Action:
    return Action(name, "all_to_all", bytes=size, likely=likely, axis="ep")
