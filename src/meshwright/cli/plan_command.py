"""`plan MODEL`: prints ranked plans with estimates, why the first won, and what would change it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from meshwright.cli.common import (
    ClusterFlag,
    DevicesFlag,
    GlobalBatchFlag,
    JsonFlag,
    MeshFlag,
    NprocFlag,
    SeqFlag,
    SetFlag,
    log_progress,
    make_config,
    parse_devices,
    print_json,
    require_torch,
    stdout,
)
from meshwright.core.errors import RequestError
from meshwright.core.quantities import show_bytes, show_seconds
from meshwright.core.serialization import to_data

if TYPE_CHECKING:
    from meshwright.core.model import ModelProfile
    from meshwright.core.plan import Plan
    from meshwright.plan import Ranking
    from meshwright.schedule import LedgerLine


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Zoo name, hf:PATH, or package.module:factory.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the best plan here, to edit or to train with.")] = None,
    max_rows: Annotated[int, typer.Option("--most", min=1, help="Rows to show.")] = 8,
    ledger: Annotated[bool, typer.Option("--ledger", help="List every collective of the best plan's start-up and step.")] = False,
    global_batch: GlobalBatchFlag = None,
    seq: SeqFlag = None,
    nproc: NprocFlag = None,
    mesh: MeshFlag = None,
    devices: DevicesFlag = None,
    cluster: ClusterFlag = None,
    settings: SetFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Estimate and rank every legal plan for this machine or another cluster, and explain why the first won.

    Example: meshwright plan gpt2-124m --global-batch 8 -o plan.json

    Example: meshwright plan gpt-mini --mesh tp=2 --ledger

    Example: meshwright plan cosmoflow-tiny --mesh cp=4

    Example: meshwright plan gpt2-124m --cluster dgx-h100:2 --mesh dp=8,tp=2 --global-batch 64
    """
    require_torch()
    from meshwright.observe.wording import describe_context_parallel
    from meshwright.orchestrate import Orchestrator
    from meshwright.schedule import plan_ledger

    begun = time.perf_counter()
    sizes: dict[str, Any] = {"global_batch": global_batch, "seq": seq, "nproc": nproc, "mesh": mesh}
    config = make_config(settings=settings, model=model, devices=parse_devices(devices), cluster=cluster, **sizes)
    with Orchestrator(config, os.environ, log_progress) as orchestrator:
        prepared = orchestrator.prepare()
    if output is not None and prepared.estimate.fits:
        prepared.plan.save(output)
    scored = prepared.ranking.scored if prepared.ranking else ()
    if as_json:
        rows = [{"plan": to_data(s.plan), "estimate": to_data(s.estimate), "fits": s.estimate.fits, "reason": s.estimate.reason} for s in scored]
        lines = [to_data(line) for line in plan_ledger(prepared.plan, prepared.profile, clip=config.clip > 0)] if ledger else None
        print_json(
            {
                "plans": rows,
                "why": prepared.why,
                "seconds": time.perf_counter() - begun,
                **({"ledger": lines} if ledger else {}),
                **(equal_split(prepared.ranking) if prepared.ranking else {}),
            }
        )
    if not prepared.estimate.fits:
        raise RequestError(prepared.why.replace("\n", " "))
    if as_json:
        return
    if prepared.ranking:
        stdout.print(ranking_table(prepared.ranking, max_rows))
    stdout.print(prepared.why, markup=False)
    if prepared.plan.context.attention_sites:
        stdout.print(describe_context_parallel(prepared.plan), markup=False)
    if prepared.plan.tensor_policies:
        stdout.print(tensor_parallel_table(prepared.plan, prepared.profile))
    if prepared.plan.spatial.grid:
        stdout.print(spatial_parallel_table(prepared.plan))
    if prepared.plan.expert:
        stdout.print(expert_parallel_table(prepared.plan, prepared.profile))
    if ledger:
        stdout.print(ledger_table(plan_ledger(prepared.plan, prepared.profile, clip=config.clip > 0)))
    if output is not None:
        stdout.print(f"written to {output}; run it with: meshwright train {model} --plan {output}", markup=False, soft_wrap=True)


def equal_split(ranking: Ranking) -> dict[str, Any]:
    """For unequal devices: the best plan with an equal split, and its step time relative to the best plan; otherwise empty."""
    equal = ranking.best_equal_split
    if equal is None:
        return {}
    return {
        "equal": {"plan": to_data(equal.plan), "estimate": to_data(equal.estimate), "fits": equal.estimate.fits, "times": ranking.speedup_over_equal}
    }


