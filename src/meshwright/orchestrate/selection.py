"""`--backend auto`: plans whose calls go over whichever backend was measured quickest for their operation and size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.cost.selection import reasons, routes, used
from meshwright.orchestrate.bench_comm import OPERATIONS, present
from meshwright.orchestrate.config import RunConfig
from meshwright.plan import Ranking, Scored, Wishes
from meshwright.schedule import plan_ledgers


def with_routes(wishes: Wishes, cluster: Cluster, calibration: Calibration) -> tuple[Wishes, str]:
    """The wishes, with every route that pays on this machine; or as they were, and the reason."""
    ranks, kind = wishes.world or len(cluster.devices), cluster.devices[0].kind
    if kind == "cuda":
        return wishes, "Backend: nccl, which alone reaches GPUs without a copy."
    if "mpi" not in present(kind, None):
        return wishes, "Backend: gloo, since MPI is not installed: pip install 'meshwright[mpi]'."
    rates = calibration.layout(ranks)
    if not any(name.startswith("mpi/") for name in rates.collectives):
        return wishes, f"Backend: gloo, since MPI was not measured on {ranks} ranks: meshwright bench comm --nproc {ranks}."
    return replace(wishes, routes=routes(rates, ("gloo", "mpi"), OPERATIONS)), ""


def settled(ranking: Ranking, clip: bool) -> tuple[Ranking, str]:
    """The best plan with the routes that its own calls take, and what was chosen and why."""
    best = ranking.best
    lines = [line for of_ranks in plan_ledgers(best.plan, ranking.profile, clip=clip).values() for line in of_ranks]
    plan = used(best.plan, lines)
    said = reasons(plan, ranking.calibration.layout(plan.world)) or ["gloo was measured quickest for every call of this plan."]
    return replace(ranking, scored=(Scored(plan, best.estimate), *ranking.scored[1:])), " ".join(["Backends:", *said])


def is_routed(config: RunConfig) -> bool:
    """Whether the plan that is given sends some calls over another backend."""
    return config.plan != "auto" and bool(Plan.load(Path(config.plan)).sync.routes)
