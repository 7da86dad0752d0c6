"""Wires as values: links, the hops of a path, and what may join the devices of one node. Between nodes: `core/fabric.py`.

A topology is a small frozen description that answers one question, the path between two places, by arithmetic on their numbers. Nothing is
built or kept, so a hundred thousand devices cost no more than eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Link:
    """What joins two devices: how long a message takes to start, and how fast it then goes."""

    name: str
    latency_s: float
    bandwidth: float  # bytes/s, one way
    efficiency: float = 1.0  # of the bandwidth, what collectives reach

    @property
    def effective_bandwidth(self) -> float:
        return self.bandwidth * self.efficiency


class DeviceLocation(NamedTuple):
    """Where a rank is: its node's number, and its own within the node."""

    node: int
    local_index: int


class ClusterShape(NamedTuple):
    """How large the whole is: nodes, and ranks on each."""

    nodes: int
    ranks_per_node: int


class PathHop(NamedTuple):
    """One wire of a path, in one direction. Two paths that have a key in common share that wire."""

    key: tuple[str | int, ...]  # its sort, and which of these it is
    link_name: str
    latency_s: float
    bandwidth: float  # bytes/s that collectives reach
    source_ranks: int  # on its near side: whoever they are, they leave by it
    kind_count: int  # how many of its sort there are
    lane_bandwidth: float = 0.0  # of a bundle: one link's bandwidth, and a group has no more of these than members there; 0: no bundle
    num_target_coordinates: int = 0  # how many of the key's last numbers name the other side
    switches: bool = False  # joins two switches
    is_dedicated: bool = False  # joins two devices and nobody else, so that several rings may pass side by side

    @property
    def kind(self) -> str | int:
        return self.key[0]

    @property
    def source_key(self) -> tuple[str | int, ...]:
        """Where it begins."""
        return self.key[: len(self.key) - self.num_target_coordinates]


LinkPath = tuple[PathHop, ...]


@dataclass(frozen=True)
class NodeSwitch:
    """Devices around a switch that never blocks: an NVSwitch island. `link` is one device's, all its ports together."""

    link: Link
    kind: Literal["switched"] = "switched"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster_shape: ClusterShape) -> LinkPath:
        name, half, speed = self.link.name, self.link.latency_s / 2, self.link.effective_bandwidth
        many = cluster_shape.nodes * cluster_shape.ranks_per_node
        return (PathHop(("port up", *a), name, half, speed, 1, many), PathHop(("port down", *b), name, half, speed, 1, many))

    def parallel_rings(self, group_size: int) -> int:
        return 1


@dataclass(frozen=True)
class FullyConnected:
    """Every two devices have a wire of their own, as the four A100 of one board; `link` is one such wire."""

    link: Link
    kind: Literal["wired"] = "wired"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster_shape: ClusterShape) -> LinkPath:
        many = cluster_shape.nodes * cluster_shape.ranks_per_node * max(cluster_shape.ranks_per_node - 1, 1)
        return (
            PathHop(
                ("wire", *a, b.local_index),
                self.link.name,
                self.link.latency_s,
                self.link.effective_bandwidth,
                1,
                many,
                num_target_coordinates=1,
                is_dedicated=True,
            ),
        )

    def parallel_rings(self, group_size: int) -> int:
        """As many rings as each has neighbours, none in the way of another: a collective uses all wires."""
        return max(group_size - 1, 1)


@dataclass(frozen=True)
class PcieTree:
    """Cards below PCIe switches below sockets. `link` is a card's, and a switch's towards its socket; `bridge` joins sockets."""

    link: Link
    switch: int  # cards a switch
    socket: int = 0  # cards a socket; 0: one socket holds all
    bridge: Link | None = None
    kind: Literal["pcie"] = "pcie"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster_shape: ClusterShape) -> LinkPath:
        name, speed, part = self.link.name, self.link.effective_bandwidth, self.link.latency_s / 4
        cards, switches = cluster_shape.nodes * cluster_shape.ranks_per_node, cluster_shape.nodes * -(-cluster_shape.ranks_per_node // self.switch)
        up, down = PathHop(("card up", *a), name, part, speed, 1, cards), PathHop(("card down", *b), name, part, speed, 1, cards)
        if a.local_index // self.switch == b.local_index // self.switch:
            return up, down
        out = PathHop(("switch up", a.node, a.local_index // self.switch), name, part, speed, self.switch, switches)
        into = PathHop(("switch down", b.node, b.local_index // self.switch), name, part, speed, self.switch, switches)
        socket = self.socket or cluster_shape.ranks_per_node
        if a.local_index // socket == b.local_index // socket:
            return up, out, into, down
        bridge, sockets = self.bridge or self.link, cluster_shape.nodes * -(-cluster_shape.ranks_per_node // socket)
        key = ("bridge", a.node, a.local_index // socket)
        return up, out, PathHop(key, bridge.name, bridge.latency_s, bridge.effective_bandwidth, socket, sockets), into, down

    def parallel_rings(self, group_size: int) -> int:
        return 1


NodeTopology = NodeSwitch | FullyConnected | PcieTree
