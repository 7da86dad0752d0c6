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
from meshwright.core.tensor import Dealt, Meet, TensorPolicy

_DEEP = 20  # blocks from which on folding pays
DEPTHS = (6, 7, 8)


def spare_blocks(plan: Plan, profile: ModelProfile, here: Collection[str]) -> tuple[int, ...]:
    """Layers that repeat the ones before them, by index, in the order in which they may be left out: of the longest run of equal blocks among
    the layers of one rank, but for its ends, which may be special. None where that would not pay."""
    if plan.mesh.cp > 1 or plan.mesh.ep > 1 or plan.placements:
        return ()
    longest: list[int] = []
    run: list[int] = []
    before: Hashable = None
    for index, layer in enumerate(profile.layers):
        kind = (layer.block, id(layer.kernels), plan.memory.mode(layer.name)) if layer.block and layer.name in here else None
        run = [*run, index] if kind is not None and kind == before else [index] if kind is not None else []
        longest, before = max(longest, run, key=len), kind
    return tuple(longest[2:-2]) if len(longest) >= _DEEP else ()


def with_blocks(plan: Plan, profile: ModelProfile, spare: Sequence[int], depth: int) -> tuple[Plan, ModelProfile]:
    """The same with `depth` of the spare blocks."""
    gone = set(spare[depth:])
    kept = [index for index in range(len(profile.layers)) if index not in gone]
    layers = tuple(profile.layers[index] for index in kept)
    shallow = replace(profile, layers=layers, slopes=tuple(profile.slopes[index] for index in kept))
    return narrowed(plan, {profile.layers[index].name for index in gone}), shallow


def narrowed(plan: Plan, without: Collection[str]) -> Plan:
    """The plan with no word about the tensor parallelism of some layers: what ranks do elsewhere is the same."""

    def there(module: str) -> bool:
        while module and module not in without:
            module = module.rpartition(".")[0]
        return not module

    def few(policy: TensorPolicy) -> TensorPolicy:
        def those(meets: tuple[Meet, ...]) -> tuple[Meet, ...]:
            return tuple(meet for meet in meets if there(meet.module))

        def cut(strand: Dealt) -> bool:
            return not strand.cuts or any(there(c.parameter) for c in strand.cuts)

        return replace(
            policy,
            strands=tuple(filter(cut, policy.strands)),
            enters=those(policy.enters),
            sums=those(policy.sums),
            gathers=those(policy.gathers),
            lookups=those(policy.lookups),
            norms=those(policy.norms),
            deals=those(policy.deals),
            collects=those(policy.collects),
            partial=tuple(filter(there, policy.partial)),
        )

    return replace(plan, tensor=few(plan.tensor), across=few(plan.across)) if plan.tensors else plan
