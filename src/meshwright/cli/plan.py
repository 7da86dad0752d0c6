"""`plan MODEL`: ranked plans with estimates, why the first won, and what would change it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from meshwright.cli.shared import (
    Devices,
    GlobalBatch,
    Json,
    MeshFlag,
    Nproc,
    Seq,
    Settings,
    device_list,
    make_config,
    need_torch,
    print_json,
    say,
    stdout,
)
from meshwright.core.serial import to_data
from meshwright.core.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from meshwright.plan import Ranking


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Zoo name, hf:PATH, or package.module:factory.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the best plan here, to edit or to train with.")] = None,
    most: Annotated[int, typer.Option("--most", min=1, help="Rows to show.")] = 8,
    global_batch: GlobalBatch = None,
    seq: Seq = None,
    nproc: Nproc = None,
    mesh: MeshFlag = None,
    devices: Devices = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Every legal plan for this machine, priced and ranked, and why the first won.

    Example: meshwright plan gpt2-124m --global-batch 8 -o plan.json
    """
    need_torch()
    from meshwright.orchestrate import Orchestrator

    begun = time.perf_counter()
    config = make_config(settings=settings, model=model, global_batch=global_batch, seq=seq, nproc=nproc, mesh=mesh, devices=device_list(devices))
    with Orchestrator(config, os.environ, say) as orchestrator:
        prepared = orchestrator.prepare()
    if output is not None:
        prepared.plan.save(output)
    scored = prepared.ranking.scored if prepared.ranking else ()
    if as_json:
        rows = [{"plan": to_data(s.plan), "estimate": to_data(s.estimate), "fits": s.estimate.fits, "reason": s.estimate.reason} for s in scored]
        print_json({"plans": rows, "why": prepared.why, "seconds": time.perf_counter() - begun})
        return
    if prepared.ranking:
        stdout.print(ranking_table(prepared.ranking, most))
    stdout.print(prepared.why, markup=False)
    if output is not None:
        stdout.print(f"written to {output}; run it with: meshwright train {model} --plan {output}", markup=False, soft_wrap=True)


def ranking_table(ranking: Ranking, most: int) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("plan")
    for column in ("step", "samples/s", "memory a rank", "communication"):
        table.add_column(column, justify="right")
    table.add_column("fits")
    for scored in ranking.scored[:most]:
        found = scored.estimate
        table.add_row(
            scored.plan.summary(),
            show_seconds(found.step_s),
            f"{found.samples_per_s:,.1f}",
            show_bytes(max(found.memory_bytes)),
            show_bytes(found.traffic_bytes),
            "yes" if found.fits else "no",
        )
    if len(ranking.scored) > most:
        table.add_row(f"[dim]… {len(ranking.scored) - most} more (--most)[/dim]")
    return table
