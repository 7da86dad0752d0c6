"""Peak bytes of a rank, by kind, from a plan and a profile. The formulas follow what `execute` allocates, not what a paper counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.core.calibration import Rates
from meshwright.core.model import LOSS_LAYER, LayerProfile, ModelProfile
from meshwright.core.plan import Plan, compiles_layer
from meshwright.core.workload import OPTIMIZER_STATES
from meshwright.cost.compression_cost import compression_bytes
from meshwright.cost.sync_memory import SyncMemory, sync_memory
from meshwright.schedule.buckets import Bucket, shard_size
from meshwright.schedule.step_actions import MeshCoordinate, gradient_buckets, pipeline_sends, unit_buffers

_CPU_RNG_STATE_BYTES = 5056  # size of torch's CPU generator state, which every recomputed unit saves
_RECEIVE_BUFFERS = 2  # of one stage: the one in use, and the one that is posted ahead
START_UP = "start-up"  # what giving the model its initial values needs beyond a step's memory, where that is more
EXACT_KINDS = ("parameters", "gradients", "optimizer", "batch")  # kinds that follow from sizes alone; measured runs correct the others


def model_state_bytes(plan: Plan, profile: ModelProfile, optimizer: str, shard: int = 0) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on a rank's device after backward, padding included: ZeRO's arithmetic for these storage
    types. `shard` is the rank's coordinate along that axis, which matters where the plan shards unevenly."""
    states = _all_model_states(plan, profile, optimizer, shard)
    return states if plan.memory.offload == "none" else {**states, "optimizer": 0}


def offloaded_bytes(plan: Plan, profile: ModelProfile, optimizer: str, shard: int = 0) -> int:
    """Bytes a rank holds in host memory instead: optimizer states, and copies of the parameters it steps and of their gradients."""
    if plan.memory.offload == "none":
        return 0
    states = _all_model_states(plan, profile, optimizer, shard)
    stepped = states["optimizer"] // OPTIMIZER_STATES[optimizer] if OPTIMIZER_STATES[optimizer] else states["gradients"]
    return states["optimizer"] + 2 * stepped


def _all_model_states(plan: Plan, profile: ModelProfile, optimizer: str, shard: int) -> dict[str, int]:
    total = sum(t.bytes for t in profile.tensors)
    trained = sum(t.bytes for t in profile.tensors if t.trainable)
    states = OPTIMIZER_STATES[optimizer]

    def shard_bytes(bucket: Bucket, itemsize: int) -> int:
        return shard_size(bucket, plan.mesh.shard, plan.balance.state_fractions, shard) * itemsize

    if plan.mesh.group_size("data") == 1:
        return {"parameters": total, "gradients": trained, "optimizer": states * trained}
    if plan.memory.zero == 3:
        shards = [(shard_bytes(b.layout, b.itemsize), b.trainable) for buffers in unit_buffers(plan, profile).values() for b in buffers]
        gradients = sum(size for size, trainable in shards if trainable)
        return {"parameters": sum(size for size, _ in shards), "gradients": gradients, "optimizer": states * gradients}
    buckets = gradient_buckets(plan, profile)
    bucketed = sum(b.bytes for b in buckets)
    if plan.memory.zero == 0:
        return {"parameters": total, "gradients": bucketed, "optimizer": states * trained}
    sharded = sum(shard_bytes(b, b.itemsize) for b in buckets)
    gradients = bucketed if plan.memory.zero == 1 else sharded
    return {"parameters": bucketed + total - trained, "gradients": gradients, "optimizer": states * sharded}


def peak_bytes(
    plan: Plan, profile: ModelProfile, optimizer: str, rates: Rates, in_flight: Sequence[Mapping[str, int]] = ({},), shard: int = 0, pp_rank: int = 0,
    largest_tensor: int = 0,
) -> dict[str, int]:  # fmt: skip
    """The largest rank's peak by kind; `profile` is its part of the model, at the largest micro-batch, and `largest_tensor` the bytes of the whole
    model's largest. For a pipeline, `in_flight` says how many micro-batches each layer holds, at the moments that may need most; `shard` is the
    rank's coordinate along that axis."""
    states = model_state_bytes(plan, profile, optimizer, shard)
    peaks = []
    for counts, first in (backward for in_flight_counts in in_flight for backward in _backward_passes(plan, in_flight_counts)):
        sync, fresh_gradients = sync_memory(plan, profile, first), first and plan.mesh.group_size("data") == 1
        peak = peak_live_memory(plan, profile, counts, sync, fresh_gradients)
        peaks.append(peak if fresh_gradients else replace(peak, gradients=peak.gradients + states["gradients"] - sync.allocated_gradients))
    peak = max(peaks, key=lambda live: live.bytes)
    sent, received = _stage_boundary_bytes(plan, profile, pp_rank, max(max(counts.values(), default=1) for counts in in_flight))
    kinds = {
        "parameters": states["parameters"],
        "optimizer": states["optimizer"],
        "activations": int(peak.activations + sent) + max(_rng_state_bytes(plan, profile, counts) for counts in in_flight),
        "batch": int(profile.sample_bytes * plan.max_share),
        "workspace": int(peak.workspace),
        "communication": int(peak.communication + received) + compression_bytes(plan, states["gradients"]),
        "framework": rates.base_bytes,
        "gradients": int(peak.gradients),
    }
    needed = {kind: size if kind in EXACT_KINDS else int(size * rates.memory_correction) for kind, size in kinds.items()}
    start_up = start_up_bytes(plan, states, largest_tensor) + needed["framework"] - sum(needed.values())
    return {**needed, START_UP: start_up} if start_up > 0 else needed


