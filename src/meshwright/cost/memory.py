"""Peak bytes of a rank, by kind. The formulas follow what `execute` allocates, not what a paper counts."""

from __future__ import annotations

from meshwright.core.calibration import Rates
from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.workload import OPTIMIZER_STATES
from meshwright.cost.compression import compression_bytes
from meshwright.schedule.expand import gradient_buckets, unit_bytes

# Of what element-wise work would save, the part that a compiler computes again in backward instead.
# From GPT-2 124M and 1.3B on one H200 (docs/log.md): compiled against eager peak memory.
FUSED_SAVED = 0.5
EXACT = ("parameters", "gradients", "optimizer")  # kinds that follow from sizes alone: runs correct the others


def held_bytes(plan: Plan, profile: ModelProfile, optimizer: str) -> dict[str, int]:
    """Parameters, gradients and optimizer state a rank holds after backward, padding included: ZeRO's arithmetic for these storage types."""
    whole = sum(t.bytes for t in profile.tensors)
    trained = sum(t.bytes for t in profile.tensors if t.trainable)
    states, shards = OPTIMIZER_STATES[optimizer], plan.mesh.shard
    if plan.mesh.group_size("data") == 1:
        return {"parameters": whole, "gradients": trained, "optimizer": states * trained}
    if plan.memory.zero == 3:
        layers = list(profile.layers)
        piece = unit_bytes(layers, shards, trainable=True)[0] // shards
        return {"parameters": unit_bytes(layers, shards)[0] // shards, "gradients": piece, "optimizer": states * piece}
    flat = sum(b.bytes for b in gradient_buckets(plan, profile))
    if plan.memory.zero == 0:
        return {"parameters": whole, "gradients": flat, "optimizer": states * trained}
    piece = flat // shards
    return {"parameters": flat + whole - trained, "gradients": flat if plan.memory.zero == 1 else piece, "optimizer": states * piece}


def peak_bytes(plan: Plan, profile: ModelProfile, optimizer: str, rates: Rates, in_flight: int = 1) -> dict[str, int]:
    """The largest rank's peak by kind; `profile` is at the largest micro-batch."""
    held = held_bytes(plan, profile, optimizer)
    activations = activation_peak(plan, profile) * in_flight
    kinds = {
        "parameters": held["parameters"],
        "optimizer": held["optimizer"],
        "activations": int(activations),
        "workspace": int(max((layer.product_bytes if plan.compile == "model" else layer.transient_bytes for layer in profile.layers), default=0)),
        "communication": _communication(plan, profile) + compression_bytes(plan, held["gradients"]),
        "framework": rates.base_bytes,
    }
    # On one device gradients appear as activations go: the peak holds the larger of the two sweeps.
    kinds["gradients"] = held["gradients"] if plan.mesh.group_size("data") > 1 else max(held["gradients"] - int(activations), 0)
    return {kind: size if kind in EXACT else int(size * rates.held) for kind, size in kinds.items()}


def activation_peak(plan: Plan, profile: ModelProfile) -> float:
    """Bytes saved for backward when the last layer's forward ends, plus one unit's worth that recomputation brings back."""
    units, modes = set(plan.memory.units), plan.memory.modes
    kept = brought_back = 0.0
    for layer in profile.layers:
        compiled = plan.compile == "model" or (plan.compile == "blocks" and layer.name in units)
        fusible = layer.fusible_bytes * (1.0 - FUSED_SAVED if compiled else 1.0)
        saved = layer.activation_bytes - layer.fusible_bytes + fusible
        mode = modes.get(layer.name, "none")
        if mode == "none":
            kept += saved
            continue
        kept += layer.output_bytes  # a block's input is as large as its output in every repeated block
        if mode == "selective":
            kept += layer.dear_bytes
        brought_back = max(brought_back, saved if mode == "full" else fusible)
    return kept + brought_back


def _communication(plan: Plan, profile: ModelProfile) -> int:
    """Buffers that live only while something travels."""
    if plan.mesh.group_size("data") == 1:
        return 0
    if plan.memory.zero == 3:
        units = set(plan.memory.units)
        sizes = [unit_bytes([layer], plan.mesh.shard)[0] for layer in profile.layers if layer.name in units]
        root = unit_bytes(_rest(profile, units), plan.mesh.shard)[0]
        # Gathered: the root and two units (the next is fetched ahead). Going back: one unit's whole gradient and its copy to send.
        return root + 4 * max(sizes, default=0) + (root if not sizes else 0)
    if plan.memory.zero == 2:
        largest = sorted((b.bytes for b in gradient_buckets(plan, profile)), reverse=True)
        return sum(largest[:2])
    return max((t.bytes for t in profile.tensors), default=0)  # a fresh gradient before it is copied into its bucket


def _rest(profile: ModelProfile, units: set[str]) -> list[LayerProfile]:
    return [layer for layer in profile.layers if layer.name not in units]
