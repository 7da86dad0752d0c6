"""Closed-form memory: peak bytes of a transformer's largest rank, by kind, from its dimensions alone (no model to trace)."""

from __future__ import annotations

from meshwright.cost.constants import CostConstants
from meshwright.cost.parallel_config import ParallelConfig
from meshwright.cost.transformer_kernels import ACTIVATION_ITEMSIZE, TransformerConfig, block_profile, head_profile


def closed_form_peak(model: TransformerConfig, parallel: ParallelConfig, constants: CostConstants) -> dict[str, float]:
    """Peak bytes by kind of the first or the last stage, whichever is larger: the first holds most micro-batches, the last holds the head."""
    return max((_stage_bytes(model, parallel, constants, stage) for stage in {0, parallel.pp - 1}), key=lambda kinds: sum(kinds.values()))


def _stage_bytes(model: TransformerConfig, parallel: ParallelConfig, constants: CostConstants, stage: int) -> dict[str, float]:
    saved, recomputed = _activation_bytes(model, parallel, constants, stage)
    head_bytes = head_profile(model, parallel.rank_shard()).output_bytes if stage == parallel.pp - 1 else 0.0
    logits = head_bytes / ACTIVATION_ITEMSIZE * constants.logit_bytes
    in_use = {
        **_model_state_bytes(model, parallel, constants, stage),
        "activations": saved,
        "workspace": max(recomputed, logits),  # never live at the same time
        "communication": _gathered_bytes(model, parallel),
    }
    return {**{kind: size * constants.slack for kind, size in in_use.items()}, "framework": constants.base_bytes}


def _model_state_bytes(model: TransformerConfig, parallel: ParallelConfig, constants: CostConstants, stage: int) -> dict[str, float]:
    """ZeRO's arithmetic: stage 1 shards optimizer state, 2 also gradients, 3 also weights; experts are sharded among the ranks that hold the same."""
    weights = ((parallel.parameters_by_stage(model)[stage], parallel.replicas), (parallel.experts_by_stage(model)[stage], parallel.expert_replicas))

    def sharded_from(level: int) -> float:
        return sum(numel / (max(min(parallel.shard, replicas), 1) if parallel.zero >= level else 1) for numel, replicas in weights)

    trained = 0.0 if parallel.frozen else 1.0
    return {
        "parameters": sharded_from(3) * ACTIVATION_ITEMSIZE,
        "gradients": sharded_from(2) * trained * (constants.held_bytes - ACTIVATION_ITEMSIZE),
        "optimizer": sharded_from(1) * trained * constants.state_bytes,
    }


def _activation_bytes(model: TransformerConfig, parallel: ParallelConfig, constants: CostConstants, stage: int) -> tuple[float, float]:
    """Bytes saved for backward, and bytes that recomputing one block makes live again."""
    block = block_profile(model, parallel.rank_shard())
    saved = block.activation_bytes * constants.kept
    layers = parallel.layers_by_stage(model.layers)[stage] * _micro_batches_in_flight(parallel, stage)
    layers *= constants.buffered if parallel.pp > 1 else 1.0
    if parallel.recompute == "full":
        share = parallel.recomputed_share
        return layers * (share * block.output_bytes + (1 - share) * saved), saved * min(share * 2, 1.0)
    if parallel.recompute == "attention":
        scores = block.transient_bytes
        return layers * (block.activation_bytes - scores) * constants.kept, scores
    return layers * saved, 0.0


def _micro_batches_in_flight(parallel: ParallelConfig, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once. Interleaved schedules hold a few more (Korthikanti et al., 2022)."""
    extra = (parallel.pp - 1) / parallel.virtual_stages if parallel.virtual_stages > 1 else 0.0
    return min(parallel.micro_batches, parallel.pp - stage + extra)


def _gathered_bytes(model: TransformerConfig, parallel: ParallelConfig) -> float:
    """Bytes of ZeRO-3's unsharded buffers: two blocks' weights and one block's gradient; 0 without ZeRO-3."""
    if parallel.zero < 3 or parallel.replicas == 1:
        return 0.0
    dense = model.attention_parameters + (0.0 if model.experts else model.ffn_parameters)
    experts = model.ffn_parameters * model.experts / parallel.ep if parallel.expert_replicas > 1 else 0.0
    return ACTIVATION_ITEMSIZE * (3 * (dense + experts) + model.vocab * model.hidden) / parallel.tp
