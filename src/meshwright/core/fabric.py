"""What joins nodes: flat switches, fat trees, rails, dragonflies, tori and HammingMesh, each with its minimal routes.

A node's network cards are one bundle: a hop's bandwidth is that of all its wires, and a group of few ranks gets as many as it has members there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meshwright.core.topology import Extent, Hop, Link, Path, Place


def _nic(sort: str, place: Place, link: Link, ports: int, extent: Extent) -> Hop:
    """A node's cards together, in one direction. Where there are more cards than ranks, a rank uses several."""
    speed = ports * link.reached
    return Hop((sort, place.node), link.name, link.latency_s / 2, speed, extent.ranks, extent.nodes, max(link.reached, speed / extent.ranks))


@dataclass(frozen=True)
class Flat:
    """One switch that never blocks; a node has `ports` links to it."""

    link: Link
    ports: int = 1
    kind: Literal["flat"] = "flat"

    def path(self, a: Place, b: Place, extent: Extent) -> Path:
        return _nic("nic up", a, self.link, self.ports, extent), _nic("nic down", b, self.link, self.ports, extent)


@dataclass(frozen=True)
class FatTree:
    """Leaf switches below a core, or below pods below a core. `taper`: how much more comes into a leaf from its nodes than it passes up.

    With `rails`, card i of every node goes to leaf i of a pod of `leaf` nodes, so neighbours by number within the pod meet in one switch; who is
    not a neighbour hands its data to the card that is (through `Cluster.path`)."""

    link: Link
    leaf: int  # nodes a leaf switch; with rails, nodes a set of leaves
    ports: int = 1
    pod: int = 0  # leaves a pod; 0: two tiers
    taper: float = 1.0
    pod_taper: float = 1.0  # the same between pods and core, on top
    hop_s: float = 3e-7  # that one more switch takes
    rails: bool = False
    kind: Literal["fat-tree"] = "fat-tree"

    def path(self, a: Place, b: Place, extent: Extent) -> Path:
        up, down = _nic("nic up", a, self.link, self.ports, extent), _nic("nic down", b, self.link, self.ports, extent)
        if a.node // self.leaf == b.node // self.leaf:
            return up, down
        path = (up, self._tier("leaf up", a, self.leaf, self.taper, extent), self._tier("leaf down", b, self.leaf, self.taper, extent), down)
        nodes = self.leaf * self.pod
        if not self.pod or a.node // nodes == b.node // nodes:
            return path
        taper = self.taper * self.pod_taper
        return (*path[:2], self._tier("pod up", a, nodes, taper, extent), self._tier("pod down", b, nodes, taper, extent), *path[2:])

    def _tier(self, sort: str, place: Place, nodes: int, taper: float, extent: Extent) -> Hop:
        nodes = min(nodes, extent.nodes)
        speed = nodes * self.ports * self.link.reached / taper
        many = math.ceil(extent.nodes / nodes)
        return Hop((sort, place.node // nodes), self.link.name, self.hop_s, speed, nodes * extent.ranks, many, switches=True)


@dataclass(frozen=True)
class Dragonfly:
    """Groups of switches, every two switches of a group joined, and every two groups. Minimal routes: at most one link within the first group,
    one between groups and one within the last. With `spines` it is a dragonfly+: a group is a tree of leaves and spines, and groups are joined
    from spine to spine."""

    link: Link
    switch: int  # nodes a switch
    group: int  # switches a group, leaves of a dragonfly+
    local: Link  # one link between switches of a group
    between: Link  # one link between groups
    ports: int = 1
    local_links: int = 1  # between two switches; of a dragonfly+, between leaf and spine
    global_links: int = 1  # between two groups
    spines: int = 0
    kind: Literal["dragonfly"] = "dragonfly"

    def path(self, a: Place, b: Place, extent: Extent) -> Path:
        up, down = _nic("nic up", a, self.link, self.ports, extent), _nic("nic down", b, self.link, self.ports, extent)
        first, last = a.node // self.switch, b.node // self.switch
        if first == last:
            return up, down
        out, into = first // self.group, last // self.group
        if self.spines:
            climb, fall = self._leaf("leaf up", first, extent), self._leaf("leaf down", last, extent)
            return (up, climb, *((self._global(out, into, extent),) if out != into else ()), fall, down)
        if out == into:
            return up, self._local(first, last, extent), down
        leave, enter = out * self.group + into % self.group, into * self.group + out % self.group  # who holds the link between these groups
        before = (self._local(first, leave, extent),) if first != leave else ()
        after = (self._local(enter, last, extent),) if enter != last else ()
        return (up, *before, self._global(out, into, extent), *after, down)

    def _local(self, first: int, last: int, extent: Extent) -> Hop:
        many = math.ceil(extent.nodes / self.switch) * max(self.group - 1, 1)
        speed, ranks = self.local_links * self.local.reached, self.switch * extent.ranks
        return Hop(("local", first, last), self.local.name, self.local.latency_s, speed, ranks, many, far=1, switches=True)

    def _leaf(self, sort: str, leaf: int, extent: Extent) -> Hop:
        speed, ranks = self.spines * self.local_links * self.local.reached, self.switch * extent.ranks
        many = math.ceil(extent.nodes / self.switch)
        return Hop((sort, leaf), self.local.name, self.local.latency_s, speed, ranks, many, switches=True)

    def _global(self, out: int, into: int, extent: Extent) -> Hop:
        size = self.switch * self.group
        groups = max(math.ceil(extent.nodes / size), 2)
        speed, ranks = self.global_links * self.between.reached, min(size, extent.nodes) * extent.ranks
        return Hop(
            ("between groups", out, into), self.between.name, self.between.latency_s, speed, ranks, groups * (groups - 1), far=1, switches=True
        )


@dataclass(frozen=True)
class Torus:
    """A grid of nodes with wires to the neighbours in each direction, ends joined. Routes go along the last dim first, each the shorter way."""

    link: Link
    shape: tuple[int, ...]
    kind: Literal["torus"] = "torus"

    def path(self, a: Place, b: Place, extent: Extent) -> Path:
        at, to = list(_coordinates(a.node, self.shape)), _coordinates(b.node, self.shape)
        found = []
        for dim in reversed(range(len(self.shape))):
            size = self.shape[dim]
            ahead = (to[dim] - at[dim]) % size
            step, sign = (1, "+") if ahead <= size - ahead else (-1, "-")
            while at[dim] != to[dim]:
                key: tuple[str | int, ...] = (f"torus {dim}{sign}", *at)
                found.append(Hop(key, self.link.name, self.link.latency_s, self.link.reached, extent.ranks, math.prod(self.shape)))
                at[dim] = (at[dim] + step) % size
        return tuple(found)


@dataclass(frozen=True)
class HammingMesh:
    """Boards of `board` = (rows, columns) nodes in a mesh; the ends of each row of boards' wires meet in a switch, and so those of each column.
    Nodes are numbered along the rows of the whole grid. Routes go along the row first, over the board's nearer edge where it must be left."""

    link: Link
    board: tuple[int, int]
    boards: tuple[int, int]
    taper: float = 1.0  # of the row's and column's switches
    kind: Literal["hammingmesh"] = "hammingmesh"

    @property
    def shape(self) -> tuple[int, int]:
        return self.board[0] * self.boards[0], self.board[1] * self.boards[1]

    def path(self, a: Place, b: Place, extent: Extent) -> Path:
        at, to = list(_coordinates(a.node, self.shape)), _coordinates(b.node, self.shape)
        found: list[Hop] = []
        for dim in (1, 0):
            found += self._along(dim, at, to[dim], extent)
            at[dim] = to[dim]
        return tuple(found)

    def _along(self, dim: int, at: list[int], goal: int, extent: Extent) -> list[Hop]:
        size, line = self.board[dim], at[1 - dim]
        if at[dim] // size == goal // size:
            return self._mesh(dim, line, at[dim], goal, extent)
        out, into = _nearer_edge(at[dim], size), _nearer_edge(goal, size)
        ends = (("up", out), ("down", into))
        jump = [self._jump(f"{['column', 'row'][dim]} {way}", line, edge, extent) for way, edge in ends]
        return [*self._mesh(dim, line, at[dim], out, extent), *jump, *self._mesh(dim, line, into, goal, extent)]

    def _mesh(self, dim: int, line: int, start: int, goal: int, extent: Extent) -> list[Hop]:
        step, sign = (1, "+") if goal > start else (-1, "-")
        name, many = self.link.name, math.prod(self.shape)
        keys = [(f"mesh {dim}{sign}", line, place) for place in range(start, goal, step)]
        return [Hop(key, name, self.link.latency_s, self.link.reached, extent.ranks, many) for key in keys]

    def _jump(self, sort: str, line: int, edge: int, extent: Extent) -> Hop:
        dim = 1 if sort.startswith("row") else 0
        ranks = max(self.board[dim] // 2, 1) * extent.ranks  # those that are nearer to this edge than to the other
        many = math.prod(self.shape) * extent.ranks // ranks
        return Hop((sort, line, edge), self.link.name, self.link.latency_s, self.link.reached / self.taper, ranks, many, switches=True)


Fabric = Flat | FatTree | Dragonfly | Torus | HammingMesh


def _coordinates(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        number, place = divmod(number, size)
        found.append(place)
    return tuple(reversed(found))


def _nearer_edge(place: int, size: int) -> int:
    first = place // size * size
    return first if 2 * (place - first) < size else first + size - 1
