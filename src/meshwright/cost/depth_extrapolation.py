"""Prices deep models from a few of their blocks: once a step is in steady state, each further block of a kind adds the same time.

[Note: depth extrapolation]
Computation and communication are two streams that wait for each other. After some equal blocks the lag between them is constant, and each further
block adds as much time as the last. Three depths are simulated; where the third adds as much as the second, the remaining blocks are extrapolated.
Where it does not (bucket boundaries in the middle of a block), the whole step is simulated.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from itertools import groupby

from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.tensor_policy import ShardedDim, TensorPolicy
from meshwright.schedule import local_profile
from meshwright.schedule.step_actions import gradient_buckets

_MIN_BLOCKS = 14  # fewest equal blocks for which extrapolation pays
SAMPLED_DEPTHS = (3, 4, 5)
_SITE_FIELDS = tuple(f"{kind}_sites" for kind in ("copy", "reduce", "gather", "embedding", "norm", "sequence_scatter", "sequence_gather"))


def removable_blocks(plan: Plan, profile: ModelProfile, local_layers: Collection[str]) -> tuple[int, ...]:
    """Indices of layers that repeat the ones before them, in the order in which they may be removed: the longest run of equal blocks among one
    rank's layers, except its ends, which may be special. Empty where removal would not pay."""
    if plan.spatial.grid or plan.expert.tables or plan.placements:
        return ()
    stages = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}

    def block_key(index: int) -> Hashable:
        layer = profile.layers[index]
        if not (layer.block and layer.name in local_layers):
            return None
        return layer.block, id(layer.kernels), plan.memory.recompute_mode(layer.name), stages.get(layer.name)

    runs = [list(run) for key, run in groupby(range(len(profile.layers)), block_key) if key is not None]
    longest = max(runs, key=len, default=[])
    return tuple(longest[2:-2]) if len(longest) >= _MIN_BLOCKS else ()


def truncate_blocks(plan: Plan, profile: ModelProfile, removable: Sequence[int], depth: int) -> tuple[Plan, ModelProfile]:
    """The plan and profile with only the first `depth` of the removable blocks."""
    removed = set(removable[depth:])
    indices = tuple(index for index in range(len(profile.layers)) if index not in removed)

    def truncated_profile() -> ModelProfile:
        layers, per_sample = (tuple(layers[index] for index in indices) for layers in (profile.layers, profile.per_sample_layers))
        return replace(profile, layers=layers, per_sample_layers=per_sample)

    truncated_plan = without_layers(plan, profile, {profile.layers[index].name for index in removed})
    return truncated_plan, profile.memo.get_or_compute("truncated", (), indices, truncated_profile)


def buckets_repeat(plan: Plan, full_profile: ModelProfile, truncated: Sequence[tuple[Plan, ModelProfile]], extra_blocks: int, pp_rank: int) -> bool:
    """Whether each further block adds the same gradient buckets. Full buckets must be the same; the last, partial one only grows."""
    if plan.memory.zero == 3 or plan.mesh.group_size("data") == 1:
        return True
    buckets = [gradient_buckets(p, local_profile(p, model, 0, pp_rank)) for p, model in (*truncated, (plan, full_profile))]
    counts = [len(of_depth) for of_depth in buckets]
    full = [{b.bytes for b in of_depth if b.bytes >= plan.sync.bucket_bytes} for of_depth in buckets]
    added = counts[2] - counts[1]
    return added == counts[1] - counts[0] and counts[3] == counts[2] + extra_blocks * added and full[2] == full[3]


def without_layers(plan: Plan, profile: ModelProfile, removed: Collection[str]) -> Plan:
    """The plan without the tensor-, context- and expert-parallel policies of the removed layers; the other layers are unaffected."""
    if not (plan.tensor_policies or plan.context.attention_sites or plan.expert.moe_layers):
        return plan
    names = frozenset(removed)
    same, equal = plan.partition_key
    changes = profile.memo.get_or_compute("without_layers", same, (*equal, names), lambda: _changes_without_layers(plan, names))
    return replace(plan, **changes)  # type: ignore[arg-type]


def _changes_without_layers(plan: Plan, removed: frozenset[str]) -> dict[str, object]:
    def is_kept(module: str) -> bool:
        while module and module not in removed:
            module = module.rpartition(".")[0]
        return not module

    tied = {t.parameter for stage in plan.stages for t in stage.tied_parameters}  # several stages use them: they keep their shards

    def restrict_policy(policy: TensorPolicy) -> TensorPolicy:
        sites = {field: tuple(site for site in getattr(policy, field) if is_kept(site.module)) for field in _SITE_FIELDS}
        used = {name for field in sites.values() for site in field for name in (site.logical_dim, site.other_axis_dim)}
        used |= {site.sequence_layout.logical_dim for field in sites.values() for site in field if site.sequence_layout}

        def is_needed(dim: ShardedDim) -> bool:
            shards = dim.parameter_shards
            return dim.name in used or not shards or any(is_kept(s.parameter) or s.parameter in tied for s in shards)

        return replace(
            policy,
            sharded_dims=tuple(filter(is_needed, policy.sharded_dims)),
            partial_grad_parameters=tuple(filter(is_kept, policy.partial_grad_parameters)),
            **sites,  # type: ignore[arg-type]
        )

    changes: dict[str, object] = {"tensor": restrict_policy(plan.tensor), "tensor_y": restrict_policy(plan.tensor_y)} if plan.tensor_policies else {}
    if plan.context.attention_sites:
        changes["context"] = replace(plan.context, attention_sites=tuple(a for a in plan.context.attention_sites if is_kept(a.module)))
    if plan.expert.moe_layers:
        changes["expert"] = replace(plan.expert, moe_layers=tuple(m for m in plan.expert.moe_layers if is_kept(m.module)))
    return changes
