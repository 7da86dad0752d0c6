"""`--backend auto`: sends each collective of a plan over the backend and algorithm that measured fastest for its operation and size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.core.backends import BACKENDS, backend_for
from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.cost.route_selection import choose_routes, explain_routes, keep_used_routes, measured_routes
from meshwright.orchestrate.bench_comm import OPERATIONS, available_backends
from meshwright.orchestrate.config import RunConfig
from meshwright.plan import Constraints, Ranking, ScoredPlan
from meshwright.schedule import plan_ledgers


def add_measured_routes(constraints: Constraints, cluster: Cluster, calibration: Calibration) -> tuple[Constraints, str]:
    """The constraints plus every measured route that is faster on this machine; or the unchanged constraints and the reason."""
    ranks, kind = constraints.world or len(cluster.devices), cluster.devices[0].kind
    default = backend_for(kind)
    if not BACKENDS[default].routable:
        return constraints, f"Backend: {default}, the only one that reaches GPUs without a copy; it chooses between rings and trees itself."
    rates = calibration.rates_for(ranks)
    available = [name for name in available_backends(kind, None) if BACKENDS[name].routable]
    nodes = tuple(len(node.devices) for node in cluster.first_devices(ranks).nodes) if len(cluster.nodes) > 1 else ()
    if not any(len(measured_routes(rates, available, op, nodes)) > 1 for op in OPERATIONS):
        absent = [(name.upper(), traits.install) for name, traits in BACKENDS.items() if traits.routable and name not in available]
        missing = "".join(f"{name} is not installed ({how}) and " for name, how in absent)
        return constraints, f"Backend: {default}, since {missing}no other route was measured on {ranks} ranks: meshwright bench comm --nproc {ranks}."
    return replace(constraints, routes=choose_routes(rates, available, OPERATIONS, nodes), nodes=nodes), ""


def select_routes(ranking: Ranking, clip: bool) -> tuple[Ranking, str]:
    """The ranking whose best plan keeps only the routes that its own collectives use, and a text that says what was chosen and why."""
    best = ranking.best
    lines = [line for rank_lines in plan_ledgers(best.plan, ranking.profile, clip=clip).values() for line in rank_lines]
    plan = keep_used_routes(best.plan, lines)
    reasons = explain_routes(plan, ranking.calibration.rates_for(plan.world)) or ["gloo's own collectives are fastest for every call of this plan."]
    return replace(ranking, scored=(ScoredPlan(plan, best.estimate), *ranking.scored[1:])), " ".join(["Backends:", *reasons])


def has_several_backends(config: RunConfig) -> bool:
    """Whether the given plan.json sends some collectives over a second backend."""
    return config.plan != "auto" and len(Plan.load(Path(config.plan)).backends) > 1
