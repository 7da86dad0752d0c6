"""The same cluster with other nodes or links: what would a better network give?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from meshwright.core.cluster import Cluster, Node
from meshwright.core.node_topology import Link


def map_nodes(cluster: Cluster, change: Callable[[Node], Node]) -> Cluster:
    """Every node changed; `change` is asked once for each that differs."""
    changed = {id(node): change(node) for node in cluster.distinct_nodes}
    return replace(cluster, nodes=tuple(changed[id(node)] for node in cluster.nodes))


def map_links(cluster: Cluster, change: Callable[[Link], Link]) -> Cluster:
    """Every link changed."""
    nodes = map_nodes(cluster, lambda node: replace(node, link=change(node.link), inside=_map_topology_links(node.inside, change)))
    return map_network_links(nodes, change)


def map_network_links(cluster: Cluster, change: Callable[[Link], Link]) -> Cluster:
    """The links between nodes changed."""
    return replace(cluster, link=change(cluster.link), fabric=_map_topology_links(cluster.fabric, change))


def _map_topology_links(topology: Any, change: Callable[[Link], Link]) -> Any:
    links = {f.name: change(link) for f in fields(topology) if isinstance(link := getattr(topology, f.name), Link)} if topology else {}
    return replace(topology, **links) if links else topology
