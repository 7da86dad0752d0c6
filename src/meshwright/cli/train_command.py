"""`train`: plans and trains. With no argument, trains the built-in model on all devices of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from meshwright.cli import options
from meshwright.cli.console import log_progress, make_table, print_json, require_torch, stderr, stdout
from meshwright.cli.stop_signals import end_on_sigterm
from meshwright.core.errors import RequestError, RunError
from meshwright.core.quantities import show_bytes, show_seconds

if TYPE_CHECKING:
    from meshwright.orchestrate import PreparedRun, RunConfig


def train(
    source: Annotated[str | None, typer.Argument(metavar="[MODEL|CONFIG.json|SCRIPT.py]", help="What to train; gpt-mini by default.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- SCRIPT ARGUMENTS]", help="Arguments for the script.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Number of optimizer steps.")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the data, instead of --steps.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="A built-in data set, or a JSON file: a list of {instruction, input, output}.")] = None,
    global_batch: options.GlobalBatch = None,
    seq: options.Seq = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of initial parameters, data order and dropout.")] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="auto (the planner's best plan), or a plan.json from `meshwright plan -o`.")] = None,
    nproc: options.Nproc = None,
    mesh: options.Mesh = None,
    devices: options.Devices = None,
    backend: Annotated[str | None, typer.Option("--backend", help="gloo, mpi or nccl; auto: for each call the fastest that was measured.")] = None,
    launcher: Annotated[str | None, typer.Option("--launcher", help="local (this command starts the ranks, the default) or mpi (mpirun).")] = None,
    run_dir: Annotated[str | None, typer.Option("--run-dir", help="Folder that gets a folder for the run; runs by default.")] = None,
    resume: Annotated[str | None, typer.Option("--resume", metavar="RUN|FOLDER", help="Go on with a run, or from one of its checkpoints.")] = None,
    init_from: Annotated[str | None, typer.Option("--init-from", metavar="RUN|FOLDER", help="Begin a new run with these weights.")] = None,
    inject: Annotated[list[str] | None, typer.Option("--inject", metavar="FAULT", help="Rehearse a fault; repeatable.")] = None,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Plan and train a model on all devices of this machine; or run a plan, a configuration file or a training script.

    Examples:
      meshwright train
      meshwright train vae --steps 50 --mesh shard=2 --set zero=2
      meshwright train --backend mpi --nproc 2 --steps 20
      meshwright train examples/02_prepare.py
      meshwright train --resume last --steps 400
      meshwright train --nproc 2 --inject hang:rank=1,step=7
    """
    require_torch()
    from meshwright.describe.discover import discover
    from meshwright.launch import detect_launched_rank
    from meshwright.observe import check_run_dir
    from meshwright.orchestrate import Orchestrator
    from meshwright.orchestrate.mpirun import needs_mpirun, train_with_mpirun
    from meshwright.orchestrate.verified_run import verify_run

    flags: dict[str, Any] = {
        "steps": steps, "epochs": epochs, "data": data, "global_batch": global_batch, "seq": seq, "seed": seed, "plan": plan,
        "nproc": nproc, "mesh": mesh, "devices": options.parse_devices(devices), "backend": backend, "run_dir": run_dir, "init_from": init_from,
        "inject": inject or None,
    }  # fmt: skip
    script = source if source and source.endswith(".py") else None
    file = Path(source) if source and source.endswith(".json") else None
    if arguments and script is None:
        raise RequestError(f"unexpected argument '{arguments[0]}': only a script takes arguments")
    if source and script is None and file is None:
        flags["model"] = _with_packaged_weights(source, settings or [])
    launched = detect_launched_rank(os.environ)
    if launched is not None:
        end_on_sigterm()

    def count_ranks(nproc: int | None, devices: tuple[int, ...] | None) -> int:
        return launched.world if launched is not None else len(discover(os.environ, ranks=nproc, devices=devices).devices)

    if resume is not None:
        if source is not None:
            raise RequestError(f"--resume goes on with a run and its own model, not with {source}: leave it out")
        if init_from is not None:
            raise RequestError(f"--resume {resume} has the run's own weights, and --init-from {init_from} names others: leave one of them out")
        config = _resumed_config(resume, settings, flags)
    else:
        config = options.make_config(file, settings, count_ranks, **flags)
    is_digest_given = any(text.startswith("digest=") for text in settings or []) or (resume is None and "digest" in config.model_fields_set)
    if as_json and script is None and not is_digest_given:
        config = config.model_copy(update={"digest": True})
    if launcher == "local" and config.backend == "auto":
        config = config.model_copy(update={"backend": None})
    if launched is None:
        check_run_dir(Path(config.run_dir))
    if needs_mpirun(launcher, config.backend, launched is not None):
        raise typer.Exit(train_with_mpirun(config, script, arguments or [], os.environ, as_json))
    console = stdout if config.log_interval and not as_json else stderr
    if launched is not None and script is None:
        from meshwright.orchestrate.external_launch import train_on_launched_ranks

        log = log_progress if launched.rank == 0 else lambda _: None
        rank0_result = train_on_launched_ranks(config, launched, os.environ, console, log)
        if rank0_result is not None:
            _print_result(rank0_result, None, as_json)
        return
    with Orchestrator(config, os.environ, log_progress) as orchestrator:
        if script is not None:
            result = orchestrator.run_script(script, arguments or [], stderr)
            print_json(result) if as_json else stderr.print(f"{result['ranks']} ranks finished in {show_seconds(result['seconds'])}; {result['run']}")
            return
        prepared = orchestrator.prepare(runs=True)
        step = f"{show_seconds(prepared.estimate.step_s)} a step predicted (± {prepared.estimate.error:.0%})"
        log_progress(f"{prepared.plan.summary()} for {prepared.task.name}, {step}")
        if any(needs_mpirun(launcher, second, is_launched=False) for second in prepared.plan.backends[1:]):
            raise typer.Exit(train_with_mpirun(config, None, [], os.environ, as_json))
        prepared = verify_run(orchestrator, prepared)
        result = orchestrator.train(prepared, console)
    _print_result(result, prepared, as_json)


