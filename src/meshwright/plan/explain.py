"""Explains a ranking in plain language: why the first plan won, what the bottleneck is, the runner-up, what would change the choice, and how sure
that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from meshwright.core.calibration import AlphaBetaModel, Calibration, Rates
from meshwright.core.cluster import Cluster, Link
from meshwright.core.cluster_changes import map_links, map_network_links
from meshwright.core.errors import RequestError
from meshwright.core.gc_control import gc_disabled
from meshwright.core.group_bandwidth import GroupBandwidth
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes, show_seconds
from meshwright.core.rank_devices import assign_rank_devices
from meshwright.core.sample_coupling import explain_samples
from meshwright.core.workload import Workload
from meshwright.cost.collective_cost import collective_seconds, group_link
from meshwright.cost.equivalent_stages import equivalent_pipeline_ranks
from meshwright.cost.memory_cost import START_UP, peak_bytes
from meshwright.cost.step_cost import HEADROOM, in_flight_by_layer
from meshwright.cost.verification_memory import verification_bytes
from meshwright.plan.heterogeneous_planner import describe_shares
from meshwright.plan.oom_advice import RetraceOptions, cluster_units, explain_oom, resize_cluster, with_memory
from meshwright.plan.search import Ranking, ScoredPlan, rank_plans, rescore_best
from meshwright.plan.search_space import Constraints, PartitionCache
from meshwright.schedule import MeshCoordinate, build_program, local_profile

_TIME_BUDGET_S = 1.0  # CPU time for questions that each need another search
_MAX_SEARCH_S = 3.0  # a search that took longer is not repeated for such a question
_MEMORY_BOUND_FRACTION = 0.85  # of a device's usable memory: above it, memory is reported as a bottleneck
_AXIS_RANK_NAMES = {"tp": "tensor-parallel ranks", "pp": "stages", "cp": "context-parallel ranks", "ep": "expert-parallel ranks"}
_AXIS_RANK_NAMES |= dict.fromkeys(("dp", "shard", "data", "replica"), "data ranks")


@gc_disabled
def explain(ranking: Ranking, retrace: RetraceOptions | None = None) -> str:
    """A few sentences, one a line; where nothing fits, one line that says what would help."""
    best = ranking.best
    if not best.estimate.fits:
        return explain_oom(ranking, retrace)
    budget = _TimeBudget(_TIME_BUDGET_S)
    lines = [_describe_choice(best), *_describe_untraceable(ranking), *_explain_mechanisms(ranking, budget), *_describe_unequal_split(ranking)]
    lines += [_describe_breakdown(best), _describe_bottleneck(ranking), _describe_memory(ranking), *ranking.tuning_notes]
    if ranking.runner_up is not None:
        lines.append(_describe_runner_up(best, ranking.runner_up))
    return "\n".join([*lines, *_describe_what_ifs(ranking, budget), *_describe_samples(ranking), _describe_uncertainty(ranking)])


class _TimeBudget:
    """CPU time that may still be spent; waiting for other processes does not count."""

    def __init__(self, seconds: float) -> None:
        self._end = time.process_time() + seconds

    @property
    def has_time(self) -> bool:
        return time.process_time() < self._end


def _describe_choice(best: ScoredPlan) -> str:
    estimate = best.estimate
    rate = f"{estimate.tokens_per_s:,.0f} tokens/s" if estimate.tokens_per_s else f"{estimate.samples_per_s:,.0f} samples/s"
    return f"Chosen: {best.plan.summary()}: {show_seconds(estimate.step_s)} a step (± {estimate.error:.0%}), {rate}."


def _describe_untraceable(ranking: Ranking) -> list[str]:
    if not (reason := ranking.profile.untraceable):
        return []
    return [f"Not traced: {reason}. The model was run instead; only data parallelism and ZeRO were considered, without recomputation."]


# -- why this plan --


def _explain_mechanisms(ranking: Ranking, budget: _TimeBudget) -> list[str]:
    """For each mechanism of the best plan: how the best plan without it compares, or that none fits."""
    reasons = [
        f"{change} {_describe_ablation(ranking, other)}"
        for change, uses_mechanism, constraint in _used_mechanisms(ranking)
        if (other := _best_without(ranking, uses_mechanism, constraint, budget))
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
        yield "without model parallelism", lambda p: p.mesh.pp > 1 or p.mesh.degree("tp") > 1, {"flow": None}
    if plan.memory.zero and constraints.zero is None:
        yield "without ZeRO", lambda p: p.memory.zero > 0, {"zero": 0}
    if plan.memory.recompute_modes and constraints.recompute is None:
        yield "without recomputation", lambda p: bool(p.memory.recompute_modes), {"recompute": "none"}


def _best_without(ranking: Ranking, uses_mechanism: Callable[[Plan], bool], constraint: dict[str, Any], budget: _TimeBudget) -> ScoredPlan | None:
    """The best plan without a mechanism; None if it is unknown and there is no time for another search."""
    known = next((s for s in ranking.scored if not uses_mechanism(s.plan)), None)
    if known is not None and (known.estimate.fits or not ranking.num_considered):
        return known
    is_long = ranking.search_s > _MAX_SEARCH_S and not constraint.keys() <= {"world", "flow"}  # as long as the search itself
    if not ranking.num_considered or not budget.has_time or is_long:
        return None
    try:
        return _search_again(ranking, constraints=replace(ranking.constraints, **constraint))
    except RequestError:
        return None


def _describe_ablation(ranking: Ranking, other: ScoredPlan) -> str:
    if not other.estimate.fits:
        return f"nothing fits ({other.estimate.reason})"
    ratio = other.estimate.step_s / ranking.best.estimate.step_s
    if ratio >= 1.005:
        return f"a step takes {ratio:.2f}×"
    return "a step is as long" if ratio >= 0.995 else f"a step would take {ratio:.2f}×, a gain smaller than the penalty for its mechanisms"


def _describe_unequal_split(ranking: Ranking) -> list[str]:
    """How heterogeneous devices divide the work, and what equal shares would cost."""
    best, equal = ranking.best, ranking.best_equal_split
    if equal is None:
        return []
    shares = f"Unequal devices: {describe_shares(best.plan, ranking.cluster)}."
    if ranking.speedup_over_equal is None:
        return [f"{shares} With equal shares nothing fits ({equal.estimate.reason})."]
    slowdown = f"{ranking.speedup_over_equal:.2f}× ({show_seconds(equal.estimate.step_s)} a step)"
    return [f"{shares} The best equal split, {equal.plan.summary()}, takes {slowdown}."]


# -- the bottleneck --


def step_breakdown(best: ScoredPlan) -> dict[str, float]:
    """Seconds of a step: computation, communication that is not overlapped, the pipeline bubble and the optimizer."""
    plan, breakdown = best.plan, best.estimate.breakdown
    compute = sum(breakdown.get(name, 0.0) for name in ("forward", "backward", "recompute"))
    communication, bubble = breakdown.get("communication", 0.0), breakdown.get("bubble", 0.0)
    if plan.mesh.pp > 1 and "bubble" not in breakdown:
        stages = max(len(plan.stages) // plan.mesh.pp, 1) * (3 if plan.splits_backward else 1)
        bubble = min(communication, (plan.mesh.pp - 1) / (plan.micro_batches * stages) * compute)
        communication -= bubble
    return {"computation": compute, "communication": communication, "bubble": bubble, "optimizer": breakdown.get("optimizer", 0.0)}


def _describe_breakdown(best: ScoredPlan) -> str:
    step = best.estimate.step_s or 1.0
    phases = dict(sorted(best.estimate.breakdown.items(), key=lambda item: -item[1]))
    bubble = step_breakdown(best)["bubble"]
    if bubble and "bubble" not in phases:
        phases |= {"communication": phases["communication"] - bubble, "the pipeline's bubble": bubble}
    return "Where the time goes: " + ", ".join(f"{name} {seconds / step:.0%}" for name, seconds in phases.items() if seconds > 0.005 * step) + "."


def _describe_bottleneck(ranking: Ranking) -> str:
    plan, step = ranking.best.plan, ranking.best.estimate.step_s or 1.0
    breakdown = step_breakdown(ranking.best)
    largest = max(breakdown, key=lambda name: breakdown[name])
    words = {"computation": "computation", "optimizer": "the optimizer's update", "bubble": "the pipeline's bubble"}
    text = f"Bottleneck: {words.get(largest) or _describe_slowest_axis(ranking)} ({breakdown[largest] / step:.0%} of the step)"
    if largest != "communication" and breakdown["communication"] > 0.1 * step:
        text += f", then {_describe_slowest_axis(ranking)} ({breakdown['communication'] / step:.0%})"
    if largest != "bubble" and breakdown["bubble"] > 0.1 * step:
        text += f", then {words['bubble']} ({breakdown['bubble'] / step:.0%}: {plan.micro_batches} micro-batches over {plan.mesh.pp} stages)"
    used = _peak_memory_fraction(ranking) / HEADROOM
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
    seconds: dict[str, float] = {}
    links: dict[str, str] = {}
    for action in build_program(plan, profile, MeshCoordinate(), micro_batches=1):
        if action.is_communication and action.num_ranks(plan.mesh) > 1:
            seconds[action.axis] = seconds.get(action.axis, 0.0) + collective_seconds(action, plan, ranking.cluster, rates)
            link = group_link(ranking.cluster, action, plan.mesh)
            name = link.slowest if isinstance(link, GroupBandwidth) else link.name
            links[action.axis] = f"{name} between nodes" if isinstance(link, GroupBandwidth) and link.nodes > 1 else name
    if not seconds:
        return "communication"
    axis = max(seconds, key=lambda a: seconds[a])
    return f"communication among {_AXIS_RANK_NAMES.get(axis, 'ranks')} over {links[axis]}"


def _describe_fullest_stage(ranking: Ranking) -> str:
    """The stage that needs the most memory."""
    plan = ranking.best.plan
    if plan.mesh.pp == 1:
        return ""
    rates, profile = ranking.calibration.rates_for(plan.world), ranking.profile.at_batch(plan.max_micro_batch_size)
    stages = equivalent_pipeline_ranks(plan, ranking.profile, range(plan.mesh.pp))

    def stage_peak_bytes(stage: int) -> int:
        in_flight = in_flight_by_layer(plan, stage, stages[stage])
        return sum(peak_bytes(plan, local_profile(plan, profile, 0, stage), ranking.workload.optimizer, rates, in_flight).values())

    return f" on stage {max(stages, key=stage_peak_bytes)}"


def _describe_memory(ranking: Ranking) -> str:
    kinds = sorted(ranking.best.estimate.memory_kinds.items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {show_bytes(size)}" for name, size in kinds[:3] if size)
    count, too_large = len(ranking.scored), sum(not s.estimate.fits for s in ranking.scored)
    effect = f"It rules out {too_large} of {count} plans" if too_large else "It is no constraint: every legal plan fits"
    if ranking.num_considered:
        effect = f"Lower bounds on {ranking.num_considered:,} plans left {count} to estimate, of which {too_large} do not fit"
    return f"Memory: {ranking.best.estimate.reason} (mostly {largest}). {effect}.{_describe_start_up(ranking)}{_describe_verification(ranking)}"


def _describe_start_up(ranking: Ranking) -> str:
    """Where giving the model its initial values needs more memory than a step."""
    beyond = ranking.best.estimate.memory_kinds.get(START_UP, 0)
    return f" Start-up binds: it needs {show_bytes(beyond)} more than a step, for the largest tensor, which is drawn whole." if beyond else ""


def _describe_verification(ranking: Ranking) -> str:
    """What verification needs before step 1, where that is more than training needs."""
    plan, training = ranking.best.plan, ranking.best.estimate.memory_bytes[0]
    needed = verification_bytes(plan, ranking.profile, ranking.workload.optimizer)
    if needed <= training:
        return ""
    has = HEADROOM * ranking.cluster.in_device_order(plan.device_order).devices[0].memory_bytes
    text = f" Verification before step 1 takes {show_bytes(needed)} on rank 0"
    return f"{text}." if needed <= has else f"{text} for the whole model and does not fit: equal blocks stand for others, or the host runs it."


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
    different, same, untried = [], [], []
    for change, find_best, quick in _what_if_changes(ranking):
        if not (quick or (budget.has_time and ranking.search_s <= _MAX_SEARCH_S)):
            untried.append(change)
            continue
        try:
            other = find_best()
        except RequestError:
            continue
        if not other.estimate.fits:
            different.append(f"{change} → nothing fits")
        elif _is_other_strategy(other.plan, ranking.best.plan, ranking):
            different.append(f"{change} → {other.plan.summary()} ({show_seconds(other.estimate.step_s)} a step)")
        else:
            same.append(change)
    lines = [f"What would change the choice: {'; '.join(different)}."] if different else []
    lines += [f"What would not: {', '.join(same)}."] if same else []
    return lines + ([f"Not tried, for lack of time: {', '.join(untried)}."] if untried else [])


def _is_other_strategy(plan: Plan, current: Plan, ranking: Ranking) -> bool:
    """Whether a plan has another strategy, recomputation or world size; a world size that only follows the number of devices does not count."""
    if plan.strategy != current.strategy or plan.memory.recompute != current.memory.recompute:
        return True
    return plan.world != current.world and (plan.world == 1 or current.world != len(ranking.cluster.devices))


def _what_if_changes(ranking: Ranking) -> Iterator[tuple[str, Callable[[], ScoredPlan], bool]]:
    """Yield (what changes, a function that finds the best plan then, whether it is quick)."""
    cluster, workload = ranking.cluster, ranking.workload
    network = "network between nodes" if len(cluster.nodes) > 1 else "network"

    if len(cluster.devices) > 1:
        for factor, words in ((4.0, "four times faster"), (2.0, "twice as fast"), (0.5, "half as fast"), (0.25, "four times slower")):
            yield f"a {network} {words}", partial(rescore_best, ranking, *_scale_network(ranking, factor)), True
    twice = with_memory(cluster, lambda size: 2 * size)
    yield "twice the memory", lambda: rescore_best(ranking, twice, ranking.calibration, memory_only=True), True
    half = with_memory(cluster, lambda size: size // 2)
    rescored = rescore_best(ranking, half, ranking.calibration, memory_only=True)
    if rescored.estimate.fits or not ranking.num_considered:
        yield "half the memory", lambda: rescored, True
    else:  # plans that fit in half the memory were too slow to be priced by this search
        yield "half the memory", lambda: _search_again(ranking, half), False
    double = replace(workload, global_batch=2 * workload.global_batch)
    yield f"a global batch of {double.global_batch}", lambda: _search_again(ranking, workload=double), False
    if ranking.constraints.mesh is None and ranking.constraints.world is None and not assign_rank_devices(cluster, len(cluster.devices)):
        count, unit = cluster_units(cluster)
        if count > 1:
            yield f"one {unit} less", lambda: _search_again(ranking, resize_cluster(cluster, count - 1)), False
        yield f"one {unit} more", lambda: _search_again(ranking, resize_cluster(cluster, count + 1)), False


def _search_again(
    ranking: Ranking, cluster: Cluster | None = None, workload: Workload | None = None, constraints: Constraints | None = None
) -> ScoredPlan:
    """The best plan of a new search with other inputs, which allow other plans. The partition cache spares partitioning the model again."""
    cache = ranking.partition_cache or PartitionCache(ranking.profile, ranking.workload, ranking.constraints)
    inputs = (cluster or ranking.cluster, workload or ranking.workload, ranking.calibration, constraints or ranking.constraints)
    return rank_plans(ranking.profile, *inputs, replace(ranking, partition_cache=cache)).best


def _scale_network(ranking: Ranking, factor: float) -> tuple[Cluster, Calibration]:
    """The cluster and calibration with a network `factor` times as fast: links between nodes, or within the only node. Measured collectives are
    scaled too, as they cross the slowest link; where nothing was measured, estimates come from the links."""

    def scale_link(link: Link) -> Link:
        return replace(link, latency_s=link.latency_s / factor, bandwidth=link.bandwidth * factor)

    def scale_rates(rates: Rates) -> Rates:
        collectives = {k: AlphaBetaModel(v.alpha_s / factor, v.bytes_per_s * factor) for k, v in rates.collectives.items()}
        curves = {k: tuple((size, seconds / factor) for size, seconds in points) for k, points in rates.curves.items()}
        return replace(rates, collectives=collectives, curves=curves)

    cluster, calibration = ranking.cluster, ranking.calibration
    scaled = map_network_links(cluster, scale_link) if len(cluster.nodes) > 1 else map_links(cluster, scale_link)
    return scaled, replace(calibration, layouts=tuple(map(scale_rates, calibration.layouts)))


# -- samples --


def _describe_samples(ranking: Ranking) -> list[str]:
    """Why a batch is kept whole, and what differs from one device."""
    plan = ranking.best.plan
    kept = ranking.constraints.samples == "together" and plan.samples.compares_samples
    reason = "Samples are compared with each other, so a batch is kept whole (samples=apart would split it): this plan equals one device."
    return [*([reason] if kept else []), *explain_samples(plan)]


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
