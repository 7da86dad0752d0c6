"""How a transformer's step is parallelised, and over which equal nodes: the two inputs of the closed form besides the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.core.cluster import Device, Link
from meshwright.cost.transformer_kernels import TransformerConfig, TransformerRecompute, TransformerShard


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel degrees and options of a step. Ranks of `tp` are adjacent, then those of `cp`, `dp` and `pp`; `ep` shards experts over `dp`."""

    micro_batch: int
    global_batch: int
    tp: int = 1
    pp: int = 1
    virtual_stages: int = 1  # stages per pipeline rank: 1 is 1F1B, more is interleaved
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    shard: int = 1  # of the `dp` times `cp` ranks, how many share one copy of what ZeRO shards
    sequence_parallel: bool = False
    recompute: TransformerRecompute = "none"
    recomputed_share: float = 1.0  # share of the blocks that are recomputed
    precision: str = "bf16"
    flash_attention: bool = True
    dropout: bool = False
    fused: bool = False  # element-wise chains run as one kernel: compiled, or hand-fused
    frozen: bool = False  # only adapters are trained
    fp32_grads: bool = False  # gradients are reduced in fp32

    @property
    def micro_batches(self) -> int:
        return max(math.ceil(self.global_batch / (self.dp * self.micro_batch)), 1)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the model, unless ZeRO shards it: their gradients are reduced together."""
        return self.dp * self.cp

    def rank_shard(self, unfused_passes: float = 1.0) -> TransformerShard:
        kernels = (self.sequence_parallel, self.flash_attention, self.dropout, self.frozen, self.precision == "fp8", unfused_passes)
        return TransformerShard(self.micro_batch, self.tp, self.cp, self.ep, *kernels)

    def layers_by_stage(self, layers: int) -> list[int]:
        """Layers per stage, as even as possible; the first stages get the remainder, since the last has the head."""
        return [layers // self.pp + (i < layers % self.pp) for i in range(self.pp)]

    def parameters_by_stage(self, model: TransformerConfig) -> list[float]:
        """A rank's parameters by stage that all replicas hold, before ZeRO; the embedding is on the first stage, the head on the last."""
        block = (model.attention_parameters + (0.0 if model.experts else model.ffn_parameters)) / self.tp
        stages = [n * block for n in self.layers_by_stage(model.layers)]
        embedding = model.vocab * model.hidden / self.tp
        stages[0] += embedding
        stages[-1] += 0.0 if self.pp == 1 and model.tied_embeddings else embedding
        return stages

    def experts_by_stage(self, model: TransformerConfig) -> list[float]:
        """A rank's expert parameters by stage; one in `ep` replicas holds them."""
        layer = model.ffn_parameters * model.experts / self.ep / self.tp
        return [n * layer for n in self.layers_by_stage(model.layers)]

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts: their gradients are reduced, and ZeRO shards them, among these."""
        return max(self.replicas // self.ep, 1)


@dataclass(frozen=True)
class UniformCluster:
    """Equal nodes: their devices, the intra-node link, and the network between nodes (its bandwidth is a whole node's, one way)."""

    device: Device
    per_node: int
    link: Link
    network: Link
