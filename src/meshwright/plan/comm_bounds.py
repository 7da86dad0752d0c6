"""Lower bounds on communication: seconds for which the collectives of a search point occupy the links of a group (see [Note: bounds])."""

from __future__ import annotations

from functools import cache

from meshwright.core.calibration import AlphaBetaModel
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action, wire_factor
from meshwright.core.tensor_policy import TensorPolicy
from meshwright.core.workload import ITEM_BYTES, LOW_PRECISION_DTYPES
from meshwright.cost.collective_cost import alpha_beta_of, group_link
from meshwright.plan.collective_totals import collective_totals, expert_parameter_bytes
from meshwright.plan.layer_totals import IdentityKey, LayerTotals
from meshwright.plan.planning_problem import PlanningProblem
from meshwright.plan.point_totals import PointTotals
from meshwright.plan.search_point import SearchPoint, is_basic_mesh
from meshwright.schedule import local_profile


class CommBounds:
    """Communication bounds of one search. `sharding` is a partial plan that says which shard of every layer a rank holds."""

    def __init__(self, problem: PlanningProblem, totals: PointTotals) -> None:
        profile, units = problem.profile, frozenset(problem.units)
        self._problem, self._totals = problem, totals
        self._tensor_collectives = cache(self._count_tensor_collectives)
        self._collective_totals = cache(lambda sharding: collective_totals(sharding.value, profile, units))
        self._min_output_bytes = cache(self._compute_min_output_bytes)
        self._expert_bytes = cache(lambda sharding: expert_parameter_bytes(sharding.value, profile))
        self._alpha_beta, self._p2p_line = cache(self._compute_alpha_beta), cache(self._compute_p2p_line)

    def seconds(self, op: str, axis: str, mesh: Mesh, calls: float, size: float) -> float:
        """Seconds for which `calls` collectives with `size` bytes in all occupy the links of a group."""
        alpha, beta = self._alpha_beta(op, axis, mesh)
        return calls * alpha + size * beta

    def _compute_alpha_beta(self, op: str, axis: str, mesh: Mesh) -> tuple[float, float]:
        """Seconds per call and per byte."""
        ranks, problem = mesh.group_size(axis), self._problem
        if ranks == 1:
            return 0.0, 0.0
        action = Action("", op, axis=axis)  # type: ignore[arg-type]
        line = alpha_beta_of(op, ranks, problem.backend, problem.rates(mesh.size), group_link(problem.cluster, action, mesh))
        return line.alpha_s, wire_factor(op, ranks) / line.bytes_per_s

    # -- pipelines --

    def pipeline_seconds(self, point: SearchPoint, sharding: Plan) -> float:
        """Approximate seconds that a middle pipeline stage takes to send activations and gradients, with the smallest unit output as the message
        size. A guide, not a bound."""
        mesh = point.mesh
        if mesh.pp == 1:
            return 0.0
        size = self._min_output_bytes(IdentityKey(sharding)) * (self._problem.workload.global_batch // mesh.data_parallel_size)
        line = self._p2p_line(mesh)
        return 2 * point.pipeline_spec.chunks * (point.micro_batches * line.alpha_s + size / line.bytes_per_s)

    def _compute_p2p_line(self, mesh: Mesh) -> AlphaBetaModel:
        """The alpha-beta model of a send between neighbouring pipeline ranks."""
        link = group_link(self._problem.cluster, Action("", "send", axis="pp", group_size=2), mesh)
        return alpha_beta_of("send", 2, self._problem.backend, self._problem.rates(mesh.size), link)

    def _compute_min_output_bytes(self, sharding: IdentityKey[Plan]) -> float:
        """Bytes of the smallest unit output for one sample."""
        profile, units = self._problem.profile, frozenset(self._problem.units)
        return min((x.output_bytes for x in local_profile(sharding.value, profile.at_batch(1), 0).layers if x.name in units), default=0.0)

    # -- gradients --

    def gradient_seconds(self, point: SearchPoint, rank: LayerTotals, sharding: Plan) -> float:
        """Seconds for a rank's gradients and, under ZeRO, its parameters, by their bytes and calls. Expert gradients are reduced among fewer
        ranks."""
        mesh, micro, trained, precision = point.mesh, point.micro_batches, rank.trainable_bytes, self._problem.workload.precision
        replicated = max(trained - self._expert_bytes(IdentityKey(sharding)) / mesh.pp, 0.0)
        calls = rank.scattered_units if point.zero == 3 else rank.own_bucket_grads if mesh.ep == 1 else 0.0
        if point.zero == 0:
            return self.seconds("all_reduce", "replica", mesh, calls, replicated)
        times = micro if point.zero > 1 else 1
        seconds = self.seconds("reduce_scatter", "shard", mesh, times * calls, times * trained)
        seconds += self.seconds("all_reduce", "replica", mesh, times * calls, times * replicated / mesh.shard)
        if point.zero < 3:
            return seconds + self.seconds("all_gather", "shard", mesh, calls, trained)
        scale = min(ITEM_BYTES[precision] / 4, 1.0) if precision in LOW_PRECISION_DTYPES else 1.0
        return seconds + self.seconds("all_gather", "shard", mesh, 2 * micro * rank.gathered_units, 2 * micro * rank.parameters * scale)

    # -- inside layers --

    def stage_seconds(self, point: SearchPoint, stage: LayerTotals) -> tuple[float, float]:
        """Seconds (forward, backward) of the 1D tensor-parallel collectives of a micro-batch in a stage. They are not overlapped: what follows
        waits."""
        mesh, at_output, at_input = point.mesh, stage.output_collectives, stage.input_collectives
        if not is_basic_mesh(mesh):
            return 0.0, 0.0
        if not point.sequence_parallel:
            return self.seconds("all_reduce", "tp", mesh, *at_output), self.seconds("all_reduce", "tp", mesh, *at_input)
        forward = self.seconds("reduce_scatter", "tp", mesh, *at_output) + self.seconds("all_gather", "tp", mesh, *at_input)
        return forward, self.seconds("all_gather", "tp", mesh, *at_output) + self.seconds("reduce_scatter", "tp", mesh, *at_input)

    def layer_seconds(self, point: SearchPoint, sharding: Plan) -> float:
        """Seconds of collectives inside layers: tensor-parallel all-reduces, or under sequence parallelism their reduce-scatters and all-gathers,
        and the collectives of the cp, ep and 2D tensor axes."""
        mesh, tensor, full = point.mesh, sharding.tensor, point.recompute == "full"
        samples = self._problem.workload.global_batch // mesh.data_parallel_size // point.micro_batches
        times = point.micro_batches / mesh.pp
        if not is_basic_mesh(mesh):
            totals = self._collective_totals(IdentityKey(sharding))
            return sum(self.seconds(t.op, t.axis, mesh, times * t.calls(full), times * t.bytes(samples, full)) for t in totals)
        if mesh.degree("tp") == 1:
            return 0.0
        calls, size, recomputed = self._tensor_collectives(IdentityKey(tensor), samples)
        with_recompute = times * (size + (recomputed if full else 0.0))
        if not tensor.is_sequence_parallel:
            return self.seconds("all_reduce", "tp", mesh, times * calls, with_recompute)
        scatter = self.seconds("reduce_scatter", "tp", mesh, times * calls, times * size)
        return scatter + self.seconds("all_gather", "tp", mesh, times * calls, with_recompute)

    def _count_tensor_collectives(self, tensor: IdentityKey[TensorPolicy], samples: int) -> tuple[int, float, float]:
        """The number of tensor-parallel collectives, their bytes, and the bytes of those that recomputed units repeat."""
        sequence = tensor.value.is_sequence_parallel
        reduce_sites, copy_sites = (
            [site for site in sites if bool(site.sequence_layout) == sequence] for sites in (tensor.value.reduce_sites, tensor.value.copy_sites)
        )
        forward = copy_sites if sequence else [site for site in reduce_sites if not site.skipped_in_recompute]
        recomputed = sum(site.bytes_for(samples) for site in forward if self._totals.is_in_unit(site.module))
        return len(reduce_sites) + len(copy_sites), sum(site.bytes_for(samples) for site in (*reduce_sites, *copy_sites)), recomputed
