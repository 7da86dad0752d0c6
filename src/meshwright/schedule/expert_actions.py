"""Expert and table parallelism in a schedule: the parameters that one rank of the `ep` axis keeps, and its all-to-alls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.core.expert_policy import MoELayer
from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action

_INDEX_BYTES = 8  # of an index or a count


def expert_profile(plan: Plan, profile: ModelProfile, ep_rank: int) -> ModelProfile:
    """The profile with this rank's share of experts and tables. Its experts get the tokens of all ranks, so their work stays the same; a table on
    another rank is no work at all."""
    rows = plan.expert.rows_per_rank(plan.mesh.ep)

    def part(layer: LayerProfile) -> LayerProfile:
        tensors = tuple(replace(t, shape=(rows[t.name][ep_rank], *t.shape[1:])) if t.name in rows else t for t in layer.tensors)
        held = sum(t.numel for t in tensors)
        layer = replace(layer, tensors=tensors, parameters=held) if held != layer.parameters else layer
        return layer if held or not tensors or not all(t.name in rows for t in tensors) else _without_work(layer)

    return replace(profile, layers=tuple(part(layer) for layer in profile.layers))


def _without_work(layer: LayerProfile) -> LayerProfile:
    return replace(layer, flops_forward=0.0, flops_backward=0.0, activation_bytes=0.0, transient_bytes=0.0, matmul_workspace_bytes=0.0, kernels=())


def expert_collectives(plan: Plan, batch: int, ep_rank: int) -> Iterator[tuple[str, str, Action, bool]]:
    """(module, phase, action, whether recomputing repeats it) for a micro-batch of `batch` samples on one rank of the `ep` axis.

    A call counts what a rank sends: all of its own tokens, or the results for tokens from every rank. The latter depends on the routing, so its
    bytes are an upper bound.
    """
    for mixture in plan.expert.moe_layers:
        yield from _moe_collectives(plan, mixture, batch, ep_rank)
    if plan.expert.tables:
        yield from _table_collectives(plan, batch, ep_rank)


def _moe_collectives(plan: Plan, moe_layer: MoELayer, batch: int, ep_rank: int) -> Iterator[tuple[str, str, Action, bool]]:
    where, ranks = moe_layer.module, plan.mesh.ep
    home = round(moe_layer.token_expert_pairs * batch * moe_layer.row_bytes)
    even = round(home * ranks * moe_layer.experts_per_rank[ep_rank] / moe_layer.num_experts)
    yield where, "forward", _all_to_all_action(f"counts/{where}", moe_layer.num_experts * _INDEX_BYTES), True
    yield where, "forward", _all_to_all_action(f"tokens/{where}", home, home), True
    yield where, "forward", _all_to_all_action(f"results/{where}", home * ranks, even), True
    yield where, "backward", _all_to_all_action(f"results/{where}", home, home), False
    yield where, "backward", _all_to_all_action(f"tokens/{where}", home * ranks, even), False


def _table_collectives(plan: Plan, batch: int, ep_rank: int) -> Iterator[tuple[str, str, Action, bool]]:
    policy, ranks = plan.expert, plan.mesh.ep
    name, where = policy.lookup_module or "model", policy.lookups[0].module
    indices = round(sum(lookup.indices for lookup in policy.lookups) * batch) * _INDEX_BYTES
    home = round(sum(lookup.result_bytes for lookup in policy.lookups) * batch)
    mine = round(sum(lookup.result_bytes for lookup in policy.lookups_on(ep_rank)) * batch) * ranks
    uneven = bool(plan.balance.shares)  # other ranks' batches may be smaller
    sizes = (("counts", 2 * len(policy.lookups) * _INDEX_BYTES, False), ("indices", indices, uneven), ("results", mine, uneven))
    for kind, size, bound in sizes:
        yield where, "forward", _all_to_all_action(f"{kind}/{name}", size, size if bound else None), False
    yield where, "backward", _all_to_all_action(f"results/{name}", home, home if uneven else None), False


def _all_to_all_action(name: str, size: int, expected_bytes: int | None = None) -> Action:
    return Action(name, "all_to_all", bytes=size, expected_bytes=expected_bytes, axis="ep")
