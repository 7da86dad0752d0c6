"""Seconds of communication actions: measured curves and α–β lines where they exist, the link's data-sheet figures otherwise."""

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
    """Bytes a rank puts on the wire for one call; where the amount depends on the data, the bytes expected under an even distribution."""
    size = action.bytes if action.expected_bytes is None else action.expected_bytes
    return size * wire_factor(action.op, action.num_ranks(plan.mesh))


def collective_seconds(action: Action, plan: Plan, cluster: Cluster, rates: Rates) -> float:
    """Seconds of one call; for tensor-parallel collectives inside a layer, plus the measured time ranks take to synchronise before it."""
    group = action.num_ranks(plan.mesh)
    if group == 1:
        return 0.0
    return _call_seconds(action, plan, cluster, rates, group) + (rates.fixed.get("tp_sync", 0.0) if action.axis in ("tp", *TP_GRID_AXES) else 0.0)


def contention_seconds(action: Action, plan: Plan, rates: Rates, seconds: float) -> float:
    """Compute time lost to an overlapped collective: the time it keeps a shared core busy, where measured; otherwise its exposed part."""
    if "gradients" not in plan.sync.overlap:
        return seconds
    sent, route, names = _measured_route(action, plan, rates)
    busy = next((s for name in names if (s := rates.core_busy_seconds(f"{route}/{name}", sent)) is not None), None)
    return seconds * (1.0 - rates.overlap) if busy is None else min(seconds, rates.oversubscription * busy)


def _call_seconds(action: Action, plan: Plan, cluster: Cluster, rates: Rates, group: int) -> float:
    link = group_link(cluster, action, plan.mesh)
    sent, route, names = _measured_route(action, plan, rates)
    measured = next((s for name in names if (s := rates.measured_seconds(f"{route}/{name}", sent)) is not None), None)
    return alpha_beta_of(action.op, group, route, rates, link).seconds(sent) if measured is None else measured


def _measured_route(action: Action, plan: Plan, rates: Rates) -> tuple[float, str, list[str]]:
    """Bytes a rank sends, the call's route, and the names under which the calibration may have it, most specific first."""
    group, sent = action.num_ranks(plan.mesh), sent_bytes(action, plan) * padding_factor(action, plan)
    routes = plan.sync.routes if action.axis != "pp" else ()  # pipeline sends use the plan's backend
    any_group = [action.op] if rates.ranks == group or action.op == "send" else []
    return sent, choose_route(routes, action.op, sent, plan.backend), [f"{action.op}/{group}", *any_group]


def padding_factor(action: Action, plan: Plan) -> float:
    """Factor on the bytes of an all-gather with uneven shards, where the backend pads them to the longest."""
    uneven = plan.balance.state_fractions and action.op == "all_gather" and action.axis == "shard"
    padded = uneven and UNEVEN_GATHER in backend_traits(plan.backend).fallbacks
    return max(plan.balance.state_fractions) * plan.mesh.shard if padded else 1.0


def p2p_seconds(action: Action, plan: Plan, cluster: Cluster, rates: Rates, source: int, target: int) -> float:
    """Seconds of one boundary message over the link between two pipeline ranks: they are not all equally far from each other."""
    stride = plan.mesh.stride("pp")
    ends = min(source, target) * stride, max(source, target) * stride
    key = ("message", ends)
    if key not in cluster.link_cache:
        cluster.link_cache[key] = effective_link(cluster, ends, "send")
    measured = rates.measured_seconds(f"{plan.backend}/send", action.bytes) if rates.ranks == 2 else None
    return alpha_beta_of("send", 2, plan.backend, rates, cluster.link_cache[key]).seconds(action.bytes) if measured is None else measured


