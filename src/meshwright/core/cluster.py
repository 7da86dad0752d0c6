"""Hardware as values: devices, the links between them, nodes, and the cluster they form."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Literal

from meshwright.core.cluster_topology import ClusterTopology
from meshwright.core.errors import RequestError
from meshwright.core.fabric import Fabric
from meshwright.core.group_bandwidth import GroupBandwidth, TrafficPattern
from meshwright.core.node_topology import DeviceLocation, Link, LinkPath, NodeTopology

__all__ = ["FP8_MIN_CAPABILITY", "Cluster", "Device", "DeviceKind", "Interface", "Link", "Node"]

DeviceKind = Literal["cpu", "cuda"]
FP8_MIN_CAPABILITY = (8, 9)  # the first compute capability of GPUs that multiply 8-bit floating point: Ada; Hopper is 9.0


@dataclass(frozen=True)
class Device:
    """One device that runs a rank. A CPU device is one rank's share of a node's cores."""

    kind: DeviceKind
    name: str
    index: int
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # by precision, e.g. {"bf16": 9.9e14}
    memory_bandwidth: float = 0.0  # bytes/s; 0 when unknown
    source: str = ""  # where the figures come from: a data sheet, or "probe"
    fp8: bool = False  # whether it multiplies matrices of 8-bit floating point


@dataclass(frozen=True)
class Interface:
    """One network interface of a node; speed is 0 when the kernel does not say."""

    name: str
    address: str
    bits_per_s: float = 0.0


@dataclass(frozen=True)
class Node:
    """One machine: its devices, cores, memory and the links between its devices."""

    name: str
    devices: tuple[Device, ...]
    cores: int
    memory_bytes: int
    cpu: str = ""
    numa: tuple[tuple[int, ...], ...] = ()  # cores by NUMA domain
    interfaces: tuple[Interface, ...] = ()
    link: Link = Link("shared memory", 5e-6, 5e9)
    inside: NodeTopology | None = None  # how its devices are connected; None: any two by `link`, without contention


@dataclass(frozen=True)
class Cluster:
    """The available machines. Ranks are numbered through the nodes in order, one per device. Identical nodes may be one object, repeated:
    frequent queries run once per distinct object, so that a hundred thousand devices cost little more than eight."""

    name: str
    nodes: tuple[Node, ...]
    link: Link = Link("network", 2e-5, 1.25e9)
    scheduler: str = "none"  # slurm, mpi, ray, kubernetes, torchrun: what started this process
    fabric: Fabric | None = None  # how its nodes are connected; None: any two by `link`, without contention
    source: str = ""  # where the figures come from, for a cluster that was not discovered

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        return tuple(d for node in self.nodes for d in node.devices)

    @cached_property
    def distinct_nodes(self) -> tuple[Node, ...]:
        """Each distinct node object, once."""
        return tuple({id(node): node for node in self.nodes}.values())

    @cached_property
    def rank_ends(self) -> list[int]:
        """For each node, the first rank after it."""
        return list(accumulate(len(node.devices) for node in self.nodes))

    @cached_property
    def _reordered(self) -> dict[tuple[int, ...], Cluster]:
        return {}

    def in_device_order(self, device_order: tuple[int, ...]) -> Cluster:
        """The cluster as seen by ranks that are assigned to its devices in this order (see `Plan.device_order`): nodes, and devices within a
        node, are permuted."""
        if not device_order or device_order in self._reordered:
            return self._reordered[device_order] if device_order else self
        if sorted(set(device_order)) != sorted(device_order) or max(device_order) >= len(self.devices):
            raise RequestError(f"plan: device_order must list different devices of this cluster's {len(self.devices)}: plan again on this cluster")
        by_node = groupby(device_order, key=self.node_index)
        nodes = tuple(replace(self.nodes[index], devices=tuple(self.devices[d] for d in devices)) for index, devices in by_node)
        if len(set(map(self.node_index, device_order))) < len(nodes):
            raise RequestError("plan: device_order leaves a node and comes back to it: keep the ranks of a node together")
        self._reordered[device_order] = replace(self, nodes=nodes)
        return self._reordered[device_order]

    @cached_property
    def link_cache(self) -> dict[Hashable, Link | GroupBandwidth]:
        """Cached links and bandwidths of groups of ranks, by a key of the group: cost models ask for them repeatedly."""
        return {}

    def node_of(self, rank: int) -> Node:
        return self.nodes[self.node_index(rank)]

    def location(self, rank: int) -> DeviceLocation:
        """The rank's node index, and its index within the node."""
        node = self.node_index(rank)
        return DeviceLocation(node, rank - self.rank_ends[node] + len(self.nodes[node].devices))

    def node_index(self, rank: int) -> int:
        if not 0 <= rank < self.rank_ends[-1]:
            raise IndexError(rank)
        return bisect_right(self.rank_ends, rank)

    def link_between(self, ranks: Sequence[int]) -> Link:
        """The slowest link that a collective among `ranks` must cross."""
        first, last = self.node_index(min(ranks)), self.node_index(max(ranks))  # a node holds consecutive ranks
        return self.link if first != last else self.nodes[first].link

    def threads_per_rank(self, world: int) -> int:
        """CPU threads for each CPU rank when the first `world` devices are used; 0 where all are GPUs. A GPU rank takes one core."""
        node = self.nodes[0]
        used = node.devices[:world]
        on_cpu = sum(d.kind == "cpu" for d in used)
        return max((node.cores - (len(used) - on_cpu)) // on_cpu, 1) if on_cpu else 0

    @cached_property
    def _topology(self) -> ClusterTopology:
        return ClusterTopology(self)

    def path(self, source: int, target: int) -> LinkPath:
        """The links from one rank to another, in order."""
        return self._topology.path(source, target)

    @property
    def has_topology(self) -> bool:
        """Whether it describes a topology, beyond one link figure for all pairs."""
        return self.fabric is not None or any(node.inside is not None for node in self.nodes[:1])

    def group_bandwidth(self, ranks: Sequence[int], pattern: TrafficPattern = "ring", all_groups_active: bool = True) -> GroupBandwidth:
        """The bandwidth of each of `ranks` in a collective; `all_groups_active`: while all other ranks communicate too, in groups like this
        one, as with the groups of a mesh axis."""
        return self._topology.group_bandwidth(ranks, pattern, all_groups_active)

    def least_memory(self, ranks: int) -> int:
        """The smallest memory among the first `ranks` devices."""
        count = bisect_right(self.rank_ends, ranks)  # of nodes that are used completely
        nodes = {id(node): node for node in self.nodes[:count]}
        remaining = self.devices[self.rank_ends[count - 1] if count else 0 : ranks]
        return min(d.memory_bytes for d in (*(d for node in nodes.values() for d in node.devices), *remaining))

    def first_devices(self, ranks: int) -> Cluster:
        """The first `ranks` devices of this cluster."""
        if not 1 <= ranks <= len(self.devices):
            raise RequestError(f"{ranks} ranks are requested, and this cluster has {len(self.devices)} devices: use --nproc 1..{len(self.devices)}")
        starts = zip(self.nodes, (0, *self.rank_ends), strict=False)
        nodes = (n if start + len(n.devices) <= ranks else replace(n, devices=n.devices[: ranks - start]) for n, start in starts if start < ranks)
        return replace(self, nodes=tuple(nodes))
