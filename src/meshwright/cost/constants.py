"""Constants of the closed form: what a kind of device and a generation of frameworks reach, fitted to published runs (fitted.json, beside this file).

A value is a common one times a factor of the device kind times a factor of the generation; what was never seen keeps the factor 1.
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
    """For one device kind and one generation of frameworks. Shares are of the data sheet's figure."""

    matmul: float  # share of the peak that large products reach
    matmul_half_s: float  # a product that would take this long at the peak reaches half of that share
    matmul_power: float  # how fast it gets there
    fp8: float  # the same share for products in fp8, over that for bf16
    casts: float  # passes over a product's operands to convert them to fp8
    attention: float  # share of the peak that a flash kernel reaches
    memory: float  # share of the memory bandwidth that element-wise work reaches
    unfused: float  # passes over memory for each that perfectly fused code makes
    kernel_s: float  # the shortest kernel
    host_s: float  # what the host needs to start a kernel, in a block that runs as written
    micro_s: float  # the same for what surrounds a micro-batch
    step_s: float  # for what surrounds a step: data, norms of gradients, logging
    optimizer: float  # passes of the optimizer, for each of one fused kernel
    intra: float  # share of the node's link that a collective reaches
    inter: float  # share of the node's network
    hop_s: float  # a step of a ring among many nodes, for each message
    exposed_tp: float  # share of tensor parallelism's traffic that computation waits for
    exposed_dp: float  # the same for gradients and gathered parameters
    exposed_pp: float  # the same for what stages hand on
    jitter: float  # slowdown with each doubling of the nodes
    grad_bytes: float  # a gradient, on the wire
    held_bytes: float  # of weight and gradient, a parameter, until ZeRO cuts them
    state_bytes: float  # of the optimizer's state, a parameter, fp32 copy included
    kept: float  # activations saved, over the formula's
    buffered: float  # micro-batches that a pipeline's stage holds, over what its schedule needs
    logit_bytes: float  # an element of the logits, with what the loss makes of it
    slack: float  # what the allocator holds, over what is in use
    base_bytes: float  # context, libraries and communication buffers


# How devices' names begin, by kind: what one kind reaches of its data sheet, another of the kind does too.
ARCHITECTURES = (
    ("volta", ("V100", "T4")), ("ampere", ("A100", "A800", "A10", "A40", "GeForce RTX 3", "RTX A")),
    ("hopper", ("H100", "H800", "H20", "H200", "GH200")),
    ("blackwell", ("B200", "B300", "GB200", "GB300")), ("ada", ("L4", "GeForce RTX 4", "RTX 6000")), ("cdna", ("MI",)),
)  # fmt: skip
FITTED_ARCHITECTURES = ("volta", "ampere", "hopper")  # kinds of which there are published runs enough to be held to
NEWEST_GENERATION = (
    "fsdp2"  # the newest generation of frameworks that work as this one does: torch's own kernels, compiled, parameters gathered layer by layer
)


def device_architecture(name: str) -> str:
    """The kind of a device by its name; empty for one of no known kind."""
    return next((kind for kind, starts in ARCHITECTURES if name.startswith(starts)), "")


@dataclass(frozen=True)
class FittedConstants:
    """The file: common values, factors by device kind and by generation, and where they come from."""

    how: str
    when: str
    base: Factors
    devices: Mapping[str, Factors]
    generations: Mapping[str, Factors]
    errors: Mapping[str, float]  # mean relative error of step times on rows that were not fitted, by generation ("" = all)

    def constants(self, architecture: str, generation: str) -> CostConstants:
        kinds = (self.devices.get(architecture, {}), self.generations.get(generation, {}))
        values = {f.name: self.base[f.name] * kinds[0].get(f.name, 1.0) * kinds[1].get(f.name, 1.0) for f in fields(CostConstants)}
        return CostConstants(**values)


@cache
def load_fitted_constants() -> FittedConstants:
    """What this version ships."""
    text = files(__package__).joinpath("fitted.json").read_text(encoding="utf-8")
    return from_data(FittedConstants, json.loads(text), "fitted.json")
