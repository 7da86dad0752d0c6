"""Prices a plan for inference: a prompt, which is bound by arithmetic, and a step of next tokens, which is bound by reading weights and keys and
values.

Both are forward passes of the same schedule that training has, so they are priced by the same rates. Pipeline stages compute one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from meshwright.core.calibration import Calibration, Rates, interpolate
from meshwright.core.cluster import Cluster
from meshwright.core.inference import InferenceEstimate, InferenceLoad, InferenceModel, KVLayer
from meshwright.core.model import LOSS_LAYER, ModelProfile, TensorSpec
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes
from meshwright.core.schedule import Action
from meshwright.core.serve_policy import MAX_SEQUENCES
from meshwright.core.workload import ITEM_BYTES
from meshwright.cost.collective_cost import collective_seconds, p2p_seconds
from meshwright.cost.compute_cost import ComputeCost
from meshwright.cost.rank_classes import find_rank_classes, memory_capacity
from meshwright.cost.step_cost import HEADROOM
from meshwright.schedule import MeshCoordinate, build_program, local_profile

STEP_TOKENS = {"cpu": 256, "cuda": 4096}  # of prompts that one step computes at most
_STEP_MESSAGE_BYTES = 4096  # what the first rank tells the others before a step
_LOGIT_PASSES = 4  # over the logits: to sample a token from them
_COMPILED_LAUNCH_S = 0.0  # a captured graph is launched as a whole


def estimate_inference(plan: Plan, model: InferenceModel, load: InferenceLoad, cluster: Cluster, calibration: Calibration) -> InferenceEstimate:
    """Predict a plan whose mesh is one replica's; `plan.serve` says how many replicas there are and what each has room for."""
    rank_class = find_rank_classes(plan, cluster, calibration)[0]
    rates = _graph_rates(calibration.rates_for(plan.world, rank_class.rates_label), plan)
    batch = plan.serve.sequences
    compute, item = ComputeCost(rates, plan.memory.precision, plan.compile != "none"), ITEM_BYTES[plan.memory.precision]
    few_rows = replace(compute, has_few_rows=True, weight_bytes=1 / item if plan.serve.quantize != "none" else 1.0)
    prefill = _forward_seconds(plan, _prompt_profile(model), 1, cluster, compute)
    decode = _forward_seconds(plan, model.token, batch, cluster, few_rows)
    cache_s = _cache_seconds(plan, model, batch * load.mean_context, rates)
    sample_s = _sample_seconds(model, batch, rates)
    decode_s = decode.seconds + cache_s + sample_s
    memory = [_rank_memory(plan, model, load, rates, pp_rank) for pp_rank in range(plan.mesh.pp)]
    largest = max(memory, key=lambda m: m.total)
    usable = int(memory_capacity(cluster, plan, rank_class) * HEADROOM)
    capacity = min(_fitting(m, usable, load.context) for m in memory)
    fits = all(m.total <= usable for m in memory)
    answers_s = batch * prefill.seconds + load.answer_tokens * decode_s
    weights_s = min(sum(m.parameters for m in memory) / interpolate(rates.memory, largest.parameters), decode.compute)
    return InferenceEstimate(
        prefill_s=prefill.seconds,
        decode_s=decode_s,
        tokens_per_s=plan.serve.replicas * batch * load.answer_tokens / answers_s if answers_s else 0.0,
        breakdown={
            "weights": weights_s, "cache": cache_s, "compute": decode.compute - weights_s + sample_s, "communication": decode.communication,
        },
        memory_bytes=tuple(memory[plan.mesh.coordinate(rank, "pp")].total for rank in range(plan.world)),
        memory_kinds=largest.kinds,
        max_batch=plan.serve.replicas * capacity,
        fits=fits,
        reason=f"needs {show_bytes(largest.total)} a device, and {show_bytes(usable)} can be used",
        error=calibration.error,
        kv_token_bytes=max(m.token_bytes for m in memory),
        notes=(calibration.basis,) if calibration.basis else (),
    )  # fmt: skip


@dataclass(frozen=True)
class _Forward:
    """Seconds of one forward pass through all stages."""

    compute: float
    communication: float

    @property
    def seconds(self) -> float:
        return self.compute + self.communication


def _graph_rates(rates: Rates, plan: Plan) -> Rates:
    """The rates without the launch of each kernel, where a step is captured as one graph."""
    if plan.compile != "model" or plan.device != "cuda":
        return rates
    return replace(rates, op_overhead_s=_COMPILED_LAUNCH_S, fixed={**rates.fixed, "host": _COMPILED_LAUNCH_S})


def _prompt_profile(model: InferenceModel) -> ModelProfile:
    """The prompt's profile, but for the layers after the last block: they compute the last token alone."""
    blocks = [i for i, layer in enumerate(model.prompt.layers) if layer.block]
    first = blocks[-1] + 1 if blocks else len(model.prompt.layers)
    token = model.token.at_batch(model.prompt.batch)
    layers = (*model.prompt.layers[:first], *token.layers[first:])
    slopes = (*model.prompt.per_sample_layers[:first], *token.per_sample_layers[first:])
    return replace(model.prompt, layers=layers, per_sample_layers=slopes)


