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
    """The profile with this rank's experts and tables. Its experts get the tokens of all ranks, so their work stays the same; a table on
    another rank is no work at all."""
    rows = plan.expert.rows_per_rank(plan.mesh.ep)
    no_work = {"flops_forward": 0.0, "flops_backward": 0.0, "activation_bytes": 0.0, "transient_bytes": 0.0, "matmul_workspace_bytes": 0.0}

    def local_layer(layer: LayerProfile) -> LayerProfile:
        tensors = tuple(replace(t, shape=(rows[t.name][ep_rank], *t.shape[1:])) if t.name in rows else t for t in layer.tensors)
        parameters = sum(t.numel for t in tensors)
        layer = replace(layer, tensors=tensors, parameters=parameters) if parameters != layer.parameters else layer
        is_elsewhere = not parameters and tensors and all(t.name in rows for t in tensors)
        return replace(layer, **no_work, kernels=()) if is_elsewhere else layer  # type: ignore[arg-type]

    return replace(profile, layers=tuple(map(local_layer, profile.layers)))


def expert_collectives(plan: Plan, batch: int, ep_rank: int) -> Iterator[tuple[str, str, Action, bool]]:
    """(module, phase, action, whether recomputing repeats it) for a micro-batch of `batch` samples on one rank of the `ep` axis.

    A call counts what a rank sends: all of its own tokens, or the results for tokens from every rank. The latter depends on the routing, so its
    bytes are an upper bound.
    """
    for moe_layer in plan.expert.moe_layers:
        yield from _moe_collectives(plan, moe_layer, batch, ep_rank)
    if plan.expert.tables:
        yield from _table_collectives(plan, batch, ep_rank)


def _moe_collectives(plan: Plan, moe_layer: MoELayer, batch: int, ep_rank: int) -> Iterator[tuple[str, str, Action, bool]]:
    module, ranks = moe_layer.module, plan.mesh.ep
    local = round(moe_layer.token_expert_pairs * batch * moe_layer.row_bytes)  # of this rank's tokens
    if_even = round(local * ranks * moe_layer.experts_per_rank[ep_rank] / moe_layer.num_experts)  # of tokens for this rank's experts
    yield module, "forward", _all_to_all_action(f"counts/{module}", moe_layer.num_experts * _INDEX_BYTES), True
    yield module, "forward", _all_to_all_action(f"tokens/{module}", local, local), True
    yield module, "forward", _all_to_all_action(f"results/{module}", local * ranks, if_even), True
    yield module, "backward", _all_to_all_action(f"results/{module}", local, local), False
    yield module, "backward", _all_to_all_action(f"tokens/{module}", local * ranks, if_even), False


def _table_collectives(plan: Plan, batch: int, ep_rank: int) -> Iterator[tuple[str, str, Action, bool]]:
    policy, ranks = plan.expert, plan.mesh.ep
    name, module = policy.lookup_module or "model", policy.lookups[0].module
    indices = round(sum(lookup.indices for lookup in policy.lookups) * batch) * _INDEX_BYTES
    received = round(sum(lookup.result_bytes for lookup in policy.lookups) * batch)
    sent = round(sum(lookup.result_bytes for lookup in policy.lookups_on(ep_rank)) * batch) * ranks
    uneven = bool(plan.balance.shares)  # other ranks' batches may be smaller
    sizes = (("counts", 2 * len(policy.lookups) * _INDEX_BYTES, False), ("indices", indices, uneven), ("results", sent, uneven))
    for kind, size, bound in sizes:
        yield module, "forward", _all_to_all_action(f"{kind}/{name}", size, size if bound else None), False
    yield module, "backward", _all_to_all_action(f"results/{name}", received, received if uneven else None), False


def _all_to_all_action(name: str, size: int, expected_bytes: int | None = None) -> Action:
    return Action(name, "all_to_all", bytes=size, expected_bytes=expected_bytes, axis="ep")
