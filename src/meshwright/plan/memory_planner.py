"""Memory Manager, deciding half: what each unit saves for backward, and whether the devices support the precision."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.plan import MemoryPolicy, Offload
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.core.workload import Precision
from meshwright.plan.partition import choose_units

RECOMPUTE_MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")  # in the order of rising time and falling memory


def choose_memory(
    profile: ModelProfile, cluster: Cluster, precision: Precision, zero: int, recompute: RecomputeMode, layers: Mapping[str, RecomputeMode],
    offload: Offload,
) -> MemoryPolicy:  # fmt: skip
    """The memory policy; raises a RequestError if these devices or this model do not support it."""
    check_precision(precision, cluster)
    memory = MemoryPolicy(zero, choose_units(profile), recompute, precision, layers, offload)  # type: ignore[arg-type]
    check_selective_recompute(memory, profile)
    return memory


def check_precision(precision: str, cluster: Cluster) -> None:
    """Raise if a device cannot multiply in fp8."""
    unsupported = next((d for d in cluster.devices if not d.fp8), None) if precision == "fp8" else None
    if unsupported is not None:
        raise RequestError(f"precision=fp8 needs GPUs of compute capability 8.9 or newer, and this machine has {unsupported.name}: use bf16")


def check_selective_recompute(memory: MemoryPolicy, profile: ModelProfile) -> None:
    """Raise where selective recomputation would save a tensor that the layer's code then changes in place."""
    for layer in profile.layers:
        if layer.has_inplace_ops and memory.recompute_mode(layer.name) == "selective":
            reason = f"recompute=selective saves the matmul outputs of {layer.name}, whose code changes one in place (like relu_)"
            raise RequestError(f"{reason}: set recompute.{layer.name}=full, or change the code")
