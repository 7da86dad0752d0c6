"""Classes of ranks that are priced together: on devices of one kind and size, with as many samples and as much of the state that ZeRO cuts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.heterogeneous import device_labels, device_memories
from meshwright.core.plan import Plan
from meshwright.core.rank_devices import device_kind


@dataclass(frozen=True)
class RankClass:
    """Ranks of one kind of device, which the first of them stands for; all ranks, of no kind in particular, where they are alike."""

    rates_label: str
    ranks: Sequence[int]
    samples: int  # samples of the largest
    pipeline_ranks: Sequence[int]  # the pipeline ranks among them
    shard: int = 0  # the coordinate of one that has as much of the state as any of them

    def micro_batch(self, plan: Plan) -> int:
        return -(-self.samples // plan.micro_batches)


def find_rank_classes(plan: Plan, cluster: Cluster, calibration: Calibration) -> list[RankClass]:
    """`cluster` is as the plan's ranks are seated on it."""
    mesh, world = plan.mesh, plan.world
    few = min(world, len(cluster.devices))
    names = rates_labels(plan, cluster, calibration)
    large = device_memories(cluster, few)
    if len(set(names)) <= 1 and not large and not plan.balance.state_fractions:
        return [RankClass(names[0] if names else "", range(world), plan.max_share, range(mesh.pp))]
    found: dict[Hashable, list[int]] = {}
    for rank in range(world):
        device = rank % few
        samples, part = plan.sample_range(mesh.data_rank(rank))[1], plan.state_fraction(mesh.coordinate(rank, "shard"))
        found.setdefault((names[device] if names else "", large[device] if large else 0, samples, part), []).append(rank)
    return [
        RankClass(str(key[0]), ranks, int(key[2]), sorted({mesh.coordinate(r, "pp") for r in ranks}), mesh.coordinate(ranks[0], "shard"))  # type: ignore[index]
        for key, ranks in found.items()
    ]


def rates_labels(plan: Plan, cluster: Cluster, calibration: Calibration) -> tuple[str, ...]:
    """By rank, as far as there are devices, under which name the calibration has its rates; empty where it has one name for all."""
    return device_labels(cluster, calibration, min(plan.world, len(cluster.devices))) or tuple(map(device_kind, plan.rank_devices))


def memory_capacity(cluster: Cluster, plan: Plan, rank_class: RankClass) -> int:
    """Memory for a rank. CPU ranks share what is free of their node's memory, however few of its devices are used."""
    devices = cluster.devices
    if devices[rank_class.ranks[0]].kind != "cpu" or device_memories(cluster, min(plan.world, len(devices))):
        alike = len(rank_class.ranks) == plan.world
        return cluster.least_memory(plan.world) if alike else min(devices[rank].memory_bytes for rank in rank_class.ranks)
    shares, first = [], 0
    for node in cluster.nodes:
        used = sum(device.kind == "cpu" for device in node.devices[: max(plan.world - first, 0)])
        if used:
            shares.append(sum(d.memory_bytes for d in node.devices if d.kind == "cpu") // used)
        first += len(node.devices)
    return min(shares)
