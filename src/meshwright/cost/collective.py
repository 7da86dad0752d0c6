"""Communication: α–β lines, measured where they were, from the link's figures where they were not."""

from __future__ import annotations

from meshwright.core.calibration import Line, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, wire_factor


def sent_bytes(action: Action, plan: Plan) -> float:
    """What a rank puts on the wire for one call; where the data decides, what an even spread of it gives."""
    size = action.bytes if action.likely is None else action.likely
    return size * wire_factor(action.op, action.ranks(plan.mesh))


def collective_seconds(action: Action, plan: Plan, cluster: Cluster, rates: Rates) -> float:
    group = action.ranks(plan.mesh)
    if group == 1:
        return 0.0
    measured = "all_gather" if action.op == "all_to_all" else action.op  # both hand every other rank its share of as many bytes
    line = rates.collectives.get(f"{plan.backend}/{measured}")
    if line is None and plan.backend == "mpi":
        line = rates.collectives.get(f"gloo/{measured}")  # the nearest to it, until `bench comm` has measured it
    if line is None:
        link = cluster.link_between(tuple(range(min(plan.world, len(cluster.devices)))))
        hops = 2 * (group - 1) if action.op == "all_reduce" else group - 1
        line = Line(link.latency_s * hops, link.bandwidth)
    elif rates.ranks not in (1, group):
        # Latency grows with the ring's length; bandwidth was measured with every rank at work.
        line = Line(line.alpha_s * max(group - 1, 1) / max(rates.ranks - 1, 1), line.bytes_per_s)
    return line.seconds(sent_bytes(action, plan))
