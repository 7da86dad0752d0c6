"""Uneven shares along a mesh axis: of the samples of a batch, and of the states that ZeRO shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh


def split_proportionally(total: int, weights: Sequence[float], multiple_of: int = 1) -> tuple[int, ...]:
    """`total` split in proportion to `weights`, at multiples of `multiple_of`: no part is off by more than one multiple. A part may be empty."""
    weight = sum(weights)
    edges = [min(round(total * end / weight / multiple_of) * multiple_of, total) for end in accumulate(weights, initial=0.0)]
    edges[-1] = total
    return tuple(b - a for a, b in pairwise(edges))


def check_state_fractions(state_fractions: Sequence[float], mesh: Mesh, zero: int) -> None:
    if not state_fractions:
        return
    if not zero or mesh.shard == 1:
        raise RequestError(f"plan: balance.state_fractions need sharded states, and mesh {mesh} with zero={zero} shards none: leave them out")
    if len(state_fractions) != mesh.shard:
        raise RequestError(f"plan: balance.state_fractions has {len(state_fractions)} entries for shard={mesh.shard}: give {mesh.shard}")
    if min(state_fractions) < 0 or abs(sum(state_fractions) - 1) > 1e-6:
        total, least = sum(state_fractions), min(state_fractions)
        raise RequestError(f"plan: balance.state_fractions sum to {total:g}, the least is {least:g}: make them sum to 1, none below 0")
