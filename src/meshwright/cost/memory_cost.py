"""Peak bytes of a rank, by kind, from a plan and a profile. The formulas follow what `execute` allocates, not what a paper counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.core.calibration import Rates
from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.workload import OPTIMIZER_STATES
from meshwright.cost.compression_cost import compression_bytes
from meshwright.cost.sync_memory import SyncMemory, sync_memory
from meshwright.schedule.buckets import Bucket, shard_size
from meshwright.schedule.step_actions import MeshCoordinate, gradient_buckets, pipeline_sends, unit_buffers

_CPU_RNG_STATE_BYTES = 5056  # size of torch's CPU generator state, which every recomputed unit saves
EXACT_KINDS = ("parameters", "gradients", "optimizer", "batch")  # kinds that follow from sizes alone; measured runs correct the others


def model_state_bytes(plan: Plan, profile: ModelProfile, optimizer: str, shard: int = 0) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on a rank's device after backward, padding included: ZeRO's arithmetic for these storage
    types. `shard` is the rank's coordinate along that axis, which matters where the plan shards unevenly."""
    found = _all_model_states(plan, profile, optimizer, shard)
    return found if plan.memory.offload == "none" else {**found, "optimizer": 0}


def offloaded_bytes(plan: Plan, profile: ModelProfile, optimizer: str, shard: int = 0) -> int:
    """Bytes a rank holds in host memory instead: optimizer states, and copies of the parameters it steps and of their gradients."""
    if plan.memory.offload == "none":
        return 0
    held = _all_model_states(plan, profile, optimizer, shard)
    stepped = held["optimizer"] // OPTIMIZER_STATES[optimizer] if OPTIMIZER_STATES[optimizer] else held["gradients"]
    return held["optimizer"] + 2 * stepped


def _all_model_states(plan: Plan, profile: ModelProfile, optimizer: str, shard: int) -> dict[str, int]:
    whole = sum(t.bytes for t in profile.tensors)
    trained = sum(t.bytes for t in profile.tensors if t.trainable)
    states = OPTIMIZER_STATES[optimizer]
    if plan.mesh.group_size("data") == 1:
        return {"parameters": whole, "gradients": trained, "optimizer": states * trained}
    if plan.memory.zero == 3:
        buffers = [buffer for found in unit_buffers(plan, profile).values() for buffer in found]
        pieces = [(_shard_numel(plan, b.layout, shard) * b.itemsize, b.trainable) for b in buffers]
        piece = sum(size for size, trainable in pieces if trainable)
        return {"parameters": sum(size for size, _ in pieces), "gradients": piece, "optimizer": states * piece}
    buckets = gradient_buckets(plan, profile)
    flat = sum(b.bytes for b in buckets)
    if plan.memory.zero == 0:
        return {"parameters": whole, "gradients": flat, "optimizer": states * trained}
    piece = sum(_shard_numel(plan, b, shard) * b.itemsize for b in buckets)
    return {"parameters": flat + whole - trained, "gradients": flat if plan.memory.zero == 1 else piece, "optimizer": states * piece}


def _shard_numel(plan: Plan, bucket: Bucket, shard: int) -> int:
    return shard_size(bucket, plan.mesh.shard, plan.balance.state_fractions, shard)


def peak_bytes(
    plan: Plan, profile: ModelProfile, optimizer: str, rates: Rates, in_flight: Sequence[Mapping[str, int]] = ({},), shard: int = 0, pp_rank: int = 0
) -> dict[str, int]:
    """The largest rank's peak by kind; `profile` is at the largest micro-batch. For a pipeline, `in_flight` says how many micro-batches each layer
    holds, at the moments that may need most; `shard` is the rank's coordinate along that axis."""
    held = model_state_bytes(plan, profile, optimizer, shard)
    moments = []
    for counts, first in (turn for under_way in in_flight for turn in _backward_passes(plan, under_way)):
        beside, own = sync_memory(plan, profile, first), first and plan.mesh.group_size("data") == 1
        moment = peak_live_memory(plan, profile, counts, beside, own)
        moments.append(moment if own else replace(moment, gradients=moment.gradients + held["gradients"] - beside.allocated_gradients))
    fullest = max(moments, key=lambda moment: moment.bytes)
    crossing, received = _stage_boundary_bytes(plan, profile, pp_rank, max(max(counts.values(), default=1) for counts in in_flight))
    kinds = {
        "parameters": held["parameters"],
        "optimizer": held["optimizer"],
        "activations": int(fullest.activations + crossing) + max(_rng_state_bytes(plan, profile, counts) for counts in in_flight),
        "batch": int(profile.sample_bytes * plan.max_share),
        "workspace": int(fullest.workspace),
        "communication": int(fullest.communication + received) + compression_bytes(plan, held["gradients"]),
        "framework": rates.base_bytes,
        "gradients": int(fullest.gradients),
    }
    return {kind: size if kind in EXACT_KINDS else int(size * rates.memory_correction) for kind, size in kinds.items()}


def _rng_state_bytes(plan: Plan, profile: ModelProfile, counts: Mapping[str, int]) -> int:
    """RNG states that recomputed units save, per micro-batch in flight. 0 on a GPU: its state is a few bytes, held on the host."""
    if plan.device != "cpu":
        return 0
    return _CPU_RNG_STATE_BYTES * sum(counts.get(layer.name, 1) for layer in profile.layers if plan.memory.recompute_mode(layer.name) != "none")


