"""`train`: plans and trains. With no argument, trains the built-in model on all devices of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from meshwright.cli.common import (
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
    stderr,
    stdout,
)
from meshwright.core.errors import RequestError
from meshwright.core.quantities import show_bytes, show_seconds

if TYPE_CHECKING:
    from meshwright.orchestrate import PreparedRun


def train(
    source: Annotated[
        str | None, typer.Argument(metavar="[MODEL|CONFIG.json|SCRIPT.py]", help="What to train; the built-in model by default.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- SCRIPT ARGUMENTS]", help="Passed on to a script.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps.")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the data, instead of steps.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Built-in data set, or a JSON list of {instruction, input, output}.")] = None,
    global_batch: GlobalBatchFlag = None,
    seq: SeqFlag = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of parameters, data order and randomness.")] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="auto, or a plan.json from `meshwright plan -o`.")] = None,
    nproc: NprocFlag = None,
    mesh: MeshFlag = None,
    devices: DevicesFlag = None,
    backend: Annotated[str | None, typer.Option("--backend", help="gloo, mpi, nccl; auto: as measured, call by call.")] = None,
    launcher: Annotated[str | None, typer.Option("--launcher", help="local (the default), or mpi: ranks are started by mpirun.")] = None,
    run_dir: Annotated[str | None, typer.Option("--run-dir", help="Folder that holds runs.")] = None,
    settings: SetFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Plan and train a model on all devices of this machine; or run a given plan, configuration file or script.

    Examples:
      meshwright train
      meshwright train vae --steps 50 --mesh shard=2 --set zero=2
      meshwright train --backend mpi --nproc 2 --steps 20
      meshwright train examples/02_prepare.py
    """
    require_torch()
    from meshwright.describe.discover import discover
    from meshwright.launch import detect_launched_rank
    from meshwright.orchestrate import Orchestrator
    from meshwright.orchestrate.mpirun import needs_mpirun, train_with_mpirun

    flags: dict[str, Any] = {
        "steps": steps, "epochs": epochs, "data": data, "global_batch": global_batch, "seq": seq, "seed": seed, "plan": plan,
        "nproc": nproc, "mesh": mesh, "devices": parse_devices(devices), "backend": backend, "run_dir": run_dir,
    }  # fmt: skip
    script = source if source and source.endswith(".py") else None
    file = Path(source) if source and source.endswith(".json") else None
    if arguments and script is None:
        raise RequestError(f"unexpected argument '{arguments[0]}': only a script takes arguments of its own")
    if source and script is None and file is None:
        flags["model"] = source
    place = detect_launched_rank(os.environ)

    def count_ranks(number: int | None, chosen: tuple[int, ...] | None) -> int:
        return place.world if place is not None else len(discover(os.environ, ranks=number, devices=chosen).devices)

    config = make_config(file, settings, count_ranks, **flags)
    if launcher == "local" and config.backend == "auto":
        config = config.model_copy(update={"backend": None})
    if needs_mpirun(launcher, config.backend, place is not None):
        raise typer.Exit(train_with_mpirun(config, script, arguments or [], os.environ, as_json))
    console = stdout if config.log_interval and not as_json else stderr
    if place is not None and script is None:
        from meshwright.orchestrate.external_launch import train_on_launched_ranks

        found = train_on_launched_ranks(config, place, os.environ, console, log_progress if place.rank == 0 else lambda _: None)
        if found is not None:
            _print_result(found, None, as_json)
        return
    with Orchestrator(config, os.environ, log_progress) as orchestrator:
        if script is not None:
            ended = orchestrator.run_script(script, arguments or [], stderr)
            print_json(ended) if as_json else stderr.print(f"{ended['ranks']} ranks finished in {show_seconds(ended['seconds'])}; {ended['run']}")
            return
        prepared = orchestrator.prepare(runs=True)
        step = f"{show_seconds(prepared.estimate.step_s)} a step predicted (± {prepared.estimate.error:.0%})"
        log_progress(f"{prepared.plan.summary()} for {prepared.task.name}, {step}")
        if any(needs_mpirun(launcher, other, is_launched=False) for other in prepared.plan.backends[1:]):
            raise typer.Exit(train_with_mpirun(config, None, [], os.environ, as_json))
        result = orchestrator.train(prepared, console)
    _print_result(result, prepared, as_json)


def _print_result(result: dict[str, Any], prepared: PreparedRun | None, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    if prepared is not None:
        stderr.print("\n[bold]Plan and why[/bold]")
        stderr.print(prepared.why, markup=False)
    stderr.print()
    stderr.print(comparison_table(result))
    losses = result["losses"]
    if losses:
        held_out = f", validation {result['validation'][-1]['loss']:.4f}" if result["validation"] else ""
        stderr.print(f"loss {losses[0]:.4f} → {losses[-1]:.4f}{held_out} in {show_seconds(result['seconds'])}")
    stderr.print(f"report: {result['report']}", markup=False, soft_wrap=True)


def comparison_table(result: dict[str, Any]) -> Table:
    """Predicted and measured step time and memory, with the relative error of the prediction."""
    predicted, measured = result["predicted"], result["measured"]
    table = Table(box=None, header_style="bold")
    table.add_column("")
    for column in ("predicted", "measured", "off by"):
        table.add_column(column, justify="right")

    def row(name: str, show: Any, a: float, b: float | None) -> None:
        table.add_row(name, show(a), show(b) if b else "too few steps", f"{a / b - 1:+.0%}" if b else "–")

    row("step time", show_seconds, predicted["step_s"], measured["step_s"])
    row("peak memory, largest rank", show_bytes, max(predicted["memory_bytes"]), max(measured["memory_bytes"]))
    if measured.get("exposed_communication_s") is not None:
        table.add_row("exposed communication", "", show_seconds(measured["exposed_communication_s"]), "")
    return table
