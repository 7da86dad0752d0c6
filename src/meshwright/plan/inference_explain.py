"""Explains a ranking of plans for inference: what was chosen, what a token's time goes into, what the memory holds, what would change the choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.core.inference import InferenceEstimate
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes, show_seconds
from meshwright.cost.inference_cost import estimate_inference
from meshwright.plan.inference_planner import InferenceRanking, ScoredInferencePlan

_NAMES = {"weights": "reading weights", "cache": "reading keys and values", "compute": "computing", "communication": "communication"}
_OBJECTIVES = {"latency": "the time of one answer", "throughput": "tokens/s", "batch": "answers at once"}
_MOST_REFUSALS = 3
_MOST_DOUBLINGS = 20


def explain_inference(ranking: InferenceRanking) -> str:
    """A few sentences, one a line; where nothing fits, one line that says what would help."""
    best = ranking.best
    if not best.estimate.fits:
        return _explain_lack_of_memory(ranking)
    lines = [_describe_choice(ranking), _describe_time(best.estimate), _describe_memory(ranking)]
    if len(ranking.scored) > 1:
        lines.append(_describe_second(ranking, ranking.scored[1]))
    lines += [*_what_ifs(ranking), *(f"Not possible: {reason}." for reason in ranking.refused[:_MOST_REFUSALS])]
    return "\n".join([*lines, _describe_error(best.estimate)])


def describe_plan(plan: Plan) -> str:
    """The plan and its replicas, in a few words."""
    replicas = plan.serve.replicas
    return plan.summary() + f", {replicas} replicas" * (replicas > 1)


def _describe_choice(ranking: InferenceRanking) -> str:
    estimate, load = ranking.best.estimate, ranking.load
    return (
        f"Chosen: {describe_plan(ranking.best.plan)}, for {_OBJECTIVES[load.objective]}: a prompt of {load.prompt_tokens:,} tokens takes "
        f"{show_seconds(estimate.prefill_s)}, then a token comes every {show_seconds(estimate.decode_s)} with {load.batch} answers at once (± "
        f"{estimate.error:.0%}); {estimate.tokens_per_s:,.0f} tokens/s, prompts included."
    )


def _describe_time(estimate: InferenceEstimate) -> str:
    parts = sorted(estimate.breakdown.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{_NAMES[name]} {seconds / estimate.decode_s:.0%}" for name, seconds in parts if seconds > 0.005 * estimate.decode_s)
    bound = {
        "weights": "memory bandwidth: a larger batch costs little more",
        "cache": "memory bandwidth: shorter contexts would help",
        "compute": "arithmetic and the launch of operations",
        "communication": "the links between ranks: fewer ranks a replica would help",
    }[parts[0][0]]
    return f"A token's time: {shares}. It is bound by {bound}."


def _describe_memory(ranking: InferenceRanking) -> str:
    estimate, load = ranking.best.estimate, ranking.load
    kinds = ", ".join(f"{name} {show_bytes(size)}" for name, size in sorted(estimate.memory_kinds.items(), key=lambda item: -item[1]) if size)
    largest = show_bytes(max(estimate.memory_bytes))
    cache = f" ({show_bytes(estimate.kv_token_bytes)} a token)" if estimate.kv_token_bytes else ""
    return f"Memory: {largest} a device: {kinds}{cache}. Up to {estimate.max_batch:,} answers of {load.context:,} tokens would fit."


def _describe_second(ranking: InferenceRanking, second: ScoredInferencePlan) -> str:
    if not second.estimate.fits:
        return f"Second: {describe_plan(second.plan)}, which does not fit: it {second.estimate.reason}."
    return (
        f"Second: {describe_plan(second.plan)}: {second.cost / ranking.best.cost:.2f} times the cost ({show_seconds(second.estimate.prefill_s)} a "
        f"prompt, {show_seconds(second.estimate.decode_s)} a token, {second.estimate.tokens_per_s:,.0f} tokens/s)."
    )


def _what_ifs(ranking: InferenceRanking) -> Iterator[str]:
    load, best = ranking.load, ranking.best
    for batch in (2 * load.batch, max(load.batch // 4, 1)):
        if batch == load.batch:
            continue
        sequences = -(-batch // best.plan.serve.replicas)
        plan = replace(best.plan, serve=replace(best.plan.serve, sequences=sequences))
        other = estimate_inference(plan, ranking.model, load.with_batch(batch), ranking.cluster, ranking.calibration)
        if other.fits:
            yield f"With batch={batch}: a token every {show_seconds(other.decode_s)}, {other.tokens_per_s:,.0f} tokens/s."


def _describe_error(estimate: InferenceEstimate) -> str:
    basis = f" ({estimate.notes[0]})" if estimate.notes else ""
    return f"Predicted times are ± {estimate.error:.0%}{basis}."


def _explain_lack_of_memory(ranking: InferenceRanking) -> str:
    """What needs least, and what would make it fit."""
    least = min(ranking.scored, key=lambda scored: max(scored.estimate.memory_bytes))
    estimate, load = least.estimate, ranking.load
    advice = []
    if estimate.max_batch:
        advice.append(f"--set batch={estimate.max_batch}")
    context = load.context
    for _ in range(_MOST_DOUBLINGS):
        context //= 2
        if context <= load.prompt_tokens:
            break
        if _fits(ranking, least.plan, context):
            advice.append(f"--set context={context}")
            break
    if ranking.model.prompt.tensors and ranking.model.prompt.tensors[0].itemsize > 2:
        advice.append("--set precision=bf16")
    advice.append("more devices")
    kinds = ", ".join(f"{name} {show_bytes(size)}" for name, size in estimate.memory_kinds.items() if size)
    return f"nothing fits: {describe_plan(least.plan)} {estimate.reason} ({kinds}): use {' or '.join(advice)}"


def _fits(ranking: InferenceRanking, plan: Plan, context: int) -> bool:
    load = replace(ranking.load, context=context)
    plan = replace(plan, serve=replace(plan.serve, context=context))
    return estimate_inference(plan, ranking.model, load, ranking.cluster, ranking.calibration).fits
