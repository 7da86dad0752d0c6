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
    def reached(self) -> float:
        return self.bandwidth * self.efficiency


class Place(NamedTuple):
    """Where a rank is: its node's number, and its own within the node."""

    node: int
    at: int


class Extent(NamedTuple):
    """How large the whole is: nodes, and ranks on each."""

    nodes: int
    ranks: int


class Hop(NamedTuple):
    """One wire of a path, in one direction. Two paths that have a key in common share that wire."""

    key: tuple[str | int, ...]  # its sort, and which of these it is
    link: str
    latency_s: float
    bandwidth: float  # bytes/s that collectives reach
    ranks: int  # on its near side: whoever they are, they leave by it
    alike: int  # how many of its sort there are
    lane: float = 0.0  # of a bundle: one link's bandwidth, and a group has no more of these than members there; 0: no bundle
    far: int = 0  # how many of the key's last numbers name the other side
    switches: bool = False  # joins two switches
    own: bool = False  # joins two devices and nobody else, so that several rings may pass side by side

    @property
    def sort(self) -> str | int:
        return self.key[0]

    @property
    def near(self) -> tuple[str | int, ...]:
        """Where it begins."""
        return self.key[: len(self.key) - self.far]


Path = tuple[Hop, ...]


@dataclass(frozen=True)
class Switched:
    """Devices around a switch that never blocks: an NVSwitch island. `link` is one device's, all its ports together."""

    link: Link
    kind: Literal["switched"] = "switched"

    def path(self, a: Place, b: Place, extent: Extent) -> Path:
        name, half, speed = self.link.name, self.link.latency_s / 2, self.link.reached
        many = extent.nodes * extent.ranks
        return (Hop(("port up", *a), name, half, speed, 1, many), Hop(("port down", *b), name, half, speed, 1, many))

    def rings(self, members: int) -> int:
        return 1


@dataclass(frozen=True)
class Wired:
    """Every two devices have a wire of their own, as the four A100 of one board; `link` is one such wire."""

    link: Link
    kind: Literal["wired"] = "wired"

    def path(self, a: Place, b: Place, extent: Extent) -> Path:
        many = extent.nodes * extent.ranks * max(extent.ranks - 1, 1)
        return (Hop(("wire", *a, b.at), self.link.name, self.link.latency_s, self.link.reached, 1, many, far=1, own=True),)

    def rings(self, members: int) -> int:
        """As many rings as each has neighbours, none in the way of another: a collective uses all wires."""
        return max(members - 1, 1)


@dataclass(frozen=True)
class PcieTree:
    """Cards below PCIe switches below sockets. `link` is a card's, and a switch's towards its socket; `bridge` joins sockets."""

    link: Link
    switch: int  # cards a switch
    socket: int = 0  # cards a socket; 0: one socket holds all
    bridge: Link | None = None
    kind: Literal["pcie"] = "pcie"

    def path(self, a: Place, b: Place, extent: Extent) -> Path:
        name, speed, part = self.link.name, self.link.reached, self.link.latency_s / 4
        cards, switches = extent.nodes * extent.ranks, extent.nodes * -(-extent.ranks // self.switch)
        up, down = Hop(("card up", *a), name, part, speed, 1, cards), Hop(("card down", *b), name, part, speed, 1, cards)
        if a.at // self.switch == b.at // self.switch:
            return up, down
        out = Hop(("switch up", a.node, a.at // self.switch), name, part, speed, self.switch, switches)
        into = Hop(("switch down", b.node, b.at // self.switch), name, part, speed, self.switch, switches)
        socket = self.socket or extent.ranks
        if a.at // socket == b.at // socket:
            return up, out, into, down
        bridge, sockets = self.bridge or self.link, extent.nodes * -(-extent.ranks // socket)
        key = ("bridge", a.node, a.at // socket)
        return up, out, Hop(key, bridge.name, bridge.latency_s, bridge.reached, socket, sockets), into, down

    def rings(self, members: int) -> int:
        return 1


Inside = Switched | Wired | PcieTree
