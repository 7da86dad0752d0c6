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

ADAM_BYTES_PER_PARAMETER = 30.0  # bytes moved by one fused pass: fp32 copy and two states read and written, gradient read, 16-bit copy written
CURVE_FLOPS = tuple(10.0 ** (6 + i / 4) for i in range(41))  # FLOPs of one matmul at which the rate curve is sampled


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
    price = ComputeCost(rates_from_datasheet(cluster.device, constants), parallel.precision, parallel.fused, frozenset({"block"}), constants.casts)
    traffic = TransformerCommunication(model, parallel, cluster, constants)
    cut = parallel.rank_shard(constants.unfused)
    forward, backward, sent = _block_seconds(model, parallel, constants, price, cut, traffic)
    layers = parallel.layers_by_stage(model.layers)
    busy = [n * (forward + backward) for n in layers]
    busy[-1] += _head_seconds(model, price, cut)
    handed = 2 * traffic.p2p_seconds() * parallel.virtual_stages
    slowest, count = max(range(parallel.pp), key=lambda s: busy[s] + layers[s] * sent), parallel.micro_batches
    waiting = layers[slowest] * sent + handed
    others = sum(busy) - busy[slowest] + (model.layers - layers[slowest]) * sent + (parallel.pp - 1) * (handed + constants.micro_s)
    replicas = traffic.data_parallel_seconds(layers[slowest] * forward, layers[slowest] * backward)
    slower = 1.0 + constants.jitter * math.log2(max(parallel.world / cluster.per_node, 1.0))
    return StepTime(
        compute=count * busy[slowest] * slower,
        communication=(count * waiting + replicas) * slower,
        bubble=others / parallel.virtual_stages * slower,
        optimizer=_optimizer_seconds(model, parallel, cluster.device, constants),
        overhead=constants.step_s + count * constants.micro_s,
    )


@lru_cache(maxsize=256)
def _cached_rates(peaks: tuple[tuple[str, float], ...], bandwidth: float, constants: CostConstants) -> Rates:
    known = dict(peaks)
    compute: dict[str, SizeCurve] = {}
    for precision in ("bf16", "fp16", "fp8"):
        peak = known.get(precision) or known.get("bf16") or known.get("fp16") or max(known.values())
        share = constants.matmul * (constants.fp8 if precision == "fp8" and "fp8" in known else 1.0)
        compute[f"matmul/{precision}"] = matmul_rate_curve(peak, share, constants.matmul_half_s, constants.matmul_power)
        compute[f"attention/{precision}"] = ((1.0, peak * constants.attention),)
    return Rates(1, 1, compute, ((1.0, bandwidth * constants.memory),), constants.kernel_s, async_dispatch=True)


def rates_from_datasheet(device: Device, constants: CostConstants) -> Rates:
    """The rates that a probe would measure, derived from a device's data sheet and the fitted constants."""
    return _cached_rates(tuple(sorted(device.peak_flops.items())), device.memory_bandwidth, constants)


def matmul_rate_curve(peak: float, efficiency: float, half_s: float, power: float) -> SizeCurve:
    """Matmul rate by size: the reached share of the peak rises with the matmul's FLOPs, because small ones underutilise the device."""
    return tuple((size, peak * efficiency / (1 + (half_s * peak / size) ** power)) for size in CURVE_FLOPS)


def _block_seconds(
    model: TransformerConfig,
    parallel: ParallelConfig,
    constants: CostConstants,
    compute_cost: ComputeCost,
    shard: TransformerShard,
    communication: TransformerCommunication,
) -> tuple[float, float, float]:
    """Seconds of one micro-batch through one block: forward, backward with recomputation, and communication."""
    profile, inside = block_profile(model, shard), communication.block_seconds()
    forward, backward = (
        _launch_bound_seconds(profile, phase, compute_cost, constants, inside, communication.calls_per_block()) for phase in ("forward", "backward")
    )
    if parallel.recompute == "full":
        return forward, backward + parallel.recomputed_share * forward, (2 + parallel.recomputed_share) * inside
    if parallel.recompute == "attention" and not parallel.flash_attention:
        backward += parallel.recomputed_share * _attention_core_seconds(profile, compute_cost)
    return forward, backward, 2 * inside


def _launch_bound_seconds(
    profile: LayerProfile, phase: str, compute_cost: ComputeCost, constants: CostConstants, communication_s: float, collectives: int
) -> float:
    """Device compute time of one phase, or the host's launch time where the device and the block's communication would finish before all kernels
    are launched."""
    calls = sum(k.count for k in profile.kernels if k.phase == phase) + collectives
    return max(compute_cost.layer_seconds(profile, phase, {}), calls * constants.host_s - communication_s)


def _attention_core_seconds(profile: LayerProfile, compute_cost: ComputeCost) -> float:
    """Forward seconds of unfused attention between the q, k, v and output projections: two matmuls over all pairs of positions and the passes
    between."""
    kernels = tuple(k for k in profile.kernels if k.phase == "forward")[1:3]
    return compute_cost.layer_seconds(LayerProfile("core", "core", 0, 0.0, 0.0, 0.0, 0.0, kernels=kernels), "forward", {})


def _head_seconds(model: TransformerConfig, compute_cost: ComputeCost, shard: TransformerShard) -> float:
    profile = head_profile(model, shard)
    return compute_cost.layer_seconds(profile, "forward", {}) + compute_cost.layer_seconds(profile, "backward", {})


def _optimizer_seconds(model: TransformerConfig, parallel: ParallelConfig, device: Device, constants: CostConstants) -> float:
    if parallel.frozen:
        return 0.0
    shared, owned = max(parallel.parameters_by_stage(model)), max(parallel.experts_by_stage(model))
    own = shared / min(parallel.shard, parallel.replicas) + owned / min(parallel.shard, parallel.expert_replicas) if parallel.zero else shared + owned
    return own * ADAM_BYTES_PER_PARAMETER * constants.optimizer / (device.memory_bandwidth * constants.memory)
