"""`plan MODEL`: prints ranked plans with estimates, why the first won, and what would change it."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from meshwright.cli import options
from meshwright.cli.console import log_progress, make_table, print_json, require_torch, stdout
from meshwright.cli.plan_inference import plan_inference
from meshwright.core.errors import RequestError, unknown_name_error
from meshwright.core.quantities import show_bytes, show_seconds
from meshwright.core.serialization import to_data

if TYPE_CHECKING:
    from meshwright.core.model import ModelProfile
    from meshwright.core.plan import Plan
    from meshwright.plan import Ranking, ScoredPlan
    from meshwright.schedule import LedgerLine

_LAYER_INDEX = re.compile(r"\.\d+\.")


def plan(
    model: options.Model,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the best plan to this file, to edit or to train with.")] = None,
    max_rows: Annotated[int, typer.Option("--most", min=1, help="Number of plans to show.")] = 8,
    ledger: Annotated[bool, typer.Option("--ledger", help="List every collective that the best plan calls at start-up and in a step.")] = False,
    global_batch: options.GlobalBatch = None,
    seq: options.Seq = None,
    nproc: options.Nproc = None,
    mesh: options.Mesh = None,
    devices: options.Devices = None,
    cluster: options.Cluster = None,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Rank the possible plans for a model on this machine or another cluster by estimated time, and explain the choice: plans for training or, with
    kind=serve, for answering prompts.

    Examples:
      meshwright plan gpt2-124m --global-batch 8 -o plan.json
      meshwright plan gpt-mini --mesh tp=2 --ledger
      meshwright plan cosmoflow-tiny --mesh cp=4
      meshwright plan gpt2-124m --cluster dgx-h100:2 --mesh dp=8,tp=2 --global-batch 64
      meshwright plan llama3-8b --cluster dgx-h100 --set kind=serve --set batch=32 --set context=4096
    """
    require_torch()
    if (kind := _setting(settings or [], "kind")) is not None:
        settings = [text for text in settings or [] if not text.startswith("kind=")]
        if kind == "serve":
            refused = {"--global-batch": global_batch, "--seq": seq, "--devices": devices, "--ledger": ledger or None}
            if given := [flag for flag, value in refused.items() if value is not None]:
                raise RequestError(f"{given[0]} is for training, and kind=serve plans for inference: leave it out (--set batch=, --set context=)")
            plan_inference(model, settings, {"nproc": nproc, "mesh": mesh}, cluster or "here", output, max_rows, as_json)
            return
        if kind != "train":
            raise unknown_name_error("kind", kind, ("train", "serve"), "--set")
    from meshwright.observe.wording import describe_context_parallel
    from meshwright.orchestrate import Orchestrator
    from meshwright.schedule import plan_ledger

    start = time.perf_counter()
    sizes: dict[str, Any] = {"global_batch": global_batch, "seq": seq, "nproc": nproc, "mesh": mesh}
    config = options.make_config(settings=settings, model=model, devices=options.parse_devices(devices), cluster=cluster, **sizes)
    with Orchestrator(config, os.environ, log_progress) as orchestrator:
        prepared = orchestrator.prepare()
    if output is not None and prepared.estimate.fits:
        prepared.plan.save(output)
    ranking, best = prepared.ranking, prepared.plan
    ledger_lines = plan_ledger(best, prepared.profile, clip=config.clip > 0, broadcasts=False) if ledger else ()
    if as_json:
        plans = [_scored_to_json(scored) | {"reason": scored.estimate.reason} for scored in (ranking.scored if ranking else ())]
        result = {"plans": plans, "why": prepared.why, "learning_rate": prepared.learning_rate, "seconds": time.perf_counter() - start}
        result |= {"ledger": [to_data(line) for line in ledger_lines]} if ledger else {}
        if ranking and ranking.best_equal_split:
            result["equal"] = _scored_to_json(ranking.best_equal_split) | {"times": ranking.speedup_over_equal}
        print_json(result)
    if not prepared.estimate.fits:
        raise RequestError(prepared.why.replace("\n", " "))
    if as_json:
        return
    if ranking:
        stdout.print(_ranking_table(ranking, max_rows))
    stdout.print(prepared.why, markup=False)
    stdout.print(prepared.learning_rate, markup=False)
    if best.context.attention_sites:
        stdout.print(describe_context_parallel(best), markup=False)
    if best.tensor_policies:
        stdout.print(_tensor_parallel_table(best, prepared.profile))
    if best.spatial.grid:
        stdout.print(_spatial_parallel_table(best))
    if best.expert:
        stdout.print(_expert_parallel_table(best, prepared.profile))
    if ledger:
        stdout.print(_ledger_table(ledger_lines))
    if output is not None:
        stdout.print(f"written to {output}; run it with: meshwright train {model} --plan {output}", markup=False, soft_wrap=True)