def group_link(cluster: Cluster, action: Action, mesh: Mesh) -> Link | GroupBandwidth:
    """The link or bandwidth that connects the action's group. Cached by the group's shape, so equal groups of different meshes are resolved once."""
    key = (mesh, action.axis, action.group_size, action.op == "all_to_all")
    if key not in cluster.link_cache:
        shape = (group_strides(action.axis, mesh), *key[2:])
        if shape not in cluster.link_cache:
            cluster.link_cache[shape] = effective_link(cluster, group_ranks(action.axis, action.group_size, mesh), action.op)
        cluster.link_cache[key] = cluster.link_cache[shape]
    return cluster.link_cache[key]


def group_strides(axis: str, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """(stride, degree) of the axes that a group spans, outermost first; adjacent axes are merged."""
    if axis == "world":
        return ((1, mesh.size),)
    strides: list[tuple[int, int]] = []
    for name in _mesh_axes(axis, mesh):
        stride, degree = mesh.stride(name), mesh.degree(name)
        if strides and strides[-1][0] == stride * degree:
            degree *= strides.pop()[1]
        if degree > 1:
            strides.append((stride, degree))
    return tuple(strides)


def _mesh_axes(axis: str, mesh: Mesh) -> list[str]:
    """The mesh axes that groups along `axis` span, outermost first."""
    axes = [a for part in GROUP_AXES.get(axis, (axis,)) for a in (TP_GRID_AXES if part == "tp" else (part,))]
    return sorted(axes, key=mesh.ordered_axes.index)


@lru_cache(maxsize=4096)
def group_ranks(axis: str, count: int, mesh: Mesh) -> Sequence[int]:
    """The ranks of rank 0's group along an axis, or the first `count` of them. The axis' other groups have the same spacing."""
    if axis == "world":
        return range(mesh.size)
    ranks = [0]
    for name in _mesh_axes(axis, mesh):
        ranks = [rank + i * mesh.stride(name) for rank in ranks for i in range(mesh.degree(name))]
    ranks = ranks[: count or None]
    even = range(0, ranks[-1] + 1, ranks[1]) if len(ranks) > 1 else range(1)
    return even if len(even) == len(ranks) else tuple(ranks)  # lookups in a range take constant time


def effective_link(cluster: Cluster, ranks: Sequence[int], op: str) -> Link | GroupBandwidth:
    """The bandwidth of a call among `ranks` while its sibling groups communicate too, from the cluster's topology; the slowest link where the
    topology is unknown. With more ranks than devices, the link that spans all devices."""
    devices = len(cluster.devices)
    if max(ranks) >= devices:
        return cluster.link_between((0, devices - 1)) if devices > 1 else cluster.nodes[0].link
    pattern: TrafficPattern = "all_to_all" if op == "all_to_all" else "ring"
    return cluster.group_bandwidth(ranks, pattern) if cluster.has_topology else cluster.link_between(ranks)


def alpha_beta_of(op: str, group: int, route: str, rates: Rates, link: Link | GroupBandwidth) -> AlphaBetaModel:
    """α–β of one collective among `group` ranks on a route: measured at this group size, scaled from another size, or from the link's figures."""
    ops = ("all_to_all", "all_gather") if op == "all_to_all" else (op,)  # both send every other rank its share of as many bytes
    backend = parse_route_name(route)[0]
    routes = dict.fromkeys(filter(None, (route, backend, backend_traits(backend).priced_like)))
    for name in (f"{known}/{like}" for known in routes for like in ops):
        if (line := rates.collectives.get(f"{name}/{group}")) is not None:
            return line
        if (line := rates.collectives.get(name)) is not None:
            if rates.ranks in (1, group) or op == "send":
                return line
            # Latency grows with the ring's length; bandwidth was measured with all ranks sending.
            longer = max(group - 1, 1) / max(rates.ranks - 1, 1)
            return replace(line, alpha_s=line.alpha_s * longer, gap_s=None if line.gap_s is None else line.gap_s * longer)
    if isinstance(link, GroupBandwidth):
        return link.alpha_beta(op)
    hops = 2 * (group - 1) if op == "all_reduce" else group - 1
    return AlphaBetaModel(link.latency_s * hops, link.bandwidth)
