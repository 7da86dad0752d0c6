"""Spatial parallelism in a schedule: every message and collective of one rank of the grid, and its share of the work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.core.model import Kernel, LayerProfile, ModelProfile
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
    for slide in policy.window_ops:
        for phase, peer, size in halo_messages(slide, policy.grid, rank):
            action = Action(f"halo/{slide.module or 'model'}", "send", bytes=round(size * samples), axis="cp", group_size=2, peer=peer)
            yield ModuleAction(slide.module, phase, action)
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
    real = math.prod(gather.sizes) * gather.bytes * samples
    whole = math.prod(largest_block(gather.sizes, policy.grid)) * policy.num_parts * gather.bytes * samples
    action = Action(gather.name, "all_gather", bytes=round(whole), padding=round(whole - real), axis="cp")
    return ModuleAction(gather.module, "forward", action, gather.skipped_in_recompute)


def spatial_profile(policy: SpatialPolicy, profile: ModelProfile) -> ModelProfile:
    """The profile of a rank that works on blocks: in sharded layers, its share of the work and of the activations."""
    if not policy.grid:
        return profile
    memo: dict[tuple[int, float], tuple[Kernel, ...]] = {}

    def shrink(layer: LayerProfile) -> LayerProfile:
        share = _layer_share(policy, layer.name)
        key = (id(layer.kernels), share)
        if key not in memo:
            memo[key] = tuple(replace(k, flops=k.flops * share, bytes=k.bytes * share) for k in layer.kernels)
        return replace(
            layer,
            flops_forward=layer.flops_forward * share,
            flops_backward=layer.flops_backward * share,
            activation_bytes=layer.activation_bytes * share,
            output_bytes=layer.output_bytes * share,
            expensive_output_bytes=layer.expensive_output_bytes * share,
            fusible_bytes=layer.fusible_bytes * share,
            compiler_recomputed_bytes=layer.compiler_recomputed_bytes * share,
            transient_bytes=layer.transient_bytes * share,
            matmul_workspace_bytes=layer.matmul_workspace_bytes * share,
            kernels=memo[key],
        )

    return replace(profile, layers=tuple(shrink(layer) for layer in profile.layers))


def _layer_share(policy: SpatialPolicy, layer: str) -> float:
    """A rank's share of a layer: 1/`num_parts` of what is sharded; a layer with some unsharded modules counts by the number of modules."""

    def inside(names: Iterable[str]) -> set[str]:
        return {name for name in names if name == layer or name.startswith(f"{layer}.")}

    told, cut = inside(policy.layer_notes), inside(policy.sharded_modules)
    part = len(told & cut) / len(told) if told else float(bool(cut))
    return 1.0 - part * (1.0 - 1.0 / policy.num_parts)