def start_up_bytes(plan: Plan, states: Mapping[str, int], largest_tensor: int) -> int:
    """Bytes of a rank that gives its pieces their initial values: the pieces, buckets that exist from the start, and one whole tensor, which is drawn
    on the host. A model that cannot be born in pieces needs more; the run says so."""
    held = states["parameters"] + (states["gradients"] if plan.mesh.group_size("data") > 1 and plan.memory.zero < 2 else 0)
    return held + (largest_tensor if plan.device == "cpu" else 0)


def _rng_state_bytes(plan: Plan, profile: ModelProfile, counts: Mapping[str, int]) -> int:
    """RNG states that recomputed units save, per micro-batch in flight. 0 on a GPU: its state is a few bytes, held on the host."""
    if plan.device != "cpu":
        return 0
    return _CPU_RNG_STATE_BYTES * sum(counts.get(layer.name, 1) for layer in profile.layers if plan.memory.recompute_mode(layer.name) != "none")


def _stage_boundary_bytes(plan: Plan, profile: ModelProfile, pp_rank: int, in_flight: int) -> tuple[float, float]:
    """(sent, received) bytes of boundary activations and gradients on a pipeline rank: a sent activation is kept until its backward. A receive
    buffer exists from the moment its receive is posted until the micro-batch has used it: one is in use and one is posted ahead. The layers of
    micro-batches in flight already count their received activations as saved."""
    if plan.mesh.pp == 1 or not plan.stages:
        return 0.0, 0.0
    same, equal = plan.partition_key

    def sent_bytes() -> list[int]:
        return [sum(a.bytes for a in pipeline_sends(plan, profile, MeshCoordinate(pp=pp_rank), phase, 0)) for phase in ("forward", "backward")]

    forward, backward = profile.memo.get_or_compute("boundary", same, (*equal, pp_rank), sent_bytes)
    gradients, activations = min(plan.micro_batches, _RECEIVE_BUFFERS), min(plan.micro_batches - in_flight, 1)
    return float(in_flight * forward), float(gradients * forward + max(activations, 0) * backward)


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
    if fresh_gradients is None:  # later micro-batches, and buckets of several ranks, find the gradients allocated
        fresh_gradients = plan.mesh.group_size("data") == 1 and plan.micro_batches == 1
    saved_bytes = [saved_activation_bytes(plan, layer, plan.memory.recompute_mode(layer.name)) for layer in profile.layers]
    counts = [(in_flight or {}).get(layer.name, 1) for layer in profile.layers]
    activations = sum(max(count - 1, 0) * saved for count, (saved, _) in zip(counts, saved_bytes, strict=True))
    sync, none = sync or SyncMemory(), (0.0,) * len(profile.layers)
    new_gradients, during, after = sync.new_gradients or (*none, 0.0), sync.during_layer or none, sync.after_layer or none
    gradients = float(sum(t.bytes for t in profile.tensors if t.trainable)) if fresh_gradients else 0.0
    peak = (0.0, 0.0, gradients + sync.allocated_gradients, sync.end)  # the end of backward, or the optimizer step
    peak_bytes, input_bytes = sum(peak), 0.0
    for i, (layer, (saved, restored), count) in enumerate(zip(profile.layers, saved_bytes, counts, strict=True)):
        if activations + new_gradients[i] + after[i] > peak_bytes:
            peak = (activations, 0.0, new_gradients[i], after[i])
            peak_bytes = activations + new_gradients[i] + after[i]
        gradients -= sum(t.bytes for t in layer.tensors if t.trainable) if fresh_gradients else 0.0
        # Fused code needs the largest matmul's operands, or the gradients it receives and produces. In one graph, received ones reuse the memory of
        # saved tensors; a loss that is compiled alone returns its input's gradient beside what it has saved.
        if plan.compile == "model" or (layer.name == LOSS_LAYER and compiles_layer(plan, layer.name)):
            workspace = max(layer.matmul_workspace_bytes, layer.output_bytes + max(input_bytes - (saved if plan.compile == "model" else 0.0), 0.0))
        else:
            workspace = layer.transient_bytes
        total = activations + saved + restored + workspace + gradients + new_gradients[i + 1] + during[i]
        if total > peak_bytes:
            peak, peak_bytes = (activations + saved + restored, workspace, gradients + new_gradients[i + 1], during[i]), total
        activations, input_bytes = activations + (saved if count else 0.0), layer.output_bytes
    return LiveMemory(*peak)


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
    recomputed = layer.compiler_recomputed_bytes if compiles_layer(plan, layer.name) else 0.0
    saved = layer.activation_bytes - recomputed
    if mode == "none":
        return saved, 0.0
    block_input = layer.output_bytes  # a repeated block's input is as large as its output
    if mode == "full":
        return block_input, saved
    return block_input + layer.expensive_output_bytes, max(layer.fusible_bytes - recomputed, 0.0)
