"""Communication: α–β lines, measured where they were, from the link's figures where they were not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from meshwright.core.backends import UNEVEN_GATHER, backend_traits
from meshwright.core.calibration import AlphaBetaModel, Rates
from meshwright.core.cluster import Cluster, Link
from meshwright.core.group_bandwidth import GroupBandwidth, TrafficPattern
from meshwright.core.mesh import GROUP_AXES, TP_GRID_AXES, Mesh
from meshwright.core.plan import Plan
from meshwright.core.routes import choose_route, parse_route_name
from meshwright.core.schedule import Action, wire_factor


def sent_bytes(action: Action, plan: Plan) -> float:
    """What a rank puts on the wire for one call; where the data decides, what an even spread of it gives."""
    size = action.bytes if action.expected_bytes is None else action.expected_bytes
    return size * wire_factor(action.op, action.num_ranks(plan.mesh))


def collective_seconds(action: Action, plan: Plan, cluster: Cluster, rates: Rates) -> float:
    """One call; where tensor-parallel ranks wait for each other inside a layer, also what they take to come to it, if that is known."""
    group = action.num_ranks(plan.mesh)
    if group == 1:
        return 0.0
    return _call_seconds(action, plan, cluster, rates, group) + (rates.fixed.get("meeting", 0.0) if action.axis in ("tp", *TP_GRID_AXES) else 0.0)


def contention_seconds(action: Action, plan: Plan, rates: Rates, seconds: float) -> float:
    """What a call beside computation takes from it: for as long as it keeps a core that ranks share, where that was measured; else the part of
    it that is not hidden."""
    if "gradients" not in plan.sync.overlap:
        return seconds
    sent, taken, names = _measured_route(action, plan, rates)
    kept = next((found for name in names if (found := rates.core_busy_seconds(f"{taken}/{name}", sent)) is not None), None)
    return seconds * (1.0 - rates.overlap) if kept is None else min(seconds, rates.oversubscription * kept)


def _call_seconds(action: Action, plan: Plan, cluster: Cluster, rates: Rates, group: int) -> float:
    link = group_link(cluster, action, plan.mesh)
    sent, taken, names = _measured_route(action, plan, rates)
    found = next((found for name in names if (found := rates.measured_seconds(f"{taken}/{name}", sent)) is not None), None)
    return alpha_beta_of(action.op, group, taken, rates, link).seconds(sent) if found is None else found


def _measured_route(action: Action, plan: Plan, rates: Rates) -> tuple[float, str, list[str]]:
    """What a rank sends, by which way, and under which names that was measured, the nearest first."""
    group, sent = action.num_ranks(plan.mesh), sent_bytes(action, plan) * padding_factor(action, plan)
    routes = plan.sync.routes if action.axis != "pp" else ()  # stages meet by the plan's backend
    anyhow = [action.op] if rates.ranks == group or action.op == "send" else []
    return sent, choose_route(routes, action.op, sent, plan.backend), [f"{action.op}/{group}", *anyhow]


def padding_factor(action: Action, plan: Plan) -> float:
    """By how much more a call takes for its uneven parts, where they are gathered padded to the longest."""
    uneven = plan.balance.state_fractions and action.op == "all_gather" and action.axis == "shard"
    padded = uneven and UNEVEN_GATHER in backend_traits(plan.backend).fallbacks
    return max(plan.balance.state_fractions) * plan.mesh.shard if padded else 1.0


def p2p_seconds(action: Action, plan: Plan, cluster: Cluster, rates: Rates, source: int, target: int) -> float:
    """What stages send each other takes the link between two pipeline ranks, which are not all as far apart."""
    stride = plan.mesh.stride("pp")
    ends = min(source, target) * stride, max(source, target) * stride
    key = ("message", ends)
    if key not in cluster.link_cache:
        cluster.link_cache[key] = effective_link(cluster, ends, "send")
    found = rates.measured_seconds(f"{plan.backend}/send", action.bytes) if rates.ranks == 2 else None
    return alpha_beta_of("send", 2, plan.backend, rates, cluster.link_cache[key]).seconds(action.bytes) if found is None else found


def group_link(cluster: Cluster, action: Action, mesh: Mesh) -> Link | GroupBandwidth:
    """What joins the action's group. Groups of one shape are asked about once, whatever mesh they belong to."""
    key = (mesh, action.axis, action.group_size, action.op == "all_to_all")
    if key not in cluster.link_cache:
        shape = (group_strides(action.axis, mesh), *key[2:])
        if shape not in cluster.link_cache:
            cluster.link_cache[shape] = effective_link(cluster, group_ranks(action.axis, action.group_size, mesh), action.op)
        cluster.link_cache[key] = cluster.link_cache[shape]
    return cluster.link_cache[key]


