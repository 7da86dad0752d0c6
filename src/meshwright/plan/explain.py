"""Explains a ranking in plain language: why the first plan won, what the bottleneck is, the runner-up, what would change the choice, and how sure
that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from meshwright.core.calibration import AlphaBetaModel, Rates
from meshwright.core.cluster import Cluster, Link
from meshwright.core.cluster_changes import map_links, map_network_links
from meshwright.core.errors import RequestError
from meshwright.core.gc_control import gc_disabled
from meshwright.core.group_bandwidth import GroupBandwidth
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes, show_seconds
from meshwright.core.rank_devices import assign_rank_devices
from meshwright.core.workload import Workload
from meshwright.cost.collective_cost import collective_seconds, group_link
from meshwright.cost.equivalent_stages import equivalent_pipeline_ranks
from meshwright.cost.memory_cost import peak_bytes
from meshwright.cost.step_cost import HEADROOM, in_flight_by_layer
from meshwright.plan.heterogeneous_planner import describe_shares
from meshwright.plan.oom_advice import RetraceOptions, cluster_units, explain_oom, resize_cluster, with_memory
from meshwright.plan.search import Ranking, ScoredPlan, rank_plans, rescore_best
from meshwright.plan.search_space import PartitionCache
from meshwright.schedule import MeshCoordinate, build_program, local_profile

_TIME_BUDGET_S = 1.0  # CPU time for questions that each need another search
_MAX_SEARCH_S = 3.0  # a search that took longer is not repeated for such a question
_MEMORY_BOUND_FRACTION = 0.85  # of a device's usable memory: above it, memory is reported as a bottleneck
_AXIS_RANK_NAMES = {
    "dp": "data ranks",
    "shard": "data ranks",
    "data": "data ranks",
    "replica": "data ranks",
    "tp": "tensor-parallel ranks",
    "pp": "stages",
    "cp": "context-parallel ranks",
    "ep": "expert-parallel ranks",
}


@gc_disabled
def explain(ranking: Ranking, retrace: RetraceOptions | None = None) -> str:
    """A few sentences, one a line; where nothing fits, one line that says what would help."""
    best = ranking.best
    if not best.estimate.fits:
        return explain_oom(ranking, retrace)
    clock = _TimeBudget(_TIME_BUDGET_S)
    lines = [
        _describe_choice(best),
        *_explain_mechanisms(ranking, clock),
        *_describe_unequal_split(ranking),
        _describe_breakdown(best),
        _describe_bottleneck(ranking),
        _describe_memory(ranking),
        *ranking.tuning_notes,
    ]
    second = ranking.runner_up
    if second is not None:
        lines.append(_describe_runner_up(best, second))
    return "\n".join([*lines, *_describe_what_ifs(ranking, clock), _describe_uncertainty(ranking)])


class _TimeBudget:
    """CPU time that may still be spent; waiting for other processes does not count."""

    def __init__(self, seconds: float) -> None:
        self._end = time.process_time() + seconds

    @property
    def has_time(self) -> bool:
        return time.process_time() < self._end


def _describe_choice(best: ScoredPlan) -> str:
    found = best.estimate
    rate = f", {found.tokens_per_s:,.0f} tokens/s" if found.tokens_per_s else f", {found.samples_per_s:,.0f} samples/s"
    return f"Chosen: {best.plan.summary()}: {show_seconds(found.step_s)} a step (± {found.error:.0%}){rate}."


# -- why this plan --


def _explain_mechanisms(ranking: Ranking, budget: _TimeBudget) -> list[str]:
    """For each mechanism of the best plan: how the best plan without it compares, or that none fits."""
    reasons = [
        f"{words} {_describe_ablation(ranking, other)}"
        for words, has, constraint in _used_mechanisms(ranking)
        if (other := _best_without(ranking, has, constraint, budget))
    ]
    return ["Why: " + "; ".join(reasons) + "."] if reasons else []


def _used_mechanisms(ranking: Ranking) -> Iterator[tuple[str, Callable[[Plan], bool], dict[str, Any]]]:
    """Yield (wording for leaving it out, whether a plan uses it, the constraint that leaves it out in another search) for each mechanism of the
    best plan."""
    plan, constraints = ranking.best.plan, ranking.constraints
    if constraints.mesh is not None:
        return
    devices = constraints.world or len(ranking.cluster.devices)
    if plan.world == devices > 1:
        yield "on one device", lambda p: p.world > 1, {"world": 1}
    elif plan.world < devices:
        yield f"on all {devices} devices", lambda p: p.world < devices, {"world": devices}
    if plan.mesh.pp > 1 or plan.mesh.degree("tp") > 1:
        yield "with every model whole on its device", lambda p: p.mesh.pp > 1 or p.mesh.degree("tp") > 1, {"flow": None}
    if plan.memory.zero and constraints.zero is None:
        yield "without ZeRO", lambda p: p.memory.zero > 0, {"zero": 0}
    if plan.memory.recompute_modes and constraints.recompute is None:
        yield "without recomputation", lambda p: bool(p.memory.recompute_modes), {"recompute": "none"}


def _best_without(ranking: Ranking, uses_mechanism: Callable[[Plan], bool], constraint: dict[str, Any], budget: _TimeBudget) -> ScoredPlan | None:
    """The best plan without a mechanism; None if it is unknown and there is no time for another search."""
    found = next((s for s in ranking.scored if not uses_mechanism(s.plan)), None)
    if found is not None and (found.estimate.fits or not ranking.num_considered):
        return found
    if not ranking.num_considered or not budget.has_time:
        return None
    try:
        constraints = replace(ranking.constraints, **constraint)
        return rank_plans(ranking.profile, ranking.cluster, ranking.workload, ranking.calibration, constraints, _with_partition_cache(ranking)).best
    except RequestError:
        return None


def _describe_ablation(ranking: Ranking, other: ScoredPlan) -> str:
    if not other.estimate.fits:
        return f"nothing fits ({other.estimate.reason})"
    ratio = other.estimate.step_s / ranking.best.estimate.step_s
    if ratio >= 1.005:
        return f"a step takes {ratio:.2f}×"
    return "a step is as long" if ratio >= 0.995 else f"a step would take {ratio:.2f}×, less than its complications are worth"


def _describe_unequal_split(ranking: Ranking) -> list[str]:
    """How heterogeneous devices divide the work, and what equal shares would cost."""
    best, equal = ranking.best, ranking.best_equal_split
    if equal is None:
        return []
    told = f"Unequal devices: {describe_shares(best.plan, ranking.cluster)}."
    if ranking.speedup_over_equal is None:
        return [f"{told} Dealt out equally nothing fits ({equal.estimate.reason})."]
    return [
        (
            f"{told} The best equal split, {equal.plan.summary()}, takes "
            f"{ranking.speedup_over_equal:.2f}× ({show_seconds(equal.estimate.step_s)} a step)."
        )
    ]


# -- the bottleneck --


def step_breakdown(best: ScoredPlan) -> dict[str, float]:
    """Seconds of a step: computation, communication that is not overlapped, the pipeline bubble and the optimizer."""
    plan, found = best.plan, best.estimate.breakdown
    compute = sum(found.get(name, 0.0) for name in ("forward", "backward", "recompute"))
    waiting, bubble = found.get("communication", 0.0), found.get("bubble", 0.0)
    if plan.mesh.pp > 1 and "bubble" not in found:
        stages = max(len(plan.stages) // plan.mesh.pp, 1) * (3 if plan.splits_backward else 1)
        bubble = min(waiting, (plan.mesh.pp - 1) / (plan.micro_batches * stages) * compute)
        waiting -= bubble
    return {"computation": compute, "communication": waiting, "bubble": bubble, "optimizer": found.get("optimizer", 0.0)}


def _describe_breakdown(best: ScoredPlan) -> str:
    step = best.estimate.step_s or 1.0
    whole = sorted(best.estimate.breakdown.items(), key=lambda item: -item[1])
    bubble = step_breakdown(best)["bubble"]
    told = [(name, seconds - (bubble if name == "communication" and "bubble" not in best.estimate.breakdown else 0.0)) for name, seconds in whole]
    told += [("the pipeline's bubble", bubble)] if bubble and "bubble" not in best.estimate.breakdown else []
    return "Where the time goes: " + ", ".join(f"{name} {seconds / step:.0%}" for name, seconds in told if seconds > 0.005 * step) + "."


def _describe_bottleneck(ranking: Ranking) -> str:
    best = ranking.best
    parts = step_breakdown(best)
    step = best.estimate.step_s or 1.0
    name, seconds = max(parts.items(), key=lambda item: item[1])
    used = _peak_memory_fraction(ranking) / HEADROOM
    said = {"computation": "computation", "optimizer": "the optimizer's update", "bubble": "the pipeline's bubble"}.get(
        name
    ) or _describe_slowest_axis(ranking)
    text = f"What binds: {said} ({seconds / step:.0%} of the step)"
    if name != "communication" and parts["communication"] > 0.1 * step:
        text += f", then {_describe_slowest_axis(ranking)} ({parts['communication'] / step:.0%})"
    if name != "bubble" and parts["bubble"] > 0.1 * step:
        text += (
            f", then the pipeline's bubble ({parts['bubble'] / step:.0%}: {best.plan.micro_batches} micro-batches over {best.plan.mesh.pp} stages)"
        )
    if used > _MEMORY_BOUND_FRACTION:
        text += f"; memory{_describe_fullest_stage(ranking)} is {used:.0%} full"
    return text + "."


def _peak_memory_fraction(ranking: Ranking) -> float:
    """The used fraction of the memory of the fullest device."""
    best = ranking.best
    if ranking.best_equal_split is None:
        return max(best.estimate.memory_bytes) / ranking.cluster.least_memory(best.plan.world)
    devices = ranking.cluster.in_device_order(best.plan.device_order).devices
    return max(need / device.memory_bytes for need, device in zip(best.estimate.memory_bytes, devices, strict=False))


def _describe_slowest_axis(ranking: Ranking) -> str:
    """The mesh axis whose collectives take longest, and the link that limits them."""
    plan, profile = ranking.best.plan, ranking.profile.at_batch(ranking.best.plan.max_micro_batch_size)
    rates = ranking.calibration.rates_for(plan.world)
    taken: dict[str, float] = {}
    links: dict[str, str] = {}
    for action in build_program(plan, profile, MeshCoordinate(), micro_batches=1):
        if action.is_communication and action.num_ranks(plan.mesh) > 1:
            taken[action.axis] = taken.get(action.axis, 0.0) + collective_seconds(action, plan, ranking.cluster, rates)
            joined = group_link(ranking.cluster, action, plan.mesh)
            across = isinstance(joined, GroupBandwidth) and joined.nodes > 1
            links[action.axis] = f"{joined.slowest if isinstance(joined, GroupBandwidth) else joined.name}{' between nodes' if across else ''}"
    if not taken:
        return "communication"
    axis = max(taken, key=lambda a: taken[a])
    return f"communication among {_AXIS_RANK_NAMES.get(axis, 'ranks')} over {links[axis]}"


def _describe_fullest_stage(ranking: Ranking) -> str:
    """The stage that needs the most memory."""
    plan = ranking.best.plan
    if plan.mesh.pp == 1:
        return ""
    rates, micro = ranking.calibration.rates_for(plan.world), ranking.profile.at_batch(plan.max_micro_batch_size)

    every = equivalent_pipeline_ranks(plan, ranking.profile, range(plan.mesh.pp))

    def stage_peak_bytes(stage: int) -> int:
        under_way = in_flight_by_layer(plan, stage, every[stage])
        return sum(peak_bytes(plan, local_profile(plan, micro, 0, stage), ranking.workload.optimizer, rates, under_way).values())

    return f" on stage {max(every, key=stage_peak_bytes)}"


def _describe_memory(ranking: Ranking) -> str:
    best = ranking.best
    kinds = sorted(best.estimate.memory_kinds.items(), key=lambda item: -item[1])
    most = ", ".join(f"{name} {show_bytes(size)}" for name, size in kinds[:3] if size)
    tight = [s for s in ranking.scored if not s.estimate.fits]
    binding = f"It rules out {len(tight)} of {len(ranking.scored)} plans" if tight else "It is no constraint: every legal plan fits"
    if ranking.num_considered:
        binding = f"{ranking.num_considered:,} plans were weighed; {len(ranking.scored)} that bounds let through were priced, {len(tight)} too large"
    return f"Memory: {best.estimate.reason} (mostly {most}). {binding}."


def _describe_runner_up(best: ScoredPlan, runner_up: ScoredPlan) -> str:
    ratio = runner_up.estimate.step_s / best.estimate.step_s
    if not runner_up.estimate.fits:
        return f"Runner-up: {runner_up.plan.summary()}: {runner_up.estimate.reason}."
    slower = "about as fast, and more complicated" if 0.995 <= ratio < 1.005 else f"{ratio:.2f}× the time"
    saved = 1 - max(runner_up.estimate.memory_bytes) / max(best.estimate.memory_bytes)
    memory = f"{saved:.0%} less memory" if saved > 0.02 else f"{-saved:.0%} more memory" if saved < -0.02 else "the same memory"
    return f"Runner-up: {runner_up.plan.summary()}: {show_seconds(runner_up.estimate.step_s)} a step, {slower}, {memory}."


# -- what would change the choice --


def _describe_what_ifs(ranking: Ranking, budget: _TimeBudget) -> list[str]:
    """Plan again with one input changed; report which changes lead to another strategy."""
    first = ranking.best.plan
    found, same, untried = [], [], []
    for words, ask, quick in _what_if_changes(ranking):
        if not (quick or (budget.has_time and ranking.search_s <= _MAX_SEARCH_S)):
            untried.append(words)
            continue
        try:
            other = ask()
        except RequestError:
            continue
        if not other.estimate.fits:
            found.append(f"{words} → nothing fits")
        elif _is_other_strategy(other.plan, first, ranking):
            found.append(f"{words} → {other.plan.summary()} ({show_seconds(other.estimate.step_s)} a step)")
        else:
            same.append(words)
    lines = ["What would change the choice: " + "; ".join(found) + "."] if found else []
    lines += [f"What would not: {', '.join(same)}."] if same else []
    return lines + ([f"Not tried, for lack of time: {', '.join(untried)}."] if untried else [])


def _is_other_strategy(plan: Plan, current: Plan, ranking: Ranking) -> bool:
    """Whether a plan has another strategy, recomputation or world size; a world size that only follows the number of devices does not count."""
    devices = len(ranking.cluster.devices)
    worlds = plan.world != current.world and not (
        current.world == devices and plan.world not in (1, current.world) and plan.strategy == current.strategy
    )
    return plan.strategy != current.strategy or plan.memory.recompute != current.memory.recompute or worlds


def _what_if_changes(ranking: Ranking) -> Iterator[tuple[str, Callable[[], ScoredPlan], bool]]:
    """Yield (what changes, a function that finds the best plan then, whether it is quick)."""
    cluster, workload = ranking.cluster, ranking.workload
    network = "network between nodes" if len(cluster.nodes) > 1 else "network"

    def rescore_on(**change: Any) -> Callable[[], ScoredPlan]:
        return lambda: rescore_best(ranking, change.get("cluster", cluster), change.get("calibration", ranking.calibration))

    if len(cluster.devices) > 1:
        for times, words in ((4.0, "four times faster"), (2.0, "twice as fast"), (0.5, "half as fast"), (0.25, "four times slower")):
            yield f"a {network} {words}", rescore_on(**_scale_network(ranking, times)), True
    twice = with_memory(cluster, lambda size: 2 * size)
    yield "twice the memory", lambda: rescore_best(ranking, twice, ranking.calibration, memory_only=True), True
    half = with_memory(cluster, lambda size: size // 2)
    near = rescore_best(ranking, half, ranking.calibration, memory_only=True)
    if near.estimate.fits or not ranking.num_considered:
        yield "half the memory", lambda: near, True
    else:  # plans that fit there were too slow here to be priced
        yield "half the memory", lambda: _search_again(ranking, cluster=half), False
    yield (
        f"a global batch of {2 * workload.global_batch}",
        lambda: _search_again(ranking, workload=replace(workload, global_batch=2 * workload.global_batch)),
        False,
    )
    if ranking.constraints.mesh is None and ranking.constraints.world is None and not assign_rank_devices(cluster, len(cluster.devices)):
        count, unit = cluster_units(cluster)
        if count > 1:
            yield f"one {unit} less", lambda: _search_again(ranking, cluster=resize_cluster(cluster, count - 1)), False
        yield f"one {unit} more", lambda: _search_again(ranking, cluster=resize_cluster(cluster, count + 1)), False


def _search_again(ranking: Ranking, cluster: Cluster | None = None, workload: Workload | None = None) -> ScoredPlan:
    """The best plan of a new search: another number of devices or samples allows other plans."""
    inputs = (ranking.profile, cluster or ranking.cluster, workload or ranking.workload, ranking.calibration, ranking.constraints)
    return rank_plans(*inputs, _with_partition_cache(ranking)).best


def _with_partition_cache(ranking: Ranking) -> Ranking:
    """The ranking with a partition cache, so that the model is not partitioned again for every question."""
    return (
        ranking
        if ranking.partition_cache
        else replace(ranking, partition_cache=PartitionCache(ranking.profile, ranking.workload, ranking.constraints))
    )


def _scale_network(ranking: Ranking, factor: float) -> dict[str, Any]:
    """The cluster and calibration with a network `factor` times as fast: links between nodes, or within the only node. Measured collectives are
    scaled too, as they cross the slowest link; where nothing was measured, estimates come from the links."""

    def scale_link(link: Link) -> Link:
        return replace(link, latency_s=link.latency_s / factor, bandwidth=link.bandwidth * factor)

    cluster = ranking.cluster
    return {
        "cluster": map_network_links(cluster, scale_link) if len(cluster.nodes) > 1 else map_links(cluster, scale_link),
        "calibration": replace(ranking.calibration, layouts=tuple(_scale_rates(r, factor) for r in ranking.calibration.layouts)),
    }


def _scale_rates(rates: Rates, factor: float) -> Rates:
    return replace(
        rates,
        collectives={k: AlphaBetaModel(v.alpha_s / factor, v.bytes_per_s * factor) for k, v in rates.collectives.items()},
        curves={k: tuple((sent, seconds / factor) for sent, seconds in points) for k, points in rates.curves.items()},
    )


# -- uncertainty --


def _describe_uncertainty(ranking: Ranking) -> str:
    calibration = ranking.calibration
    basis = calibration.basis or {"probe": "a quick probe of this machine"}.get(calibration.source, calibration.source)
    text = f"How sure: ± {ranking.best.estimate.error:.0%}, from {basis}"
    if calibration.source != "probe" and ranking.cluster.name == "here":
        text += "; `meshwright describe cluster --probe` would measure this machine"
    world = ranking.best.plan.world
    measured = calibration.rates_for(world)
    if calibration.source == "probe" and measured.ranks != world:
        text += f"; measured with {measured.ranks} ranks, not {world}"
    return text + "."
