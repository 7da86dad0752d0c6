"""Plans, devices and events in plain words, for the live view and the report."""

from __future__ import annotations

from collections import Counter

from meshwright.core.cluster import Cluster
from meshwright.core.event import Event
from meshwright.core.plan import Plan
from meshwright.core.spatial import show_grid
from meshwright.core.units import show_bytes
from meshwright.observe import figures

_ZERO = {
    1: "The optimizer's state is cut over {n} ranks; every rank keeps all parameters and gradients (ZeRO-1).",
    2: "Gradients and the optimizer's state are cut over {n} ranks; every rank keeps all parameters (ZeRO-2).",
    3: "Parameters, gradients and the optimizer's state are cut over {n} ranks, and gathered where they are needed (ZeRO-3).",
}


def plan_in_words(plan: Plan) -> list[str]:
    """What the plan does, a sentence a choice."""
    said = [_who(plan)]
    if plan.spatial.grid:
        said.append(_blocks(plan))
    if plan.memory.zero:
        said.append(_ZERO[plan.memory.zero].format(n=plan.mesh.shard))
    elif plan.mesh.ep > 1:
        said.append("Every rank keeps all that is not owned, and gradients are averaged at each step.")
    elif plan.mesh.dp > 1:
        said.append("Every rank keeps the whole model, and gradients are averaged at each step.")
    if plan.context.attends:
        said.append(context_in_words(plan))
    if plan.mesh.ep > 1:
        said += _owners(plan)
    if plan.mesh.group_size("data") > 1:
        said.append(_sync(plan))
    said.append(f"Arithmetic is in {plan.memory.precision}; {_recompute(plan)}.")
    if plan.compile != "none":
        said.append(f"{'Repeated blocks are' if plan.compile == 'blocks' else 'The whole model is'} compiled.")
    return said


def plan_choices(plan: Plan) -> list[tuple[str, str, str]]:
    """(choice, value, what it means) for every choice a plan makes."""
    shares = ", ".join(map(str, plan.balance.shares)) or "equal"
    sync = plan.sync
    rows = [
        ("strategy", plan.strategy, f"on {plan.world} rank{'s' * (plan.world > 1)}"),
        ("mesh", str(plan.mesh), "degree of each axis; an axis left out is 1"),
        ("global batch", str(plan.global_batch), "samples in one optimizer step"),
        ("micro-batches", str(plan.micro_batches), f"at most {plan.largest_micro_batch} samples in memory at once"),
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
    rows += [("owned", show_owned(plan), f"by each of {plan.mesh.ep} owners")] if plan.mesh.ep > 1 else []
    rows += [("placements", str(len(plan.placements)), ", ".join(f"{k}: {v}" for k, v in plan.placements.items()))] if plan.placements else []
    return rows


def show_owned(plan: Plan) -> str:
    """'3 + 2 experts, 2 + 2 tables': how many each owner has; mixtures of one model are alike, or the first is shown."""
    counts = [Counter(t.owner for t in plan.owners.tables)[owner] for owner in range(plan.mesh.ep)]
    parts = [f"{' + '.join(map(str, plan.owners.mixtures[0].counts))} experts × {len(plan.owners.mixtures)}"] if plan.owners.mixtures else []
    parts += [f"{' + '.join(map(str, counts))} tables"] if plan.owners.tables else []
    return ", ".join(parts)


def event_in_words(event: Event) -> str:
    """What a reader wants of an event's data, in one line."""
    data = event.data
    if event.kind == "fault":
        return f"{data.get('kind', '')}: {data.get('message', '')}".strip(": ").partition("\n")[0]
    return ", ".join(_item(key, value) for key, value in data.items())


def devices_in_words(cluster: Cluster, used: int | None = None) -> str:
    """'4 × NVIDIA H100 on 2 nodes', of the first `used` devices."""
    devices = cluster.devices[:used]
    names = Counter(device.name for device in devices)
    text = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in names.items())
    nodes = len({id(cluster.node_of(rank)) for rank in range(len(devices))})
    return f"{text} on {nodes} nodes" if nodes > 1 else text


def _who(plan: Plan) -> str:
    micro = f", in {plan.micro_batches} micro-batches of at most {plan.largest_micro_batch}" if plan.micro_batches > 1 else ""
    if plan.world == 1:
        return f"One {plan.device} device takes all {plan.global_batch} samples of a step{micro}."
    if plan.balance.shares:
        return f"{plan.world} ranks share the {plan.global_batch} samples of a step as {', '.join(map(str, plan.balance.shares))}{micro}."
    return f"{plan.world} ranks take {plan.share(0)[1]} of the {plan.global_batch} samples of a step each{micro}."


def context_in_words(plan: Plan) -> str:
    """How a sequence is shared, for a plan with a cp axis."""
    count, ways = plan.context.positions, plan.mesh.cp
    paired = ", one run from the front and one from the back, so that causal attention is equal work" if plan.context.chunks > ways else ""
    return (
        f"Each sequence of {count} positions is shared by {ways} ranks, {count // ways} each{paired}; "
        f"keys and values are gathered at {len(plan.context.attends)} attentions (context parallelism)."
    )


def _blocks(plan: Plan) -> str:
    """How ranks share positions, and until where."""
    policy = plan.spatial
    until = ", ".join(gather.module or "the model" for gather in policy.gathers)
    who = f"Each {policy.ways} of them take the same samples, and a block of the positions each, on a grid of {show_grid(policy.grid)}"
    return f"{who}; neighbours exchange borders, and blocks become whole after {until}."


def _owners(plan: Plan) -> list[str]:
    owners, ranks = plan.owners, plan.mesh.ep
    said = []
    if owners.mixtures:
        held = " and ".join(dict.fromkeys(f"{min(m.counts)}" + f" to {max(m.counts)}" * (min(m.counts) < max(m.counts)) for m in owners.mixtures))
        said.append(f"Of each of {len(owners.mixtures)} mixtures a rank owns {held} experts; tokens travel to the {ranks} owners and results back.")
    if owners.tables:
        said.append(f"{len(owners.tables)} embedding tables have {ranks} owners; indices travel to them and rows back, all of them together.")
    return said


def _sync(plan: Plan) -> str:
    when = "while backward goes on" if "gradients" in plan.sync.overlap else "after backward"
    return f"Gradients travel over {' and '.join(plan.backends)} in buckets of {show_bytes(plan.sync.bucket_bytes)}, {when}.{_compression(plan)}"


def _compression(plan: Plan) -> str:
    how = {"bf16": "rounded to bf16", "powersgd": f"as factors of rank {plan.sync.compression_rank}"}.get(plan.sync.compression)
    return f" They travel {how}: the run is not exact." if how else ""


def _recompute(plan: Plan) -> str:
    said = {
        "none": "activations are kept for backward",
        "selective": "of activations, what is dear to compute is kept for backward and the rest computed again",
        "full": "activations are computed again in backward to save memory",
    }[plan.memory.recompute]
    own = ", ".join(f"{name}: {mode}" for name, mode in plan.memory.layers.items())
    return f"{said} (but {own})" if own else said


def _item(key: str, value: object) -> str:
    if key.endswith("bytes"):
        return f"{key.removesuffix('bytes').strip('_') or 'size'} {figures.size(value)}"
    if key == "seconds":
        return figures.seconds(value)
    if key == "held" and isinstance(value, dict):
        return "holds " + ", ".join(f"{name} {figures.size(part)}" for name, part in value.items())
    return f"{key} {figures.quantity(value) if isinstance(value, float) else value}"
