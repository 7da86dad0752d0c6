"""Groups ranks that are priced together: same device kind and memory, same number of samples, same share of the state that ZeRO shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.heterogeneous import device_labels, device_memories
from meshwright.core.plan import Plan
from meshwright.core.rank_devices import device_kind


@dataclass(frozen=True)
class RankClass:
    """Ranks of one device kind, represented by the first; where all ranks are alike, one class of all of them."""

    rates_label: str
    ranks: Sequence[int]
    samples: int  # the largest rank's samples
    pipeline_ranks: Sequence[int]  # their coordinates along `pp`
    shard: int = 0  # coordinate along that axis of a rank with the largest share of the state

    def micro_batch(self, plan: Plan) -> int:
        return -(-self.samples // plan.micro_batches)


def find_rank_classes(plan: Plan, cluster: Cluster, calibration: Calibration) -> list[RankClass]:
    """The plan's rank classes; `cluster` must be in the plan's device order."""
    mesh, world = plan.mesh, plan.world
    num_devices = min(world, len(cluster.devices))
    labels, memories = rates_labels(plan, cluster, calibration), device_memories(cluster, num_devices)
    if len(set(labels)) <= 1 and not memories and not plan.balance.state_fractions:
        return [RankClass(labels[0] if labels else "", range(world), plan.max_share, range(mesh.pp))]
    classes: dict[tuple[str, int, int, float], list[int]] = {}
    for rank in range(world):
        device = rank % num_devices
        samples, fraction = plan.sample_range(mesh.data_rank(rank))[1], plan.state_fraction(mesh.coordinate(rank, "shard"))
        classes.setdefault((labels[device] if labels else "", memories[device] if memories else 0, samples, fraction), []).append(rank)
    return [
        RankClass(label, ranks, samples, sorted({mesh.coordinate(rank, "pp") for rank in ranks}), mesh.coordinate(ranks[0], "shard"))
        for (label, _, samples, _), ranks in classes.items()
    ]


def rates_labels(plan: Plan, cluster: Cluster, calibration: Calibration) -> tuple[str, ...]:
    """By rank, up to the number of devices, the name under which the calibration has its rates; empty where one name covers all."""
    return device_labels(cluster, calibration, min(plan.world, len(cluster.devices))) or tuple(map(device_kind, plan.rank_devices))


def memory_capacity(cluster: Cluster, plan: Plan, rank_class: RankClass) -> int:
    """Memory per rank. The CPU ranks of a node divide all of its free memory, however few of its devices are used."""
    devices = cluster.devices
    if devices[rank_class.ranks[0]].kind != "cpu" or device_memories(cluster, min(plan.world, len(devices))):
        alike = len(rank_class.ranks) == plan.world
        return cluster.least_memory(plan.world) if alike else min(devices[rank].memory_bytes for rank in rank_class.ranks)
    bytes_per_rank, first = [], 0
    for node in cluster.nodes:
        used = sum(device.kind == "cpu" for device in node.devices[: max(plan.world - first, 0)])
        if used:
            bytes_per_rank.append(sum(d.memory_bytes for d in node.devices if d.kind == "cpu") // used)
        first += len(node.devices)
    return min(bytes_per_rank)
