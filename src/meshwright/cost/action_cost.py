"""Prices one action of a plan's schedule: its compute time in seconds and its FLOPs, from a profile and measured rates."""

from __future__ import annotations

from meshwright.core.calibration import Rates
from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action
from meshwright.cost.compute_cost import ComputeCost
from meshwright.schedule.step_actions import gradient_buckets


class ActionCost:
    """Prices the computation of one plan at one set of rates; each distinct layer is priced once."""

    def __init__(self, plan: Plan, optimizer: str, rates: Rates, shard: int = 0) -> None:
        self._plan, self._optimizer = plan, optimizer
        self._state_share = plan.state_fraction(shard)
        self._compute_cost = ComputeCost(rates, plan.memory.precision, plan.compile != "none", frozenset(plan.memory.units))
        self._oversubscription = rates.oversubscription
        self._steps_bucket_slices = plan.memory.zero in (1, 2) and plan.mesh.group_size("data") > 1  # the optimizer steps a slice of each bucket
        self._splits_backward = plan.splits_backward
        self._memo: dict[tuple[int, int, str, bool, bool], float] = {}  # micro-batches repeat the same actions

    def seconds(self, profile: ModelProfile, action: Action) -> float:
        """Seconds of one action; `profile` is one rank's part of the model. Ranks that share a core slow each other down by the oversubscription
        factor (see [Note: oversubscribed cores] in describe/stopwatch.py)."""
        if action.op == "optimizer":
            return self._oversubscription * self._optimizer_seconds(profile)
        key = (id(profile), action.layer, action.op, action.skips_expensive, action.name.startswith("recompute/"))
        if key not in self._memo:
            self._memo[key] = self._oversubscription * self._layer_seconds(profile, *key[1:])
        return self._memo[key]

    def _layer_seconds(self, profile: ModelProfile, index: int, op: str, cheap: bool, recompute: bool) -> float:
        layer, cost = profile.layers[index], self._compute_cost
        overhead = cost.recompute_overhead(layer, cheap) if recompute else 0.0
        if op == "backward":
            overhead += self._gradient_overhead(layer) + (cost.split_backward_overhead(layer) if self._splits_backward else 0.0)
        return cost.layer_seconds(layer, op, cost.memo(profile), cheap, profile.batch == 1) + overhead

    def _optimizer_seconds(self, profile: ModelProfile) -> float:
        itemsize = profile.tensors[0].itemsize if profile.tensors else 4
        trained = sum(t.numel for t in profile.tensors if t.trainable)
        tensors = len(gradient_buckets(self._plan, profile)) if self._steps_bucket_slices else sum(t.trainable for t in profile.tensors)
        offload = self._plan.memory.offload == "optimizer"
        return self._compute_cost.optimizer_seconds(trained * self._state_share, self._optimizer, itemsize, offload, tensors)

    def _gradient_overhead(self, layer: LayerProfile) -> float:
        """Seconds of gradient accumulation and hooks in one backward. Counted only where the hook cost was measured: on a GPU this overlaps with
        other work."""
        if "hook" not in self._compute_cost.rates.fixed:
            return 0.0
        micro_batches, synced = self._plan.micro_batches, self._plan.mesh.group_size("data") > 1
        return sum(self._compute_cost.gradient_seconds(t.numel, t.itemsize, micro_batches, synced) for t in layer.tensors if t.trainable)

    def flops(self, profile: ModelProfile, action: Action) -> float:
        if action.op == "optimizer" or action.skips_expensive:
            return 0.0
        layer = profile.layers[action.layer]
        return layer.flops_forward if action.op == "forward" else layer.flops_backward
