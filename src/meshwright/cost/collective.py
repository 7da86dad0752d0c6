"""Communication: α–β lines, measured where they were, from the link's figures where they were not."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.calibration import Line, Rates
from meshwright.core.cluster import Cluster, Link
from meshwright.core.plan import Plan
from meshwright.core.routes import way
from meshwright.core.schedule import Action, wire_factor


def sent_bytes(action: Action, plan: Plan) -> float:
    """What a rank puts on the wire for one call; where the data decides, what an even spread of it gives."""
    size = action.bytes if action.likely is None else action.likely
    return size * wire_factor(action.op, action.ranks(plan.mesh))


def collective_seconds(action: Action, plan: Plan, cluster: Cluster, rates: Rates) -> float:
    group = action.ranks(plan.mesh)
    if group == 1:
        return 0.0
    link = cluster.link_between((0, min(plan.world, len(cluster.devices)) - 1))
    sent = sent_bytes(action, plan)
    routes = plan.sync.routes if action.axis != "pp" else ()  # stages meet by the plan's backend
    return line_of(action.op, group, way(routes, action.op, sent, plan.backend), rates, link).seconds(sent)


def line_of(op: str, group: int, backend: str, rates: Rates, link: Link) -> Line:
    """α–β of one operation among `group` ranks: measured among as many, or among others, or from the figures of the link."""
    ops = ("all_to_all", "all_gather") if op == "all_to_all" else (op,)  # both hand every other rank its share of as many bytes
    backends = ("mpi", "gloo") if backend == "mpi" else (backend,)  # the nearest to it, until it is measured
    for name in (f"{known}/{like}" for known in backends for like in ops):
        if (line := rates.collectives.get(f"{name}/{group}")) is not None:
            return line
        if (line := rates.collectives.get(name)) is not None:
            if rates.ranks in (1, group) or op == "send":
                return line
            # Latency grows with the ring's length; bandwidth was measured with every rank at work.
            longer = max(group - 1, 1) / max(rates.ranks - 1, 1)
            return replace(line, alpha_s=line.alpha_s * longer, gap_s=None if line.gap_s is None else line.gap_s * longer)
    hops = 2 * (group - 1) if op == "all_reduce" else group - 1
    return Line(link.latency_s * hops, link.bandwidth)