def group_strides(axis: str, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """(stride, degree) of the axes that a group runs along, outermost first; neighbouring axes are one."""
    found = [(1, mesh.size)] if axis == "world" else []
    axes = [a for part in GROUP_AXES.get(axis, (axis,)) for a in (TP_GRID_AXES if part == "tp" else (part,))]
    for name in sorted(axes, key=mesh.ordered_axes.index) if axis != "world" else ():
        stride, degree = mesh.stride(name), mesh.degree(name)
        if found and found[-1][0] == stride * degree:
            stride, degree = stride, degree * found.pop()[1]
        if degree > 1:
            found.append((stride, degree))
    return tuple(found)


@lru_cache(maxsize=4096)
def group_ranks(axis: str, count: int, mesh: Mesh) -> Sequence[int]:
    """The ranks that meet in rank 0's group of an axis, or the first `count` of them. Those of the other groups are as far apart."""
    if axis == "world":
        return range(mesh.size)
    found = [0]
    axes = [a for part in GROUP_AXES.get(axis, (axis,)) for a in (TP_GRID_AXES if part == "tp" else (part,))]
    for part in sorted(axes, key=mesh.ordered_axes.index):
        stride = mesh.stride(part)
        places = range(0, mesh.degree(part) * stride, stride)
        found = [rank + place for rank in found for place in places]
    found = found[: count or None]
    even = range(0, found[-1] + 1, found[1]) if len(found) > 1 else range(1)
    return even if len(even) == len(found) else tuple(found)  # a range is looked up at once, however long it is


def effective_link(cluster: Cluster, ranks: Sequence[int], op: str) -> Link | GroupBandwidth:
    """What a call among `ranks` gets while others like it are under way, by the cluster's wires; where these are not known, the slowest link.
    More ranks than devices are as far apart as devices are."""
    devices = len(cluster.devices)
    if max(ranks) >= devices:
        return cluster.link_between((0, devices - 1)) if devices > 1 else cluster.nodes[0].link
    pattern: TrafficPattern = "all_to_all" if op == "all_to_all" else "ring"
    return cluster.group_bandwidth(ranks, pattern) if cluster.has_topology else cluster.link_between(ranks)


def alpha_beta_of(op: str, group: int, route: str, rates: Rates, link: Link | GroupBandwidth) -> AlphaBetaModel:
    """α–β of one operation among `group` ranks by the way that is taken: measured among as many, or among others, or from the link's figures."""
    ops = ("all_to_all", "all_gather") if op == "all_to_all" else (op,)  # both hand every other rank its share of as many bytes
    backend = parse_route_name(route)[0]
    nearest = dict.fromkeys(filter(None, (route, backend, backend_traits(backend).priced_like)))
    for name in (f"{known}/{like}" for known in nearest for like in ops):
        if (line := rates.collectives.get(f"{name}/{group}")) is not None:
            return line
        if (line := rates.collectives.get(name)) is not None:
            if rates.ranks in (1, group) or op == "send":
                return line
            # Latency grows with the ring's length; bandwidth was measured with every rank at work.
            longer = max(group - 1, 1) / max(rates.ranks - 1, 1)
            return replace(line, alpha_s=line.alpha_s * longer, gap_s=None if line.gap_s is None else line.gap_s * longer)
    if isinstance(link, GroupBandwidth):
        return link.alpha_beta(op)
    hops = 2 * (group - 1) if op == "all_reduce" else group - 1
    return AlphaBetaModel(link.latency_s * hops, link.bandwidth)
