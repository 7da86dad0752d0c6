"""Buffers that differ between data ranks, such as BatchNorm's running statistics, are averaged before they are used or saved."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.execute.apply import AppliedPlan


@torch.no_grad()
def average_buffers(applied: AppliedPlan) -> None:
    """Replace floating-point buffers that differ between data ranks by their mean, in which a rank counts by its samples. Others are not written to:
    integers and flags, and tables, which a mean would change by rounding. Collective."""
    comm, plan = applied.groups.data, applied.plan
    if comm.size == 1:
        return
    samples = plan.sample_range(plan.mesh.data_rank(applied.groups.rank))[1]
    weight = samples * plan.mesh.data_parallel_size / (plan.global_batch * comm.size)  # ranks along cp have the same samples
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in applied.model.buffers():
        if buffer.is_floating_point() and buffer.numel():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        values = torch.cat([b.reshape(-1) for b in buffers])
        extremes = torch.cat([values, -values])
        comm.all_reduce(extremes, "buffers/extremes", "max").wait()
        sizes = [b.numel() for b in buffers]
        spans = zip(buffers, *(part.split(sizes) for part in extremes.chunk(2)), strict=True)
        if different := [buffer for buffer, largest, least in spans if not torch.equal(largest, -least)]:
            mean = torch.cat([b.reshape(-1) for b in different]).mul_(weight)
            comm.all_reduce(mean, "buffers").wait()
            for buffer, part in zip(different, mean.split([b.numel() for b in different]), strict=True):
                buffer.copy_(part.view_as(buffer))
