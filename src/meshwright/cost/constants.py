"""Constants of the closed form: the efficiency that a device architecture and a framework generation reach, fitted to published runs (fitted.json).

A value is a common base times a factor of the architecture and one of the generation; a factor is 1 where there are no runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from meshwright.core.serialization import from_data

Factors = Mapping[str, float]


@dataclass(frozen=True)
class CostConstants:
    """Constants of one device architecture and one framework generation. Shares are of the data sheet's figure."""

    matmul: float  # share of the peak that large matmuls reach
    matmul_half_s: float  # a matmul that would take this long at the peak reaches half of that share
    matmul_power: float  # exponent of that saturation curve
    fp8: float  # share of the peak for fp8 matmuls, over that for bf16
    casts: float  # passes over a matmul's operands to convert them to fp8
    attention: float  # share of the peak that a flash-attention kernel reaches
    memory: float  # share of the memory bandwidth that element-wise work reaches
    unfused: float  # memory passes for each that perfectly fused code makes
    kernel_s: float  # seconds of the shortest kernel
    host_s: float  # host seconds to launch a kernel of an eager block
    micro_s: float  # host seconds around a micro-batch
    step_s: float  # seconds around a step: data loading, gradient norms, logging
    optimizer: float  # optimizer passes for each of one fused kernel
    intra: float  # share of the intra-node link's bandwidth that a collective reaches
    inter: float  # share of the node's network bandwidth
    hop_s: float  # seconds per ring step among many nodes, for each message
    exposed_tp: float  # exposed share of tensor-parallel communication
    exposed_dp: float  # exposed share of gradient reductions and parameter all-gathers
    exposed_pp: float  # exposed share of sends between pipeline stages
    jitter: float  # slowdown with each doubling of the nodes
    grad_bytes: float  # bytes of a gradient element on the wire
    held_bytes: float  # bytes of weight and gradient per parameter, before ZeRO shards them
    state_bytes: float  # bytes of optimizer state per parameter, fp32 copy included
    kept: float  # saved activations over the formula's
    buffered: float  # micro-batches that a pipeline stage holds, over what its schedule needs
    logit_bytes: float  # bytes per logit, with the loss's intermediates
    slack: float  # memory the allocator reserves, over what is in use
    base_bytes: float  # CUDA context, libraries and communication buffers


# Device-name prefixes by architecture: devices of one architecture reach the same shares of their data sheets.
_ARCHITECTURES = (
    ("volta", ("V100", "T4")), ("ampere", ("A100", "A800", "A10", "A40", "GeForce RTX 3", "RTX A")),
    ("hopper", ("H100", "H800", "H20", "H200", "GH200")),
    ("blackwell", ("B200", "B300", "GB200", "GB300")), ("ada", ("L4", "GeForce RTX 4", "RTX 6000")), ("cdna", ("MI",)),
)  # fmt: skip
FITTED_ARCHITECTURES = ("volta", "ampere", "hopper")  # architectures with enough published runs for a fit
NEWEST_GENERATION = "fsdp2"  # the newest framework generation: torch's own kernels, compiled, parameters all-gathered layer by layer


def device_architecture(name: str) -> str:
    """The architecture of a device by its name; empty if unknown."""
    return next((kind for kind, starts in _ARCHITECTURES if name.startswith(starts)), "")


@dataclass(frozen=True)
class FittedConstants:
    """The contents of fitted.json: common values, factors by architecture and by framework generation, and their origin."""

    how: str
    when: str
    base: Factors
    devices: Mapping[str, Factors]
    generations: Mapping[str, Factors]
    errors: Mapping[str, float]  # mean relative step-time error on held-out runs, by generation ("" = all)

    def constants(self, architecture: str, generation: str) -> CostConstants:
        device, framework = self.devices.get(architecture, {}), self.generations.get(generation, {})
        return CostConstants(**{f.name: self.base[f.name] * device.get(f.name, 1.0) * framework.get(f.name, 1.0) for f in fields(CostConstants)})


@cache
def load_fitted_constants() -> FittedConstants:
    """The constants that this version ships."""
    text = files(__package__).joinpath("fitted.json").read_text(encoding="utf-8")
    return from_data(FittedConstants, json.loads(text), "fitted.json")
