"""Spatial parallelism before the run: every message and collective of one rank of the grid, and what a rank has left to compute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.core.model import Kernel, LayerProfile, ModelProfile
from meshwright.core.schedule import Action
from meshwright.core.spatial import Norm, Phase, Regather, SpatialPolicy, sent, widest


@dataclass(frozen=True)
class Spot:
    """Something that travels because of a module, in one phase."""

    module: str
    phase: Phase
    action: Action
    final_in: tuple[str, ...] = ()


def spatial_meetings(policy: SpatialPolicy, samples: int, rank: int) -> Iterator[Spot]:
    """In forward order by kind; ranks inside the grid have more neighbours than those at its border."""
    for slide in policy.slides:
        for phase, peer, size in sent(slide, policy.grid, rank):
            action = Action(f"halo/{slide.module or 'model'}", "send", bytes=round(size * samples), axis="cp", group=2, peer=peer)
            yield Spot(slide.module, phase, action)
    for norm in policy.norms:
        yield from _statistics(norm, policy.ways, samples)
    for gather in policy.gathers:
        yield _gathering(gather, policy, samples)


def _statistics(norm: Norm, ways: int, samples: int) -> Iterator[Spot]:
    """Forward: everybody's mean and variance. Backward: two means of the gradient, summed."""
    size = 2 * norm.numbers * norm.itemsize * (1 if norm.fixed else samples)
    name = f"statistics/{norm.module or 'model'}"
    yield Spot(norm.module, "forward", Action(name, "all_gather", bytes=size * ways, axis="cp"))
    if norm.backward:
        yield Spot(norm.module, "backward", Action(name, "all_reduce", bytes=size, axis="cp"))


def _gathering(gather: Regather, policy: SpatialPolicy, samples: int) -> Spot:
    """Blocks travel padded to the largest. Backward needs nobody: every rank has the whole gradient."""
    real = math.prod(gather.sizes) * gather.bytes * samples
    whole = math.prod(widest(gather.sizes, policy.grid)) * policy.ways * gather.bytes * samples
    action = Action(gather.name, "all_gather", bytes=round(whole), padding=round(whole - real), axis="cp")
    return Spot(gather.module, "forward", action, gather.final_in)


def block_profile(policy: SpatialPolicy, profile: ModelProfile) -> ModelProfile:
    """The profile of a rank that works on blocks: in layers that are cut, its share of the work and of the activations."""
    if not policy.grid:
        return profile
    memo: dict[tuple[int, float], tuple[Kernel, ...]] = {}

    def shrink(layer: LayerProfile) -> LayerProfile:
        share = _share(policy, layer.name)
        key = (id(layer.kernels), share)
        if key not in memo:
            memo[key] = tuple(replace(k, flops=k.flops * share, bytes=k.bytes * share) for k in layer.kernels)
        return replace(
            layer,
            flops_forward=layer.flops_forward * share,
            flops_backward=layer.flops_backward * share,
            activation_bytes=layer.activation_bytes * share,
            output_bytes=layer.output_bytes * share,
            dear_bytes=layer.dear_bytes * share,
            fusible_bytes=layer.fusible_bytes * share,
            remade_bytes=layer.remade_bytes * share,
            transient_bytes=layer.transient_bytes * share,
            product_bytes=layer.product_bytes * share,
            kernels=memo[key],
        )

    return replace(profile, layers=tuple(shrink(layer) for layer in profile.layers))


def _share(policy: SpatialPolicy, layer: str) -> float:
    """One part of `ways` of what is cut; a layer some of whose modules are whole counts by their number."""

    def inside(names: Iterable[str]) -> set[str]:
        return {name for name in names if name == layer or name.startswith(f"{layer}.")}

    told, cut = inside(policy.fates), inside(policy.cut)
    part = len(told & cut) / len(told) if told else float(bool(cut))
    return 1.0 - part * (1.0 - 1.0 / policy.ways)
