"""Groups ranks that are priced together: same device kind and memory, same number of samples, same share of the state that ZeRO shards."""

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
    """By rank, up to the number of devices, the name under which the calibration has its rates; empty where one name covers all."""
    return device_labels(cluster, calibration, min(plan.world, len(cluster.devices))) or tuple(map(device_kind, plan.rank_devices))


def memory_capacity(cluster: Cluster, plan: Plan, rank_class: RankClass) -> int:
    """Memory per rank. The CPU ranks of a node divide all of its free memory, however few of its devices are used."""
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
