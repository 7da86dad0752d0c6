"""Keys of files that were written in format version 1 (plan.json, calibrations, schedule files), by dataclass
("Rates") or field ("Rates.fixed"): what each key is now."""

from __future__ import annotations

from collections.abc import Mapping

_RENAMED = {
    "Rates.fixed": "meeting→tp_sync handing→p2p parted→split_backward",
    "Rates": "call_s→op_overhead_s queued→async_dispatch held→memory_correction crowding→oversubscription busy→core_busy_curves",
    "PositionGenerator": "of→source_length cut→is_sharded",
    "AttentionSite": "strand→logical_dim trained→needs_grad",
    "ContextPolicy": (
        "positions→sequence_length attends→attention_sites makes→position_generators enters→position_splits held→position_tables "
        "counts→mean_loss_modules rewrites→size_rewrites"
    ),
    "MoELayer": (
        "counts→experts_per_rank pairs→token_expert_pairs width→hidden_size tokens→tokens_input choices→expert_ids_input "
        "weights→routing_weights_input"
    ),
    "EmbeddingTable": "owner→ep_rank",
    "ExpertPolicy": "mixtures→moe_layers container→lookup_module",
    "BoundaryActivation": "sinks→consumers at_door→at_module_input strand→logical_dim fixed→is_batch_independent returns→needs_grad",
    "Stage": "receives→boundary_activations skips→skipped_modules also→tied_parameters",
    "SyncPolicy": "nodes→ranks_per_node",
    "BalancePolicy": "states→state_fractions",
    "Plan": "across→tensor_y owners→expert places→rank_devices seats→device_order",
    "Route": "sent→min_sent_bytes",
    "Action": "likely→expected_bytes group→group_size waits→depends_on cheap→skips_expensive blocks→is_blocking",
    "Schedule": "ranks→program_of_rank",
    "WindowOp": "made→output_sizes backward→needs_grad",
    "SpatialNorm": "numbers→num_statistics fixed→is_batch_independent backward→needs_grad",
    "SpatialGather": "final_in→skipped_in_recompute",
    "SpatialPolicy": "doors→inputs slides→window_ops cut→sharded_modules fates→layer_notes",
    "ShardedDim": "cuts→parameter_shards",
    "SizeRewrite": "rank→num_sizes number→original_size strand→logical_dim",
    "SequenceLayout": "strand→logical_dim mixed→has_outer_dims",
    "DropoutSite": "along→sequence_layout",
    "CollectiveSite": (
        "fixed→is_batch_independent strand→logical_dim final_in→skipped_in_recompute feeds→linear_layers numbers→num_statistics "
        "across→other_axis_dim along→sequence_layout trained→needs_grad"
    ),
    "TensorPolicy": (
        "strands→sharded_dims enters→copy_sites sums→reduce_sites gathers→gather_sites lookups→embedding_sites norms→norm_sites "
        "deals→sequence_scatter_sites collects→sequence_gather_sites masks→dropout_sites partial→partial_grad_parameters rewrites→size_rewrites "
        "whole→unsharded_reasons"
    ),
}
VERSION_1_KEYS: Mapping[str, Mapping[str, str]] = {
    kind: dict(pair.split("→") for pair in pairs.split())  # type: ignore[misc]
    for kind, pairs in _RENAMED.items()
}
