"""Spatial parallelism in a schedule: every message and collective of one rank of the grid, and its fraction of the work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.core.model import KernelCache, ModelProfile, scale_layer
from meshwright.core.schedule import Action
from meshwright.core.spatial_policy import HaloPhase, SpatialGather, SpatialNorm, SpatialPolicy, halo_messages, largest_block


@dataclass(frozen=True)
class ModuleAction:
    """A communication action that a module causes in one phase."""

    module: str
    phase: HaloPhase
    action: Action
    skipped_in_recompute: tuple[str, ...] = ()


def spatial_collectives(policy: SpatialPolicy, samples: int, rank: int) -> Iterator[ModuleAction]:
    """All messages and collectives of one rank, in forward order by kind; ranks inside the grid have more neighbours than those at its border."""
    for op in policy.window_ops:
        for phase, peer, size in halo_messages(op, policy.grid, rank):
            action = Action(f"halo/{op.module or 'model'}", "send", bytes=round(size * samples), axis="cp", group_size=2, peer=peer)
            yield ModuleAction(op.module, phase, action)
    for norm in policy.norms:
        yield from _norm_actions(norm, policy.num_parts, samples)
    for gather in policy.gathers:
        yield _gather_action(gather, policy, samples)


def _norm_actions(norm: SpatialNorm, num_parts: int, samples: int) -> Iterator[ModuleAction]:
    """Forward all-gathers mean and variance; backward all-reduces two means of the gradient."""
    size = 2 * norm.num_statistics * norm.itemsize * (1 if norm.is_batch_independent else samples)
    name = f"statistics/{norm.module or 'model'}"
    yield ModuleAction(norm.module, "forward", Action(name, "all_gather", bytes=size * num_parts, axis="cp"))
    if norm.needs_grad:
        yield ModuleAction(norm.module, "backward", Action(name, "all_reduce", bytes=size, axis="cp"))


def _gather_action(gather: SpatialGather, policy: SpatialPolicy, samples: int) -> ModuleAction:
    """Blocks are padded to the largest. Backward needs no communication: every rank has the full gradient."""
    size = math.prod(gather.sizes) * gather.bytes * samples
    padded = math.prod(largest_block(gather.sizes, policy.grid)) * policy.num_parts * gather.bytes * samples
    action = Action(gather.name, "all_gather", bytes=round(padded), padding=round(padded - size), axis="cp")
    return ModuleAction(gather.module, "forward", action, gather.skipped_in_recompute)


def spatial_profile(policy: SpatialPolicy, profile: ModelProfile) -> ModelProfile:
    """The profile of a rank that works on blocks: in sharded layers, its fraction of the work and of the activations."""
    if not policy.grid:
        return profile
    cache: KernelCache = {}
    return replace(profile, layers=tuple(scale_layer(layer, _local_fraction(policy, layer.name), cache) for layer in profile.layers))


def _local_fraction(policy: SpatialPolicy, layer: str) -> float:
    """A rank's fraction of a layer: 1/`num_parts` of what is sharded; a layer with some unsharded modules counts by the number of modules."""

    def inside(names: Iterable[str]) -> set[str]:
        return {name for name in names if name == layer or name.startswith(f"{layer}.")}

    modules, sharded = inside(policy.layer_notes), inside(policy.sharded_modules)
    sharded_fraction = len(modules & sharded) / len(modules) if modules else float(bool(sharded))
    return 1.0 - sharded_fraction * (1.0 - 1.0 / policy.num_parts)