def _stage_boundary_bytes(plan: Plan, profile: ModelProfile, pp_rank: int, in_flight: int) -> tuple[float, float]:
    """(sent, received) bytes of boundary activations and gradients on a pipeline rank: a sent activation is kept until its backward; there is one
    receive buffer per micro-batch, and the layers of micro-batches in flight already count theirs as saved."""
    if plan.mesh.pp == 1 or not plan.stages:
        return 0.0, 0.0
    same, equal = plan.partition_key
    on, back = profile.memo.get_or_compute(
        "crossing", same, (*equal, pp_rank), lambda: [_sent_boundary_bytes(plan, profile, pp_rank, p) for p in ("forward", "backward")]
    )
    return float(in_flight * on), float(plan.micro_batches * on + max(plan.micro_batches - in_flight, 0) * back)


def _sent_boundary_bytes(plan: Plan, profile: ModelProfile, pp_rank: int, phase: str) -> int:
    return sum(action.bytes for action in pipeline_sends(plan, profile, MeshCoordinate(pp=pp_rank), phase, 0))


@dataclass(frozen=True)
class LiveMemory:
    """Live bytes beside parameters and optimizer states."""

    activations: float
    workspace: float
    gradients: float = 0.0  # gradients accumulated so far in this backward, where each step allocates them anew
    communication: float = 0.0

    @property
    def bytes(self) -> float:
        return self.activations + self.workspace + self.gradients + self.communication


def peak_live_memory(
    plan: Plan, profile: ModelProfile, in_flight: Mapping[str, int] | None = None, sync: SyncMemory | None = None, fresh_gradients: bool | None = None
) -> LiveMemory:
    """The moment in forward and backward at which most bytes are live.

    While a layer runs, live are: what the earlier layers saved for backward, everything the layer needs itself (recomputation restores that for
    one unit at a time), its workspace and, in backward, the gradients of later layers and the buffers in flight. When it ends, complete buckets
    are sent. Other micro-batches in flight keep their saved activations: `in_flight` counts them by layer, including the running one.
    `fresh_gradients`: this backward allocates the gradients (see `_backward_passes`)."""
    fresh_gradients = _gradients_are_transient(plan) if fresh_gradients is None else fresh_gradients
    kept = [saved_activation_bytes(plan, layer, plan.memory.recompute_mode(layer.name)) for layer in profile.layers]
    counts = [(in_flight or {}).get(layer.name, 1) for layer in profile.layers]
    before = sum(max(count - 1, 0) * keeps for count, (keeps, _) in zip(counts, kept, strict=True))
    sync, none = sync or SyncMemory(), (0.0,) * len(profile.layers)
    fresh, working, leaving = sync.new_gradients or (*none, 0.0), sync.during_layer or none, sync.after_layer or none
    later = float(sum(t.bytes for t in profile.tensors if t.trainable)) if fresh_gradients else 0.0
    fullest = (0.0, 0.0, later + sync.allocated_gradients, sync.end)  # the end of backward, or the optimizer step
    most, given, fused = sum(fullest), 0.0, plan.compile == "model"
    for at, (layer, (keeps, back), count) in enumerate(zip(profile.layers, kept, counts, strict=True)):
        if before + fresh[at] + leaving[at] > most:
            fullest = (before, 0.0, fresh[at], leaving[at])
            most = before + fresh[at] + leaving[at]
        later -= sum(t.bytes for t in layer.tensors if t.trainable) if fresh_gradients else 0.0
        # Fused code needs the largest matmul's operands, or the gradients it receives and produces; the received ones reuse the memory of saved
        # tensors.
        workspace = max(layer.matmul_workspace_bytes, layer.output_bytes + max(given - keeps, 0.0)) if fused else layer.transient_bytes
        total = before + keeps + back + workspace + later + fresh[at + 1] + working[at]
        if total > most:
            fullest, most = (before + keeps + back, workspace, later + fresh[at + 1], working[at]), total
        before, given = before + (keeps if count else 0.0), layer.output_bytes
    return LiveMemory(*fullest)


def _gradients_are_transient(plan: Plan) -> bool:
    """Whether gradients are allocated as activations are freed: with one data-parallel rank and one micro-batch. Later micro-batches, and buckets
    of several ranks, find them allocated."""
    return plan.mesh.group_size("data") == 1 and plan.micro_batches == 1


def _backward_passes(plan: Plan, counts: Mapping[str, int]) -> list[tuple[Mapping[str, int], bool]]:
    """(micro-batches in flight by layer, whether backward allocates gradients) of the passes to consider. If all micro-batches are in flight
    before the first backward, that backward allocates the gradients; the next finds them allocated and one micro-batch less. Buckets are allocated
    from the start, except under ZeRO-2."""
    if plan.micro_batches == 1:
        return [(counts, True)]
    buckets = plan.mesh.group_size("data") > 1 and plan.memory.zero != 2
    if buckets or min(counts.values(), default=0) < plan.micro_batches:
        return [(counts, False)]
    return [(counts, True), ({name: count - 1 for name, count in counts.items()}, False)]


def saved_activation_bytes(plan: Plan, layer: LayerProfile, mode: str) -> tuple[float, float]:
    """Bytes a layer saves for backward per micro-batch, and bytes that recomputation restores."""
    compiled = plan.compile == "model" or (plan.compile == "blocks" and layer.name in plan.memory.units)
    remade = layer.compiler_recomputed_bytes if compiled else 0.0
    saved = layer.activation_bytes - remade
    if mode == "none":
        return saved, 0.0
    kept = layer.output_bytes + (layer.expensive_output_bytes if mode == "selective" else 0.0)  # a repeated block's input is as large as its output
    return kept, saved if mode == "full" else max(layer.fusible_bytes - remade, 0.0)
