"""Deep models priced by few of their blocks: once a step has settled, each further block of a kind adds the same.

[Note: folding a step]
Computation and communication are two streams that wait for each other. After some equal blocks the one is ahead of the other by as much as before,
and from there on a block adds what the last one did. Three depths are run; where the third adds what the second did, all others are added on. Where
it does not (buckets that end in the middle of a block), the whole step is run.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.tensor import Dealt, TensorPolicy
from meshwright.schedule import local_profile
from meshwright.schedule.expand import gradient_buckets

_DEEP = 14  # blocks from which on folding pays
DEPTHS = (3, 4, 5)
_MEETS = ("enters", "sums", "gathers", "lookups", "norms", "deals", "collects")


def spare_blocks(plan: Plan, profile: ModelProfile, here: Collection[str]) -> tuple[int, ...]:
    """Layers that repeat the ones before them, by index, in the order in which they may be left out: of the longest run of equal blocks among
    the layers of one rank, but for its ends, which may be special. None where that would not pay."""
    if plan.spatial.grid or plan.owners.tables or plan.placements:
        return ()
    longest: list[int] = []
    run: list[int] = []
    before: Hashable = None
    stages = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    for index, layer in enumerate(profile.layers):
        there = layer.block and layer.name in here
        kind = (layer.block, id(layer.kernels), plan.memory.mode(layer.name), stages.get(layer.name)) if there else None
        run = [*run, index] if kind is not None and kind == before else [index] if kind is not None else []
        longest, before = max(longest, run, key=len), kind
    return tuple(longest[2:-2]) if len(longest) >= _DEEP else ()


def with_blocks(plan: Plan, profile: ModelProfile, spare: Sequence[int], depth: int) -> tuple[Plan, ModelProfile]:
    """The same with `depth` of the spare blocks."""
    gone = set(spare[depth:])
    kept = [index for index in range(len(profile.layers)) if index not in gone]

    def few() -> ModelProfile:
        layers = tuple(profile.layers[index] for index in kept)
        return replace(profile, layers=layers, slopes=tuple(profile.slopes[index] for index in kept))

    return narrowed(plan, profile, {profile.layers[index].name for index in gone}), profile.memo.once("few", (), tuple(kept), few)


def even_buckets(plan: Plan, whole: ModelProfile, few: Sequence[tuple[Plan, ModelProfile]], more: int, pp_rank: int) -> bool:
    """Whether each further block adds the same buckets of gradients. Full ones must be the same; what stays open to the end only grows."""
    if plan.memory.zero == 3 or plan.mesh.group_size("data") == 1:
        return True
    buckets = [gradient_buckets(p, local_profile(p, model, 0, pp_rank)) for p, model in (*few, (plan, whole))]
    counts = [len(found) for found in buckets]
    full = [{b.bytes for b in found if b.bytes >= plan.sync.bucket_bytes} for found in buckets]
    added = counts[2] - counts[1]
    return added == counts[1] - counts[0] and counts[3] == counts[2] + more * added and full[2] == full[3]


def narrowed(plan: Plan, profile: ModelProfile, without: Collection[str]) -> Plan:
    """The plan with no word about the tensor parallelism, positions and experts of some layers: what ranks do elsewhere is the same."""
    if not (plan.tensors or plan.context.attends or plan.owners.mixtures):
        return plan
    gone = frozenset(without)
    same, equal = plan.cut
    changes = profile.memo.once("narrowed", same, (*equal, gone), lambda: _narrowed(plan, gone))
    return replace(plan, **changes)  # type: ignore[arg-type]


def _narrowed(plan: Plan, without: frozenset[str]) -> dict[str, object]:
    def there(module: str) -> bool:
        while module and module not in without:
            module = module.rpartition(".")[0]
        return not module

    borrowed = {b.parameter for stage in plan.stages for b in stage.also}  # what several stages use stays as it is

    def few(policy: TensorPolicy) -> TensorPolicy:
        meets = {kind: tuple(m for m in getattr(policy, kind) if there(m.module)) for kind in _MEETS}
        named = {name for kind in meets.values() for m in kind for name in (m.strand, m.across, m.along.strand if m.along else "")}

        def cut(strand: Dealt) -> bool:
            return strand.name in named or not strand.cuts or any(there(c.parameter) or c.parameter in borrowed for c in strand.cuts)

        return replace(policy, strands=tuple(filter(cut, policy.strands)), partial=tuple(filter(there, policy.partial)), **meets)  # type: ignore[arg-type]

    found: dict[str, object] = {"tensor": few(plan.tensor), "across": few(plan.across)} if plan.tensors else {}
    if plan.context.attends:
        found["context"] = replace(plan.context, attends=tuple(a for a in plan.context.attends if there(a.module)))
    if plan.owners.mixtures:
        found["owners"] = replace(plan.owners, mixtures=tuple(m for m in plan.owners.mixtures if there(m.module)))
    return found
