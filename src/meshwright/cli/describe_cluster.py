"""`describe cluster --cluster NAME`: prints a named cluster's nodes and devices, and the bandwidth that typical rank groups get."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

from rich.table import Table

from meshwright.cli.console import make_table, print_json, print_line, stdout
from meshwright.core.cluster import Cluster, Node
from meshwright.core.quantities import show_bytes, show_rate, show_seconds
from meshwright.core.serialization import to_data


def show_named_cluster(name: str, as_json: bool) -> None:
    from meshwright.describe.cluster_resolver import resolve_cluster

    cluster = resolve_cluster(name, os.environ)
    if as_json:
        print_json(_cluster_to_json(cluster))
        return
    num_nodes = len(cluster.nodes)
    stdout.print(f"[bold]{cluster.name}[/bold]: {len(cluster.devices):,} devices on {num_nodes:,} node{'s' * (num_nodes > 1)}")
    for node, count in _count_equal_nodes(cluster):
        print_line(f"{count:,} × {node.name}: {node.cpu or 'CPU unknown'}, {node.cores} cores, {show_bytes(node.memory_bytes)} memory")
    stdout.print(_devices_table(cluster))
    if cluster.has_topology:
        stdout.print(_group_bandwidth_table(cluster))
    if cluster.source:
        stdout.print(f"source: {cluster.source}", markup=False)


def _count_equal_nodes(cluster: Cluster) -> list[tuple[Node, int]]:
    """Each run of equal neighbouring nodes as one node with its count."""
    return [(node, len(list(equal))) for node, equal in groupby(cluster.nodes)]


def _typical_rank_groups(cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """Rank groups that meshes commonly make: the ranks of a node, one rank per node, all ranks."""
    sizes = [len(node.devices) for node in cluster.nodes]
    first_ranks = tuple(accumulate(sizes[:-1], initial=0))
    groups = {"the ranks of a node": tuple(range(sizes[0])), "one rank a node": first_ranks, "all ranks": tuple(range(sum(sizes)))}
    return {name: ranks for name, ranks in groups.items() if len(ranks) > 1}


def _cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    nodes = _count_equal_nodes(cluster)
    reach = {
        name: {pattern: to_data(cluster.group_bandwidth(ranks, pattern)) for pattern in ("ring", "all_to_all")}
        for name, ranks in _typical_rank_groups(cluster).items()
        if cluster.has_topology
    }
    data = to_data(replace(cluster, nodes=tuple(node for node, _ in nodes)))
    return {"cluster": data, "counts": [count for _, count in nodes], "devices": len(cluster.devices), "reach": reach}


def _devices_table(cluster: Cluster) -> Table:
    table = make_table("devices", "memory", "peaks", "bandwidth", "source", fold=True)
    for node, _ in _count_equal_nodes(cluster):
        for (name, memory), equal in groupby(node.devices, key=lambda d: (d.name, d.memory_bytes)):
            devices = list(equal)
            peaks = ", ".join(f"{precision} {show_rate(peak, 'FLOP/s')}" for precision, peak in devices[0].peak_flops.items())
            bandwidth = show_rate(devices[0].memory_bandwidth, "B/s") if devices[0].memory_bandwidth else "unknown"
            table.add_row(f"{len(devices)} × {name}", show_bytes(memory), peaks or "unknown", bandwidth, devices[0].source)
    return table


def _group_bandwidth_table(cluster: Cluster) -> Table:
    caption = "bytes/s that each rank sends while all other ranks are in such groups too"
    table = make_table("group", "ring", "limited by", "shared by", "all-to-all", "switch hops", "latency", caption=caption)
    for name, ranks in _typical_rank_groups(cluster).items():
        ring, all_to_all = cluster.group_bandwidth(ranks), cluster.group_bandwidth(ranks, "all_to_all")
        rates = show_rate(ring.rate, "B/s"), ring.slowest, f"{ring.sharing:.3g}", show_rate(all_to_all.rate, "B/s")
        table.add_row(f"{name} ({len(ranks):,})", *rates, str(all_to_all.switch_hops), show_seconds(ring.link.latency_s))
    return table