def _forward_seconds(plan: Plan, profile: ModelProfile, batch: int, cluster: Cluster, cost: ComputeCost) -> _Forward:
    profile, rates, compute, communication = profile.at_batch(batch), cost.rates, 0.0, 0.0
    if plan.world > 1:
        message = Action("serve/step", "all_reduce", bytes=_STEP_MESSAGE_BYTES, axis="world")
        communication += collective_seconds(message, plan, cluster, rates)
    for pp_rank in range(plan.mesh.pp):
        local = local_profile(plan, profile, 0, pp_rank)
        memo = cost.memo(local)
        program = build_program(plan, profile, MeshCoordinate(pp=pp_rank), micro_batches=1)
        for action in takewhile(lambda a: a.op not in ("backward", "optimizer"), program):
            if action.op == "forward" and local.layers[action.layer].name != LOSS_LAYER:
                compute += rates.oversubscription * cost.layer_seconds(local.layers[action.layer], "forward", memo)
            elif action.op == "send":
                communication += p2p_seconds(action, plan, cluster, rates, pp_rank, pp_rank + 1)
            elif action.is_collective and action.axis != "world":
                communication += collective_seconds(action, plan, cluster, rates)
    return _Forward(compute, communication)


def _stage_kv_layers(plan: Plan, model: InferenceModel, pp_rank: int) -> Sequence[KVLayer]:
    """The attention layers of a stage: the model's in order, as blocks are."""
    if plan.mesh.pp == 1 or not plan.stages:
        return model.kv_layers
    block_names = [layer.name for layer in model.prompt.layers if layer.block]
    per_block = len(model.kv_layers) / max(len(block_names), 1)
    mine = {name for index, stage in enumerate(plan.stages) if plan.stage_rank(index) == pp_rank for name in stage.layers}
    held = [i for i, name in enumerate(block_names) if name in mine]
    first, last = (int(held[0] * per_block), int((held[-1] + 1) * per_block)) if held else (0, 0)
    return model.kv_layers[first:last]


def kv_token_bytes(plan: Plan, model: InferenceModel, pp_rank: int = 0) -> int:
    """Bytes of keys and values that one token takes on a rank of a stage."""
    item = ITEM_BYTES[plan.memory.precision]
    return sum(layer.elements(plan.mesh.degree("tp")) for layer in _stage_kv_layers(plan, model, pp_rank)) * item


def _cache_seconds(plan: Plan, model: InferenceModel, tokens: int, rates: Rates) -> float:
    """Seconds to read the keys and values of `tokens` tokens, stage after stage."""
    total = sum(kv_token_bytes(plan, model, pp_rank) for pp_rank in range(plan.mesh.pp)) * tokens
    layers = max(len(model.kv_layers), 1)
    return total / interpolate(rates.memory, max(total / layers, 1.0)) * rates.oversubscription if total else 0.0


def _sample_seconds(model: InferenceModel, batch: int, rates: Rates) -> float:
    """Seconds to choose a token from each row of logits."""
    size = _logit_bytes(model) * batch
    return _LOGIT_PASSES * size / interpolate(rates.memory, max(size, 1.0)) if size else 0.0


def _logit_bytes(model: InferenceModel) -> float:
    """Of one token, in float32."""
    outputs = [layer.output_bytes for layer in model.token.at_batch(1).layers if layer.name != LOSS_LAYER and layer.output_bytes]
    return outputs[-1] * 4 / max(_item_bytes(model.token), 1) if outputs else 0.0


def _item_bytes(profile: ModelProfile) -> int:
    return next((t.itemsize for t in profile.tensors), 4)


@dataclass(frozen=True)
class _RankMemory:
    kinds: dict[str, int]
    token_bytes: int

    @property
    def parameters(self) -> int:
        return self.kinds["parameters"]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def _rank_memory(plan: Plan, model: InferenceModel, load: InferenceLoad, rates: Rates, pp_rank: int) -> _RankMemory:
    local = local_profile(plan, model.prompt.at_batch(1), 0, pp_rank)
    tokens = min(STEP_TOKENS[plan.device], load.context * plan.serve.sequences)
    live = max((layer.activation_bytes + layer.output_bytes for layer in local.layers if layer.name != LOSS_LAYER), default=0.0)
    token_bytes = kv_token_bytes(plan, model, pp_rank)
    pages = plan.serve.sequences * -(-load.context // plan.serve.page_tokens)
    logits = _logit_bytes(model) * (_LOGIT_PASSES - 1) * plan.serve.sequences if pp_rank == plan.mesh.pp - 1 else 0.0
    kinds = {
        "parameters": sum(_stored_bytes(t, plan) for t in local.tensors) + sum(b.bytes for b in local.buffers),
        "cache": pages * plan.serve.page_tokens * token_bytes,
        "activations": int(live * tokens / model.prompt_tokens + logits),
        "framework": rates.base_bytes,
    }
    return _RankMemory(kinds, token_bytes)


def _stored_bytes(tensor: TensorSpec, plan: Plan) -> int:
    """Quantization leaves embeddings, which a model looks rows up in, and vectors as they are."""
    quantized = plan.serve.quantize != "none" and len(tensor.shape) == 2 and "embed" not in tensor.name and "wte" not in tensor.name
    return tensor.numel if quantized else tensor.bytes


def _fitting(memory: _RankMemory, usable: int, context: int) -> int:
    """How many answers of `context` tokens a rank has room for."""
    rest = usable - (memory.total - memory.kinds["cache"])
    return min(max(int(rest // max(memory.token_bytes * context, 1)), 0), MAX_SEQUENCES)
