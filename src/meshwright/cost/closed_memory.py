"""The closed form's other half: peak bytes of a transformer's largest rank, by kind, before there is a model to trace."""

from __future__ import annotations

from meshwright.cost.constants import Constants
from meshwright.cost.spread import Spread
from meshwright.cost.transformer import HALF, Transformer, block, head


def peak(model: Transformer, spread: Spread, constants: Constants) -> dict[str, float]:
    """The first or the last stage's, whichever is larger: the first holds most micro-batches, the last the head."""
    stages = {0, spread.pp - 1}
    return max((_stage(model, spread, constants, s) for s in stages), key=lambda kinds: sum(kinds.values()))


def _stage(model: Transformer, spread: Spread, constants: Constants, stage: int) -> dict[str, float]:
    cut = spread.cut()
    kept, once = _activations(model, spread, constants, stage)
    last = stage == spread.pp - 1
    logits = head(model, cut).output_bytes / HALF * constants.logit_bytes if last else 0.0
    in_use = {
        **_states(model, spread, constants, stage),
        "activations": kept,
        # A block that is computed again has given its memory back by the time the head needs it, and the other way round.
        "workspace": max(once, logits),
        "communication": _gathered(model, spread),
    }
    return {**{kind: size * constants.slack for kind, size in in_use.items()}, "framework": constants.base_bytes}


def _states(model: Transformer, spread: Spread, constants: Constants, stage: int) -> dict[str, float]:
    """ZeRO's arithmetic: 1 cuts the optimizer's state, 2 the gradients too, 3 the weights too; experts are cut among those who own the same."""
    held = ((spread.parameters_by_stage(model)[stage], spread.replicas), (spread.experts_by_stage(model)[stage], spread.owners))

    def cut_from(level: int) -> float:
        return sum(weights / (max(min(spread.shard, holders), 1) if spread.zero >= level else 1) for weights, holders in held)

    trained = 0.0 if spread.frozen else 1.0
    return {
        "parameters": cut_from(3) * HALF,
        "gradients": cut_from(2) * trained * (constants.held_bytes - HALF),
        "optimizer": cut_from(1) * trained * constants.state_bytes,
    }


def _activations(model: Transformer, spread: Spread, constants: Constants, stage: int) -> tuple[float, float]:
    """What waits for backward, and what one block brings back when it is computed again."""
    one = block(model, spread.cut())
    whole = one.activation_bytes * constants.kept
    input_only = one.output_bytes
    layers = spread.layers_by_stage(model.layers)[stage] * in_flight(spread, stage) * (constants.buffered if spread.pp > 1 else 1.0)
    if spread.recompute == "full":
        share = spread.recomputed
        return layers * (share * input_only + (1 - share) * whole), whole * min(share * 2, 1.0)
    if spread.recompute == "attention":
        scores = one.transient_bytes
        return layers * (one.activation_bytes - scores) * constants.kept, scores
    return layers * whole, 0.0


def in_flight(spread: Spread, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once. Interleaved chunks hold some more (Korthikanti et al., 2022)."""
    most = float(spread.pp - stage)
    if spread.chunks > 1:
        most += (spread.pp - 1) / spread.chunks
    return min(spread.micro_batches, most)


def _gathered(model: Transformer, spread: Spread) -> float:
    """Under ZeRO-3, two blocks' whole weights and the gradient of one; otherwise nothing that is not counted already."""
    if spread.zero < 3 or spread.replicas == 1:
        return 0.0
    shared = model.attention_parameters + (0.0 if model.experts else model.ffn_parameters)
    owned = model.ffn_parameters * model.experts / spread.ep if spread.owners > 1 else 0.0
    return HALF * (3 * (shared + owned) + model.vocab * model.hidden) / spread.tp
