"""The training job that a plan is made for: global batch, precision, optimizer and the objective to optimize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
Objective = Literal["time", "throughput", "memory", "money", "energy"]
# The dtype of activations, and of unsharded parameters under ZeRO-3: fp8 is for the matmuls of linear layers only, everything else is bf16.
LOW_PRECISION_DTYPES: dict[str, str] = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
ITEM_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
# State elements that an optimizer keeps for each parameter element.
OPTIMIZER_STATES: dict[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class Workload:
    """One training job, as the planner sees it."""

    global_batch: int
    kind: Literal["train", "serve"] = "train"
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    objective: Objective = "time"
    price: float = 0.0  # per device and hour
    watts: float = 0.0  # power of one device
