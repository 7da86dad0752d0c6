"""Network topologies between nodes: flat switches, fat trees, rails, dragonflies, tori and HammingMesh, each with its minimal routes.

A node's network cards form one bundle: a hop has the bandwidth of all its links, and a small group gets as many links as it has ranks on the node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshwright.core.node_topology import ClusterShape, DeviceLocation, Link, LinkPath, PathHop


def _nic_hop(kind: str, location: DeviceLocation, link: Link, ports: int, cluster_shape: ClusterShape) -> PathHop:
    """The bundle of a node's cards, in one direction. Where there are more cards than ranks, a rank uses several."""
    speed = ports * link.effective_bandwidth
    return PathHop(
        (kind, location.node),
        link.name,
        link.latency_s / 2,
        speed,
        cluster_shape.ranks_per_node,
        cluster_shape.nodes,
        max(link.effective_bandwidth, speed / cluster_shape.ranks_per_node),
    )


@dataclass(frozen=True)
class SingleSwitch:
    """One non-blocking switch; a node has `ports` links to it."""

    link: Link
    ports: int = 1
    kind: Literal["flat"] = "flat"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster_shape: ClusterShape) -> LinkPath:
        return _nic_hop("nic up", a, self.link, self.ports, cluster_shape), _nic_hop("nic down", b, self.link, self.ports, cluster_shape)


@dataclass(frozen=True)
class FatTree:
    """Leaf switches below a core, or below pods below a core. `taper`: a leaf's bandwidth from its nodes over its bandwidth upwards.

    With `rails`, card i of every node connects to leaf i of a pod of `leaf` nodes, so devices of one local index within the pod share a switch;
    traffic to another local index first moves to that device within the sender's node (see `ClusterTopology.path`)."""

    link: Link
    leaf: int  # nodes per leaf switch; with rails, nodes per set of leaves
    ports: int = 1
    pod: int = 0  # leaves per pod; 0: two tiers
    taper: float = 1.0
    pod_taper: float = 1.0  # the additional taper between pods and core
    hop_s: float = 3e-7  # latency of one more switch
    rails: bool = False
    kind: Literal["fat-tree"] = "fat-tree"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster_shape: ClusterShape) -> LinkPath:
        up, down = _nic_hop("nic up", a, self.link, self.ports, cluster_shape), _nic_hop("nic down", b, self.link, self.ports, cluster_shape)
        if a.node // self.leaf == b.node // self.leaf:
            return up, down
        path = (
            up,
            self._tier_hop("leaf up", a, self.leaf, self.taper, cluster_shape),
            self._tier_hop("leaf down", b, self.leaf, self.taper, cluster_shape),
            down,
        )
        nodes = self.leaf * self.pod
        if not self.pod or a.node // nodes == b.node // nodes:
            return path
        taper = self.taper * self.pod_taper
        return (
            *path[:2],
            self._tier_hop("pod up", a, nodes, taper, cluster_shape),
            self._tier_hop("pod down", b, nodes, taper, cluster_shape),
            *path[2:],
        )

    def _tier_hop(self, kind: str, location: DeviceLocation, nodes: int, taper: float, cluster_shape: ClusterShape) -> PathHop:
        nodes = min(nodes, cluster_shape.nodes)
        speed = nodes * self.ports * self.link.effective_bandwidth / taper
        many = math.ceil(cluster_shape.nodes / nodes)
        return PathHop((kind, location.node // nodes), self.link.name, self.hop_s, speed, nodes * cluster_shape.ranks_per_node, many, switches=True)


@dataclass(frozen=True)
class Dragonfly:
    """Groups of switches: any two switches of a group are linked, and any two groups. Minimal routes: at most one link within the first group,
    one between groups and one within the last. With `spines` it is a dragonfly+: a group is a tree of leaves and spines, and groups are linked
    from spine to spine."""

    link: Link
    switch: int  # nodes per switch
    group: int  # switches per group; of a dragonfly+, leaves per group
    local: Link  # one link between switches of a group
    between: Link  # one link between groups
    ports: int = 1
    local_links: int = 1  # between two switches; of a dragonfly+, between leaf and spine
    global_links: int = 1  # between two groups
    spines: int = 0
    kind: Literal["dragonfly"] = "dragonfly"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster_shape: ClusterShape) -> LinkPath:
        up, down = _nic_hop("nic up", a, self.link, self.ports, cluster_shape), _nic_hop("nic down", b, self.link, self.ports, cluster_shape)
        first, last = a.node // self.switch, b.node // self.switch
        if first == last:
            return up, down
        out, into = first // self.group, last // self.group
        if self.spines:
            climb, fall = self._leaf_hop("leaf up", first, cluster_shape), self._leaf_hop("leaf down", last, cluster_shape)
            return (up, climb, *((self._global_hop(out, into, cluster_shape),) if out != into else ()), fall, down)
        if out == into:
            return up, self._local_hop(first, last, cluster_shape), down
        leave, enter = out * self.group + into % self.group, into * self.group + out % self.group  # the switches that hold this link
        before = (self._local_hop(first, leave, cluster_shape),) if first != leave else ()
        after = (self._local_hop(enter, last, cluster_shape),) if enter != last else ()
        return (up, *before, self._global_hop(out, into, cluster_shape), *after, down)

    def _local_hop(self, first: int, last: int, cluster_shape: ClusterShape) -> PathHop:
        many = math.ceil(cluster_shape.nodes / self.switch) * max(self.group - 1, 1)
        speed, ranks = self.local_links * self.local.effective_bandwidth, self.switch * cluster_shape.ranks_per_node
        return PathHop(("local", first, last), self.local.name, self.local.latency_s, speed, ranks, many, num_target_coordinates=1, switches=True)

    def _leaf_hop(self, kind: str, leaf: int, cluster_shape: ClusterShape) -> PathHop:
        speed, ranks = self.spines * self.local_links * self.local.effective_bandwidth, self.switch * cluster_shape.ranks_per_node
        many = math.ceil(cluster_shape.nodes / self.switch)
        return PathHop((kind, leaf), self.local.name, self.local.latency_s, speed, ranks, many, switches=True)

    def _global_hop(self, source_group: int, target_group: int, cluster_shape: ClusterShape) -> PathHop:
        size = self.switch * self.group
        groups = max(math.ceil(cluster_shape.nodes / size), 2)
        speed, ranks = self.global_links * self.between.effective_bandwidth, min(size, cluster_shape.nodes) * cluster_shape.ranks_per_node
        return PathHop(
            ("between groups", source_group, target_group),
            self.between.name,
            self.between.latency_s,
            speed,
            ranks,
            groups * (groups - 1),
            num_target_coordinates=1,
            switches=True,
        )


@dataclass(frozen=True)
class Torus:
    """A grid of nodes with links to the neighbours in each direction, with wraparound. Routes take the last dim first, in the shorter direction."""

    link: Link
    shape: tuple[int, ...]
    kind: Literal["torus"] = "torus"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster_shape: ClusterShape) -> LinkPath:
        at, to = list(_coordinates(a.node, self.shape)), _coordinates(b.node, self.shape)
        found = []
        for dim in reversed(range(len(self.shape))):
            size = self.shape[dim]
            ahead = (to[dim] - at[dim]) % size
            step, sign = (1, "+") if ahead <= size - ahead else (-1, "-")
            while at[dim] != to[dim]:
                key: tuple[str | int, ...] = (f"torus {dim}{sign}", *at)
                found.append(
                    PathHop(
                        key, self.link.name, self.link.latency_s, self.link.effective_bandwidth, cluster_shape.ranks_per_node, math.prod(self.shape)
                    )
                )
                at[dim] = (at[dim] + step) % size
        return tuple(found)


