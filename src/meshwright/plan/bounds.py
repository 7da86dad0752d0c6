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
        stage_totals = self._totals.of_stages(point, sharding, compile_mode, stages)
        ranks = self._totals.of_ranks(point, stage_totals, stages)
        compute_cost = ComputeCost(rates, self._problem.workload.precision, compile_mode != "none", self._units)
        shards = mesh.dp * mesh.shard if not with_communication else mesh.shard if point.zero else 1
        elements = min(rank.trainable_bytes for rank in ranks) / 4 / shards
        update = compute_cost.optimizer_seconds(elements, self._problem.workload.optimizer, 4, self._problem.offloads_optimizer)
        added_by_rank, added_by_stage = self._added_recompute(point, stage_totals, ranks, stages)
        compute = [r.forward + r.backward + r.recompute_seconds[point.recompute] + added for r, added in zip(ranks, added_by_rank, strict=True)]
        bound, mean_bound = micro * max(compute) + update, 0.0
        exposed = 1.0 - self._overlap(rates)
        gradients = _map_unique(ranks, lambda rank: self.comm.gradient_seconds(point, rank, sharding)) if with_communication else [0.0] * len(ranks)
        layer_comm = self.comm.layer_seconds(point, sharding) if with_communication else 0.0
        if stages:
            no_comm = [(0.0, 0.0)] * len(stage_totals)
            stage_comm = _map_unique(stage_totals, lambda stage: self.comm.stage_seconds(point, stage)) if with_communication else no_comm
            times = [
                StageTime(s.forward + forward, s.backward + s.recompute_seconds[point.recompute] + added + backward)
                for s, added, (forward, backward) in zip(stage_totals, added_by_stage, stage_comm, strict=True)
            ]
            during = [max(added - sum(added_by_stage[s] for s in point.pipeline_spec.stages(rank)), 0.0) for rank, added in enumerate(added_by_rank)]
            after = [update if point.zero < 2 else 0.0] * len(ranks)  # zero=2 and zero=3 communicate within a pipeline action, possibly nothing after
            for rank, seconds in enumerate(gradients):
                (after if point.zero < 2 else during)[rank] += exposed * seconds / (1 if point.zero < 2 else micro)
            pipeline, mean_bound = lower_bound_seconds(point.pipeline_spec, times, during, after)
            bound = max(bound, pipeline)
            mean_bound += 0.0 if is_basic_mesh(mesh) else layer_comm
        if not with_communication:
            return bound
        sent = sum(gradients) / len(ranks)
        return max(bound, mean_bound, micro * (sum(compute) / len(ranks)) + update + exposed * sent + layer_comm, sent)

    def _added_recompute(
        self, point: SearchPoint, stage_totals: Sequence[LayerTotals], rank_totals: Sequence[LayerTotals], stages: StageLayers
    ) -> tuple[list[float], list[float]]:
        """Least recompute seconds that "mixed" adds to a micro-batch, by rank and by stage: enough to save the bytes above the memory limit, taken
        where a second saves most, which is where the most micro-batches are in flight."""
        by_rank, by_stage = [0.0] * len(rank_totals), [0.0] * len(stage_totals)
        if point.recompute != "mixed" or (point.mesh.pp > 1 and not stages):
            return by_rank, by_stage
        without, limit = replace(point, recompute="none"), self.memory.room(point)
        stage_savings = _map_unique(stage_totals, lambda stage: sorted(self._recompute_savings(point, stage), reverse=True))
        peaks = self.memory.peak_moments(point.pipeline_spec, IdentityKey(stage_totals), "none")
        for rank, (totals, moments) in enumerate(zip(rank_totals, peaks, strict=True)):
            rank_stages = point.pipeline_spec.stages(rank) if stages else (0,)
            for counts, saved in moments:
                excess = self.memory.rank_bytes(without, totals, saved) - limit
                if excess <= 0:
                    continue
                savings = {s: [(n * rate, n * size) for rate, size in stage_savings[s]] for n, s in zip(counts, rank_stages, strict=True) if n}
                all_savings = sorted((saving for stage in savings.values() for saving in stage), reverse=True)
                by_rank[rank] = max(by_rank[rank], _min_recompute_seconds(excess, all_savings))
                total = sum(size for stage in savings.values() for _, size in stage)
                for stage_index, own in savings.items():
                    elsewhere = total - sum(size for _, size in own)
                    by_stage[stage_index] = max(by_stage[stage_index], _min_recompute_seconds(excess - elsewhere, own))
        return by_rank, by_stage

    def _recompute_savings(self, point: SearchPoint, totals: LayerTotals) -> list[tuple[float, float]]:
        """How recomputation can save the activations of a micro-batch: (bytes saved per second, bytes in all). A unit's more expensive mode
        follows its cheaper one, with the additional bytes at the additional cost."""
        mesh, op = point.mesh, "all_gather" if point.sequence_parallel else "all_reduce"
        savings: list[tuple[float, float]] = []
        for options, count in totals.recompute_options:
            comm = [self.comm.seconds(op, "tp", mesh, o.collective_calls, o.collective_bytes) if is_basic_mesh(mesh) else 0.0 for o in options]
            costs = [(option.bytes, option.seconds + seconds) for option, seconds in zip(options, comm, strict=True)]
            saved, spent = 0.0, 0.0
            while larger := [(size - saved, seconds - spent) for size, seconds in costs if size > saved]:
                size, seconds = max(larger, key=lambda step: step[0] / step[1] if step[1] > 0 else math.inf)
                savings.append((size / seconds if seconds > 0 else math.inf, count * size))
                saved, spent = saved + size, spent + max(seconds, 0.0)
        return savings

    def _overlap(self, rates: Rates) -> float:
        if rates.core_busy_curves:  # a measured curve gives the compute time lost to a collective, by its size
            return 1.0
        overlaps = self._problem.constraints.overlap
        return rates.overlap if overlaps is None or "gradients" in overlaps else 0.0


def _map_unique(totals_list: Sequence[LayerTotals], compute: Callable[[LayerTotals], T]) -> list[T]:
    """`compute` of each item, called once for items that are the same object."""
    results = {key: compute(totals) for key, totals in {id(totals): totals for totals in totals_list}.items()}
    return [results[id(totals)] for totals in totals_list]


def _min_recompute_seconds(excess: float, savings: Sequence[tuple[float, float]]) -> float:
    """Least seconds to save `excess` bytes with `savings`: (bytes per second, maximum bytes), fastest first."""
    seconds = 0.0
    for rate, size in savings:
        if excess <= 0:
            break
        seconds += min(excess, size) / rate
        excess -= size
    return seconds
