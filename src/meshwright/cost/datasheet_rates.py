"""Rates from data sheets, for devices that were not measured: GPUs by constants fitted to published runs, CPUs by a rule of thumb.

[Note: links on data sheets]
The share of a link's bandwidth that collectives reach is stated with the link (`Link.efficiency`, fitted to NCCL tables in the catalog), so the
fitted shares of links (`CostConstants.intra`, `inter`) are not applied again here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime

from meshwright.core.calibration import Calibration, Rates, SizeCurve, monotone_rates
from meshwright.core.cluster import Cluster, Device
from meshwright.cost.closed_form_step import matmul_rate_curve, rates_from_datasheet
from meshwright.cost.constants import FITTED_ARCHITECTURES, NEWEST_GENERATION, device_architecture, load_fitted_constants

# For a device whose architecture has no fit (a CPU): (FLOPs of a matmul, share of the peak it reaches) and (bytes of a pass, share of the bandwidth).
# Small calls are bound by their launch; the figures are rounded.
_COMPUTE_SHARE = ((1e7, 0.02), (1e8, 0.10), (1e9, 0.30), (1e10, 0.50), (1e11, 0.62), (1e12, 0.70))
_BANDWIDTH_SHARE = ((1e5, 0.10), (1e6, 0.35), (1e7, 0.65), (1e8, 0.80))
_UNKNOWN_FLOPS, _UNKNOWN_BANDWIDTH = 2e10, 1e10  # for a device without a data sheet: one core
_CALL_S = 5e-6
_OVERLAP = 0.8
_BASE_BYTES = 300_000_000  # an interpreter with torch
_DEFAULT_ERROR = 0.4  # relative, one sigma, where nothing was fitted
_TRACED_LAUNCH_SHARE = 0.5  # launch time of a traced kernel over that of a closed-form kernel: a traced block has twice as many
_SIGMA_PER_MEAN_ERROR = 1.25  # one sigma over the mean absolute error of a normal distribution
_PLAN_ERROR = 0.12  # relative error of plans of traced models with the framework's own constants, on 33 published runs (bench/planned.py)
_UNSEEN_DEVICE_ERROR = 0.2  # added for an architecture without a published run


def datasheet_calibration(cluster: Cluster, generation: str = NEWEST_GENERATION) -> Calibration:
    """The calibration of a cluster from data sheets: the slowest device's rates, which bound the step, and each kind of device's by name."""
    devices = [device for node in cluster.distinct_nodes for device in node.devices]
    layouts = [device_rates(_slowest_device(devices), generation)]
    names = dict.fromkeys(device.name for device in devices)
    if len(names) > 1:
        layouts += [replace(device_rates(_slowest_device([d for d in devices if d.name == name]), generation), device=name) for name in names]
    error, basis = _error_estimate(devices)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Calibration(cluster.name, " and ".join(names), when, tuple(layouts), source="data sheets", error=error, basis=basis)


def device_rates(device: Device, generation: str = NEWEST_GENERATION) -> Rates:
    if device.kind != "cuda" or not device.peak_flops or not device.memory_bandwidth:
        return _rule_of_thumb_rates(device)
    constants = load_fitted_constants().constants(device_architecture(device.name), generation)
    rates = rates_from_datasheet(device, constants)
    shapes = (constants.matmul, constants.matmul_half_s, constants.matmul_power)
    others = {f"matmul/{p}": matmul_rate_curve(peak, *shapes) for p, peak in device.peak_flops.items() if f"matmul/{p}" not in rates.compute}
    overlap = 1.0 - min(constants.exposed_dp, 1.0)
    compute = {name: monotone_rates(points) for name, points in {**rates.compute, **others}.items()}
    fixed = {"host": _TRACED_LAUNCH_SHARE * constants.host_s}
    return replace(rates, threads=0, compute=compute, overlap=overlap, base_bytes=int(constants.base_bytes), fixed=fixed)


def _rule_of_thumb_rates(device: Device) -> Rates:
    peaks = device.peak_flops or {"fp32": _UNKNOWN_FLOPS}
    compute: dict[str, SizeCurve] = {f"matmul/{p}": tuple((size, share * peak) for size, share in _COMPUTE_SHARE) for p, peak in peaks.items()}
    memory = tuple((size, share * (device.memory_bandwidth or _UNKNOWN_BANDWIDTH)) for size, share in _BANDWIDTH_SHARE)
    return Rates(1, 0, compute, memory, _CALL_S, overlap=_OVERLAP, base_bytes=_BASE_BYTES, async_dispatch=device.kind == "cuda")


def _error_estimate(devices: list[Device]) -> tuple[float, str]:
    """One sigma and its basis: the constants' error on held-out runs, the error of plans, and an addition for devices without published runs."""
    if any(d.kind != "cuda" or not d.peak_flops for d in devices):
        return _DEFAULT_ERROR, "data sheets and a rule of thumb"
    errors = load_fitted_constants().errors
    error = errors.get(NEWEST_GENERATION, errors[""])
    unseen = sorted({d.name for d in devices if device_architecture(d.name) not in FITTED_ARCHITECTURES})
    sigma = math.hypot(_SIGMA_PER_MEAN_ERROR * error, _PLAN_ERROR, _UNSEEN_DEVICE_ERROR if unseen else 0.0)
    basis = f"data sheets and constants fitted to published runs: their mean error on held-out runs is {error:.0%}, that of plans is larger"
    return sigma, basis + (f"; no published run used {unseen[0]}" if unseen else "")


def _slowest_device(devices: list[Device]) -> Device:
    """A synthetic device with the minimum of every figure that all of them have."""
    shared = set.intersection(*(set(device.peak_flops) for device in devices))
    peaks = {p: min(device.peak_flops[p] for device in devices) for p in devices[0].peak_flops if p in shared}
    slowest = min(devices, key=lambda d: max(d.peak_flops.values(), default=0.0))
    return Device(slowest.kind, slowest.name, 0, 0, peaks, min(device.memory_bandwidth for device in devices))