@dataclass(frozen=True)
class HammingMesh:
    """Boards of `board` = (rows, columns) nodes in a mesh; the edge links of each row of boards connect to a switch, and so do those of each column.
    Nodes are numbered along the rows of the whole grid. Routes go along the row first, and leave a board by its nearer edge."""

    link: Link
    board: tuple[int, int]
    boards: tuple[int, int]
    taper: float = 1.0  # of the row and column switches
    kind: Literal["hammingmesh"] = "hammingmesh"

    @property
    def shape(self) -> tuple[int, int]:
        return self.board[0] * self.boards[0], self.board[1] * self.boards[1]

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster_shape: ClusterShape) -> LinkPath:
        at, to = list(_coordinates(a.node, self.shape)), _coordinates(b.node, self.shape)
        found: list[PathHop] = []
        for dim in (1, 0):
            found += self._dim_hops(dim, at, to[dim], cluster_shape)
            at[dim] = to[dim]
        return tuple(found)

    def _dim_hops(self, dim: int, at: list[int], goal: int, cluster_shape: ClusterShape) -> list[PathHop]:
        size, line = self.board[dim], at[1 - dim]
        if at[dim] // size == goal // size:
            return self._mesh_hops(dim, line, at[dim], goal, cluster_shape)
        out, into = _nearer_edge(at[dim], size), _nearer_edge(goal, size)
        ends = (("up", out), ("down", into))
        jump = [self._switch_hop(f"{['column', 'row'][dim]} {way}", line, edge, cluster_shape) for way, edge in ends]
        return [*self._mesh_hops(dim, line, at[dim], out, cluster_shape), *jump, *self._mesh_hops(dim, line, into, goal, cluster_shape)]

    def _mesh_hops(self, dim: int, line: int, start: int, goal: int, cluster_shape: ClusterShape) -> list[PathHop]:
        step, sign = (1, "+") if goal > start else (-1, "-")
        name, many = self.link.name, math.prod(self.shape)
        keys = [(f"mesh {dim}{sign}", line, place) for place in range(start, goal, step)]
        return [PathHop(key, name, self.link.latency_s, self.link.effective_bandwidth, cluster_shape.ranks_per_node, many) for key in keys]

    def _switch_hop(self, kind: str, line: int, edge: int, cluster_shape: ClusterShape) -> PathHop:
        dim = 1 if kind.startswith("row") else 0
        ranks = max(self.board[dim] // 2, 1) * cluster_shape.ranks_per_node  # ranks that are nearer to this edge than to the other
        many = math.prod(self.shape) * cluster_shape.ranks_per_node // ranks
        return PathHop(
            (kind, line, edge), self.link.name, self.link.latency_s, self.link.effective_bandwidth / self.taper, ranks, many, switches=True
        )


Fabric = SingleSwitch | FatTree | Dragonfly | Torus | HammingMesh


def _coordinates(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        found.append(place)
    return tuple(reversed(found))


def _nearer_edge(coordinate: int, size: int) -> int:
    first = coordinate // size * size
    return first if 2 * (coordinate - first) < size else first + size - 1
