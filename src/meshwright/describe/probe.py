"""Micro-benchmarks one rank while all ranks work at once: takes a Comm and returns Rates."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from meshwright.core.calibration import Rates, SizeCurve, monotone_rates
from meshwright.core.comm import Comm
from meshwright.describe.collective_probe import collective_curves, fit_alpha_beta, in_layer_overhead, measure_overlap, measure_oversubscription
from meshwright.describe.compute_probe import (
    compute_rates,
    convolution_rates,
    grad_hook_seconds,
    memory_bandwidth,
    op_overhead_seconds,
    optimizer_rates,
    recompute_seconds,
    split_backward_seconds,
)
from meshwright.describe.stopwatch import Stopwatch

_ALLOCATOR_RELEASE_S = 0.15  # torch's own allocator on some CPUs (mimalloc) releases memory that has been free for 0.1 s, at the next allocation


def measure_rates(
    comm: Comm,
    device: torch.device,
    *,
    backend: str,
    threads: int,
    read_memory: Callable[[], int],
    log_progress: Callable[[str], None],
    quick: bool = True,
    mixed_devices: bool = False,
    pair_comm: Comm | None = None,
) -> Rates:
    """All rates of this rank; `read_memory` returns the memory it holds. Every rank calls this at the same time; collectives keep them in step.
    With `mixed_devices` all ranks use the CPU's message sizes. `pair_comm` connects every rank with one other."""
    sizes, kind = ("cpu", device.type) if mixed_devices else (device.type, "")
    watch = Stopwatch(device, 0.04 if quick else 0.4, threads)
    comm.barrier()
    log_progress("arithmetic")
    measured = compute_rates(device, watch)
    fixed: dict[str, float] = {}
    if device.type == "cpu":
        conv_rates, fixed = convolution_rates(Stopwatch(device, watch.budget_s / 4, threads))
        measured |= conv_rates
    compute = {name: monotone_rates(points) if name.startswith(("matmul/", "attention")) else points for name, points in measured.items()}
    comm.barrier()
    log_progress("memory bandwidth")
    call_s = op_overhead_seconds(device, watch)
    memory = memory_bandwidth(device, watch)
    if device.type == "cpu":
        compute["optimizer/fp32"], optimizer_s = optimizer_rates(watch)
        fixed |= optimizer_s | recompute_seconds(watch) | {"hook": grad_hook_seconds(watch), "split_backward": split_backward_seconds(watch)}
    per_core = measure_oversubscription(comm, watch)
    curves: dict[str, SizeCurve] = {}
    busy: dict[str, SizeCurve] = {}
    overlap = 0.0
    if comm.size > 1:
        log_progress("collectives")
        curves, busy = collective_curves(comm, pair_comm, device, backend, sizes)
        overhead_s = in_layer_overhead(comm) if sizes == "cpu" else 0.0  # a collective, so on all ranks or none: in a mixed job some have a GPU
        fixed |= {"tp_sync": overhead_s} if device.type == "cpu" else {}
        overlap = measure_overlap(comm, device, sizes)
    lines = {name: fit_alpha_beta(list(points)) for name, points in curves.items()}
    comm.barrier()
    host = _host_offload_rates(device) if device.type == "cuda" else {}
    log_progress("framework")
    base = _baseline_memory(device, read_memory)
    async_dispatch = device.type == "cuda"
    return Rates(
        comm.size,
        threads,
        compute,
        memory,
        call_s,
        lines,
        overlap,
        base,
        kind,
        async_dispatch,
        host,
        curves,
        oversubscription=per_core,
        fixed=fixed,
        core_busy_curves=busy,
    )


def slowest_rates(all_rates: list[Rates]) -> Rates:
    """The rates that bound a step: at each point the slowest rank's figure."""
    first = all_rates[0]
    if len(all_rates) == 1:
        return first

    def min_points(points: list[SizeCurve]) -> SizeCurve:
        return tuple((column[0][0], min(rate for _, rate in column)) for column in zip(*points, strict=False))

    keys = set.intersection(*(set(r.compute) for r in all_rates))
    # Ranks leave a collective together: a late rank waited less, so the mean is the time beyond the mean rank's arrival.
    curves = {name: _mean_points([r.curves[name] for r in all_rates]) for name in first.curves}
    lines = {name: fit_alpha_beta(list(points)) for name, points in curves.items()}
    return Rates(
        first.ranks,
        first.threads,
        {key: min_points([r.compute[key] for r in all_rates]) for key in sorted(keys)},
        min_points([r.memory for r in all_rates]),
        max(r.op_overhead_s for r in all_rates),
        lines,
        min(r.overlap for r in all_rates),
        max(r.base_bytes for r in all_rates),
        first.device,
        first.async_dispatch,
        {key: min(r.host.get(key, 0.0) for r in all_rates) for key in first.host},
        curves,
        oversubscription=statistics.harmonic_mean([r.oversubscription for r in all_rates]),  # the ranks' combined share of the cores
        fixed={key: max(r.fixed[key] for r in all_rates) for key in first.fixed},
        core_busy_curves={
            name: _mean_points([r.core_busy_curves[name] for r in all_rates])
            for name in first.core_busy_curves
            if all(name in r.core_busy_curves for r in all_rates)
        },
    )


def _mean_points(curves: list[SizeCurve]) -> SizeCurve:
    return tuple((column[0][0], statistics.fmean(seconds for _, seconds in column)) for column in zip(*curves, strict=True))


def host_copy_rates(device: torch.device) -> Mapping[str, float]:
    """Bytes per second between pinned host memory and the device; empty on a CPU."""
    if device.type != "cuda":
        return {}
    size = 2**28
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    watch = Stopwatch(device, 0.2)
    return {"host_to_device": size / watch(lambda: on_device.copy_(host)), "device_to_host": size / watch(lambda: host.copy_(on_device))}


def _host_offload_rates(device: torch.device) -> dict[str, float]:
    """Rates of an optimizer in host memory, while all ranks do the same: the link in each direction, and the optimizer's own pass."""
    elements = 2**24
    on_device = torch.zeros(elements, device=device)
    host = torch.nn.Parameter(torch.zeros(elements, pin_memory=True))
    host.grad = torch.ones_like(host)
    optimizer = torch.optim.AdamW([host], fused=True)
    watch = Stopwatch(device, 0.1)
    link = watch(lambda: (on_device.copy_(host.detach(), non_blocking=True), host.grad.copy_(on_device, non_blocking=True)))  # type: ignore[union-attr]
    step = watch(optimizer.step)
    return {"link": 2 * 4 * elements / link, "step": 7 * 4 * elements / step}


def _baseline_memory(device: torch.device, read_memory: Callable[[], int]) -> int:
    """Memory after one use of everything a step uses: libraries load their parts on first use, and keep them."""
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for _ in range(2):
        F.cross_entropy(layer(torch.randn(2, 8, 32, device=device)).flatten(0, 1), torch.zeros(16, dtype=torch.long, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    del layer, optimizer
    gc.collect()
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):  # glibc keeps freed memory until it is asked to release it
            ctypes.CDLL(None).malloc_trim(0)
        time.sleep(_ALLOCATOR_RELEASE_S)
        torch.empty(2**23)
    return read_memory()