def _with_packaged_weights(model: str, settings: list[str]) -> str:
    """The folder of a model whose weights an installed Python package carries; other models, and those that begin anew, stay as they are."""
    from meshwright.zoo.gguf_folder import find_packaged_file, folder_of_gguf

    if "random_init=true" in settings or (file := find_packaged_file(model)) is None:
        return model
    log_progress(f"{model}: the weights of {file.name}")
    return f"hf:{folder_of_gguf(file, os.environ)}"


def _resumed_config(run: str, settings: list[str] | None, flags: dict[str, Any]) -> RunConfig:
    """The configuration of the run that goes on, changed by what was given."""
    from meshwright.orchestrate.config import check_keys, parse_setting
    from meshwright.orchestrate.resume import named_folder, resumed_config

    given = dict(parse_setting(text) for text in settings or []) | {key: value for key, value in flags.items() if value is not None}
    check_keys(given, "--set")
    config, line = resumed_config(named_folder(run, Path(flags["run_dir"] or "runs")), given, os.environ)
    log_progress(line)
    return config


def _print_result(result: dict[str, Any], prepared: PreparedRun | None, as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        _print_summary(result, prepared)
    if "unwritten" in result:
        raise RunError(result["unwritten"])


def _print_summary(result: dict[str, Any], prepared: PreparedRun | None) -> None:
    if prepared is not None:
        stderr.print("\n[bold]The plan, and why it was chosen[/bold]")
        stderr.print(prepared.why, markup=False)
        stderr.print(prepared.learning_rate, markup=False)
    stderr.print()
    stderr.print(_comparison_table(result))
    losses = result["losses"]
    if losses:
        validation = f", validation {result['validation'][-1]['loss']:.4f}" if result["validation"] else ""
        stderr.print(f"loss {losses[0]:.4f} → {losses[-1]:.4f}{validation} in {show_seconds(result['seconds'])}")
    if phases := result.get("phases"):
        stderr.print("where the time went: " + ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in phases.items() if seconds >= 0.05))
    if restarts := result.get("restarts"):
        count = f"{len(restarts)} restart{'s' * (len(restarts) > 1)}"
        stderr.print(f"{count} after faults at step{'s' * (len(restarts) > 1)} {', '.join(str(row['failed_at']) for row in restarts)}")
    if result.get("checkpoint"):
        stderr.print(f"checkpoint of step {result['checkpoint']['step']}: {result['checkpoint']['folder']}", markup=False, soft_wrap=True)
    if result.get("model"):
        stderr.print(f"weights: {result['model']}", markup=False, soft_wrap=True)
    stderr.print(f"report: {result['report']}", markup=False, soft_wrap=True)


def _comparison_table(result: dict[str, Any]) -> Table:
    """Predicted and measured step time and memory, with the difference as in the report."""
    from meshwright.observe.formatting import MEASURED_RELATIVE, format_signed_percent, relative_error

    predicted, measured = result["predicted"], result["measured"]
    table = make_table("", ">predicted", ">measured", ">off by", caption=MEASURED_RELATIVE)
    for name, show, a, b in (
        ("step time", show_seconds, predicted["step_s"], measured["step_s"]),
        ("peak memory, largest rank", show_bytes, max(predicted["memory_bytes"]), max(measured["memory_bytes"])),
    ):
        table.add_row(name, show(a), show(b) if b else "too few steps", format_signed_percent(relative_error(b, a)))
    if measured.get("exposed_communication_s") is not None:
        table.add_row("exposed communication", "", show_seconds(measured["exposed_communication_s"]), "")
    return table
