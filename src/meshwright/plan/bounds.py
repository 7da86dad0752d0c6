"""Lower bounds on the step time and memory of a search point, computed before its plan is built and priced.

[Note: bounds]
A step takes at least the compute time of the mean pipeline rank, and the time that its gradients occupy the links of its group; a rank holds at
least the mean of the parameters, gradients and states. The mean is never above the maximum, and the maximum decides an estimate. Once its stages
are known, a pipeline takes at least some rank's compute time plus the pipeline fill before it and the drain after it. Where each unit may have its
own recompute mode ("mixed"), the bound adds the least time in which recomputation can save the missing memory. Equal layers are priced once, at
the same rates as in an estimate, so the bounds are tight: what they leave out is the time that ranks wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from meshwright.core.calibration import Rates
from meshwright.core.plan import CompileMode, Plan
from meshwright.cost.compute_cost import ComputeCost
from meshwright.cost.pipeline_cost import StageTime, lower_bound_seconds
from meshwright.plan.comm_bounds import CommBounds
from meshwright.plan.layer_totals import IdentityKey, LayerTotals, StageLayers
from meshwright.plan.memory_bounds import MemoryBounds
from meshwright.plan.planning_problem import PlanningProblem
from meshwright.plan.point_totals import PointTotals
from meshwright.plan.search_point import SearchPoint, is_basic_mesh

T = TypeVar("T")


class LowerBounds:
    """Lower bounds for the points of one search: on step time, and separately on memory (`memory`) and communication (`comm`)."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem, self._totals = problem, PointTotals(problem)
        self.memory, self.comm = MemoryBounds(problem, self._totals), CommBounds(problem, self._totals)
        self._units = frozenset(problem.units)

    def seconds(
        self, point: SearchPoint, sharding: Plan, compile_mode: CompileMode, with_communication: bool = True, stages: StageLayers = ()
    ) -> float:
        """Compute time of the slowest pipeline rank (of the mean one where `stages`, the layers of each stage, are not known), pipeline fill and
        drain, the optimizer and, with `with_communication`, the time that collectives occupy the links. Without it the ZeRO stage is still open,
        so the optimizer update may be sharded over all data ranks."""
        mesh, rates, micro = point.mesh, self._problem.rates(point.mesh.size), point.micro_batches
        parts = self._totals.of_stages(point, sharding, compile_mode, stages)
        ranks = self._totals.of_ranks(point, parts, stages)
        price = ComputeCost(rates, self._problem.workload.precision, compile_mode != "none", self._units)
        owners = mesh.dp * mesh.shard if not with_communication else mesh.shard if point.zero else 1
        stepped = min(part.trainable_bytes for part in ranks) / 4 / owners
        update = price.optimizer_seconds(stepped, self._problem.workload.optimizer, 4, self._problem.offloads_optimizer)
        added, in_stages = self._added_recompute(point, parts, ranks, stages)
        each = max(rank.forward + rank.backward + rank.recompute_seconds[point.recompute] + more for rank, more in zip(ranks, added, strict=True))
        computed = micro * each + update
        way = 0.0
        stolen = 1.0 - self._overlap(rates)
        moved = _map_unique(ranks, lambda rank: self.comm.gradient_seconds(point, rank, sharding)) if with_communication else [0.0] * len(ranks)
        if stages:
            met = _map_unique(parts, lambda part: self.comm.stage_seconds(point, part)) if with_communication else [(0.0, 0.0)] * len(parts)
            turns = [
                StageTime(p.forward + on, p.backward + p.recompute_seconds[point.recompute] + least + back)
                for p, least, (on, back) in zip(parts, in_stages, met, strict=True)
            ]
            besides = [max(more - sum(in_stages[s] for s in point.pipeline_spec.stages(rank)), 0.0) for rank, more in enumerate(added)]
            after = [update if point.zero < 2 else 0.0] * len(ranks)  # zero=2 and zero=3 communicate within a pipeline action, possibly nothing after
            sums = after if point.zero < 2 else besides
            for rank, sent in enumerate(moved):
                sums[rank] += stolen * sent / (1 if point.zero < 2 else micro)
            least, way = lower_bound_seconds(point.pipeline_spec, turns, besides, after)
            computed = max(computed, least)
            way += 0.0 if is_basic_mesh(mesh) or not with_communication else self.comm.layer_seconds(point, sharding)
        if not with_communication:
            return computed
        mean = sum(
            rank.forward + rank.backward + rank.recompute_seconds[point.recompute] + more for rank, more in zip(ranks, added, strict=True)
        ) / len(ranks)
        sent, all_met = sum(moved) / len(ranks), self.comm.layer_seconds(point, sharding)
        return max(computed, way, micro * mean + update + stolen * sent + all_met, sent)

    def _added_recompute(
        self, point: SearchPoint, stage_totals: Sequence[LayerTotals], rank_totals: Sequence[LayerTotals], stages: StageLayers
    ) -> tuple[list[float], list[float]]:
        """Least recompute seconds that "mixed" adds to a micro-batch, by rank and by stage: enough to save the bytes above the memory limit, taken
        where a second saves most, which is where the most micro-batches are in flight."""
        alone, none = [0.0] * len(rank_totals), [0.0] * len(stage_totals)
        if point.recompute != "mixed" or (point.mesh.pp > 1 and not stages):
            return alone, none
        plain, limit = replace(point, recompute="none"), self.memory.room(point)
        ways = _map_unique(stage_totals, lambda part: sorted(self._recompute_savings(point, part), reverse=True))
        for rank, (whole, moments) in enumerate(
            zip(rank_totals, self.memory.peak_moments(point.pipeline_spec, IdentityKey(stage_totals), "none"), strict=True)
        ):
            mine = point.pipeline_spec.stages(rank) if stages else (0,)
            for counts, kept in moments:
                excess = self.memory.rank_bytes(plain, whole, kept) - limit
                if excess <= 0:
                    continue
                every = {stage: [(n * rate, n * most) for rate, most in ways[stage]] for n, stage in zip(counts, mine, strict=True) if n}
                alone[rank] = max(
                    alone[rank], _min_recompute_seconds(excess, sorted((way for found in every.values() for way in found), reverse=True))
                )
                room = sum(most for found in every.values() for _, most in found)
                for stage, found in every.items():
                    here = sum(most for _, most in found)
                    none[stage] = max(none[stage], _min_recompute_seconds(excess - (room - here), found))
        return alone, none

    def _recompute_savings(self, point: SearchPoint, totals: LayerTotals) -> list[tuple[float, float]]:
        """How recomputation can save the activations of a micro-batch: (bytes saved per second, bytes in all). A unit's more expensive mode
        follows its cheaper one, with the additional bytes at the additional cost."""
        op, met = "all_gather" if point.sequence_parallel else "all_reduce", is_basic_mesh(point.mesh)
        found: list[tuple[float, float]] = []
        for modes, count in totals.recompute_options:
            done, spent = 0.0, 0.0
            costs = [
                (s.bytes, s.seconds + (self.comm.seconds(op, "tp", point.mesh, s.collective_calls, s.collective_bytes) if met else 0.0))
                for s in modes
            ]
            while left := [(size - done, seconds - spent) for size, seconds in costs if size > done]:
                more, extra = max(left, key=lambda way: way[0] / way[1] if way[1] > 0 else math.inf)
                found.append((more / extra if extra > 0 else math.inf, count * more))
                done, spent = done + more, spent + max(extra, 0.0)
        return found

    def _overlap(self, rates: Rates) -> float:
        if rates.core_busy_curves:  # a measured curve gives the compute time lost to a collective, by its size
            return 1.0
        overlaps = self._problem.constraints.overlap
        return rates.overlap if overlaps is None or "gradients" in overlaps else 0.0


def _map_unique(totals_list: Sequence[LayerTotals], compute: Callable[[LayerTotals], T]) -> list[T]:
    """`compute` of each item, called once for items that are the same object."""
    found: dict[int, T] = {}
    for row in totals_list:
        if id(row) not in found:
            found[id(row)] = compute(row)
    return [found[id(row)] for row in totals_list]


def _min_recompute_seconds(excess: float, savings: Sequence[tuple[float, float]]) -> float:
    """Least seconds to save `excess` bytes with `savings`: (bytes per second, maximum bytes), fastest first."""
    spent = 0.0
    for rate, most in savings:
        if excess <= 0:
            break
        spent += min(excess, most) / rate
        excess -= most
    return spent
