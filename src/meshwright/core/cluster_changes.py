"""Copies of a cluster with other nodes or links, for questions such as the gain from a faster network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from meshwright.core.cluster import Cluster, Node
from meshwright.core.node_topology import Link


def map_nodes(cluster: Cluster, change: Callable[[Node], Node]) -> Cluster:
    """The cluster with every node changed; `change` is called once per distinct node."""
    changed = {id(node): change(node) for node in cluster.distinct_nodes}
    return replace(cluster, nodes=tuple(changed[id(node)] for node in cluster.nodes))


def map_links(cluster: Cluster, change: Callable[[Link], Link]) -> Cluster:
    """The cluster with every link changed."""
    nodes = map_nodes(cluster, lambda node: replace(node, link=change(node.link), inside=_map_topology_links(node.inside, change)))
    return map_network_links(nodes, change)


def map_network_links(cluster: Cluster, change: Callable[[Link], Link]) -> Cluster:
    """The cluster with the links between nodes changed."""
    return replace(cluster, link=change(cluster.link), fabric=_map_topology_links(cluster.fabric, change))


def _map_topology_links(topology: Any, change: Callable[[Link], Link]) -> Any:
    links = {f.name: change(link) for f in fields(topology) if isinstance(link := getattr(topology, f.name), Link)} if topology else {}
    return replace(topology, **links) if links else topology
