"""The strict schema of a cluster file, and the `Cluster` built from it. `describe/cluster_file.py` reads the file.

Quantities are written with units: '80 GB', '200 Gb/s', '2 us'."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from meshwright.core.cluster import Cluster, Device, DeviceKind, Node
from meshwright.core.errors import RequestError
from meshwright.core.fabric import Dragonfly, Fabric, FatTree, HammingMesh, SingleSwitch, Torus
from meshwright.core.mesh import MAX_RANKS
from meshwright.core.node_topology import FullyConnected, Link, NodeSwitch, NodeTopology, PcieTree
from meshwright.core.quantities import parse_bytes, parse_flops, parse_rate, parse_seconds
from meshwright.describe.catalog import DeviceDatasheet, find_datasheet


def _quantity_validator(parse: Callable[[str], float]) -> BeforeValidator:
    def read(value: object) -> object:
        if not isinstance(value, str) or not value.strip()[-1:].isalpha():
            raise ValueError(f"{value} has no unit; write it in quotes with one")
        try:
            return parse(value)
        except RequestError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(read)


ByteCount = Annotated[int, _quantity_validator(parse_bytes), Field(gt=0)]
Rate = Annotated[float, _quantity_validator(parse_rate), Field(gt=0)]
Flops = Annotated[float, _quantity_validator(parse_flops), Field(gt=0)]
Seconds = Annotated[float, _quantity_validator(parse_seconds), Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=MAX_RANKS, strict=True)]


def check_device_count(count: int, name: str) -> None:
    """Raise RequestError before so many devices are made that they fill memory."""
    if count > MAX_RANKS:
        raise RequestError(f"{name}: {count:,} devices are more than {MAX_RANKS:,}: use fewer nodes")


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LinkSpec(_StrictModel):
    """A link; its bandwidth is one way."""

    name: str = ""
    bandwidth: Rate
    latency: Seconds
    efficiency: float = Field(1.0, gt=0, le=1)

    def link(self, default: str = "link") -> Link:
        return Link(self.name or default, self.latency, self.bandwidth, self.efficiency)


class FlatNodeSpec(LinkSpec):
    kind: Literal["flat"] = "flat"

    def topology(self) -> NodeTopology | None:
        return None


class SwitchedNodeSpec(LinkSpec):
    kind: Literal["switched"]

    def topology(self) -> NodeTopology:
        return NodeSwitch(self.link())


class FullyConnectedNodeSpec(LinkSpec):
    kind: Literal["wired"]

    def topology(self) -> NodeTopology:
        return FullyConnected(self.link())


class PcieNodeSpec(LinkSpec):
    kind: Literal["pcie"]
    switch: Count
    socket: Annotated[int, Field(ge=0)] = 0
    bridge: LinkSpec | None = None

    def topology(self) -> NodeTopology:
        return PcieTree(self.link("PCIe"), self.switch, self.socket, self.bridge.link("socket to socket") if self.bridge else None)


class FlatNetwork(LinkSpec):
    kind: Literal["flat"] = "flat"
    ports: Count = 1

    def fabric(self) -> Fabric:
        return SingleSwitch(self.link("network"), self.ports)


class FatTreeNetwork(LinkSpec):
    kind: Literal["fat-tree"]
    ports: Count = 1
    leaf: Count
    pod: Annotated[int, Field(ge=0)] = 0
    taper: float = Field(1.0, ge=1)
    pod_taper: float = Field(1.0, ge=1)
    hop: Seconds = 3e-7
    rails: bool = False

    def fabric(self) -> Fabric:
        return FatTree(self.link("network"), self.leaf, self.ports, self.pod, self.taper, self.pod_taper, self.hop, self.rails)


class DragonflyNetwork(LinkSpec):
    kind: Literal["dragonfly"]
    ports: Count = 1
    switch: Count
    group: Count
    local: LinkSpec
    between: LinkSpec
    local_links: Count = 1
    global_links: Count = 1
    spines: Annotated[int, Field(ge=0)] = 0

    def fabric(self) -> Fabric:
        local, between = self.local.link("within groups"), self.between.link("between groups")
        ends = (self.ports, self.local_links, self.global_links, self.spines)
        return Dragonfly(self.link("network"), self.switch, self.group, local, between, *ends)


class TorusNetwork(LinkSpec):
    kind: Literal["torus"]
    shape: tuple[Count, ...] = Field(min_length=1)

    def fabric(self) -> Fabric:
        return Torus(self.link("torus"), self.shape)


class HammingMeshNetwork(LinkSpec):
    kind: Literal["hammingmesh"]
    board: tuple[Count, Count]
    boards: tuple[Count, Count]
    taper: float = Field(1.0, ge=1)

    def fabric(self) -> Fabric:
        return HammingMesh(self.link("mesh"), self.board, self.boards, self.taper)


def _default_kind_flat(value: object) -> object:
    return {"kind": "flat", **value} if isinstance(value, dict) else value


IntraNodeSpec = Annotated[
    FlatNodeSpec | SwitchedNodeSpec | FullyConnectedNodeSpec | PcieNodeSpec, Field(discriminator="kind"), BeforeValidator(_default_kind_flat)
]
NetworkSpec = Annotated[
    FlatNetwork | FatTreeNetwork | DragonflyNetwork | TorusNetwork | HammingMeshNetwork,
    Field(discriminator="kind"),
    BeforeValidator(_default_kind_flat),
]


class DeviceSpec(_StrictModel):
    """A device of the catalog, with any of its figures overridden; or one that the catalog does not have."""

    device: str | None = None
    count: Count = 1
    name: str | None = None
    kind: DeviceKind = "cuda"
    memory: ByteCount | None = None
    memory_bandwidth: Rate | None = None
    peak: dict[str, Flops] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _parse_shorthand(cls, value: object) -> object:
        """'8 x H100' is {device = "H100", count = 8}."""
        if not isinstance(value, str):
            return value
        count, _, device = value.rpartition(" x ")
        if count and not re.fullmatch(r"\s*[0-9]{1,9}\s*", count):
            raise ValueError(f"'{value}' is not a device; write it like H100 or 8 x H100")
        return {"device": device.strip(), **({"count": int(count)} if count else {})}

    @model_validator(mode="after")
    def _check_known(self) -> DeviceSpec:
        try:
            sheet = self.datasheet
        except RequestError as error:
            raise ValueError(str(error)) from None
        if sheet is None and (self.name is None or self.memory is None):
            raise ValueError('name a device of the catalog (device = "H100"), or give a name and a memory')
        return self

    @property
    def datasheet(self) -> DeviceDatasheet | None:
        return find_datasheet(self.device) if self.device is not None else None

    def build_devices(self, first_index: int, default_memory: int) -> list[Device]:
        """The devices, numbered from `first_index`; `default_memory` is a CPU's memory where the file does not give it."""
        sheet = self.datasheet
        peak = {**(sheet.peak_flops if sheet else {}), **self.peak}
        memory = self.memory or (sheet.memory_bytes if sheet else 0) or default_memory
        bandwidth = self.memory_bandwidth or (sheet.memory_bandwidth if sheet else 0.0)
        kind, name = (sheet.kind, self.name or sheet.name) if sheet else (self.kind, self.name or "")
        source = sheet.source if sheet else "cluster file"
        return [Device(kind, name, first_index + i, memory, peak, bandwidth, source, "fp8" in peak) for i in range(self.count)]