def _setting(settings: list[str], key: str) -> str | None:
    return next((text.partition("=")[2] for text in settings if text.partition("=")[0] == key), None)


def _scored_to_json(scored: ScoredPlan) -> dict[str, Any]:
    return {"plan": to_data(scored.plan), "estimate": to_data(scored.estimate), "fits": scored.estimate.fits}


def _tensor_parallel_table(plan: Plan, profile: ModelProfile) -> Table:
    """The parameters that tensor parallelism shards, and those it does not with the reason; repeated blocks are one row."""
    sizes = {t.name: t.numel for t in profile.tensors}
    table = make_table("parameters", "sharded along", "units, or why not sharded", ">elements", title="tensor parallelism", fold=True)
    rows: Counter[tuple[str, str, str]] = Counter()
    for axis, policy in plan.tensor_policies:
        over = f" over {axis}" if len(plan.tensor_policies) > 1 else ""
        for dim, shard in ((d, s) for d in policy.sharded_dims for s in d.parameter_shards):
            units = f"{dim.size} × {shard.inner}" if shard.inner > 1 else str(dim.size)
            rows[_LAYER_INDEX.sub(".*.", shard.parameter), f"dim {shard.dim}{over}", units] += sizes.get(shard.parameter, 0)
        for name, reason in policy.unsharded_reasons.items():
            rows[_LAYER_INDEX.sub(".*.", name), f"not sharded{over}", _LAYER_INDEX.sub(".*.", reason)] += sizes.get(name, 0)
    for row, count in rows.items():
        table.add_row(*row, f"{count:,}")
    return table


def _spatial_parallel_table(plan: Plan) -> Table:
    """The layers that run on blocks of positions, and why the others do not; layers with the same note are one row."""
    table = make_table("layers", "positions", title="spatial parallelism", fold=True)
    layers: dict[str, list[str]] = {}
    for name, note in plan.spatial.layer_notes.items():
        layers.setdefault(note, []).append(name)
    for note, names in layers.items():
        table.add_row(", ".join(names), note)
    return table


def _expert_parallel_table(plan: Plan, profile: ModelProfile) -> Table:
    """The experts (by number) and embedding tables (by name) on each rank of the ep axis."""
    sizes = {t.name: t.bytes for t in profile.tensors}
    table = make_table("ep rank", "holds", ">size", title="experts and tables", fold=True)
    for rank in range(plan.mesh.ep):
        for layer in plan.expert.moe_layers:
            first, count = layer.first_expert(rank), layer.experts_per_rank[rank]
            size = sum(sizes.get(name, 0) for name in layer.parameters) * count / layer.num_experts
            table.add_row(str(rank), f"experts {first} to {first + count - 1} of {layer.module}", show_bytes(size))
        for embedding in (t for t in plan.expert.tables if t.ep_rank == rank):
            table.add_row(str(rank), f"table {embedding.module}, {embedding.rows:,} rows", show_bytes(sizes.get(embedding.parameter, 0)))
    return table


def _ledger_table(lines: tuple[LedgerLine, ...]) -> Table:
    columns = ("phase", "name", "operation", "axis", ">ranks", ">calls", ">bytes", ">padding", ">sent by a rank")
    table = make_table(*columns, title="communication", fold=True)
    for column in table.columns[1:3]:
        column.min_width = 12
    for line in lines:
        at_most = "≤ " if line.bound else ""  # an upper bound: the amount depends on the data
        padding = show_bytes(line.padding) if line.padding else ""
        counts = (str(line.group), str(line.calls), at_most + show_bytes(line.bytes), padding, at_most + show_bytes(line.sent))
        table.add_row(line.phase, line.name, line.op, line.axis, *counts)
    return table


def _ranking_table(ranking: Ranking, max_rows: int) -> Table:
    order = "in order of the objective, with a penalty for each mechanism that a plan adds: predictions are not finer"
    table = make_table("plan", ">step", ">samples/s", ">memory a rank", ">communication", "fits", caption=order)
    for plan, estimate in ((scored.plan, scored.estimate) for scored in ranking.scored[:max_rows]):
        rates = (show_seconds(estimate.step_s), f"{estimate.samples_per_s:,.1f}")
        sizes = (show_bytes(max(estimate.memory_bytes)), show_bytes(estimate.traffic_bytes))
        table.add_row(plan.summary(), *rates, *sizes, "yes" if estimate.fits else "no")
    if len(ranking.scored) > max_rows:
        table.add_row(f"[dim]… {len(ranking.scored) - max_rows} more (--most)[/dim]")
    return table
