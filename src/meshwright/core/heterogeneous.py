"""Clusters of different devices: which devices differ, candidate orders of ranks on them, and a homogeneous average of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

from meshwright.core.calibration import Calibration, scale_rates
from meshwright.core.cluster import Cluster, Device
from meshwright.core.cluster_changes import map_nodes

_MEMORY_TOLERANCE = 1.1  # memory within this factor counts as equal: a card's free memory varies with what other processes use
_LARGE_MATMUL_FLOPS = 1e12  # FLOPs
_MAX_PERMUTED_KINDS = 3  # up to this number of kinds of devices, all orders are tried


def device_labels(cluster: Cluster, calibration: Calibration, world: int) -> tuple[str, ...]:
    """By rank, the label of its device's rates in the calibration: the device's name, or else its kind. Empty where the calibration
    covers a single kind of device."""
    measured = {rates.device for rates in calibration.layouts}
    if measured == {""}:
        return ()
    labels = tuple(_device_label(device, measured) for device in cluster.devices[:world])
    return labels if any(labels) else ()


def _device_label(device: Device, measured: set[str]) -> str:
    return device.name if device.name in measured else device.kind if device.kind in measured else ""


def device_memories(cluster: Cluster, world: int) -> tuple[int, ...]:
    """By rank, the memory of its device; empty where all are about the same."""
    least, largest = cluster.least_memory(world), max(d.memory_bytes for node in cluster.distinct_nodes for d in node.devices)
    return tuple(device.memory_bytes for device in cluster.devices[:world]) if largest > _MEMORY_TOLERANCE * max(least, 1) else ()


def is_heterogeneous(cluster: Cluster, calibration: Calibration, world: int = 0) -> bool:
    ranks = world or len(cluster.devices)
    return ranks > 1 and (len(set(device_labels(cluster, calibration, ranks))) > 1 or bool(device_memories(cluster, ranks)))


def _device_key(device: Device) -> tuple[str, str, int]:
    return device.kind, device.name, round(device.memory_bytes, -9)


def matmul_speed(device: Device, calibration: Calibration, precision: str) -> float:
    """A device's FLOP/s in a large matmul, for ordering devices by speed."""
    rates = calibration.rates_for(2, _device_label(device, {rates.device for rates in calibration.layouts}))
    return rates.compute_rate("matmul", precision, _LARGE_MATMUL_FLOPS) / rates.oversubscription


def device_orders(cluster: Cluster, calibration: Calibration, precision: str) -> Iterator[tuple[int, ...]]:
    """Candidate device orders, one for each order of the kinds of devices (of the kinds of nodes, where there are several nodes): the
    default one, which is empty, the fastest first or last, the largest first or last and, where kinds are few, all others. Devices of a kind
    keep their order."""
    if len(cluster.nodes) > 1:
        blocks = [(tuple(map(_device_key, node.devices)), node.devices[0]) for node in cluster.nodes]
        members = [range(end - len(node.devices), end) for node, end in zip(cluster.nodes, cluster.rank_ends, strict=True)]
    else:
        blocks = [((_device_key(device),), device) for device in cluster.devices]
        members = [range(i, i + 1) for i in range(len(cluster.devices))]
    kinds = dict(reversed(blocks))
    by_speed = sorted(kinds, key=lambda kind: -matmul_speed(kinds[kind], calibration, precision))
    by_size = sorted(kinds, key=lambda kind: -kinds[kind].memory_bytes)
    orders = [by_speed, by_speed[::-1], by_size, by_size[::-1], *(permutations(by_speed) if len(kinds) <= _MAX_PERMUTED_KINDS else ())]
    default = tuple(range(len(cluster.devices)))
    permuted = (sorted(range(len(blocks)), key=lambda i: (order.index(blocks[i][0]), i)) for order in orders)
    candidates = dict.fromkeys(tuple(rank for i in block_order for rank in members[i]) for block_order in permuted)
    yield from ((), *(order for order in candidates if order != default))


def homogeneous_average(cluster: Cluster, calibration: Calibration, precision: str) -> tuple[Cluster, Calibration]:
    """The cluster with every device at the mean memory and the mean speed. Work that is distributed in proportion to device speed takes about as
    long there, so a plan that is good on it is good on the real cluster once the work is balanced."""
    devices = cluster.devices
    mean = sum(d.memory_bytes for d in devices) // len(devices)
    speeds = [matmul_speed(d, calibration, precision) for d in devices]
    slowest = speeds.index(min(speeds))
    speedup = sum(speeds) / len(speeds) / max(speeds[slowest], 1e-9)
    average = replace(devices[slowest], memory_bytes=mean)
    homogeneous = map_nodes(cluster, lambda n: replace(n, devices=tuple(replace(average, index=d.index) for d in n.devices)))
    labels = device_labels(cluster, calibration, len(devices))
    layouts = [r for r in calibration.layouts if not labels or r.device == labels[slowest]]
    return homogeneous, replace(calibration, layouts=tuple(scale_rates(replace(r, device=""), speedup) for r in layouts))


def with_measured_names(cluster: Cluster, calibration: Calibration) -> Cluster:
    """The cluster with the device names that a probe assigned, where ranks of one kind of device differ in speed."""
    max_ranks = max(rates.ranks for rates in calibration.layouts)
    names = {rank: rates.device for rates in calibration.layouts if rates.ranks == max_ranks for rank in rates.members}
    if len(names) < len(cluster.devices):
        return cluster
    name = iter([names[rank] for rank in range(len(cluster.devices))])
    return replace(cluster, nodes=tuple(replace(n, devices=tuple(replace(d, name=next(name)) for d in n.devices)) for n in cluster.nodes))
