"""Proxies of ResNet-50 and ResNet-152 under data parallelism, with weak and strong scaling, and of FSDP (ZeRO-3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import RequestError
from meshwright.core.schedule import Schedule
from meshwright.proxies.proxy_program import ProgramBuilder, ProxyConfig, build_schedule, require_multiple, world_group

RESNET50_BUCKETS = (3104745, 4461568, 4462592, 4986880, 4468736, 4074560)
RESNET152_BUCKETS = (6511592, 6567936, 5905920, 6113280, 6176256, 6112768, 6176256, 6112768, 5321216, 5194816)
RESNET152_FLOPS = 2 * 11.56e9  # forward, for one image of 224 × 224


def resnet_tensors(blocks: tuple[int, int, int, int], classes: int) -> list[int]:
    """Sizes of the parameters of a ResNet with bottleneck blocks, last first: the order in which gradients become ready."""
    tensors, wide = [64 * 3 * 49, 64, 64], 64
    for stage, count in enumerate(blocks):
        narrow = 64 * 2**stage
        for block in range(count):
            if block == 0:
                tensors += [wide * 4 * narrow, 4 * narrow, 4 * narrow]
            tensors += [wide * narrow, narrow, narrow, narrow * narrow * 9, narrow, narrow, narrow * 4 * narrow, 4 * narrow, 4 * narrow]
            wide = 4 * narrow
    return [*tensors, wide * classes, classes][::-1]


@dataclass(frozen=True)
class ResNet50ProxyConfig(ProxyConfig):
    buckets: tuple[int, ...] = RESNET50_BUCKETS  # floats
    exchange: Literal["all_reduce", "ring", "both"] = "all_reduce"  # "both": one after the other, as in the original


def resnet50(config: ResNet50ProxyConfig, world: int) -> Schedule:
    """A blocking all-reduce of each bucket, or a send of each bucket to the next rank of a ring."""
    sizes = [config.float_bytes(n) for n in (resnet_tensors((3, 4, 6, 3), 1001) if config.gradients == "tensor" else config.buckets)]
    programs = []
    for rank in range(world if config.exchange != "all_reduce" else 1):
        out = ProgramBuilder()
        for i, size in enumerate(sizes if config.exchange != "ring" and world > 1 else ()):
            out.collective(f"grads/bucket{i}", "all_reduce", "world", size)
        for i, size in enumerate(sizes if config.exchange != "all_reduce" and world > 1 else ()):
            received = out.receive(f"ring/bucket{i}/in", "world", (rank - 1) % world, size)
            out.send(f"ring/bucket{i}", "world", (rank + 1) % world, size, blocks=True)
            out.wait(f"wait/bucket{i}", (received,))
        programs.append(out)
    return build_schedule("resnet50", world, world_group(world), programs, lambda rank: rank)


@dataclass(frozen=True)
class ResNet152ProxyConfig(ProxyConfig):
    buckets: tuple[int, ...] = RESNET152_BUCKETS
    forward_us: float = 119000.0
    backward_us: float = 23800.0  # per bucket
    batch: int = 128  # images per rank


def resnet152(config: ResNet152ProxyConfig, world: int, name: str = "resnet152") -> Schedule:
    """Forward; then for each bucket its backward and an async all-reduce that overlaps with the rest."""
    flops = config.scaled_flops(RESNET152_FLOPS * config.batch)
    tensors = resnet_tensors((3, 8, 36, 3), 1000)
    out = ProgramBuilder()
    out.compute("forward", config.scaled_seconds(config.forward_us), flops)
    buckets = _assign_to_buckets(tensors, config.buckets) if config.gradients == "tensor" else [[n] for n in config.buckets]
    reductions = []
    for i, sizes in enumerate(buckets):
        out.compute(f"backward/{i}", config.scaled_seconds(config.backward_us), 2 * flops / len(buckets), op="backward")
        reductions += out.all_reduces(f"grads/bucket{i}", "world", map(config.float_bytes, sizes if world > 1 else ()))
    out.wait("wait/gradients", reductions)
    return build_schedule(name, world, world_group(world), [out], lambda _: 0)


def _assign_to_buckets(tensors: list[int], buckets: tuple[int, ...]) -> list[list[int]]:
    """Split the tensors into as many parts as there are buckets; a part is closed once it is as large as its bucket."""
    parts: list[list[int]] = [[]]
    for numel in tensors:
        if sum(parts[-1]) >= buckets[len(parts) - 1] and len(parts) < len(buckets):
            parts.append([])
        parts[-1].append(numel)
    return parts


@dataclass(frozen=True)
class StrongScalingProxyConfig(ProxyConfig):
    """`table` rows: world size, local batch, forward and backward microseconds."""

    buckets: tuple[int, ...] = RESNET152_BUCKETS
    table: tuple[tuple[int, int, float, float], ...] = (
        (256, 128, 119000.0, 23800.0),
        (512, 64, 63000.0, 12600.0),
        (1024, 32, 36000.0, 7200.0),
        (2048, 16, 27667.0, 5533.0),
    )


def resnet152_strong(config: StrongScalingProxyConfig, world: int) -> Schedule:
    """ResNet-152 with the same global batch for every world size."""
    row = next((row for row in config.table if row[0] == world), None)
    if row is None:
        known, setting = ", ".join(str(r[0]) for r in config.table), f"--set 'table=[[{world}, batch, forward_us, backward_us]]'"
        raise RequestError(f"resnet152-strong: {world} ranks are not in its table ({known}): use one of these, or {setting}")
    _, batch, forward, backward = row
    return resnet152(ResNet152ProxyConfig(config.scale_down, config.gradients, config.buckets, forward, backward, batch), world, "resnet152-strong")


@dataclass(frozen=True)
class FSDPProxyConfig(ProxyConfig):
    """Units of equal size, sharded over `sharding` ranks and replicated over the rest. The defaults are the 32 layers of an 8B Llama with
    4096 tokens per rank, timed at 400 TFLOP/s."""

    units: int = 32
    sharding: int = 0  # ranks that share one replica; 0: all
    unit_floats: int = 218_112_000
    tokens: int = 4096
    forward_us: float = 4467.0  # per unit
    backward_us: float = 8934.0
    prefetch: int = 1  # units all-gathered ahead of the one that computes


def fsdp(config: FSDPProxyConfig, world: int) -> Schedule:
    """All-gather each unit before its forward and its backward, reduce-scatter its gradients, and all-reduce them over the replicas."""
    sharding = config.sharding or world
    require_multiple("fsdp", world, sharding, "sharding")
    replicas = world // sharding
    groups = {
        "shard": tuple(tuple(range(r * sharding, (r + 1) * sharding)) for r in range(replicas)),
        "dp": tuple(tuple(range(s, world, sharding)) for s in range(sharding)),
    }
    shard_bytes = config.float_bytes(config.unit_floats / sharding)
    out = ProgramBuilder()
    reductions: list[str] = []
    for phase in ("forward", "backward"):
        units = list(range(config.units) if phase == "forward" else reversed(range(config.units)))
        gathered = 0
        for i, unit in enumerate(units):
            while sharding > 1 and gathered < min(i + 1 + config.prefetch, config.units):
                out.collective(f"params/{phase}/{units[gathered]}", "all_gather", "shard", shard_bytes * sharding, blocks=False)
                gathered += 1
            scale, seconds = (1, config.forward_us) if phase == "forward" else (2, config.backward_us)
            flops = config.scaled_flops(2.0 * scale * config.unit_floats * config.tokens)
            waits: tuple[str, ...] = (f"params/{phase}/{unit}",) if sharding > 1 else ()
            out.compute(f"{phase}/{unit}", config.scaled_seconds(seconds), flops, op=phase, waits=waits)  # type: ignore[arg-type]
            waits = ()
            if phase == "backward" and sharding > 1:
                waits = (out.collective(f"grads/unit/{unit}", "reduce_scatter", "shard", shard_bytes * sharding, blocks=False),)
                reductions += waits
            if phase == "backward" and replicas > 1:
                reductions.append(out.collective(f"replicas/unit/{unit}", "all_reduce", "dp", shard_bytes, blocks=False, waits=waits))
    out.wait("wait/gradients", reductions)
    return build_schedule("fsdp", world, groups, [out], lambda _: 0)
