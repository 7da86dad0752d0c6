"""Lower bounds on the memory of a rank, in bytes (see [Note: bounds])."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import itemgetter

from meshwright.core.plan import CompileMode, Plan
from meshwright.core.workload import OPTIMIZER_STATES
from meshwright.cost.pipeline_cost import PipelineSpec, in_flight_by_stage, pareto_maxima
from meshwright.cost.step_cost import HEADROOM
from meshwright.plan.layer_totals import IdentityKey, LayerTotals, RecomputeChoice, StageLayers
from meshwright.plan.planning_problem import PlanningProblem
from meshwright.plan.point_totals import PointTotals
from meshwright.plan.search_point import SearchPoint

_StageTotals = IdentityKey[Sequence[LayerTotals]]
_Moments = list[tuple[tuple[int, ...], float]]  # micro-batches in flight by stage, and the bytes they save


class MemoryBounds:
    """Memory bounds of one search."""

    def __init__(self, problem: PlanningProblem, totals: PointTotals) -> None:
        self._problem, self._totals = problem, totals
        self._states = 0 if problem.offloads_optimizer else OPTIMIZER_STATES[problem.workload.optimizer]
        self._min_device_memory = cache(problem.cluster.least_memory)
        self.peak_moments, self._in_flight_bytes = cache(self._compute_peak_moments), cache(self._compute_in_flight_bytes)

    def bytes(self, point: SearchPoint, sharding: Plan, compile_mode: CompileMode, stages: StageLayers = ()) -> float:
        """Bytes on the mean pipeline rank: parameters, gradients, states, and the saved activations of one micro-batch. With `stages`, on the
        largest rank, with the activations of all its micro-batches in flight."""
        rates = self._problem.rates(point.mesh.size)
        stage_totals = self._totals.of_stages(point, sharding, compile_mode, stages)
        return min(rates.memory_correction, 1.0) * (rates.base_bytes + self._max_rank_bytes(point, stage_totals, stages))

    def fits(self, point: SearchPoint, sharding: Plan, compile_mode: CompileMode, stages: StageLayers = ()) -> bool:
        return self.bytes(point, sharding, compile_mode, stages) <= self.limit(point)

    def limit(self, point: SearchPoint) -> float:
        """The usable bytes of a device."""
        return HEADROOM * self._min_device_memory(point.mesh.size)

    def room(self, point: SearchPoint) -> float:
        """The bytes of the limit that are left for tensors."""
        return self.limit(point) - self._problem.rates(point.mesh.size).base_bytes

    def _max_rank_bytes(self, point: SearchPoint, stage_totals: Sequence[LayerTotals], stages: StageLayers) -> float:
        ranks = self._totals.of_ranks(point, stage_totals, stages)
        if not stages:
            return self.rank_bytes(point, ranks[0], ranks[0].activation_bytes[point.recompute])
        saved = self._in_flight_bytes(point.pipeline_spec, IdentityKey(stage_totals), point.recompute)
        return max(self.rank_bytes(point, rank, size) for rank, size in zip(ranks, saved, strict=True))

    def _compute_in_flight_bytes(self, spec: PipelineSpec, stage_totals: _StageTotals, recompute: RecomputeChoice) -> list[float]:
        """By rank: the most bytes that its micro-batches in flight save for backward."""
        return [max(saved for _, saved in moments) for moments in self.peak_moments(spec, stage_totals, recompute)]

    def _compute_peak_moments(self, spec: PipelineSpec, stage_totals: _StageTotals, recompute: RecomputeChoice) -> list[_Moments]:
        """By rank, at each moment that may be the peak: the micro-batches in flight in each of its stages, and the bytes that they save for
        backward."""
        saved = [stage.activation_bytes[recompute] for stage in stage_totals.value]
        peaks: list[_Moments] = []
        for rank in range(spec.ranks):
            stages = spec.stages(rank) if len(saved) > 1 else (0,)
            counts_at_peaks = _dominant_counts(in_flight_by_stage(spec, rank), [id(stage_totals.value[stage]) for stage in stages])
            peaks.append([(counts, sum(n * saved[stage] for n, stage in zip(counts, stages, strict=True))) for counts in counts_at_peaks])
        return peaks

    def rank_bytes(self, point: SearchPoint, rank: LayerTotals, saved: float) -> float:
        """Parameters, gradients, states, and `saved` bytes of activations."""
        mesh, zero, parameters, gradients = point.mesh, point.zero, rank.parameters, rank.trainable_bytes
        states = self._states * gradients
        if mesh.group_size("data") == 1:  # gradients are allocated as activations are freed
            return parameters + states + max(gradients, saved)
        if zero == 3 and mesh.pp == 1:  # with few activations, the peak is at the largest unit's unsharded gradients
            saved = max(saved, rank.largest_unit_bytes)
        reused = gradients if point.micro_batches == 1 and zero < 2 else 0.0  # gradients with a bucket of their own replace freed activations
        if zero == 2 and (point.micro_batches == 1 or mesh.pp > 1):
            reused = gradients / mesh.shard  # so do a rank's gradient shards, in the first backward
        sharded = [size / mesh.shard if zero >= stage else size for size, stage in ((parameters, 3), (gradients, 2), (states, 1))]
        return max(saved, reused) - reused + sum(sharded)


def _dominant_counts(all_counts: Sequence[tuple[int, ...]], kinds: Sequence[int]) -> list[tuple[int, ...]]:
    """The in-flight counts with the Pareto-largest totals by kind of stage and, among equal totals, those with the most of each stage."""
    if len(all_counts) == 1:
        return [*all_counts]
    by_totals: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for counts in all_counts:
        totals = tuple(sum(n for n, k in zip(counts, kinds, strict=True) if k == kind) for kind in sorted(set(kinds)))
        by_totals.setdefault(totals, []).append(counts)
    largest = [by_totals[totals] for totals in pareto_maxima(set(by_totals))]
    return [*{max(equal, key=itemgetter(stage)): None for equal in largest for stage in range(len(kinds))}]
