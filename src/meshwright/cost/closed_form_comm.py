"""Communication of one transformer training step in the closed form: seconds within blocks, between stages and between replicas, and how much is
exposed."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost.constants import CostConstants
from meshwright.cost.parallel_config import ParallelConfig, UniformCluster
from meshwright.cost.ring_cost import Ring, ring_seconds
from meshwright.cost.transformer_kernels import ACTIVATION_ITEMSIZE, TransformerConfig


@dataclass(frozen=True)
class TransformerCommunication:
    """Prices the communication of one parallel configuration of one model on one cluster."""

    model: TransformerConfig
    parallel: ParallelConfig
    cluster: UniformCluster
    constants: CostConstants

    def block_seconds(self) -> float:
        """Exposed communication of one micro-batch through one block, in one direction (forward or backward)."""
        spread, model = self.parallel, self.model
        tokens = spread.micro_batch * model.seq / spread.cp
        wide = tokens * model.hidden * ACTIVATION_ITEMSIZE
        tensor = 2 * self._collective_seconds("all_reduce", wide, Ring(spread.tp))
        keys = 2 * tokens * spread.cp * model.kv_hidden / spread.tp * ACTIVATION_ITEMSIZE
        context = self._collective_seconds("all_gather", keys, Ring(spread.cp, spread.tp))
        return (tensor + context) * self.constants.exposed_tp + self._expert_all_to_all(wide)

    def calls_per_block(self) -> int:
        """Collectives within a block, in one direction."""
        return 2 * (self.parallel.tp > 1) + (self.parallel.cp > 1) + 2 * (self.parallel.ep > 1)

    def _expert_all_to_all(self, activation_bytes: float) -> float:
        """Seconds of dispatching tokens to their experts and combining them. A token routed to several experts of one node crosses to that node
        once."""
        spread, model = self.parallel, self.model
        if not model.experts:
            return 0.0
        ring = Ring(spread.ep, spread.tp * spread.cp)
        nodes = spread.ep / ring.ranks_per_node(self.cluster.per_node)
        places = nodes * (1 - (1 - 1 / nodes) ** model.topk) if nodes > 1 else model.topk
        return 2 * self._collective_seconds("all_to_all", activation_bytes * min(places, model.topk), ring)

    def p2p_seconds(self) -> float:
        """Seconds to send one micro-batch's boundary activation to the next stage."""
        spread = self.parallel
        if spread.pp == 1:
            return 0.0
        size = spread.micro_batch * self.model.seq / spread.cp * self.model.hidden * ACTIVATION_ITEMSIZE
        ring = Ring(2, spread.tp * spread.cp * spread.dp)
        return self._collective_seconds("send", size / (spread.tp if spread.sequence_parallel else 1), ring) * self.constants.exposed_pp

    def data_parallel_seconds(self, forward: float, backward: float) -> float:
        """Exposed gradient reductions and parameter all-gathers of a step; `forward` and `backward` are one rank's seconds for one micro-batch."""
        gather, reduce, across = self._data_parallel_parts()
        count = self.parallel.micro_batches
        if self.parallel.zero < 3 and not (self.parallel.zero == 2 and self.parallel.pp == 1):
            return self._exposed(gather + reduce + across, forward + backward)
        again = 1.0 if self.parallel.zero == 3 else 0.0
        each = self._exposed(gather, forward) + self._exposed(again * gather + reduce, backward)
        return count * each + self._exposed(across, backward)

    def _data_parallel_parts(self) -> tuple[float, float, float]:
        """Seconds of one parameter all-gather, one gradient reduce-scatter within a shard group, and one gradient all-reduce across shard groups."""
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
        """The exposed part of communication that overlaps with computation: at least the share that is never hidden."""
        return max(seconds - overlapping_s, seconds * min(self.constants.exposed_dp, 1.0))

    def _collective_seconds(self, op: str, size: float, ring: Ring, messages: float = 1.0) -> float:
        return ring_seconds(op, size, ring, self.cluster, self.constants, messages)
