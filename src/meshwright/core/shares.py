"""Shares: whole things dealt out unevenly along an axis, the samples of a batch and the state that ZeRO cuts alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh


def cut(total: int, parts: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """`total` cut as the parts are to each other, at multiples of `unit`: no piece is off by more than one. A piece may be empty."""
    whole = sum(parts)
    edges = [min(round(total * end / whole / unit) * unit, total) for end in accumulate(parts, initial=0.0)]
    edges[-1] = total
    return tuple(b - a for a, b in pairwise(edges))


def check_states(states: Sequence[float], mesh: Mesh, zero: int) -> None:
    if not states:
        return
    if not zero or mesh.shard == 1:
        raise RequestError(f"plan: balance.states are parts of what ZeRO cuts, and mesh {mesh} with zero={zero} cuts nothing: leave them out")
    if len(states) != mesh.shard:
        raise RequestError(f"plan: balance.states has {len(states)} entries for shard={mesh.shard}: give {mesh.shard}")
    if min(states) < 0 or abs(sum(states) - 1) > 1e-6:
        raise RequestError(f"plan: balance.states sum to {sum(states):g} and the least is {min(states):g}: make them parts of 1, none below 0")
