"""The closed form: one training step of a transformer on a machine that may not exist, without a model to trace or a schedule to run.

In: dimensions (`Transformer`), how it is spread (`Spread`), the machine (`Machine`), constants. Out: seconds by part. Blocks are the same kernels
that a traced model has and are priced by the same roofline (`ComputeCost`); what is closed is the rest: pipelines, collectives, what hides what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from meshwright.core.calibration import Points, Rates
from meshwright.core.cluster import Device
from meshwright.core.model import LayerProfile
from meshwright.cost.compute import ComputeCost
from meshwright.cost.constants import Constants
from meshwright.cost.spread import Machine, Spread
from meshwright.cost.traffic import Traffic
from meshwright.cost.transformer import Cut, Transformer, block, head

ADAM_BYTES = 30.0  # a parameter, in one fused pass: fp32 copy and two states read and written, gradient read, low copy written
CURVE = tuple(10.0 ** (6 + i / 4) for i in range(41))  # sizes of products, in FLOPs, at which their rate is laid down


@dataclass(frozen=True)
class Step:
    """Seconds of one step by part. `bubble` is what stages wait for each other; `communication` is what nothing hides."""

    compute: float
    communication: float
    bubble: float
    optimizer: float
    overhead: float

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.bubble + self.optimizer + self.overhead


def step(model: Transformer, spread: Spread, machine: Machine, constants: Constants) -> Step:
    """Predict one step: a pipeline of stages, the last with the head, then gradients, then the optimizer."""
    price = ComputeCost(rates(machine.device, constants), spread.precision, spread.fused, frozenset({"block"}), constants.casts)
    traffic = Traffic(model, spread, machine, constants)
    cut = spread.cut(constants.unfused)
    forward, backward, sent = _block(model, spread, constants, price, cut, traffic)
    layers = spread.layers_by_stage(model.layers)
    busy = [n * (forward + backward) for n in layers]
    busy[-1] += _head(model, price, cut)
    handed = 2 * traffic.between_stages() * spread.chunks
    slowest, count = max(range(spread.pp), key=lambda s: busy[s] + layers[s] * sent), spread.micro_batches
    waiting = layers[slowest] * sent + handed
    others = sum(busy) - busy[slowest] + (model.layers - layers[slowest]) * sent + (spread.pp - 1) * (handed + constants.micro_s)
    replicas = traffic.replicas(layers[slowest] * forward, layers[slowest] * backward)
    slower = 1.0 + constants.jitter * math.log2(max(spread.world / machine.per_node, 1.0))
    return Step(
        compute=count * busy[slowest] * slower,
        communication=(count * waiting + replicas) * slower,
        bubble=others / spread.chunks * slower,
        optimizer=_optimizer(model, spread, machine.device, constants),
        overhead=constants.step_s + count * constants.micro_s,
    )


@lru_cache(maxsize=256)
def _rates(peaks: tuple[tuple[str, float], ...], bandwidth: float, constants: Constants) -> Rates:
    known = dict(peaks)
    compute: dict[str, Points] = {}
    for precision in ("bf16", "fp16", "fp8"):
        peak = known.get(precision) or known.get("bf16") or known.get("fp16") or max(known.values())
        share = constants.matmul * (constants.fp8 if precision == "fp8" and "fp8" in known else 1.0)
        compute[f"matmul/{precision}"] = curve(peak, share, constants.matmul_half_s, constants.matmul_power)
        compute[f"attention/{precision}"] = ((1.0, peak * constants.attention),)
    return Rates(1, 1, compute, ((1.0, bandwidth * constants.memory),), constants.kernel_s, queued=True)


def rates(device: Device, constants: Constants) -> Rates:
    """A data sheet and the constants as the rates that a probe would have measured."""
    return _rates(tuple(sorted(device.peak_flops.items())), device.memory_bandwidth, constants)


def curve(peak: float, share: float, half_s: float, power: float) -> Points:
    """Small products fill a device badly: the share of the peak rises with a product's size."""
    return tuple((size, peak * share / (1 + (half_s * peak / size) ** power)) for size in CURVE)


def _block(model: Transformer, spread: Spread, constants: Constants, price: ComputeCost, cut: Cut, traffic: Traffic) -> tuple[float, float, float]:
    """One micro-batch through one block: seconds forward, backward with what is recomputed, and sent."""
    profile, inside = block(model, cut), traffic.block()
    forward, backward = (_waiting_for_host(profile, phase, price, constants, inside, traffic.calls()) for phase in ("forward", "backward"))
    if spread.recompute == "full":
        return forward, backward + spread.recomputed * forward, (2 + spread.recomputed) * inside
    if spread.recompute == "attention" and not spread.flash:
        backward += spread.recomputed * _core(profile, price)
    return forward, backward, 2 * inside


def _waiting_for_host(profile: LayerProfile, phase: str, price: ComputeCost, constants: Constants, inside: float, collectives: int) -> float:
    """Computation of the device, stretched where it and the traffic inside the block end before the host has started everything."""
    calls = sum(k.count for k in profile.kernels if k.phase == phase) + collectives
    return max(price.layer(profile, phase, {}), calls * constants.host_s - inside)


def _core(profile: LayerProfile, price: ComputeCost) -> float:
    """Forward of what is between q, k, v and the projection where it is written out: two products over pairs and the passes between them."""
    kernels = tuple(k for k in profile.kernels if k.phase == "forward")[1:3]
    return price.layer(LayerProfile("core", "core", 0, 0.0, 0.0, 0.0, 0.0, kernels=kernels), "forward", {})


def _head(model: Transformer, price: ComputeCost, cut: Cut) -> float:
    profile = head(model, cut)
    return price.layer(profile, "forward", {}) + price.layer(profile, "backward", {})


def _optimizer(model: Transformer, spread: Spread, device: Device, constants: Constants) -> float:
    if spread.frozen:
        return 0.0
    shared, owned = max(spread.parameters_by_stage(model)), max(spread.experts_by_stage(model))
    own = shared / min(spread.shard, spread.replicas) + owned / min(spread.shard, spread.owners) if spread.zero else shared + owned
    return own * ADAM_BYTES * constants.optimizer / (device.memory_bandwidth * constants.memory)
