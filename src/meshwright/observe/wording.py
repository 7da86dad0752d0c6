"""Describes plans, devices and events in plain words, for the live view and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.event import Event
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes
from meshwright.core.spatial_policy import show_grid
from meshwright.observe.formatting import format_bytes, format_number, format_seconds

_ZERO_SENTENCES = {
    1: "Optimizer state is sharded over {n} ranks; parameters and gradients are replicated (ZeRO-1).",
    2: "Gradients and optimizer state are sharded over {n} ranks; parameters are replicated (ZeRO-2).",
    3: "Parameters, gradients and optimizer state are sharded over {n} ranks; parameters are gathered where they are used (ZeRO-3).",
}
_RECOMPUTE_CLAUSES = {
    "none": "activations are saved for backward",
    "selective": "outputs of expensive operations are saved for backward, and the other activations are recomputed",
    "full": "activations are recomputed in backward to save memory",
}


def describe_plan(plan: Plan) -> list[str]:
    """What the plan does, one sentence per choice."""
    sentences = [_describe_ranks(plan)]
    if plan.spatial.grid:
        sentences.append(_describe_spatial(plan))
    if plan.memory.zero:
        sentences.append(_ZERO_SENTENCES[plan.memory.zero].format(n=plan.mesh.shard))
    elif plan.mesh.ep > 1:
        sentences.append("All parameters except experts and expert-parallel tables are replicated, and gradients are averaged at each step.")
    elif plan.mesh.dp > 1:
        sentences.append(f"The model has {plan.mesh.dp} replicas, whose gradients are averaged at each step.")
    if plan.context.attention_sites:
        sentences.append(describe_context_parallel(plan))
    if plan.mesh.ep > 1:
        sentences += _describe_experts(plan)
    if plan.mesh.group_size("data") > 1:
        sentences.append(_describe_sync(plan))
    exceptions = ", ".join(f"{name}: {mode}" for name, mode in plan.memory.layers.items())
    recompute = _RECOMPUTE_CLAUSES[plan.memory.recompute] + (f" (but {exceptions})" if exceptions else "")
    sentences.append(f"Arithmetic is in {plan.memory.precision}; {recompute}.")
    if plan.compile != "none":
        sentences.append(f"{'Repeated blocks are' if plan.compile == 'blocks' else 'The whole model is'} compiled.")
    return sentences


def plan_setting_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """(setting, value, meaning) for every setting of a plan."""
    shares = ", ".join(map(str, plan.balance.shares)) or "equal"
    sync = plan.sync
    rows = [
        ("strategy", plan.strategy, f"on {plan.world} rank{'s' * (plan.world > 1)}"),
        ("mesh", str(plan.mesh), "degree of each axis; an axis left out is 1"),
        ("global batch", str(plan.global_batch), "samples in one optimizer step"),
        ("micro-batches", str(plan.micro_batches), f"at most {plan.max_micro_batch_size} samples in memory at once"),
        ("shares", shares, "samples of a global batch for each data rank"),
        ("zero", str(plan.memory.zero), "sharded over the shard axis: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too"),
        ("recompute", plan.memory.recompute, "activations recomputed in backward"),
        ("precision", plan.memory.precision, "of the arithmetic"),
        ("gradient buckets", show_bytes(sync.bucket_bytes), f"first one {show_bytes(sync.first_bucket_bytes)}"),
        ("overlap", ", ".join(sync.overlap) or "none", "communication that runs while a rank computes"),
        ("compression", sync.compression, "of gradients between data ranks"),
        ("compile", plan.compile, "what torch.compile is applied to"),
        ("device", plan.device, f"communication by {' and '.join(plan.backends)}"),
    ]
    if plan.spatial.grid:
        rows.append(("grid", show_grid(plan.spatial.grid), "ranks over which positions are split, along each spatial dim"))
    rows += [("threads", str(plan.threads), "CPU threads a rank")] if plan.threads else []
    rows += [("stages", str(len(plan.stages)), ", ".join(f"{len(s.layers)} layers" for s in plan.stages))] if plan.stages else []
    rows += [("experts and tables", show_expert_counts(plan), f"on each of {plan.mesh.ep} ep ranks")] if plan.mesh.ep > 1 else []
    rows += [("placements", str(len(plan.placements)), ", ".join(f"{k}: {v}" for k, v in plan.placements.items()))] if plan.placements else []
    return rows


def show_expert_counts(plan: Plan) -> str:
    """'3 + 2 experts, 2 + 2 tables': the number on each ep rank; of several MoE layers the first is shown."""
    layers, tables = plan.expert.moe_layers, Counter(t.ep_rank for t in plan.expert.tables)
    counts = [f"{' + '.join(map(str, layers[0].experts_per_rank))} experts × {len(layers)}"] if layers else []
    counts += [f"{' + '.join(str(tables[rank]) for rank in range(plan.mesh.ep))} tables"] if tables else []
    return ", ".join(counts)


def describe_event(event: Event) -> str:
    """An event's data in one line; of a fault, the first line of its message."""
    data = event.data
    if event.kind == "fault":
        return f"{data.get('kind', '')}: {data.get('message', '')}".strip(": ").partition("\n")[0]
    if event.kind in _WORDINGS and (text := _WORDINGS[event.kind](event.step, data)):
        return text
    return ", ".join(_format_item(key, value) for key, value in data.items())


def _describe_checkpoint(step: int, data: Mapping[str, Any]) -> str:
    if data.get("error"):
        return str(data["error"])
    numbers = [data.get(key) for key in ("bytes", "seconds", "stalled_s")]
    if not all(isinstance(number, (int, float)) for number in numbers):
        return ""
    size, seconds, stalled = numbers
    return f"step {step} saved: {format_bytes(size)} in {format_seconds(seconds)}, training waited {format_seconds(stalled)}"


