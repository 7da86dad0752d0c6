"""Describes plans, devices and events in plain words, for the live view and the report."""

from __future__ import annotations

from collections import Counter

from meshwright.core.cluster import Cluster
from meshwright.core.event import Event
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes
from meshwright.core.spatial_policy import show_grid
from meshwright.observe import formatting

_ZERO_SENTENCES = {
    1: "The optimizer's state is cut over {n} ranks; every rank keeps all parameters and gradients (ZeRO-1).",
    2: "Gradients and the optimizer's state are cut over {n} ranks; every rank keeps all parameters (ZeRO-2).",
    3: "Parameters, gradients and the optimizer's state are cut over {n} ranks, and gathered where they are needed (ZeRO-3).",
}


def describe_plan(plan: Plan) -> list[str]:
    """What the plan does, one sentence per choice."""
    said = [_describe_ranks(plan)]
    if plan.spatial.grid:
        said.append(_describe_spatial(plan))
    if plan.memory.zero:
        said.append(_ZERO_SENTENCES[plan.memory.zero].format(n=plan.mesh.shard))
    elif plan.mesh.ep > 1:
        said.append("Every rank keeps all that is not owned, and gradients are averaged at each step.")
    elif plan.mesh.dp > 1:
        said.append("Every rank keeps the whole model, and gradients are averaged at each step.")
    if plan.context.attention_sites:
        said.append(describe_context_parallel(plan))
    if plan.mesh.ep > 1:
        said += _describe_experts(plan)
    if plan.mesh.group_size("data") > 1:
        said.append(_describe_sync(plan))
    said.append(f"Arithmetic is in {plan.memory.precision}; {_describe_recompute(plan)}.")
    if plan.compile != "none":
        said.append(f"{'Repeated blocks are' if plan.compile == 'blocks' else 'The whole model is'} compiled.")
    return said


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
        ("zero", str(plan.memory.zero), "states cut over the shard axis: 0 none … 3 all"),
        ("recompute", plan.memory.recompute, "activations computed again in backward"),
        ("precision", plan.memory.precision, "of the arithmetic"),
        ("gradient buckets", show_bytes(sync.bucket_bytes), f"first one {show_bytes(sync.first_bucket_bytes)}"),
        ("overlap", ", ".join(sync.overlap) or "none", "what travels while something is computed"),
        ("compression", sync.compression, "of gradients between data ranks"),
        ("compile", plan.compile, "what torch.compile is applied to"),
        ("device", plan.device, f"communication by {' and '.join(plan.backends)}"),
    ]
    if plan.spatial.grid:
        rows.append(("grid", show_grid(plan.spatial.grid), "ranks that share the positions of a sample, along each spatial dim"))
    rows += [("threads", str(plan.threads), "CPU threads a rank")] if plan.threads else []
    rows += [("stages", str(len(plan.stages)), ", ".join(f"{len(s.layers)} layers" for s in plan.stages))] if plan.stages else []
    rows += [("experts and tables", show_expert_counts(plan), f"on each of {plan.mesh.ep} ep ranks")] if plan.mesh.ep > 1 else []
    rows += [("placements", str(len(plan.placements)), ", ".join(f"{k}: {v}" for k, v in plan.placements.items()))] if plan.placements else []
    return rows


def show_expert_counts(plan: Plan) -> str:
    """'3 + 2 experts, 2 + 2 tables': the number on each ep rank; of several MoE layers the first is shown."""
    counts = [Counter(t.ep_rank for t in plan.expert.tables)[owner] for owner in range(plan.mesh.ep)]
    parts = (
        [f"{' + '.join(map(str, plan.expert.moe_layers[0].experts_per_rank))} experts × {len(plan.expert.moe_layers)}"]
        if plan.expert.moe_layers
        else []
    )
    parts += [f"{' + '.join(map(str, counts))} tables"] if plan.expert.tables else []
    return ", ".join(parts)


def describe_event(event: Event) -> str:
    """An event's data in one line; of a fault, the first line of its message."""
    data = event.data
    if event.kind == "fault":
        return f"{data.get('kind', '')}: {data.get('message', '')}".strip(": ").partition("\n")[0]
    return ", ".join(_format_item(key, value) for key, value in data.items())


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
    """How context parallelism shards a sequence, for a plan with a cp axis."""
    count, routes = plan.context.sequence_length, plan.mesh.cp
    paired = ", one run from the front and one from the back, so that causal attention is equal work" if plan.context.chunks > routes else ""
    return (
        f"Each sequence of {count} positions is shared by {routes} ranks, {count // routes} each{paired}; "
        f"keys and values are gathered at {len(plan.context.attention_sites)} attentions (context parallelism)."
    )


def _describe_spatial(plan: Plan) -> str:
    """How spatial parallelism shards positions, and after which modules they are gathered."""
    policy = plan.spatial
    until = ", ".join(gather.module or "the model" for gather in policy.gathers)
    who = f"Each {policy.num_parts} of them take the same samples, and a block of the positions each, on a grid of {show_grid(policy.grid)}"
    return f"{who}; neighbours exchange borders, and blocks become whole after {until}."


def _describe_experts(plan: Plan) -> list[str]:
    owners, ranks = plan.expert, plan.mesh.ep
    said = []
    if owners.moe_layers:
        held = " and ".join(
            dict.fromkeys(
                f"{min(m.experts_per_rank)}" + f" to {max(m.experts_per_rank)}" * (min(m.experts_per_rank) < max(m.experts_per_rank))
                for m in owners.moe_layers
            )
        )
        said.append(
            f"Of each of {len(owners.moe_layers)} MoE layers a rank holds {held} "
            f"experts; all-to-alls take tokens to the {ranks} ep ranks and results back."
        )
    if owners.tables:
        said.append(
            f"{len(owners.tables)} embedding tables are spread over {ranks} ep ranks; "
            f"one all-to-all takes all indices there and one brings the rows back."
        )
    return said


def _describe_sync(plan: Plan) -> str:
    when = "while backward goes on" if "gradients" in plan.sync.overlap else "after backward"
    return (
        f"Gradients travel over {' and '.join(plan.backends)} in buckets of "
        f"{show_bytes(plan.sync.bucket_bytes)}, {when}.{_describe_compression(plan)}"
    )


def _describe_compression(plan: Plan) -> str:
    how = {"bf16": "rounded to bf16", "powersgd": f"as factors of rank {plan.sync.compression_rank}"}.get(plan.sync.compression)
    return f" They travel {how}: the run is not exact." if how else ""


def _describe_recompute(plan: Plan) -> str:
    said = {
        "none": "activations are kept for backward",
        "selective": "of activations, what is dear to compute is kept for backward and the rest computed again",
        "full": "activations are computed again in backward to save memory",
    }[plan.memory.recompute]
    own = ", ".join(f"{name}: {mode}" for name, mode in plan.memory.layers.items())
    return f"{said} (but {own})" if own else said


def _format_item(key: str, value: object) -> str:
    if key.endswith("bytes"):
        return f"{key.removesuffix('bytes').strip('_') or 'size'} {formatting.format_bytes(value)}"
    if key == "seconds":
        return formatting.format_seconds(value)
    if key == "held" and isinstance(value, dict):
        return "holds " + ", ".join(f"{name} {formatting.format_bytes(part)}" for name, part in value.items())
    return f"{key} {formatting.format_number(value) if isinstance(value, float) else value}"
