"""What ranks send each other in a step of a transformer, in seconds before anything hides it: within blocks, between stages, between replicas."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost.constants import CostConstants
from meshwright.cost.parallel_config import ParallelConfig, UniformCluster
from meshwright.cost.ring_cost import Ring, ring_seconds
from meshwright.cost.transformer_kernels import ACTIVATION_ITEMSIZE, TransformerConfig


@dataclass(frozen=True)
class TransformerCommunication:
    """Prices one spread of one model on one machine."""

    model: TransformerConfig
    parallel: ParallelConfig
    cluster: UniformCluster
    constants: CostConstants

    def block_seconds(self) -> float:
        """One micro-batch through one block, one way, of what computation waits for."""
        spread, model = self.parallel, self.model
        tokens = spread.micro_batch * model.seq / spread.cp
        wide = tokens * model.hidden * ACTIVATION_ITEMSIZE
        tensor = 2 * self._collective_seconds("all_reduce", wide, Ring(spread.tp))
        keys = 2 * tokens * spread.cp * model.kv_hidden / spread.tp * ACTIVATION_ITEMSIZE
        context = self._collective_seconds("all_gather", keys, Ring(spread.cp, spread.tp))
        return (tensor + context) * self.constants.exposed_tp + self._expert_all_to_all(wide)

    def calls_per_block(self) -> int:
        """Collectives within a block, one way."""
        return 2 * (self.parallel.tp > 1) + (self.parallel.cp > 1) + 2 * (self.parallel.ep > 1)

    def _expert_all_to_all(self, activation_bytes: float) -> float:
        """Tokens to their experts and back. One that goes to several experts of a node crosses to that node once."""
        spread, model = self.parallel, self.model
        if not model.experts:
            return 0.0
        ring = Ring(spread.ep, spread.tp * spread.cp)
        nodes = spread.ep / ring.ranks_per_node(self.cluster.per_node)
        places = nodes * (1 - (1 - 1 / nodes) ** model.topk) if nodes > 1 else model.topk
        return 2 * self._collective_seconds("all_to_all", activation_bytes * min(places, model.topk), ring)

    def p2p_seconds(self) -> float:
        """One micro-batch handed to the next stage."""
        spread = self.parallel
        if spread.pp == 1:
            return 0.0
        size = spread.micro_batch * self.model.seq / spread.cp * self.model.hidden * ACTIVATION_ITEMSIZE
        ring = Ring(2, spread.tp * spread.cp * spread.dp)
        return self._collective_seconds("send", size / (spread.tp if spread.sequence_parallel else 1), ring) * self.constants.exposed_pp

    def data_parallel_seconds(self, forward: float, backward: float) -> float:
        """Gradients and gathered parameters of a step that computation waits for; `forward` and `backward` are a rank's, of one micro-batch."""
        gather, reduce, across = self._data_parallel_parts()
        count = self.parallel.micro_batches
        if self.parallel.zero < 3 and not (self.parallel.zero == 2 and self.parallel.pp == 1):
            return self._exposed(gather + reduce + across, forward + backward)
        again = 1.0 if self.parallel.zero == 3 else 0.0
        each = self._exposed(gather, forward) + self._exposed(again * gather + reduce, backward)
        return count * each + self._exposed(across, backward)

    def _data_parallel_parts(self) -> tuple[float, float, float]:
        """One gathering of the parameters, one reduction of the gradients within those who share a copy, and one across the copies."""
        spread = self.parallel
        shared = self._exchange_seconds(max(spread.parameters_by_stage(self.model)), spread.replicas, spread.tp)
        owned = self._exchange_seconds(max(spread.experts_by_stage(self.model)), spread.expert_replicas, spread.tp * spread.cp * spread.ep)
        return shared[0] + owned[0], shared[1] + owned[1], shared[2] + owned[2]

    def _exchange_seconds(self, weights: float, replicas: int, stride: int) -> tuple[float, float, float]:
        spread = self.parallel
        grads = 0.0 if spread.frozen else weights * (4.0 if spread.fp32_grads else self.constants.grad_bytes)
        if spread.zero == 0:
            return 0.0, 0.0, self._collective_seconds("all_reduce", grads, Ring(replicas, stride))
        shard = max(min(spread.shard, replicas), 1)
        ring, messages = Ring(shard, stride), max(spread.layers_by_stage(self.model.layers))
        params = 0.0 if spread.frozen and spread.zero < 3 else weights * ACTIVATION_ITEMSIZE
        gather = self._collective_seconds("all_gather", params, ring, messages)
        reduce = self._collective_seconds("reduce_scatter", grads, ring, messages)
        across = self._collective_seconds("all_reduce", grads / shard, Ring(replicas // shard, stride * shard))
        return gather, reduce, across

    def _exposed(self, seconds: float, overlapping_s: float) -> float:
        """What is left over of traffic that runs beside computation, at least the share that never hides."""
        return max(seconds - overlapping_s, seconds * min(self.constants.exposed_dp, 1.0))

    def _collective_seconds(self, op: str, size: float, ring: Ring, messages: float = 1.0) -> float:
        return ring_seconds(op, size, ring, self.cluster, self.constants, messages)
