"""Closed-form memory: peak bytes of a transformer's largest rank, by kind, from its dimensions alone (no model to trace)."""

from __future__ import annotations

from meshwright.cost.constants import CostConstants
from meshwright.cost.parallel_config import ParallelConfig
from meshwright.cost.transformer_kernels import ACTIVATION_ITEMSIZE, TransformerConfig, block_profile, head_profile


def closed_form_peak(model: TransformerConfig, parallel: ParallelConfig, constants: CostConstants) -> dict[str, float]:
    """Peak bytes by kind of the first or the last stage, whichever is larger: the first holds most micro-batches, the last holds the head."""
    stages = {0, parallel.pp - 1}
    return max((_stage_bytes(model, parallel, constants, s) for s in stages), key=lambda kinds: sum(kinds.values()))


def _stage_bytes(model: TransformerConfig, parallel: ParallelConfig, constants: CostConstants, stage: int) -> dict[str, float]:
    cut = parallel.rank_shard()
    kept, once = _activation_bytes(model, parallel, constants, stage)
    last = stage == parallel.pp - 1
    logits = head_profile(model, cut).output_bytes / ACTIVATION_ITEMSIZE * constants.logit_bytes if last else 0.0
    in_use = {
        **_model_state_bytes(model, parallel, constants, stage),
        "activations": kept,
        # The recomputed block's activations and the logits are never live at the same time.
        "workspace": max(once, logits),
        "communication": _gathered_bytes(model, parallel),
    }
    return {**{kind: size * constants.slack for kind, size in in_use.items()}, "framework": constants.base_bytes}


def _model_state_bytes(model: TransformerConfig, parallel: ParallelConfig, constants: CostConstants, stage: int) -> dict[str, float]:
    """ZeRO's arithmetic: stage 1 shards optimizer state, 2 also gradients, 3 also weights; experts are sharded among the ranks that hold the same
    experts."""
    held = ((parallel.parameters_by_stage(model)[stage], parallel.replicas), (parallel.experts_by_stage(model)[stage], parallel.expert_replicas))

    def sharded_from(level: int) -> float:
        return sum(weights / (max(min(parallel.shard, holders), 1) if parallel.zero >= level else 1) for weights, holders in held)

    trained = 0.0 if parallel.frozen else 1.0
    return {
        "parameters": sharded_from(3) * ACTIVATION_ITEMSIZE,
        "gradients": sharded_from(2) * trained * (constants.held_bytes - ACTIVATION_ITEMSIZE),
        "optimizer": sharded_from(1) * trained * constants.state_bytes,
    }


def _activation_bytes(model: TransformerConfig, parallel: ParallelConfig, constants: CostConstants, stage: int) -> tuple[float, float]:
    """Bytes saved for backward, and bytes that recomputing one block makes live again."""
    one = block_profile(model, parallel.rank_shard())
    whole = one.activation_bytes * constants.kept
    input_only = one.output_bytes
    layers = (
        parallel.layers_by_stage(model.layers)[stage] * in_flight_micro_batches(parallel, stage) * (constants.buffered if parallel.pp > 1 else 1.0)
    )
    if parallel.recompute == "full":
        share = parallel.recomputed_share
        return layers * (share * input_only + (1 - share) * whole), whole * min(share * 2, 1.0)
    if parallel.recompute == "attention":
        scores = one.transient_bytes
        return layers * (one.activation_bytes - scores) * constants.kept, scores
    return layers * whole, 0.0


def in_flight_micro_batches(parallel: ParallelConfig, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once. Interleaved schedules hold a few more (Korthikanti et al., 2022)."""
    most = float(parallel.pp - stage)
    if parallel.virtual_stages > 1:
        most += (parallel.pp - 1) / parallel.virtual_stages
    return min(parallel.micro_batches, most)


def _gathered_bytes(model: TransformerConfig, parallel: ParallelConfig) -> float:
    """Bytes of ZeRO-3's unsharded buffers: two blocks' whole weights and one block's gradient. 0 otherwise: the rest is counted elsewhere."""
    if parallel.zero < 3 or parallel.replicas == 1:
        return 0.0
    shared = model.attention_parameters + (0.0 if model.experts else model.ffn_parameters)
    owned = model.ffn_parameters * model.experts / parallel.ep if parallel.expert_replicas > 1 else 0.0
    return ACTIVATION_ITEMSIZE * (3 * (shared + owned) + model.vocab * model.hidden) / parallel.tp
