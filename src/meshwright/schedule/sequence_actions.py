"""Sequence parallelism in a schedule: collectives of tensor-parallel ranks that shard positions. [Note: sequence] in core/tensor_policy.py."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.schedule import Action, Op
from meshwright.core.tensor_policy import CollectiveSite, TensorPolicy
from meshwright.schedule.spatial_actions import ModuleAction


def sequence_collectives(policy: TensorPolicy, num_parts: int, axis: str, samples: int) -> Iterator[ModuleAction]:
    """The collectives of one tensor-parallel axis. One at a module's input or output is not repeated when that module itself is recomputed."""
    dims = {logical_dim.name: logical_dim for logical_dim in policy.sharded_dims}

    def action(kind: str, op: Op, site: CollectiveSite) -> Action:
        assert site.sequence_layout is not None
        size = site.bytes_for(samples)
        padded = dims[site.sequence_layout.logical_dim].padded_bytes(size, num_parts)
        return Action(f"{kind}/{site.module}", op, bytes=round(padded), padding=round(padded - size), axis=axis)

    for site in (s for s in policy.reduce_sites if s.sequence_layout):
        yield ModuleAction(site.module, "forward", action("tp_output", "reduce_scatter", site), site.skipped_in_recompute)
        yield ModuleAction(site.module, "backward", action("tp_output", "all_gather", site))
    for site in (s for s in policy.copy_sites if s.sequence_layout):
        yield ModuleAction(site.module, "forward", action("tp_input", "all_gather", site), (site.module,))
        yield ModuleAction(site.module, "backward", action("tp_input", "reduce_scatter", site))
    for site in policy.sequence_gather_sites:
        yield ModuleAction(site.module, "forward", action("seq_gather", "all_gather", site), (site.module,))
    for site in (s for s in policy.sequence_scatter_sites if s.needs_grad):
        yield ModuleAction(site.module, "backward", action("seq_scatter", "all_gather", site))
