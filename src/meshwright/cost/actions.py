"""What one action of a plan's schedule computes, in seconds and in FLOPs."""

from __future__ import annotations

from meshwright.core.calibration import Rates
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action
from meshwright.cost.compute import ComputeCost


class ActionCost:
    """Prices computation of one plan at one set of rates; equal layers are priced once."""

    def __init__(self, plan: Plan, optimizer: str, rates: Rates) -> None:
        self._plan, self._optimizer = plan, optimizer
        self._price = ComputeCost(rates, plan.memory.precision, plan.compile != "none", frozenset(plan.memory.units))
        self._memo: dict[tuple[int, str, bool], float] = {}

    def seconds(self, profile: ModelProfile, action: Action) -> float:
        """`profile` is one rank's part of the model."""
        if action.op != "optimizer":
            return self._price.layer(profile.layers[action.layer], action.op, self._memo, action.cheap)
        shards = self._plan.mesh.shard if self._plan.memory.zero else 1
        item = profile.tensors[0].itemsize if profile.tensors else 4
        trained = sum(t.numel for t in profile.tensors if t.trainable)
        return self._price.optimizer(trained / shards, self._optimizer, item, self._plan.memory.offload == "optimizer")

    def flops(self, profile: ModelProfile, action: Action) -> float:
        if action.op == "optimizer" or action.cheap:
            return 0.0
        layer = profile.layers[action.layer]
        return layer.flops_forward if action.op == "forward" else layer.flops_backward