def _describe_birth(_: int, data: Mapping[str, Any]) -> str:
    return "each rank makes its own pieces" if data.get("sharded") else f"every rank builds the whole model: {data.get('reason', '')}"


def _describe_resumed(step: int, data: Mapping[str, Any]) -> str:
    saved = "from a snapshot in memory" if data.get("source") == "snapshot" else f"saved by {data.get('world', '?')} ranks"
    return f"from step {step}, {saved}" + "".join(f"; {line}" for line in data.get("problems") or ())


def _describe_restart(step: int, data: Mapping[str, Any]) -> str:
    names = {"snapshot": f"step {step}, a snapshot in memory", "checkpoint": f"step {step}, a checkpoint"}
    at = f" at step {data['failed_at']}" if data.get("failed_at") is not None else ""
    return f"after a fault{at}, from {names.get(str(data.get('source')), 'the beginning')}"


def _describe_snapshots(_: int, data: Mapping[str, Any]) -> str:
    return f"{data.get('count', '?')} in memory, training waited {format_seconds(data.get('stalled_s'))} for all of them"


_WORDINGS: dict[str, Callable[[int, Mapping[str, Any]], str]] = {
    "saving": lambda step, _: f"step {step} is being written",
    "checkpoint": _describe_checkpoint,
    "born": _describe_birth,
    "resumed": _describe_resumed,
    "restart": _describe_restart,
    "injected": lambda step, data: f"as --inject {data.get('fault', '?')} asks",
    "skipped": lambda step, data: f"step {step} was left out; {data.get('skipped', '?')} so far",
    "slow": lambda _, data: str(data.get("message", "")),
    "snapshots": _describe_snapshots,
}


def describe_devices(cluster: Cluster, num_used: int | None = None) -> str:
    """'4 × NVIDIA H100 on 2 nodes', of the first `num_used` devices."""
    devices = cluster.devices[:num_used]
    names = Counter(device.name for device in devices)
    text = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in names.items())
    nodes = len({id(cluster.node_of(rank)) for rank in range(len(devices))})
    return f"{text} on {nodes} nodes" if nodes > 1 else text


def _describe_ranks(plan: Plan) -> str:
    micro = f", in {plan.micro_batches} micro-batches of at most {plan.max_micro_batch_size}" if plan.micro_batches > 1 else ""
    if plan.world == 1:
        return f"One {plan.device} device takes all {plan.global_batch} samples of a step{micro}."
    if plan.balance.shares:
        return f"{plan.world} ranks share the {plan.global_batch} samples of a step as {', '.join(map(str, plan.balance.shares))}{micro}."
    return f"{plan.world} ranks take {plan.sample_range(0)[1]} of the {plan.global_batch} samples of a step each{micro}."


def describe_context_parallel(plan: Plan) -> str:
    """How context parallelism splits a sequence, for a plan with a cp axis."""
    length, degree = plan.context.sequence_length, plan.mesh.cp
    paired = ", one chunk from the front and one from the back, to balance causal attention" if plan.context.chunks > degree else ""
    split = f"Each sequence of {length} positions is split over {degree} ranks, {length // degree} each{paired}"
    return f"{split}; keys and values are gathered at {len(plan.context.attention_sites)} attentions (context parallelism)."


def _describe_spatial(plan: Plan) -> str:
    """How spatial parallelism splits positions, and after which modules they are gathered."""
    policy = plan.spatial
    modules = ", ".join(gather.module or "the model" for gather in policy.gathers)
    split = f"Groups of {policy.num_parts} ranks take the same samples, each rank one block of positions, on a grid of {show_grid(policy.grid)}"
    return f"{split}; neighbours exchange borders, and blocks are gathered after {modules}."


def _describe_experts(plan: Plan) -> list[str]:
    layers, tables, degree = plan.expert.moe_layers, plan.expert.tables, plan.mesh.ep
    sentences = []
    if layers:
        ranges = [(min(layer.experts_per_rank), max(layer.experts_per_rank)) for layer in layers]
        counts = " and ".join(dict.fromkeys(f"{low} to {high}" if low < high else f"{low}" for low, high in ranges))
        sends = f"all-to-alls send tokens to the {degree} ep ranks and results back"
        sentences.append(f"Of each of {len(layers)} MoE layers a rank holds {counts} experts; {sends}.")
    if tables:
        sends = "one all-to-all sends all indices and one returns the rows"
        sentences.append(f"{len(tables)} embedding tables are distributed over {degree} ep ranks; {sends}.")
    return sentences


def _describe_sync(plan: Plan) -> str:
    sync = plan.sync
    when = "while backward goes on" if "gradients" in sync.overlap else "after backward"
    form = {"bf16": "rounded to bf16", "powersgd": f"as factors of rank {sync.compression_rank}"}.get(sync.compression)
    compressed = f" They are sent {form}: the run is not exact." if form else ""
    return f"Gradients are reduced by {' and '.join(plan.backends)} in buckets of {show_bytes(sync.bucket_bytes)}, {when}.{compressed}"


def _format_item(key: str, value: object) -> str:
    if key.endswith("bytes"):
        return f"{key.removesuffix('bytes').strip('_') or 'size'} {format_bytes(value)}"
    if key == "seconds":
        return format_seconds(value)
    if key == "held" and isinstance(value, dict):
        return "holds " + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in value.items())
    return f"{key} {format_number(value) if isinstance(value, float) else value}"
