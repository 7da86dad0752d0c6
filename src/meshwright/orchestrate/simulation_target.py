"""Resolves `--cluster` for the simulator: the cluster, its measured or data-sheet rates, and the network model between its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.core.backends import backend_for
from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster, Link, Node
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.cost.rank_classes import rates_labels
from meshwright.describe.cluster_resolver import resolve_cluster
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.orchestrator import Orchestrator, ProgressCallback
from meshwright.simulate import AlphaBetaNetwork, FabricNetwork, IdealNetwork, Network, OverlapBehavior

_IDEAL_LINK = Link("ideal", 0.0, float("inf"))


@dataclass(frozen=True)
class SimulationTarget:
    """A cluster with its calibration; `make_network(plan)` gives the network model for the plan's ranks."""

    cluster: Cluster
    calibration: Calibration
    make_network: Callable[[Plan], Network]

    def with_ranks(self, ranks: int) -> SimulationTarget:
        """The target with `ranks` devices: the first of its own, or its nodes repeated if it has fewer."""
        if ranks <= len(self.cluster.devices):
            return replace(self, cluster=self.cluster.first_devices(ranks))
        if self.cluster.name == "ideal":
            return _ideal_target(self.cluster.nodes[0], ranks, self.calibration)
        rounds = -(-ranks // len(self.cluster.devices))
        named = (replace(node, name=f"{node.name}-{number}") for number, node in enumerate(self.cluster.nodes * rounds))
        return target_from_datasheets(replace(self.cluster, nodes=tuple(named)).first_devices(ranks))


def resolve_target(name: str, config: RunConfig, environ: Mapping[str, str], log_progress: ProgressCallback) -> SimulationTarget:
    """The target named `here`, `ideal[:N]`, a machine such as dgx-h100:16, or a cluster file (`FILE:N`: N nodes like its first)."""
    if name != "here" and name.partition(":")[0] != "ideal":
        return target_from_datasheets(resolve_cluster(name, environ))
    ideal = resolve_cluster(name, environ, ranks=requested_ranks(config)) if name != "here" else None
    local_config = config.model_copy(update={"mesh": None, "nproc": None, "plan": "auto"}) if ideal is not None else config
    with Orchestrator(local_config, environ, log_progress) as orchestrator:
        cluster, measured = orchestrator.cluster, orchestrator.calibration()
    if ideal is not None:
        return _ideal_target(cluster.nodes[0], len(ideal.devices), measured)
    kind = cluster.devices[0].kind

    def network(plan: Plan) -> Network:
        ordered, duplex = cluster.in_device_order(plan.device_order), kind == "cuda" or len(cluster.nodes) > 1
        overlap = _overlap_by_rank(plan, ordered, measured)
        return AlphaBetaNetwork(ordered, measured.rates_for(plan.world), backend_for(kind), duplex=duplex, overlap_by_rank=overlap)

    return SimulationTarget(cluster, measured, network)


def requested_ranks(config: RunConfig) -> int | None:
    """The number of ranks that the plan, the mesh or --nproc asks for; None if none does."""
    if config.plan != "auto":
        return Plan.load(Path(config.plan)).world
    return Mesh.parse(config.mesh).size if config.mesh is not None else config.nproc


def _ideal_target(node: Node, ranks: int, calibration: Calibration) -> SimulationTarget:
    """`ranks` devices like this node's, with a network that costs no time and does not slow computation."""
    device = node.devices[0]
    devices = tuple(replace(device, index=i) for i in range(ranks))
    layouts = tuple(replace(rates, collectives={}, overlap=1.0) for rates in calibration.layouts)
    cluster = Cluster("ideal", (replace(node, devices=devices, memory_bytes=ranks * device.memory_bytes, link=_IDEAL_LINK),), _IDEAL_LINK)
    return SimulationTarget(cluster, replace(calibration, layouts=layouts), lambda _: IdealNetwork())


def target_from_datasheets(cluster: Cluster) -> SimulationTarget:
    calibration = datasheet_calibration(cluster)
    backend = backend_for(cluster.devices[0].kind)

    def network(plan: Plan) -> Network:
        ordered = cluster.in_device_order(plan.device_order)
        overlap = _overlap_by_rank(plan, ordered, calibration)
        return FabricNetwork.from_cluster(ordered, calibration.rates_for(plan.world), backend=backend, overlap_by_rank=overlap)

    return SimulationTarget(cluster, calibration, network)


def _overlap_by_rank(plan: Plan, ordered_cluster: Cluster, calibration: Calibration) -> list[OverlapBehavior]:
    """The overlap behaviour of each rank; a single entry if all ranks have the same."""
    labels = rates_labels(plan, ordered_cluster, calibration)
    rates = {label: calibration.rates_for(plan.world, label) for label in labels or ("",)}
    overlaps = {label: OverlapBehavior(r.async_dispatch, 1.0 - r.overlap) for label, r in rates.items()}
    return [overlaps[label] for label in labels] if len(overlaps) > 1 else list(overlaps.values())
