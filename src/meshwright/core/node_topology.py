"""Links, the hops of a path, and the topologies that connect the devices of one node. Topologies between nodes: `core/fabric.py`.

A topology is a small frozen description that answers one question, the path between two locations, by arithmetic on their indices. Nothing is
built or stored, so a hundred thousand devices cost no more than eight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Link:
    """A connection between two devices: its latency and its bandwidth."""

    name: str
    latency_s: float
    bandwidth: float  # bytes/s in one direction
    efficiency: float = 1.0  # fraction of the bandwidth that collectives reach

    @property
    def effective_bandwidth(self) -> float:
        return self.bandwidth * self.efficiency

    def hop(
        self, key: tuple[str | int, ...], source_ranks: int, kind_count: int, num_links: int = 1, taper: float = 1.0, switches: bool = False
    ) -> PathHop:
        """A hop over `num_links` such links together."""
        bandwidth = num_links * self.effective_bandwidth / taper
        return PathHop(key, self.name, self.latency_s, bandwidth, source_ranks, kind_count, switches=switches)


class DeviceLocation(NamedTuple):
    """A rank's node index, and its index within the node."""

    node: int
    local_index: int


class ClusterShape(NamedTuple):
    """The number of nodes, and of ranks on each."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class PathHop(NamedTuple):
    """One link of a path, in one direction. Two paths with a common `key` share that link."""

    key: tuple[str | int, ...]  # its kind, and the indices that identify it among links of that kind
    link_name: str
    latency_s: float
    bandwidth: float  # bytes/s that collectives reach
    source_ranks: int  # ranks on its source side: their outgoing traffic passes this link
    kind_count: int  # how many links of its kind the cluster has
    lane_bandwidth: float = 0.0  # of a bundle: one link's bandwidth; a group gets at most one link per member on the node; 0: no bundle
    num_target_coordinates: int = 0  # how many of the key's last indices identify the target
    switches: bool = False  # connects two switches
    is_dedicated: bool = False  # connects two devices exclusively: a group runs one ring per neighbour of a device, on disjoint links

    @property
    def kind(self) -> str | int:
        return self.key[0]

    @property
    def source_key(self) -> tuple[str | int, ...]:
        """The key without the target's indices: where the link begins."""
        return self.key[: len(self.key) - self.num_target_coordinates]


LinkPath = tuple[PathHop, ...]


@dataclass(frozen=True)
class NodeSwitch:
    """Devices around a non-blocking switch: an NVSwitch island. `link` is one device's, all its ports together."""

    link: Link
    kind: Literal["switched"] = "switched"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster: ClusterShape) -> LinkPath:
        half = replace(self.link, latency_s=self.link.latency_s / 2)
        return half.hop(("port up", *a), 1, cluster.ranks), half.hop(("port down", *b), 1, cluster.ranks)


@dataclass(frozen=True)
class FullyConnected:
    """Every pair of devices has a link of its own, as the four A100 of one board; `link` is one such link."""

    link: Link
    kind: Literal["wired"] = "wired"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster: ClusterShape) -> LinkPath:
        num_links = cluster.ranks * max(cluster.ranks_per_node - 1, 1)
        return (self.link.hop(("wire", *a, b.local_index), 1, num_links)._replace(num_target_coordinates=1, is_dedicated=True),)


@dataclass(frozen=True)
class PcieTree:
    """Cards below PCIe switches below sockets. `link` connects a card to its switch, and a switch to its socket; `bridge` connects sockets."""

    link: Link
    switch: int  # cards per switch
    socket: int = 0  # cards per socket; 0: one socket holds all
    bridge: Link | None = None
    kind: Literal["pcie"] = "pcie"

    def path(self, a: DeviceLocation, b: DeviceLocation, cluster: ClusterShape) -> LinkPath:
        quarter = replace(self.link, latency_s=self.link.latency_s / 4)
        up, down = quarter.hop(("card up", *a), 1, cluster.ranks), quarter.hop(("card down", *b), 1, cluster.ranks)
        if a.local_index // self.switch == b.local_index // self.switch:
            return up, down
        num_switches = cluster.nodes * -(-cluster.ranks_per_node // self.switch)
        out = quarter.hop(("switch up", a.node, a.local_index // self.switch), self.switch, num_switches)
        into = quarter.hop(("switch down", b.node, b.local_index // self.switch), self.switch, num_switches)
        socket = self.socket or cluster.ranks_per_node
        if a.local_index // socket == b.local_index // socket:
            return up, out, into, down
        num_sockets = cluster.nodes * -(-cluster.ranks_per_node // socket)
        return up, out, (self.bridge or self.link).hop(("bridge", a.node, a.local_index // socket), socket, num_sockets), into, down


NodeTopology = NodeSwitch | FullyConnected | PcieTree
