"""Sequence parallelism in a schedule: the collectives of tensor-parallel ranks that shard positions (see [Note: sequence] in
core/tensor_policy.py)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.schedule import Action
from meshwright.core.tensor_policy import CollectiveSite, TensorPolicy
from meshwright.schedule.spatial_actions import ModuleAction


def sequence_collectives(policy: TensorPolicy, num_parts: int, axis: str, samples: int) -> Iterator[ModuleAction]:
    """The collectives of one tensor-parallel axis. Backends move equal pieces, so positions that do not divide are padded. A collective at a
    module's input or output is not repeated when that module itself is recomputed."""
    sizes = {logical_dim.name: logical_dim for logical_dim in policy.sharded_dims}

    def moved(kind: str, op: str, meet: CollectiveSite) -> Action:
        assert meet.sequence_layout is not None
        logical_dim, size = sizes[meet.sequence_layout.logical_dim], meet.bytes_for(samples)
        padded = size / logical_dim.size * logical_dim.shard_range(0, num_parts)[1] * num_parts
        return Action(f"{kind}/{meet.module}", op, bytes=round(padded), padding=round(padded - size), axis=axis)  # type: ignore[arg-type]

    for meet in (m for m in policy.reduce_sites if m.sequence_layout):
        yield ModuleAction(meet.module, "forward", moved("tp_output", "reduce_scatter", meet), meet.skipped_in_recompute)
        yield ModuleAction(meet.module, "backward", moved("tp_output", "all_gather", meet))
    for meet in (m for m in policy.copy_sites if m.sequence_layout):
        yield ModuleAction(meet.module, "forward", moved("tp_input", "all_gather", meet), (meet.module,))
        yield ModuleAction(meet.module, "backward", moved("tp_input", "reduce_scatter", meet))
    for meet in policy.sequence_gather_sites:
        yield ModuleAction(meet.module, "forward", moved("seq_gather", "all_gather", meet), (meet.module,))
    for meet in (m for m in policy.sequence_scatter_sites if m.needs_grad):
        yield ModuleAction(meet.module, "backward", moved("seq_scatter", "all_gather", meet))
