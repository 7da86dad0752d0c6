"""`verify MODEL`: compares plans with one device, on a few samples, and prints what differs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from meshwright.cli import options
from meshwright.cli.console import log_progress, make_table, print_json, require_torch, stdout
from meshwright.core.errors import RequestError
from meshwright.core.quantities import show_seconds
from meshwright.core.serialization import to_data

if TYPE_CHECKING:
    from meshwright.core.plan import Plan
    from meshwright.core.verification import Comparison, Verification

_WORST_GRADIENTS = 5  # rows of gradients in a table: those farthest beyond their tolerance


def verify(
    model: options.Model,
    top: Annotated[int, typer.Option("--top", min=1, help="Number of plans to verify: the chosen one and the best of the next strategies.")] = 1,
    global_batch: options.GlobalBatch = None,
    seq: options.Seq = None,
    plan: Annotated[str | None, typer.Option("--plan", help="auto (the planner's best plan), or a plan.json from `meshwright plan -o`.")] = None,
    nproc: options.Nproc = None,
    mesh: options.Mesh = None,
    devices: options.Devices = None,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Compare one step under a plan with one step on a single device: the loss, every gradient, and the optimizer's update.

    The exit code is 0 if every plan computes what one device does, 1 if one is wrong or fails, 2 for a request that cannot be planned.

    Examples:
      meshwright verify gpt-tiny --mesh tp=2
      meshwright verify vae --nproc 2 --top 3 --json
    """
    require_torch()
    from meshwright.orchestrate import Orchestrator
    from meshwright.orchestrate.run_inputs import require_fit
    from meshwright.orchestrate.verified_run import verify_plan

    flags: dict[str, Any] = {
        "global_batch": global_batch,
        "seq": seq,
        "plan": plan,
        "nproc": nproc,
        "mesh": mesh,
        "devices": options.parse_devices(devices),
    }
    config = options.make_config(settings=settings, model=model, **flags)
    with Orchestrator(config, os.environ, log_progress) as orchestrator:
        prepared = orchestrator.prepare(runs=True)
        require_fit(prepared)
        plans = [p for p in prepared.alternatives if p.world > 1][:top]
        if not plans:
            raise RequestError(f"the plan for {model} is {prepared.plan.summary()}, which needs no verification: choose one with --mesh, like tp=2")
        found = [(p, verify_plan(orchestrator, prepared, p, again=True)) for p in plans]
    if as_json:
        rows = [{"plan": to_data(p), "summary": p.summary(), "may_train": v.may_train, **to_data(v)} for p, v in found]
        print_json({"model": model, "plans": rows})
    else:
        for p, verification in found:
            stdout.print(_verification_table(p, verification))
            stdout.print(_verdict(verification), markup=False)
    if not all(verification.may_train for _, verification in found):
        raise typer.Exit(1)


def _verification_table(plan: Plan, found: Verification) -> Table:
    table = make_table("compared", "of", ">one device", ">the plan", ">off by", ">allowed", "", title=plan.summary(), fold=True)
    gradients = sorted((c for c in found.comparisons if c.quantity == "gradient"), key=_excess, reverse=True)
    loss, norm, step = (found.largest(quantity) for quantity in ("loss", "gradient norm", "step"))
    for row in (loss, norm, *gradients[:_WORST_GRADIENTS], step):
        if row is not None:
            values = (f"{row.on_one_device:.6g}", f"{row.under_the_plan:.6g}", f"{row.difference:.1e}", f"{row.tolerance:.0e}")
            table.add_row(row.quantity, row.name, *values, "equal" if row.is_equal else "[bold red]different[/bold red]")
    if len(gradients) > _WORST_GRADIENTS:
        table.caption = f"and {len(gradients) - _WORST_GRADIENTS} gradients that are closer; tensors by their norms, differences relative to these"
    return table


def _excess(row: Comparison) -> float:
    return row.difference / row.tolerance if row.difference == row.difference else float("inf")


def _verdict(found: Verification) -> str:
    text = f"{found.verdict}, {found.samples} samples in {show_seconds(found.seconds)}" if found.comparisons else found.verdict
    return ": ".join(filter(None, [text, found.reason or found.describe_left_out()]))