class NodeSpec(_StrictModel):
    """A number of equal nodes."""

    name: str = "node"
    count: Count = 1
    devices: list[DeviceSpec] = Field(min_length=1)
    cores: Count = 1
    memory: ByteCount
    cpu: str = ""
    inside: IntraNodeSpec | None = None

    @model_validator(mode="after")
    def _check_linked(self) -> NodeSpec:
        count = sum(d.count for d in self.devices)
        if count > 1 and self.inside is None:
            raise ValueError(f'{count} devices and no link between them; add inside = {{ bandwidth = "32 GB/s", latency = "10 us" }}')
        return self

    def node(self) -> Node:
        count = sum(d.count for d in self.devices)
        devices: list[Device] = []
        for spec in self.devices:
            devices += spec.build_devices(len(devices), self.memory // count)
        node = Node(self.name, tuple(devices), self.cores, self.memory, self.cpu)
        return replace(node, link=self.inside.link("between devices"), inside=self.inside.topology()) if self.inside else node


class ClusterSpec(_StrictModel):
    """The file."""

    name: str | None = None
    source: str = ""
    most: Annotated[int, Field(ge=0)] = 0  # nodes that exist; 0: no limit
    nodes: list[NodeSpec] = Field(min_length=1)
    network: NetworkSpec | None = None

    @model_validator(mode="after")
    def _check_linked(self) -> ClusterSpec:
        count = sum(n.count for n in self.nodes)
        if count > 1 and self.network is None:
            raise ValueError(f'{count} nodes and no [network]; add one with bandwidth = "200 Gb/s" and latency = "5 us"')
        fabric = self.network.fabric() if self.network else None
        positions = math.prod(fabric.shape) if isinstance(fabric, Torus | HammingMesh) else count
        if positions < count:
            raise ValueError(f"[network] has {positions} positions for {count} nodes; make its shape larger")
        return self

    def cluster(self, name: str, nodes: int | None = None) -> Cluster:
        if nodes is not None and len(self.nodes) > 1:
            raise RequestError(f"{name}:{nodes}: the cluster has {len(self.nodes)} kinds of nodes, so their number is ambiguous; leave :{nodes} out")
        if nodes is not None and self.most and nodes > self.most:
            raise RequestError(f"{name}:{nodes}: the machine has {self.most} nodes; use 1..{self.most}")
        check_device_count(sum((nodes or spec.count) * sum(d.count for d in spec.devices) for spec in self.nodes), name)
        all_nodes = tuple(node for spec in self.nodes for node in (spec.node(),) * (nodes or spec.count))
        cluster = Cluster(self.name or name, all_nodes, source=self.source)
        return replace(cluster, link=self.network.link("network"), fabric=self.network.fabric()) if self.network else cluster
