"""Buffers that differ between data ranks, such as BatchNorm's running statistics, are averaged before they are used or saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    for different in map(list, map(dict.values, _differing_buffers(applied))):
        mean = torch.cat([b.reshape(-1) for b in different]).mul_(weight)
        comm.all_reduce(mean, "buffers").wait()
        for buffer, part in zip(different, mean.split([b.numel() for b in different]), strict=True):
            buffer.copy_(part.view_as(buffer))


@torch.no_grad()
def own_buffers(applied: AppliedPlan) -> dict[str, Tensor]:
    """Copies of the buffers that `average_buffers` would change now, by name. Collective."""
    return {name: buffer.clone() for different in _differing_buffers(applied) for name, buffer in different.items()}


@torch.no_grad()
def set_buffers(applied: AppliedPlan, values: Mapping[str, Tensor]) -> None:
    buffers = dict(applied.model.named_buffers())
    for name, value in values.items():
        buffers[name].copy_(value)


def _differing_buffers(applied: AppliedPlan) -> Iterator[dict[str, Tensor]]:
    """For each dtype that has some, the floating-point buffers that differ between data ranks, by name. Collective."""
    comm = applied.groups.data
    by_dtype: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, buffer in applied.model.named_buffers() if comm.size > 1 else ():
        if buffer.is_floating_point() and buffer.numel():
            by_dtype.setdefault(buffer.dtype, {})[name] = buffer
    for buffers in by_dtype.values():
        values = torch.cat([b.reshape(-1) for b in buffers.values()])
        extremes = torch.cat([values, -values])
        comm.all_reduce(extremes, "buffers/extremes", "max").wait()
        sizes = [b.numel() for b in buffers.values()]
        spans = zip(buffers.items(), *(part.split(sizes) for part in extremes.chunk(2)), strict=True)
        if different := {name: buffer for (name, buffer), largest, least in spans if not torch.equal(largest, -least)}:
            yield different
