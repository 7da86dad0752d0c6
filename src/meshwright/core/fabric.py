"""Network topologies between nodes: flat switches, fat trees, rails, dragonflies, tori and HammingMesh, each with its minimal routes.

A node's network cards form one bundle: a hop has the bandwidth of all its links, and a small group gets as many links as it has ranks on the node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.core.mesh import grid_coordinates
from meshwright.core.node_topology import ClusterShape, DeviceLocation, Link, LinkPath, PathHop


def _nic_hops(a: DeviceLocation, b: DeviceLocation, link: Link, ports: int, cluster: ClusterShape) -> tuple[PathHop, PathHop]:
    """The bundles of network cards of node a, upwards, and node b, downwards. Where there are more cards than ranks, a rank uses several."""
    lane = max(link.effective_bandwidth, ports * link.effective_bandwidth / cluster.ranks_per_node)
    half = replace(link, latency_s=link.latency_s / 2)
    up = half.hop(("nic up", a.node), cluster.ranks_per_node, cluster.nodes, ports)._replace(lane_bandwidth=lane)
    return up, up._replace(key=("nic down", b.node))


@dataclass(frozen=True)
class SingleSwitch:
    """One non-blocking switch; a node has `ports` links to it."""

    link: Link
    ports: int = 1
    kind: Literal["flat"] = "flat"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster: ClusterShape) -> LinkPath:
        return _nic_hops(a, b, self.link, self.ports, cluster)


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

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster: ClusterShape) -> LinkPath:
        up, down = _nic_hops(a, b, self.link, self.ports, cluster)
        if a.node // self.leaf == b.node // self.leaf:
            return up, down
        leaf_up, leaf_down = self._tier_hops("leaf", a, b, self.leaf, self.taper, cluster)
        nodes = self.leaf * self.pod
        if not self.pod or a.node // nodes == b.node // nodes:
            return up, leaf_up, leaf_down, down
        return up, leaf_up, *self._tier_hops("pod", a, b, nodes, self.taper * self.pod_taper, cluster), leaf_down, down

    def _tier_hops(self, tier: str, a: DeviceLocation, b: DeviceLocation, nodes: int, taper: float, cluster: ClusterShape) -> tuple[PathHop, PathHop]:
        """Up from a's switch of a tier with `nodes` nodes below each switch, and down to b's."""
        nodes = min(nodes, cluster.nodes)
        ranks, num_switches = nodes * cluster.ranks_per_node, math.ceil(cluster.nodes / nodes)
        link = replace(self.link, latency_s=self.hop_s)
        up = link.hop((f"{tier} up", a.node // nodes), ranks, num_switches, nodes * self.ports, taper, switches=True)
        return up, up._replace(key=(f"{tier} down", b.node // nodes))


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

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster: ClusterShape) -> LinkPath:
        up, down = _nic_hops(a, b, self.link, self.ports, cluster)
        first, last = a.node // self.switch, b.node // self.switch
        if first == last:
            return up, down
        source_group, target_group = first // self.group, last // self.group
        between = (self._global_hop(source_group, target_group, cluster),) if source_group != target_group else ()
        if self.spines:
            return up, self._leaf_hop("leaf up", first, cluster), *between, self._leaf_hop("leaf down", last, cluster), down
        if not between:
            return up, self._local_hop(first, last, cluster), down
        leave = source_group * self.group + target_group % self.group  # the switches at the ends of the link between the groups
        enter = target_group * self.group + source_group % self.group
        before = (self._local_hop(first, leave, cluster),) if first != leave else ()
        after = (self._local_hop(enter, last, cluster),) if enter != last else ()
        return up, *before, *between, *after, down

    def _local_hop(self, first: int, last: int, cluster: ClusterShape) -> PathHop:
        ranks, num_links = self.switch * cluster.ranks_per_node, math.ceil(cluster.nodes / self.switch) * max(self.group - 1, 1)
        hop = self.local.hop(("local", first, last), ranks, num_links, self.local_links, switches=True)
        return hop._replace(num_target_coordinates=1)

    def _leaf_hop(self, kind: str, leaf: int, cluster: ClusterShape) -> PathHop:
        ranks, num_leaves = self.switch * cluster.ranks_per_node, math.ceil(cluster.nodes / self.switch)
        return self.local.hop((kind, leaf), ranks, num_leaves, self.spines * self.local_links, switches=True)

    def _global_hop(self, source_group: int, target_group: int, cluster: ClusterShape) -> PathHop:
        size = self.switch * self.group
        groups, ranks = max(math.ceil(cluster.nodes / size), 2), min(size, cluster.nodes) * cluster.ranks_per_node
        hop = self.between.hop(("between groups", source_group, target_group), ranks, groups * (groups - 1), self.global_links, switches=True)
        return hop._replace(num_target_coordinates=1)


@dataclass(frozen=True)
class Torus:
    """A grid of nodes with links to the neighbours in each direction, with wraparound. Routes take the last dim first, in the shorter direction."""

    link: Link
    shape: tuple[int, ...]
    kind: Literal["torus"] = "torus"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster: ClusterShape) -> LinkPath:
        at, goal = list(grid_coordinates(a.node, self.shape)), grid_coordinates(b.node, self.shape)
        path = []
        for dim in reversed(range(len(self.shape))):
            size = self.shape[dim]
            ahead = (goal[dim] - at[dim]) % size
            step, sign = (1, "+") if ahead <= size - ahead else (-1, "-")
            while at[dim] != goal[dim]:
                path.append(self.link.hop((f"torus {dim}{sign}", *at), cluster.ranks_per_node, math.prod(self.shape)))
                at[dim] = (at[dim] + step) % size
        return tuple(path)


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

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster: ClusterShape) -> LinkPath:
        (row, start), (last_row, column) = (grid_coordinates(location.node, self.shape) for location in (a, b))
        return *self._dim_hops(1, row, start, column, cluster), *self._dim_hops(0, column, row, last_row, cluster)

    def _dim_hops(self, dim: int, line: int, start: int, goal: int, cluster: ClusterShape) -> list[PathHop]:
        """The hops along one dim, within row or column `line`."""
        size = self.board[dim]
        if start // size == goal // size:
            return self._mesh_hops(dim, line, start, goal, cluster)
        leave, enter = _nearer_edge(start, size), _nearer_edge(goal, size)
        ends = (("up", leave), ("down", enter))
        switch = [self._switch_hop(dim, direction, line, edge, cluster) for direction, edge in ends]
        return [*self._mesh_hops(dim, line, start, leave, cluster), *switch, *self._mesh_hops(dim, line, enter, goal, cluster)]

    def _mesh_hops(self, dim: int, line: int, start: int, goal: int, cluster: ClusterShape) -> list[PathHop]:
        step, sign = (1, "+") if goal > start else (-1, "-")
        keys = [(f"mesh {dim}{sign}", line, position) for position in range(start, goal, step)]
        return [self.link.hop(key, cluster.ranks_per_node, math.prod(self.shape)) for key in keys]

    def _switch_hop(self, dim: int, direction: str, line: int, edge: int, cluster: ClusterShape) -> PathHop:
        ranks = max(self.board[dim] // 2, 1) * cluster.ranks_per_node  # ranks that are nearer to this edge than to the other
        num_links = math.prod(self.shape) * cluster.ranks_per_node // ranks
        return self.link.hop((f"{('column', 'row')[dim]} {direction}", line, edge), ranks, num_links, taper=self.taper, switches=True)


Fabric = SingleSwitch | FatTree | Dragonfly | Torus | HammingMesh


def _nearer_edge(coordinate: int, size: int) -> int:
    first = coordinate // size * size
    return first if 2 * (coordinate - first) < size else first + size - 1
