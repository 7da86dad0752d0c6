"""What `--cluster` names: the machines, what they reach, and the network between them as the simulator wants it. The one place that decides this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.core.backends import backend_for
from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster, Link, Node
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.cost.classes import kinds
from meshwright.cost.sheets import from_sheets
from meshwright.describe.clusters import resolve
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.orchestrator import Orchestrator, Say
from meshwright.simulate import Fabric, Habits, Ideal, Linked, Network

_FREE = Link("ideal", 0.0, float("inf"))


@dataclass(frozen=True)
class Machine:
    """A cluster with its measurements or figures; `network(plan)` is what a plan's ranks would meet on."""

    cluster: Cluster
    calibration: Calibration
    network: Callable[[Plan], Network]

    def of(self, ranks: int) -> Machine:
        """The same for so many ranks: the first of its devices, or, where there are fewer, the same nodes over again."""
        if ranks <= len(self.cluster.devices):
            return replace(self, cluster=self.cluster.take(ranks))
        if self.cluster.name == "ideal":
            return _ideal(self.cluster.nodes[0], ranks, self.calibration)
        rounds = -(-ranks // len(self.cluster.devices))
        named = (replace(node, name=f"{node.name}-{number}") for number, node in enumerate(self.cluster.nodes * rounds))
        return from_figures(replace(self.cluster, nodes=tuple(named)).take(ranks))


def find_machine(text: str, config: RunConfig, environ: Mapping[str, str], say: Say) -> Machine:
    """`here`, `ideal[:N]`, a machine such as dgx-h100:16, or a cluster's file, `FILE:N` for N nodes like its first."""
    if text != "here" and text.partition(":")[0] != "ideal":
        return from_figures(resolve(text, environ))
    ideal = resolve(text, environ, ranks=asked_ranks(config)) if text != "here" else None
    alone = config.model_copy(update={"mesh": None, "nproc": None, "plan": "auto"}) if ideal is not None else config
    with Orchestrator(alone, environ, say) as orchestrator:
        here, measured = orchestrator.cluster, orchestrator.calibration()
    if ideal is not None:
        return _ideal(here.nodes[0], len(ideal.devices), measured)
    kind = here.devices[0].kind

    def network(plan: Plan) -> Network:
        seated, rates = here.seated(plan.seats), measured.layout(plan.world)
        return Linked(seated, rates, backend_for(kind), duplex=kind == "cuda" or len(here.nodes) > 1, each=_habits(plan, seated, measured))

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


def from_figures(cluster: Cluster) -> Machine:
    figures = from_sheets(cluster)
    backend = backend_for(cluster.devices[0].kind)

    def network(plan: Plan) -> Network:
        seated = cluster.seated(plan.seats)
        return Fabric.of(seated, figures.layout(plan.world), backend=backend, each=_habits(plan, seated, figures))

    return Machine(cluster, figures, network)


def _habits(plan: Plan, seated: Cluster, known: Calibration) -> list[Habits]:
    """By rank; one for all where they are of one kind."""
    names = kinds(plan, seated, known)
    rates = {name: known.layout(plan.world, name) for name in names or ("",)}
    found = {name: Habits(of.queued, 1.0 - of.overlap) for name, of in rates.items()}
    return [found[name] for name in names] if len(found) > 1 else list(found.values())
