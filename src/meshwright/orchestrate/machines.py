"""What `--cluster` names: the machines, what they reach, and the network between them as the simulator wants it. The one place that decides this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster, Link, Node
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.cost.sheets import from_sheets
from meshwright.describe.clusters import resolve
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.orchestrator import Orchestrator, Say
from meshwright.simulate import Fabric, Ideal, Linked, Network

_FREE = Link("ideal", 0.0, float("inf"))


@dataclass(frozen=True)
class Machine:
    """A cluster with its measurements or figures; `network(world)` is what so many ranks would meet on."""

    cluster: Cluster
    calibration: Calibration
    network: Callable[[int], Network]

    def of(self, ranks: int) -> Machine:
        """The same for so many ranks: the first of its devices, or, where there are fewer, more nodes like the first."""
        if ranks <= len(self.cluster.devices):
            return replace(self, cluster=self.cluster.take(ranks))
        node = self.cluster.nodes[0]
        if self.cluster.name == "ideal":
            return _ideal(node, ranks, self.calibration)
        nodes = -(-ranks // len(node.devices))
        grown = replace(self.cluster, nodes=tuple(replace(node, name=f"{node.name}-{i}") for i in range(nodes))).take(ranks)
        return _from_figures(grown)


def find_machine(text: str, config: RunConfig, environ: Mapping[str, str], say: Say) -> Machine:
    """`here`, `ideal[:N]`, a machine such as dgx-h100:16, or a cluster's file, `FILE:N` for N nodes like its first."""
    if text != "here" and text.partition(":")[0] != "ideal":
        return _from_figures(resolve(text, environ))
    ideal = resolve(text, environ, ranks=asked_ranks(config)) if text != "here" else None
    alone = config.model_copy(update={"mesh": None, "nproc": None, "plan": "auto"}) if ideal is not None else config
    with Orchestrator(alone, environ, say) as orchestrator:
        here, measured = orchestrator.cluster, orchestrator.calibration()
    if ideal is not None:
        return _ideal(here.nodes[0], len(ideal.devices), measured)
    cuda = here.devices[0].kind == "cuda"

    def network(world: int) -> Network:
        rates = measured.layout(world)
        return Linked(here, rates, "nccl" if cuda else "gloo", duplex=cuda or len(here.nodes) > 1, steals=1.0 - rates.overlap)

    return Machine(here, measured, network)


def asked_ranks(config: RunConfig) -> int | None:
    """How many ranks were asked for, by number, mesh or plan."""
    if config.plan != "auto":
        return Plan.load(Path(config.plan)).world
    return Mesh.parse(config.mesh).size if config.mesh is not None else config.nproc


def _ideal(node: Node, ranks: int, measured: Calibration) -> Machine:
    """So many devices like this machine's, and a network that costs nothing and takes nothing from them."""
    one = node.devices[0]
    devices = tuple(replace(one, index=i) for i in range(ranks))
    layouts = tuple(replace(rates, collectives={}, overlap=1.0) for rates in measured.layouts)
    cluster = Cluster("ideal", (replace(node, devices=devices, memory_bytes=ranks * one.memory_bytes, link=_FREE),), _FREE)
    return Machine(cluster, replace(measured, layouts=layouts), lambda _: Ideal())


def _from_figures(cluster: Cluster) -> Machine:
    figures = from_sheets(cluster)
    backend = "nccl" if cluster.devices[0].kind == "cuda" else "gloo"

    def network(world: int) -> Network:
        rates = figures.layout(world)
        return Fabric.of(cluster, rates, backend=backend, steals=1.0 - rates.overlap)

    return Machine(cluster, figures, network)
