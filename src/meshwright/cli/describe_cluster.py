"""`describe cluster --cluster NAME`: prints a named cluster's nodes and devices, and the bandwidth that typical rank groups get."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import groupby
from typing import Any

from rich.table import Table

from meshwright.cli.common import print_json, stdout
from meshwright.core.cluster import Cluster, Node
from meshwright.core.group_bandwidth import GroupBandwidth
from meshwright.core.quantities import show_bytes, show_rate, show_seconds
from meshwright.core.serialization import to_data


def show_named_cluster(name: str, as_json: bool) -> None:
    from meshwright.describe.cluster_resolver import resolve_cluster

    found = resolve_cluster(name, os.environ)
    if as_json:
        print_json(_cluster_to_json(found))
        return
    stdout.print(f"[bold]{found.name}[/bold]: {len(found.devices):,} devices on {len(found.nodes):,} node{'s' * (len(found.nodes) > 1)}")
    for node, count in count_equal_nodes(found):
        stdout.print(
            f"{count:,} × {node.name}: {node.cpu or 'CPU not said'}, {node.cores} cores, {show_bytes(node.memory_bytes)} memory", markup=False
        )
    stdout.print(_devices_table(found))
    if found.has_topology:
        stdout.print(_group_bandwidth_table(found))
    if found.source:
        stdout.print(f"source: {found.source}", markup=False)


def count_equal_nodes(cluster: Cluster) -> list[tuple[Node, int]]:
    """Each run of equal neighbouring nodes as one node with its count."""
    return [(node, len(list(alike))) for node, alike in groupby(cluster.nodes)]


def typical_rank_groups(cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """Rank groups that meshes commonly make: the ranks of a node, one rank per node, all ranks."""
    first = len(cluster.nodes[0].devices)
    starts = [0]
    for node in cluster.nodes[:-1]:
        starts.append(starts[-1] + len(node.devices))
    found = {"the ranks of a node": tuple(range(first)), "one rank a node": tuple(starts), "all ranks": tuple(range(len(cluster.devices)))}
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def _cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    nodes = count_equal_nodes(cluster)
    data = to_data(replace(cluster, nodes=tuple(node for node, _ in nodes)))
    reached = {
        name: {pattern: to_data(cluster.group_bandwidth(ranks, pattern)) for pattern in ("ring", "all_to_all")}
        for name, ranks in typical_rank_groups(cluster).items()
    }
    return {
        "cluster": data,
        "counts": [count for _, count in nodes],
        "devices": len(cluster.devices),
        "reach": reached if cluster.has_topology else {},
    }


def _devices_table(cluster: Cluster) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("devices", "memory", "peaks", "bandwidth", "source"):
        table.add_column(column, overflow="fold")
    for node, _ in count_equal_nodes(cluster):
        for (name, memory), alike in groupby(node.devices, key=lambda d: (d.name, d.memory_bytes)):
            same = list(alike)
            peaks = ", ".join(f"{p} {show_rate(peak, 'FLOP/s')}" for p, peak in same[0].peak_flops.items())
            bandwidth = show_rate(same[0].memory_bandwidth, "B/s") if same[0].memory_bandwidth else "not known"
            table.add_row(f"{len(same)} × {name}", show_bytes(memory), peaks or "not known", bandwidth, same[0].source)
    return table


def _group_bandwidth_table(cluster: Cluster) -> Table:
    caption = "bytes/s that each rank sends while all other ranks are in such groups too"
    table = Table(box=None, header_style="bold", caption=caption, caption_justify="left")
    for column in ("group", "ring", "decided by", "shared by", "all to all", "switch hops", "latency"):
        table.add_column(column)
    for name, ranks in typical_rank_groups(cluster).items():
        ring, mixed = cluster.group_bandwidth(ranks), cluster.group_bandwidth(ranks, "all_to_all")
        table.add_row(f"{name} ({len(ranks):,})", *_bandwidth_row(ring, mixed))
    return table


def _bandwidth_row(ring: GroupBandwidth, all_to_all: GroupBandwidth) -> tuple[str, ...]:
    rates = show_rate(ring.rate, "B/s"), ring.slowest, f"{ring.sharing:.3g}", show_rate(all_to_all.rate, "B/s")
    return (*rates, str(all_to_all.switch_hops), show_seconds(ring.link.latency_s))
