"""Hardware as values: devices, the links between them, nodes, and the cluster they form."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

from meshwright.core.errors import RequestError

DeviceKind = Literal["cpu", "cuda"]
FP8_SINCE = (8, 9)  # the first compute capability of GPUs that multiply 8-bit floating point: Ada; Hopper is 9.0


@dataclass(frozen=True)
class Device:
    """One thing that computes. A CPU device is a share of a node's cores that one rank gets."""

    kind: DeviceKind
    name: str
    index: int
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # by precision, e.g. {"bf16": 9.9e14}
    memory_bandwidth: float = 0.0  # bytes/s; 0 when unknown
    source: str = ""  # where the figures come from: a data sheet, or "probe"
    fp8: bool = False  # whether it multiplies matrices of 8-bit floating point


@dataclass(frozen=True)
class Link:
    """What joins two devices: how long a message takes to start, and how fast it then goes."""

    name: str
    latency_s: float
    bandwidth: float  # bytes/s, one way


@dataclass(frozen=True)
class Interface:
    """One network interface of a node; speed is 0 when the kernel does not say."""

    name: str
    address: str
    bits_per_s: float = 0.0


@dataclass(frozen=True)
class Node:
    """One machine: its devices, cores, memory and what joins its devices."""

    name: str
    devices: tuple[Device, ...]
    cores: int
    memory_bytes: int
    cpu: str = ""
    numa: tuple[tuple[int, ...], ...] = ()  # cores by NUMA domain
    interfaces: tuple[Interface, ...] = ()
    link: Link = Link("shared memory", 5e-6, 5e9)


@dataclass(frozen=True)
class Cluster:
    """The machines at hand. Ranks are numbered through the nodes in order, one a device."""

    name: str
    nodes: tuple[Node, ...]
    link: Link = Link("network", 2e-5, 1.25e9)
    scheduler: str = "none"  # slurm, mpi, ray, kubernetes, torchrun: who started us

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        return tuple(d for node in self.nodes for d in node.devices)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """The rank after each node's last: asked for every call of every plan, on thousands of nodes."""
        return tuple(accumulate(len(node.devices) for node in self.nodes))

    def node_of(self, rank: int) -> Node:
        return self.nodes[self.node_index(rank)]

    def node_index(self, rank: int) -> int:
        if not 0 <= rank < self._ends[-1]:
            raise IndexError(rank)
        return bisect_right(self._ends, rank)

    def link_between(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link that a collective among `ranks` must cross."""
        first, last = self.node_index(min(ranks)), self.node_index(max(ranks))  # nodes hold neighbouring ranks
        return self.link if first != last else self.nodes[first].link

    def take(self, ranks: int) -> Cluster:
        """The first `ranks` devices of this cluster."""
        if not 1 <= ranks <= len(self.devices):
            raise RequestError(f"{ranks} ranks asked for, this cluster has {len(self.devices)} devices: use --nproc 1..{len(self.devices)}")
        kept, nodes = ranks, []
        for node in self.nodes:
            if kept > 0:
                nodes.append(Node(**{**vars(node), "devices": node.devices[:kept]}))
                kept -= len(node.devices)
        return Cluster(self.name, tuple(nodes), self.link, self.scheduler)
