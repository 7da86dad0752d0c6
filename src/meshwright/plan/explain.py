"""Explain: in plain language, why the first plan won, what binds, what came second, what would change the choice, and how sure that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from meshwright.core.calibration import Line, Rates
from meshwright.core.cluster import Cluster, Link
from meshwright.core.cluster_changes import map_links, map_network_links
from meshwright.core.collector import uncollected
from meshwright.core.errors import RequestError
from meshwright.core.hybrid import places
from meshwright.core.plan import Plan
from meshwright.core.reach import Reach
from meshwright.core.units import show_bytes, show_seconds
from meshwright.core.workload import Workload
from meshwright.cost.alike import alike
from meshwright.cost.collective import between, collective_seconds
from meshwright.cost.memory import peak_bytes
from meshwright.cost.step import HEADROOM, in_flight
from meshwright.plan.remedy import Retrace, grown, too_big, units_of, with_memory
from meshwright.plan.search import Ranking, Scored, best_again, rank_plans
from meshwright.plan.space import Cutter
from meshwright.plan.uneven import in_parts
from meshwright.schedule import Place, local_profile, program

_BUDGET_S = 1.0  # of computing time for questions that each take another search
_LONG_S = 3.0  # a search that took longer is not done again for one of them
_TIGHT = 0.85  # of what may be used of a device's memory, above which it is said to bind
_WHO = {"dp": "data ranks", "shard": "data ranks", "data": "data ranks", "replica": "data ranks", "tp": "tensor-parallel ranks", "pp": "stages",
        "cp": "ranks that share positions", "ep": "owners"}  # fmt: skip


@uncollected
def explain(ranking: Ranking, retrace: Retrace | None = None) -> str:
    """A few sentences, one a line; where nothing fits, one that says what would help."""
    best = ranking.best
    if not best.estimate.fits:
        return too_big(ranking, retrace)
    clock = _Budget(_BUDGET_S)
    lines = [_choice(best), *_why(ranking, clock), *_unequal(ranking), _time(best), _binds(ranking), _memory(ranking), *ranking.tuned]
    second = ranking.runner_up
    if second is not None:
        lines.append(_second(best, second))
    return "\n".join([*lines, *_what_if(ranking, clock), _uncertain(ranking)])


class _Budget:
    """Computing time that may still be spent; waiting for other processes does not count."""

    def __init__(self, seconds: float) -> None:
        self._end = time.process_time() + seconds

    @property
    def left(self) -> bool:
        return time.process_time() < self._end


def _choice(best: Scored) -> str:
    found = best.estimate
    rate = f", {found.tokens_per_s:,.0f} tokens/s" if found.tokens_per_s else f", {found.samples_per_s:,.0f} samples/s"
    return f"Chosen: {best.plan.summary()}: {show_seconds(found.step_s)} a step (± {found.error:.0%}){rate}."


# -- why this one --


def _why(ranking: Ranking, clock: _Budget) -> list[str]:
    """What each mechanism of the plan is for: the best plan without it, or that none fits."""
    reasons = [f"{words} {_lack(ranking, other)}" for words, has, wish in _mechanisms(ranking) if (other := _without(ranking, has, wish, clock))]
    return ["Why: " + "; ".join(reasons) + "."] if reasons else []


def _mechanisms(ranking: Ranking) -> Iterator[tuple[str, Callable[[Plan], bool], dict[str, Any]]]:
    """(how to say that it is left out, who has it, the wish that leaves it out on a large cluster), for each that the best plan has."""
    plan, wishes = ranking.best.plan, ranking.wishes
    if wishes.mesh is not None:
        return
    devices = wishes.world or len(ranking.cluster.devices)
    if plan.world == devices > 1:
        yield "on one device", lambda p: p.world > 1, {"world": 1}
    elif plan.world < devices:
        yield f"on all {devices} devices", lambda p: p.world < devices, {"world": devices}
    if plan.mesh.pp > 1 or plan.mesh.degree("tp") > 1:
        yield "with every model whole on its device", lambda p: p.mesh.pp > 1 or p.mesh.degree("tp") > 1, {"flow": None}
    if plan.memory.zero and wishes.zero is None:
        yield "without ZeRO", lambda p: p.memory.zero > 0, {"zero": 0}
    if plan.memory.modes and wishes.recompute is None:
        yield "without recomputation", lambda p: bool(p.memory.modes), {"recompute": "none"}


def _without(ranking: Ranking, has: Callable[[Plan], bool], wish: dict[str, Any], clock: _Budget) -> Scored | None:
    """The best plan that does without; None where that was not worked out."""
    found = next((s for s in ranking.scored if not has(s.plan)), None)
    if found is not None and (found.estimate.fits or not ranking.considered):
        return found
    if not ranking.considered or not clock.left:
        return None
    try:
        wishes = replace(ranking.wishes, **wish)
        return rank_plans(ranking.profile, ranking.cluster, ranking.workload, ranking.calibration, wishes, _like(ranking)).best
    except RequestError:
        return None


def _lack(ranking: Ranking, other: Scored) -> str:
    if not other.estimate.fits:
        return f"nothing fits ({other.estimate.reason})"
    ratio = other.estimate.step_s / ranking.best.estimate.step_s
    if ratio >= 1.005:
        return f"a step takes {ratio:.2f}×"
    return "a step is as long" if ratio >= 0.995 else f"a step would take {ratio:.2f}×, less than its complications are worth"


def _unequal(ranking: Ranking) -> list[str]:
    """How unlike devices share the work, and what dealing everything out equally would cost."""
    best, equal = ranking.best, ranking.equal
    if equal is None:
        return []
    told = f"Unequal devices: {in_parts(best.plan, ranking.cluster)}."
    if ranking.gain is None:
        return [f"{told} Dealt out equally nothing fits ({equal.estimate.reason})."]
    return [f"{told} The best equal split, {equal.plan.summary()}, takes {ranking.gain:.2f}× ({show_seconds(equal.estimate.step_s)} a step)."]


# -- what binds --


def parts_of(best: Scored) -> dict[str, float]:
    """Seconds of the step: computation, communication that nothing hides, the pipeline's bubble and the optimizer."""
    plan, found = best.plan, best.estimate.breakdown
    compute = sum(found.get(name, 0.0) for name in ("forward", "backward", "recompute"))
    waiting, bubble = found.get("communication", 0.0), found.get("bubble", 0.0)
    if plan.mesh.pp > 1 and "bubble" not in found:
        stages = max(len(plan.stages) // plan.mesh.pp, 1) * (3 if plan.splits_backward else 1)
        bubble = min(waiting, (plan.mesh.pp - 1) / (plan.micro_batches * stages) * compute)
        waiting -= bubble
    return {"computation": compute, "communication": waiting, "bubble": bubble, "optimizer": found.get("optimizer", 0.0)}


def _time(best: Scored) -> str:
    step = best.estimate.step_s or 1.0
    whole = sorted(best.estimate.breakdown.items(), key=lambda item: -item[1])
    bubble = parts_of(best)["bubble"]
    told = [(name, seconds - (bubble if name == "communication" and "bubble" not in best.estimate.breakdown else 0.0)) for name, seconds in whole]
    told += [("the pipeline's bubble", bubble)] if bubble and "bubble" not in best.estimate.breakdown else []
    return "Where the time goes: " + ", ".join(f"{name} {seconds / step:.0%}" for name, seconds in told if seconds > 0.005 * step) + "."


def _binds(ranking: Ranking) -> str:
    best = ranking.best
    parts = parts_of(best)
    step = best.estimate.step_s or 1.0
    name, seconds = max(parts.items(), key=lambda item: item[1])
    used = _used(ranking) / HEADROOM
    said = {"computation": "computation", "optimizer": "the optimizer's update", "bubble": "the pipeline's bubble"}.get(name) or _slow_wire(ranking)
    text = f"What binds: {said} ({seconds / step:.0%} of the step)"
    if name != "communication" and parts["communication"] > 0.1 * step:
        text += f", then {_slow_wire(ranking)} ({parts['communication'] / step:.0%})"
    if name != "bubble" and parts["bubble"] > 0.1 * step:
        text += (
            f", then the pipeline's bubble ({parts['bubble'] / step:.0%}: {best.plan.micro_batches} micro-batches over {best.plan.mesh.pp} stages)"
        )
    if used > _TIGHT:
        text += f"; memory{_fullest(ranking)} is {used:.0%} full"
    return text + "."


def _used(ranking: Ranking) -> float:
    """Of the memory of the device that is fullest."""
    best = ranking.best
    if ranking.equal is None:
        return max(best.estimate.memory_bytes) / ranking.cluster.least_memory(best.plan.world)
    devices = ranking.cluster.seated(best.plan.seats).devices
    return max(need / device.memory_bytes for need, device in zip(best.estimate.memory_bytes, devices, strict=False))


def _slow_wire(ranking: Ranking) -> str:
    """The axis whose calls take longest, and the link that decides."""
    plan, profile = ranking.best.plan, ranking.profile.at(ranking.best.plan.largest_micro_batch)
    rates = ranking.calibration.layout(plan.world)
    taken: dict[str, float] = {}
    links: dict[str, str] = {}
    for action in program(plan, profile, Place(), micro_batches=1):
        if action.communicates and action.ranks(plan.mesh) > 1:
            taken[action.axis] = taken.get(action.axis, 0.0) + collective_seconds(action, plan, ranking.cluster, rates)
            joined = between(ranking.cluster, action, plan.mesh)
            across = isinstance(joined, Reach) and joined.nodes > 1
            links[action.axis] = f"{joined.slowest if isinstance(joined, Reach) else joined.name}{' between nodes' if across else ''}"
    if not taken:
        return "communication"
    axis = max(taken, key=lambda a: taken[a])
    return f"communication among {_WHO.get(axis, 'ranks')} over {links[axis]}"


def _fullest(ranking: Ranking) -> str:
    """The stage that needs most."""
    plan = ranking.best.plan
    if plan.mesh.pp == 1:
        return ""
    rates, micro = ranking.calibration.layout(plan.world), ranking.profile.at(plan.largest_micro_batch)

    every = alike(plan, ranking.profile, range(plan.mesh.pp))

    def need(stage: int) -> int:
        under_way = in_flight(plan, stage, every[stage])
        return sum(peak_bytes(plan, local_profile(plan, micro, 0, stage), ranking.workload.optimizer, rates, under_way).values())

    return f" on stage {max(every, key=need)}"


def _memory(ranking: Ranking) -> str:
    best = ranking.best
    kinds = sorted(best.estimate.memory_kinds.items(), key=lambda item: -item[1])
    most = ", ".join(f"{name} {show_bytes(size)}" for name, size in kinds[:3] if size)
    tight = [s for s in ranking.scored if not s.estimate.fits]
    binding = f"It rules out {len(tight)} of {len(ranking.scored)} plans" if tight else "It is no constraint: every legal plan fits"
    if ranking.considered:
        binding = f"{ranking.considered:,} plans were weighed; {len(ranking.scored)} that bounds let through were priced, {len(tight)} too large"
    return f"Memory: {best.estimate.reason} (mostly {most}). {binding}."


def _second(best: Scored, second: Scored) -> str:
    ratio = second.estimate.step_s / best.estimate.step_s
    if not second.estimate.fits:
        return f"Runner-up: {second.plan.summary()}: {second.estimate.reason}."
    slower = "about as fast, and more complicated" if 0.995 <= ratio < 1.005 else f"{ratio:.2f}× the time"
    saved = 1 - max(second.estimate.memory_bytes) / max(best.estimate.memory_bytes)
    memory = f"{saved:.0%} less memory" if saved > 0.02 else f"{-saved:.0%} more memory" if saved < -0.02 else "the same memory"
    return f"Runner-up: {second.plan.summary()}: {show_seconds(second.estimate.step_s)} a step, {slower}, {memory}."


# -- what would change it --


def _what_if(ranking: Ranking, clock: _Budget) -> list[str]:
    """Ask the planner again with one thing changed; report the changes that change the strategy."""
    first = ranking.best.plan
    found, same, untried = [], [], []
    for words, ask, quick in _changes(ranking):
        if not (quick or (clock.left and ranking.took_s <= _LONG_S)):
            untried.append(words)
            continue
        try:
            other = ask()
        except RequestError:
            continue
        if not other.estimate.fits:
            found.append(f"{words} → nothing fits")
        elif _differs(other.plan, first, ranking):
            found.append(f"{words} → {other.plan.summary()} ({show_seconds(other.estimate.step_s)} a step)")
        else:
            same.append(words)
    lines = ["What would change the choice: " + "; ".join(found) + "."] if found else []
    lines += [f"What would not: {', '.join(same)}."] if same else []
    return lines + ([f"Not tried, for lack of time: {', '.join(untried)}."] if untried else [])


def _differs(plan: Plan, first: Plan, ranking: Ranking) -> bool:
    """Another strategy or recomputation; another number of ranks, but for the devices that came or went."""
    devices = len(ranking.cluster.devices)
    worlds = plan.world != first.world and not (first.world == devices and plan.world not in (1, first.world) and plan.strategy == first.strategy)
    return plan.strategy != first.strategy or plan.memory.recompute != first.memory.recompute or worlds


def _changes(ranking: Ranking) -> Iterator[tuple[str, Callable[[], Scored], bool]]:
    """(what changes, how to ask, whether that is quick)."""
    cluster, workload = ranking.cluster, ranking.workload
    network = "network between nodes" if len(cluster.nodes) > 1 else "network"

    def machine(**change: Any) -> Callable[[], Scored]:
        return lambda: best_again(ranking, change.get("cluster", cluster), change.get("calibration", ranking.calibration))

    if len(cluster.devices) > 1:
        for times, words in ((4.0, "four times faster"), (2.0, "twice as fast"), (0.5, "half as fast"), (0.25, "four times slower")):
            yield f"a {network} {words}", machine(**_network(ranking, times)), True
    twice = with_memory(cluster, lambda size: 2 * size)
    yield "twice the memory", lambda: best_again(ranking, twice, ranking.calibration, as_quick=True), True
    half = with_memory(cluster, lambda size: size // 2)
    near = best_again(ranking, half, ranking.calibration, as_quick=True)
    if near.estimate.fits or not ranking.considered:
        yield "half the memory", lambda: near, True
    else:  # what fits there was too slow here to be looked at
        yield "half the memory", lambda: _searched(ranking, cluster=half), False
    yield (
        f"a global batch of {2 * workload.global_batch}",
        lambda: _searched(ranking, workload=replace(workload, global_batch=2 * workload.global_batch)),
        False,
    )
    if ranking.wishes.mesh is None and ranking.wishes.world is None and not places(cluster, len(cluster.devices)):
        count, unit = units_of(cluster)
        if count > 1:
            yield f"one {unit} less", lambda: _searched(ranking, cluster=grown(cluster, count - 1)), False
        yield f"one {unit} more", lambda: _searched(ranking, cluster=grown(cluster, count + 1)), False


def _searched(ranking: Ranking, cluster: Cluster | None = None, workload: Workload | None = None) -> Scored:
    """The best plan of another search: other numbers of devices or samples have other plans."""
    inputs = (ranking.profile, cluster or ranking.cluster, workload or ranking.workload, ranking.calibration, ranking.wishes)
    return rank_plans(*inputs, _like(ranking)).best


def _like(ranking: Ranking) -> Ranking:
    """With what takes the model apart, so that it is not found out for every question."""
    return ranking if ranking.cutter else replace(ranking, cutter=Cutter(ranking.profile, ranking.workload, ranking.wishes))


def _network(ranking: Ranking, factor: float) -> dict[str, Any]:
    """Links between nodes, and within the only one; measured collectives cross the slowest of them: where nothing was measured, links are priced."""

    def link(found: Link) -> Link:
        return replace(found, latency_s=found.latency_s / factor, bandwidth=found.bandwidth * factor)

    cluster = ranking.cluster
    return {
        "cluster": map_network_links(cluster, link) if len(cluster.nodes) > 1 else map_links(cluster, link),
        "calibration": replace(ranking.calibration, layouts=tuple(_faster(r, factor) for r in ranking.calibration.layouts)),
    }


def _faster(rates: Rates, factor: float) -> Rates:
    return replace(
        rates,
        collectives={k: Line(v.alpha_s / factor, v.bytes_per_s * factor) for k, v in rates.collectives.items()},
        curves={k: tuple((sent, seconds / factor) for sent, seconds in points) for k, points in rates.curves.items()},
    )


# -- how sure --


def _uncertain(ranking: Ranking) -> str:
    calibration = ranking.calibration
    basis = calibration.basis or {"probe": "a quick probe of this machine"}.get(calibration.source, calibration.source)
    text = f"How sure: ± {ranking.best.estimate.error:.0%}, from {basis}"
    if calibration.source != "probe" and ranking.cluster.name == "here":
        text += "; `meshwright describe cluster --probe` would measure this machine"
    world = ranking.best.plan.world
    measured = calibration.layout(world)
    if calibration.source == "probe" and measured.ranks != world:
        text += f"; measured with {measured.ranks} ranks, not {world}"
    return text + "."
