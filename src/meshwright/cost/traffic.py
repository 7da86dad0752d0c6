"""What ranks send each other in a step of a transformer, in seconds before anything hides it: within blocks, between stages, between replicas."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost.constants import Constants
from meshwright.cost.rings import Ring, ring_seconds
from meshwright.cost.spread import Machine, Spread
from meshwright.cost.transformer import HALF, Transformer


@dataclass(frozen=True)
class Traffic:
    """Prices one spread of one model on one machine."""

    model: Transformer
    spread: Spread
    machine: Machine
    constants: Constants

    def block(self) -> float:
        """One micro-batch through one block, one way, of what computation waits for."""
        spread, model = self.spread, self.model
        tokens = spread.micro_batch * model.seq / spread.cp
        wide = tokens * model.hidden * HALF
        tensor = 2 * self._seconds("all_reduce", wide, Ring(spread.tp))
        keys = 2 * tokens * spread.cp * model.kv_hidden / spread.tp * HALF
        context = self._seconds("all_gather", keys, Ring(spread.cp, spread.tp))
        return (tensor + context) * self.constants.exposed_tp + self._routed(wide)

    def calls(self) -> int:
        """Collectives within a block, one way."""
        return 2 * (self.spread.tp > 1) + (self.spread.cp > 1) + 2 * (self.spread.ep > 1)

    def _routed(self, wide: float) -> float:
        """Tokens to their experts and back. One that goes to several experts of a node crosses to that node once."""
        spread, model = self.spread, self.model
        if not model.experts:
            return 0.0
        ring = Ring(spread.ep, spread.tp * spread.cp)
        nodes = spread.ep / ring.local(self.machine.per_node)
        places = nodes * (1 - (1 - 1 / nodes) ** model.topk) if nodes > 1 else model.topk
        return 2 * self._seconds("all_to_all", wide * min(places, model.topk), ring)

    def between_stages(self) -> float:
        """One micro-batch handed to the next stage."""
        spread = self.spread
        if spread.pp == 1:
            return 0.0
        size = spread.micro_batch * self.model.seq / spread.cp * self.model.hidden * HALF
        ring = Ring(2, spread.tp * spread.cp * spread.dp)
        return self._seconds("send", size / (spread.tp if spread.sequence_parallel else 1), ring) * self.constants.exposed_pp

    def replicas(self, forward: float, backward: float) -> float:
        """Gradients and gathered parameters of a step that computation waits for; `forward` and `backward` are a rank's, of one micro-batch."""
        gather, reduce, across = self._replica_parts()
        count = self.spread.micro_batches
        if self.spread.zero < 3 and not (self.spread.zero == 2 and self.spread.pp == 1):
            return self._waited(gather + reduce + across, forward + backward)
        again = 1.0 if self.spread.zero == 3 else 0.0
        each = self._waited(gather, forward) + self._waited(again * gather + reduce, backward)
        return count * each + self._waited(across, backward)

    def _replica_parts(self) -> tuple[float, float, float]:
        """One gathering of the parameters, one reduction of the gradients within those who share a copy, and one across the copies."""
        spread = self.spread
        shared = self._parts_of(max(spread.parameters_by_stage(self.model)), spread.replicas, spread.tp)
        owned = self._parts_of(max(spread.experts_by_stage(self.model)), spread.owners, spread.tp * spread.cp * spread.ep)
        return shared[0] + owned[0], shared[1] + owned[1], shared[2] + owned[2]

    def _parts_of(self, weights: float, holders: int, stride: int) -> tuple[float, float, float]:
        spread = self.spread
        grads = 0.0 if spread.frozen else weights * (4.0 if spread.wide_grads else self.constants.grad_bytes)
        if spread.zero == 0:
            return 0.0, 0.0, self._seconds("all_reduce", grads, Ring(holders, stride))
        shard = max(min(spread.shard, holders), 1)
        ring, messages = Ring(shard, stride), max(spread.layers_by_stage(self.model.layers))
        params = 0.0 if spread.frozen and spread.zero < 3 else weights * HALF
        gather = self._seconds("all_gather", params, ring, messages)
        reduce = self._seconds("reduce_scatter", grads, ring, messages)
        across = self._seconds("all_reduce", grads / shard, Ring(holders // shard, stride * shard))
        return gather, reduce, across

    def _waited(self, seconds: float, beside: float) -> float:
        """What is left over of traffic that runs beside computation, at least the share that never hides."""
        return max(seconds - beside, seconds * min(self.constants.exposed_dp, 1.0))

    def _seconds(self, op: str, size: float, ring: Ring, messages: float = 1.0) -> float:
        return ring_seconds(op, size, ring, self.machine, self.constants, messages)
