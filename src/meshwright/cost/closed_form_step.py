"""The closed form: predicts one training step of a transformer on a hypothetical cluster, without a model to trace or a schedule to run.

In: dimensions (`TransformerConfig`), parallel degrees (`ParallelConfig`), the machine (`UniformCluster`), constants. Out: seconds by part.
A block consists of the same kernels as a traced model's and is priced by the same roofline (`ComputeCost`); only pipelines, collectives and overlap
have closed-form formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from meshwright.core.calibration import Rates, SizeCurve
from meshwright.core.cluster import Device
from meshwright.core.model import LayerProfile
from meshwright.cost.closed_form_comm import TransformerCommunication
from meshwright.cost.compute_cost import ComputeCost
from meshwright.cost.constants import CostConstants
from meshwright.cost.parallel_config import ParallelConfig, UniformCluster
from meshwright.cost.transformer_kernels import TransformerConfig, TransformerShard, block_profile, head_profile

_ADAM_BYTES_PER_PARAMETER = 30.0  # bytes moved by one fused pass: fp32 copy and two states read and written, gradient read, 16-bit copy written
_CURVE_FLOPS = tuple(10.0 ** (6 + i / 4) for i in range(41))  # FLOPs of one matmul at which the rate curve is sampled


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by part. `bubble` is the time stages wait for each other; `communication` is the exposed part."""

    compute: float
    communication: float
    bubble: float
    optimizer: float
    overhead: float

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.bubble + self.optimizer + self.overhead


def closed_form_step(model: TransformerConfig, parallel: ParallelConfig, cluster: UniformCluster, constants: CostConstants) -> StepTime:
    """Predict one step: a pipeline of stages, the last with the head, then the gradient reduction, then the optimizer."""
    compute = ComputeCost(rates_from_datasheet(cluster.device, constants), parallel.precision, parallel.fused, frozenset({"block"}), constants.casts)
    communication = TransformerCommunication(model, parallel, cluster, constants)
    shard, micro_batches = parallel.rank_shard(constants.unfused), parallel.micro_batches
    forward, backward, block_comm = _block_seconds(model, constants, compute, shard, communication)
    layers = parallel.layers_by_stage(model.layers)
    stage_compute = [n * (forward + backward) for n in layers]
    stage_compute[-1] += sum(compute.layer_seconds(head_profile(model, shard), phase, {}) for phase in ("forward", "backward"))
    p2p = 2 * communication.p2p_seconds() * parallel.virtual_stages
    slowest = max(range(parallel.pp), key=lambda stage: stage_compute[stage] + layers[stage] * block_comm)
    other_layers = model.layers - layers[slowest]
    bubble = sum(stage_compute) - stage_compute[slowest] + other_layers * block_comm + (parallel.pp - 1) * (p2p + constants.micro_s)
    data_parallel = communication.data_parallel_seconds(layers[slowest] * forward, layers[slowest] * backward)
    slowdown = 1.0 + constants.jitter * math.log2(max(parallel.world / cluster.per_node, 1.0))
    return StepTime(
        compute=micro_batches * stage_compute[slowest] * slowdown,
        communication=(micro_batches * (layers[slowest] * block_comm + p2p) + data_parallel) * slowdown,
        bubble=bubble / parallel.virtual_stages * slowdown,
        optimizer=_optimizer_seconds(model, parallel, cluster.device, constants),
        overhead=constants.step_s + micro_batches * constants.micro_s,
    )


@lru_cache(maxsize=256)
def _cached_rates(peak_flops: tuple[tuple[str, float], ...], bandwidth: float, constants: CostConstants) -> Rates:
    peaks = dict(peak_flops)
    compute: dict[str, SizeCurve] = {}
    for precision in ("bf16", "fp16", "fp8"):
        peak = peaks.get(precision) or peaks.get("bf16") or peaks.get("fp16") or max(peaks.values())
        share = constants.matmul * (constants.fp8 if precision == "fp8" and "fp8" in peaks else 1.0)
        compute[f"matmul/{precision}"] = matmul_rate_curve(peak, share, constants.matmul_half_s, constants.matmul_power)
        compute[f"attention/{precision}"] = ((1.0, peak * constants.attention),)
    return Rates(1, 1, compute, ((1.0, bandwidth * constants.memory),), constants.kernel_s, async_dispatch=True)


def rates_from_datasheet(device: Device, constants: CostConstants) -> Rates:
    """The rates that a probe would measure, derived from a device's data sheet and the fitted constants."""
    return _cached_rates(tuple(sorted(device.peak_flops.items())), device.memory_bandwidth, constants)


def matmul_rate_curve(peak: float, efficiency: float, half_s: float, power: float) -> SizeCurve:
    """Matmul rate by size: the reached share of the peak rises with the matmul's FLOPs, because small ones underutilise the device."""
    return tuple((size, peak * efficiency / (1 + (half_s * peak / size) ** power)) for size in _CURVE_FLOPS)


def _block_seconds(
    model: TransformerConfig, constants: CostConstants, compute: ComputeCost, shard: TransformerShard, communication: TransformerCommunication
) -> tuple[float, float, float]:
    """Seconds of one micro-batch through one block: forward, backward with recomputation, and communication."""
    profile, parallel, block_comm = block_profile(model, shard), communication.parallel, communication.block_seconds()

    def phase_seconds(phase: str) -> float:
        """The device's compute time, or the host's launch time where device and communication would finish before all kernels are launched."""
        calls = sum(k.count for k in profile.kernels if k.phase == phase) + communication.calls_per_block()
        return max(compute.layer_seconds(profile, phase, {}), calls * constants.host_s - block_comm)

    forward, backward = phase_seconds("forward"), phase_seconds("backward")
    if parallel.recompute == "full":
        return forward, backward + parallel.recomputed_share * forward, (2 + parallel.recomputed_share) * block_comm
    if parallel.recompute == "attention" and not parallel.flash_attention:
        backward += parallel.recomputed_share * _attention_core_seconds(profile, compute)
    return forward, backward, 2 * block_comm


def _attention_core_seconds(profile: LayerProfile, compute: ComputeCost) -> float:
    """Forward seconds of unfused attention between its projections: two matmuls over all pairs of positions and the passes between."""
    kernels = tuple(k for k in profile.kernels if k.phase == "forward")[1:3]
    return compute.layer_seconds(LayerProfile("core", "core", 0, 0.0, 0.0, 0.0, 0.0, kernels=kernels), "forward", {})


def _optimizer_seconds(model: TransformerConfig, parallel: ParallelConfig, device: Device, constants: CostConstants) -> float:
    if parallel.frozen:
        return 0.0
    dense, experts = max(parallel.parameters_by_stage(model)), max(parallel.experts_by_stage(model))
    if parallel.zero:
        dense, experts = dense / min(parallel.shard, parallel.replicas), experts / min(parallel.shard, parallel.expert_replicas)
    return (dense + experts) * _ADAM_BYTES_PER_PARAMETER * constants.optimizer / (device.memory_bandwidth * constants.memory)
