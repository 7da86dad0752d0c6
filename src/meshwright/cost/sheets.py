"""Rates from data sheets, for devices that nobody measured: the peak times an efficiency that grows with the size of the call.

The curves are one default for all devices; whoever has better ones for a kind of device replaces `rates_of`."""

from __future__ import annotations

from datetime import UTC, datetime

from meshwright.core.calibration import Calibration, Points, Rates
from meshwright.core.cluster import Cluster, Device

# Share of the peak that one product of so many FLOPs reaches, and of the bandwidth that one pass over so many bytes does. Large products reach
# 60 to 75% of a tensor core's dense peak on A100 and H100, small ones are bound by their start: the shape is common, the figures are rounded.
_ARITHMETIC = ((1e7, 0.02), (1e8, 0.10), (1e9, 0.30), (1e10, 0.50), (1e11, 0.62), (1e12, 0.70))
_TRAFFIC = ((1e5, 0.10), (1e6, 0.35), (1e7, 0.65), (1e8, 0.80))
_UNKNOWN_FLOPS, _UNKNOWN_BANDWIDTH = 2e10, 1e10  # of a device without a sheet: one core
_CALL_S = 5e-6
_OVERLAP = 0.8
_BASE_BYTES = {"cuda": 1_200_000_000, "cpu": 300_000_000}  # a context and communicators; an interpreter with torch
ERROR = 0.4  # relative, one sigma


def from_sheets(cluster: Cluster) -> Calibration:
    """What the slowest of its devices should reach, for all wait for it."""
    kinds = list({id(node): node for node in cluster.nodes}.values())
    devices = [device for node in kinds for device in node.devices]
    rates = rates_of(_slowest(devices))
    names = " and ".join(dict.fromkeys(device.name for device in devices))
    return Calibration(cluster.name, names, datetime.now(UTC).isoformat(timespec="seconds"), (rates,), source="data sheets", error=ERROR)


def rates_of(device: Device) -> Rates:
    peaks = device.peak_flops or {"fp32": _UNKNOWN_FLOPS}
    compute: dict[str, Points] = {f"matmul/{p}": tuple((size, share * peak) for size, share in _ARITHMETIC) for p, peak in peaks.items()}
    memory = tuple((size, share * (device.memory_bandwidth or _UNKNOWN_BANDWIDTH)) for size, share in _TRAFFIC)
    cuda = device.kind == "cuda"
    return Rates(1, 0, compute, memory, _CALL_S, overlap=_OVERLAP, base_bytes=_BASE_BYTES[device.kind], queued=cuda)


def _slowest(devices: list[Device]) -> Device:
    """A device with the least of every figure that all of them have."""
    shared = set.intersection(*(set(device.peak_flops) for device in devices))
    peaks = {p: min(device.peak_flops[p] for device in devices) for p in devices[0].peak_flops if p in shared}
    return Device(devices[0].kind, "", 0, 0, peaks, min(device.memory_bandwidth for device in devices))
