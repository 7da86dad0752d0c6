"""Peak bytes of a rank, by kind. The formulas follow what `execute` allocates, not what a paper counts."""

from __future__ import annotations

from meshwright.core.calibration import Rates
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.workload import OPTIMIZER_STATES
from meshwright.cost.compression import compression_bytes
from meshwright.schedule.expand import gradient_buckets, unit_buffers

# Of what element-wise work would save, the part that a compiler computes again in backward instead.
# From GPT-2 124M and 1.3B on one H200 (docs/log.md): compiled against eager peak memory.
FUSED_SAVED = 0.5


def held_bytes(plan: Plan, profile: ModelProfile, optimizer: str) -> dict[str, int]:
    """Parameters, gradients and optimizer state a rank holds after backward, padding included: ZeRO's arithmetic for these storage types."""
    whole = sum(t.bytes for t in profile.tensors)
    trained = sum(t.bytes for t in profile.tensors if t.trainable)
    states, shards = OPTIMIZER_STATES[optimizer], plan.mesh.shard
    if plan.mesh.group_size("data") == 1:
        return {"parameters": whole, "gradients": trained, "optimizer": states * trained}
    if plan.memory.zero == 3:
        buffers = [buffer for found in unit_buffers(plan, profile).values() for buffer in found]
        piece = sum(b.bytes for b in buffers if b.trainable) // shards
        return {"parameters": sum(b.bytes for b in buffers) // shards, "gradients": piece, "optimizer": states * piece}
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
    return kinds


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
        buffers = unit_buffers(plan, profile)
        gathered = {name: sum(b.layout.bytes for b in found) for name, found in buffers.items()}
        reduced = {name: sum(b.bytes for b in found if b.trainable) for name, found in buffers.items()}
        # The root and its gradient, and two units and theirs: the next is fetched beside this one, a gradient is filled while another travels.
        return sum(found.pop("root") + 2 * max(found.values(), default=0) for found in (gathered, reduced))
    if plan.memory.zero == 2:
        largest = sorted((b.bytes for b in gradient_buckets(plan, profile)), reverse=True)
        return sum(largest[:2])
    buckets = (b for b in gradient_buckets(plan, profile) if len(b.slots) > 1 or b.padding)
    return max((s.numel * b.itemsize for b in buckets for s in b.slots), default=0)  # a fresh gradient before it is copied into its bucket