def tensor_parallel_table(plan: Plan, profile: ModelProfile) -> Table:
    """The parameters that tensor parallelism shards, and those it does not with the reason; repeated blocks are one row."""
    sizes = {t.name: t.numel for t in profile.tensors}
    table = Table(box=None, header_style="bold", title="tensor parallelism", title_justify="left")
    for column in ("parameters", "cut along", "pieces of", "number"):
        table.add_column(column, justify="right" if column == "number" else "left", overflow="fold")
    rows: dict[tuple[str, str, str], int] = {}
    for axis, policy in plan.tensor_policies:
        over = f" over {axis}" if len(plan.tensor_policies) > 1 else ""
        for logical_dim, cut in ((s, c) for s in policy.sharded_dims for c in s.parameter_shards):
            pieces = f"{logical_dim.size} × {cut.inner}" if cut.inner > 1 else str(logical_dim.size)
            key = (_LAYER_INDEX.sub(".*.", cut.parameter), f"dim {cut.dim}{over}", pieces)
            rows[key] = rows.get(key, 0) + sizes.get(cut.parameter, 0)
        for name, reason in policy.unsharded_reasons.items():
            key = (_LAYER_INDEX.sub(".*.", name), f"whole{over}", _LAYER_INDEX.sub(".*.", reason))
            rows[key] = rows.get(key, 0) + sizes.get(name, 0)
    for (name, how, what), count in rows.items():
        table.add_row(name, how, what, f"{count:,}")
    return table


def spatial_parallel_table(plan: Plan) -> Table:
    """The layers that run on blocks of positions, and why the others do not; layers with the same note are one row."""
    table = Table(box=None, header_style="bold", title="spatial parallelism", title_justify="left")
    for column in ("layers", "positions"):
        table.add_column(column, overflow="fold")
    rows: dict[str, list[str]] = {}
    for name, fate in plan.spatial.layer_notes.items():
        rows.setdefault(fate, []).append(name)
    for fate, names in rows.items():
        table.add_row(", ".join(names), fate)
    return table


def expert_parallel_table(plan: Plan, profile: ModelProfile) -> Table:
    """The experts (by number) and embedding tables (by name) on each rank of the ep axis."""
    sizes = {t.name: t.bytes for t in profile.tensors}
    table = Table(box=None, header_style="bold", title="experts and tables", title_justify="left")
    for column in ("rank of ep", "owns", "size"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for owner in range(plan.mesh.ep):
        for mixture in plan.expert.moe_layers:
            first, count = mixture.first_expert(owner), mixture.experts_per_rank[owner]
            share = sum(sizes.get(name, 0) for name in mixture.parameters) * count / mixture.num_experts
            table.add_row(str(owner), f"experts {first} to {first + count - 1} of {mixture.module}", show_bytes(share))
        for held in (t for t in plan.expert.tables if t.ep_rank == owner):
            table.add_row(str(owner), f"table {held.module}, {held.rows:,} rows", show_bytes(sizes.get(held.parameter, 0)))
    return table


_LAYER_INDEX = re.compile(r"\.\d+\.")


def ledger_table(lines: tuple[LedgerLine, ...]) -> Table:
    table = Table(box=None, header_style="bold", title="communication", title_justify="left")
    for column in ("phase", "name", "operation", "axis"):
        table.add_column(column, overflow="fold", min_width=12 if column in ("name", "operation") else None)
    for column in ("ranks", "calls", "bytes", "padding", "sent by a rank"):
        table.add_column(column, justify="right")
    for line in lines:
        most = "≤ " if line.bound else ""  # an upper bound: the amount depends on the data
        sums = (
            str(line.group),
            str(line.calls),
            most + show_bytes(line.bytes),
            show_bytes(line.padding) if line.padding else "",
            most + show_bytes(line.sent),
        )
        table.add_row(line.phase, line.name, line.op, line.axis, *sums)
    return table


def ranking_table(ranking: Ranking, max_rows: int) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("plan")
    for column in ("step", "samples/s", "memory a rank", "communication"):
        table.add_column(column, justify="right")
    table.add_column("fits")
    for scored in ranking.scored[:max_rows]:
        found = scored.estimate
        table.add_row(
            scored.plan.summary(),
            show_seconds(found.step_s),
            f"{found.samples_per_s:,.1f}",
            show_bytes(max(found.memory_bytes)),
            show_bytes(found.traffic_bytes),
            "yes" if found.fits else "no",
        )
    if len(ranking.scored) > max_rows:
        table.add_row(f"[dim]… {len(ranking.scored) - max_rows} more (--most)[/dim]")
    return table
