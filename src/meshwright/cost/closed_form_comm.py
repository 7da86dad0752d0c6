"""Communication of one transformer training step in the closed form: exposed seconds within blocks, between stages and between replicas."""

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
        parallel, model = self.parallel, self.model
        tokens = parallel.micro_batch * model.seq / parallel.cp
        activation_bytes = tokens * model.hidden * ACTIVATION_ITEMSIZE
        tensor = 2 * self._collective_seconds("all_reduce", activation_bytes, Ring(parallel.tp))
        kv_bytes = 2 * tokens * parallel.cp * model.kv_hidden / parallel.tp * ACTIVATION_ITEMSIZE
        context = self._collective_seconds("all_gather", kv_bytes, Ring(parallel.cp, parallel.tp))
        return (tensor + context) * self.constants.exposed_tp + self._expert_all_to_all(activation_bytes)

    def calls_per_block(self) -> int:
        """Collectives within a block, in one direction."""
        return 2 * (self.parallel.tp > 1) + (self.parallel.cp > 1) + 2 * (self.parallel.ep > 1)

    def _expert_all_to_all(self, activation_bytes: float) -> float:
        """Seconds of token dispatch and combine. A token routed to several experts of one node is sent to that node once."""
        parallel, model = self.parallel, self.model
        if not model.experts:
            return 0.0
        ring = Ring(parallel.ep, parallel.tp * parallel.cp)
        nodes = parallel.ep / ring.ranks_per_node(self.cluster.per_node)
        copies = nodes * (1 - (1 - 1 / nodes) ** model.topk) if nodes > 1 else model.topk  # of a token that are sent
        return 2 * self._collective_seconds("all_to_all", activation_bytes * min(copies, model.topk), ring)

    def p2p_seconds(self) -> float:
        """Seconds to send one micro-batch's boundary activation to the next stage."""
        parallel = self.parallel
        if parallel.pp == 1:
            return 0.0
        size = parallel.micro_batch * self.model.seq / parallel.cp * self.model.hidden * ACTIVATION_ITEMSIZE
        ring = Ring(2, parallel.tp * parallel.cp * parallel.dp)
        return self._collective_seconds("send", size / (parallel.tp if parallel.sequence_parallel else 1), ring) * self.constants.exposed_pp

    def data_parallel_seconds(self, forward: float, backward: float) -> float:
        """Exposed gradient reductions and parameter all-gathers of a step; `forward` and `backward` are one rank's seconds for one micro-batch."""
        gather, reduce, across = self._data_parallel_parts()
        zero = self.parallel.zero
        if zero < 3 and not (zero == 2 and self.parallel.pp == 1):
            return self._exposed(gather + reduce + across, forward + backward)
        gathers = 1.0 if zero == 3 else 0.0  # in backward
        micro_batch = self._exposed(gather, forward) + self._exposed(gathers * gather + reduce, backward)
        return self.parallel.micro_batches * micro_batch + self._exposed(across, backward)

    def _data_parallel_parts(self) -> tuple[float, float, float]:
        """Seconds of one parameter all-gather, one gradient reduce-scatter within a shard group, and one gradient all-reduce across shard groups."""
        parallel = self.parallel
        dense = self._exchange_seconds(max(parallel.parameters_by_stage(self.model)), parallel.replicas, parallel.tp)
        stride = parallel.tp * parallel.cp * parallel.ep
        experts = self._exchange_seconds(max(parallel.experts_by_stage(self.model)), parallel.expert_replicas, stride)
        return dense[0] + experts[0], dense[1] + experts[1], dense[2] + experts[2]

    def _exchange_seconds(self, weights: float, replicas: int, stride: int) -> tuple[float, float, float]:
        parallel = self.parallel
        grads = 0.0 if parallel.frozen else weights * (4.0 if parallel.fp32_grads else self.constants.grad_bytes)
        if parallel.zero == 0:
            return 0.0, 0.0, self._collective_seconds("all_reduce", grads, Ring(replicas, stride))
        shard = max(min(parallel.shard, replicas), 1)
        ring, messages = Ring(shard, stride), max(parallel.layers_by_stage(self.model.layers))
        params = 0.0 if parallel.frozen and parallel.zero < 3 else weights * ACTIVATION_ITEMSIZE
        gather = self._collective_seconds("all_gather", params, ring, messages)
        reduce = self._collective_seconds("reduce_scatter", grads, ring, messages)
        across = self._collective_seconds("all_reduce", grads / shard, Ring(replicas // shard, stride * shard))
        return gather, reduce, across

    def _exposed(self, seconds: float, overlapping_s: float) -> float:
        """The exposed part of communication that overlaps with computation: at least the share that is never hidden."""
        return max(seconds - overlapping_s, seconds * min(self.constants.exposed_dp, 1.0))

    def _collective_seconds(self, op: str, size: float, ring: Ring, messages: float = 1.0) -> float:
        return ring_seconds(op, size, ring, self.cluster, self.constants, messages)
