"""BatchNorm over all data ranks in a schedule: the collectives of its statistics."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.plan import Plan
from meshwright.core.schedule import Action
from meshwright.schedule.spatial_actions import ModuleAction


def synced_norm_collectives(plan: Plan) -> Iterator[ModuleAction]:
    """Forward all-gathers mean, variance and count; backward all-reduces two sums of the gradient."""
    ranks, itemsize = plan.mesh.group_size("data"), 8 if plan.memory.precision == "fp64" else 4
    for norm in plan.samples.batch_norms if plan.batch_norm == "sync" and plan.mesh.data_parallel_size > 1 else ():
        name, channels = f"statistics/{norm.module or 'model'}", norm.num_channels
        for _ in range(norm.calls):
            size = (2 * channels + 1) * itemsize * ranks
            yield ModuleAction(norm.module, "forward", Action(name, "all_gather", bytes=size, axis="data"))
            yield ModuleAction(norm.module, "backward", Action(name, "all_reduce", bytes=2 * channels * itemsize, axis="data"))
