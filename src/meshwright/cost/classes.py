"""Classes of ranks that are priced together: on devices of one kind and size, with as many samples and as much of the state that ZeRO cuts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.hybrid import kind_of
from meshwright.core.plan import Plan
from meshwright.core.unlike import labels, sizes


@dataclass(frozen=True)
class Class:
    """Ranks of one kind of device, which the first of them stands for; all ranks, of no kind in particular, where they are alike."""

    kind: str
    ranks: Sequence[int]
    share: int  # samples of the largest
    stages: Sequence[int]  # the pipeline ranks among them
    shard: int = 0  # the coordinate of one that has as much of the state as any of them

    def micro_batch(self, plan: Plan) -> int:
        return -(-self.share // plan.micro_batches)


def classes(plan: Plan, cluster: Cluster, calibration: Calibration) -> list[Class]:
    """`cluster` is as the plan's ranks are seated on it."""
    mesh, world = plan.mesh, plan.world
    few = min(world, len(cluster.devices))
    names = kinds(plan, cluster, calibration)
    large = sizes(cluster, few)
    if len(set(names)) <= 1 and not large and not plan.balance.states:
        return [Class(names[0] if names else "", range(world), plan.largest_share, range(mesh.pp))]
    found: dict[Hashable, list[int]] = {}
    for rank in range(world):
        device = rank % few
        samples, part = plan.share(mesh.data_rank(rank))[1], plan.state_part(mesh.coordinate(rank, "shard"))
        found.setdefault((names[device] if names else "", large[device] if large else 0, samples, part), []).append(rank)
    return [
        Class(str(key[0]), ranks, int(key[2]), sorted({mesh.coordinate(r, "pp") for r in ranks}), mesh.coordinate(ranks[0], "shard"))  # type: ignore[index]
        for key, ranks in found.items()
    ]


def kinds(plan: Plan, cluster: Cluster, calibration: Calibration) -> tuple[str, ...]:
    """By rank, as far as there are devices, under which name the calibration has its rates; empty where it has one name for all."""
    return labels(cluster, calibration, min(plan.world, len(cluster.devices))) or tuple(map(kind_of, plan.places))


def capacity(cluster: Cluster, plan: Plan, of: Class) -> int:
    """Memory for a rank. CPU ranks share what is free of their node's memory, however few of its devices are used."""
    devices = cluster.devices
    if devices[of.ranks[0]].kind != "cpu" or sizes(cluster, min(plan.world, len(devices))):
        alike = len(of.ranks) == plan.world
        return cluster.least_memory(plan.world) if alike else min(devices[rank].memory_bytes for rank in of.ranks)
    shares, first = [], 0
    for node in cluster.nodes:
        used = sum(device.kind == "cpu" for device in node.devices[: max(plan.world - first, 0)])
        if used:
            shares.append(sum(d.memory_bytes for d in node.devices if d.kind == "cpu") // used)
        first += len(node.devices)
    return min(shares)
