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
        kept = self._in_flight_bytes(point.pipeline_spec, IdentityKey(stage_totals), point.recompute)
        return max(self.rank_bytes(point, rank, most) for rank, most in zip(ranks, kept, strict=True))

    def _compute_in_flight_bytes(
        self, order: PipelineSpec, stage_totals: IdentityKey[Sequence[LayerTotals]], recompute: RecomputeChoice
    ) -> list[float]:
        """By rank: the most bytes that its micro-batches in flight save for backward."""
        return [max(kept for _, kept in moments) for moments in self.peak_moments(order, stage_totals, recompute)]

    def _compute_peak_moments(
        self, order: PipelineSpec, stage_totals: IdentityKey[Sequence[LayerTotals]], recompute: RecomputeChoice
    ) -> list[list[tuple[tuple[int, ...], float]]]:  # fmt: skip
        """By rank, at each moment that may be the peak: the micro-batches in flight in each of its stages, and the bytes that they save for
        backward."""
        kept = [stage.activation_bytes[recompute] for stage in stage_totals.value]
        found: list[list[tuple[tuple[int, ...], float]]] = []
        for rank in range(order.ranks):
            mine = order.stages(rank) if len(kept) > 1 else (0,)
            most = _dominant_counts(in_flight_by_stage(order, rank), [id(stage_totals.value[stage]) for stage in mine])
            found.append([(counts, sum(n * kept[stage] for n, stage in zip(counts, mine, strict=True))) for counts in most])
        return found

    def rank_bytes(self, point: SearchPoint, rank: LayerTotals, kept: float) -> float:
        """Parameters, gradients, states, and `kept` bytes saved for backward."""
        mesh, states, shards = point.mesh, self._states, point.mesh.shard
        whole, trained = rank.parameters, rank.trainable_bytes
        if mesh.group_size("data") == 1:  # gradients are allocated as activations are freed
            return whole + states * trained + max(trained, kept)
        kept = (
            max(kept, rank.largest_unit_bytes) if point.zero == 3 and mesh.pp == 1 else kept
        )  # few activations: the peak is at the largest unit's unsharded gradients
        come = trained if point.micro_batches == 1 and point.zero < 2 else 0.0  # gradients with a bucket of their own replace freed activations
        if point.zero == 2 and (point.micro_batches == 1 or mesh.pp > 1):
            come = trained / shards  # so do a rank's gradient shards, in the first backward
        return (
            max(kept, come)
            - come
            + {
                0: whole + (1 + states) * trained,
                1: whole + trained + states * trained / shards,
                2: whole + (1 + states) * trained / shards,
                3: whole / shards + (1 + states) * trained / shards,
            }[point.zero]
        )


def _dominant_counts(every: Sequence[tuple[int, ...]], kinds: Sequence[int]) -> list[tuple[int, ...]]:
    """The in-flight counts with the Pareto-largest totals by kind of stage and, among equal totals, those with the most of each stage."""
    if len(every) == 1:
        return [*every]
    known = sorted(set(kinds))
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for counts in every:
        together = tuple(sum(n for n, kind in zip(counts, kinds, strict=True) if kind == one) for one in known)
        alike.setdefault(together, []).append(counts)
    most = [alike[together] for together in pareto_maxima(set(alike))]
    return [*{max(same, key=itemgetter(stage)): None for same in most for stage in range(len(kinds))}]
