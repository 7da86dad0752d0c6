"""`simulate MODEL|plan.json`: simulates a step on any cluster, with disturbances, as a scaling curve, or as goodput under failures."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from meshwright.cli.common import (
    ClusterFlag,
    GlobalBatchFlag,
    JsonFlag,
    MeshFlag,
    NprocFlag,
    SeqFlag,
    SetFlag,
    log_progress,
    make_config,
    print_json,
    require_torch,
    stdout,
)
from meshwright.core.errors import RequestError
from meshwright.core.quantities import parse_bytes, show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from meshwright.orchestrate import RunConfig
    from meshwright.orchestrate.simulation import SimulatedStep, SimulationJob
    from meshwright.orchestrate.simulation_target import SimulationTarget
    from meshwright.simulate import Disturbances

RepeatedOption = list[str] | None


def simulate(
    source: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help="Zoo name, hf:PATH, package.module:factory, or a plan.json.")],
    cluster: ClusterFlag = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a timeline for Chrome or Perfetto.")] = None,
    slow: Annotated[RepeatedOption, typer.Option("--slow", help="RANK=FACTOR: its computation takes so many times as long.")] = None,
    jitter: Annotated[float, typer.Option("--jitter", help="Vary every computation by this share, the same for a seed.")] = 0.0,
    degrade: Annotated[RepeatedOption, typer.Option("--degrade", help="LINK=FACTOR@SECONDS: what is left of its bandwidth; 0 is down.")] = None,
    fail: Annotated[RepeatedOption, typer.Option("--fail", help="RANK@SECONDS: its device dies then.")] = None,
    disturb: Annotated[Path | None, typer.Option("--disturb", help="A JSON file of such: slow, jitter, seed, degrade, fail.")] = None,
    scale_range: Annotated[str | None, typer.Option("--scale", help="A scaling curve: 8..4096 or 8,24,64 ranks.")] = None,
    weak: Annotated[bool, typer.Option("--weak", help="With --scale: a rank's part of the batch stays, not the global batch.")] = False,
    mtbf: Annotated[float | None, typer.Option("--mtbf", help="Goodput under failures: hours between two of one device.")] = None,
    mtbf_of: Annotated[Literal["device", "node"], typer.Option("--mtbf-of", help="Whose hours --mtbf gives.")] = "device",
    restart: Annotated[float | None, typer.Option("--restart", help="With --mtbf: seconds until the job runs again; 60 by default.")] = None,
    checkpoint: Annotated[float | None, typer.Option("--checkpoint", help="With --mtbf: seconds to write one; from --storage otherwise.")] = None,
    storage: Annotated[str | None, typer.Option("--storage", help="Bytes a second to where checkpoints go, all ranks together; 10GB.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for tables and figures of --scale and --mtbf.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of jitter and of drawn failures; 0 by default.")] = None,
    global_batch: GlobalBatchFlag = None,
    seq: SeqFlag = None,
    nproc: NprocFlag = None,
    mesh: MeshFlag = None,
    settings: SetFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Simulate a training step of a model or plan: step time, MFU, memory, time breakdown, and the closed-form estimate for comparison.

    Example: meshwright simulate gpt-tiny --cluster ideal:4 --mesh pp=2,dp=2 --trace trace.json

    Example: meshwright simulate gpt-tiny --cluster ideal --mesh dp=4 --slow 3=1.5

    Example: meshwright simulate vae --cluster ideal --mesh dp=1 --scale 1..8 --weak

    Example: meshwright simulate gpt-tiny --cluster ideal --mesh dp=4 --mtbf 50000 --checkpoint 30 --restart 120
    """
    require_torch()
    from meshwright.orchestrate.simulation import SimulationJob
    from meshwright.orchestrate.simulation_target import resolve_target

    faults = _parse_disturbances(disturb, slow or [], degrade or [], fail or [], jitter, seed)
    unused = {
        "--weak": weak and scale_range is None,
        "--mtbf-of": mtbf is None and mtbf_of != "device",
        "-o": out is not None and scale_range is None and mtbf is None,
    }
    unused |= {
        flag: mtbf is None and value is not None for flag, value in (("--restart", restart), ("--checkpoint", checkpoint), ("--storage", storage))
    }
    for flag in (flag for flag, idle in unused.items() if idle):
        needs = {"--weak": "--scale", "-o": "--scale or --mtbf"}.get(flag, "--mtbf")
        raise RequestError(f"{flag} says nothing without {needs}: give {needs} too, or leave it out")
    config = _make_run_config(source, settings, global_batch=global_batch, seq=seq, nproc=nproc, mesh=mesh)
    failing = _FailureOptions(mtbf, mtbf_of, restart, checkpoint, storage or "10GB", seed or 0) if mtbf is not None else None
    if scale_range is not None:
        from meshwright.orchestrate.scaling import ScalingSpec, parse_rank_counts

        if failing is not None or trace is not None:
            raise RequestError("--scale simulates many steps, --mtbf and --trace are of one: leave one of them out")
        growth = ScalingSpec(parse_rank_counts(scale_range), weak)
        machine = resolve_target(cluster or "here", config.model_copy(update={"mesh": None, "nproc": None}), os.environ, log_progress)
        _run_scaling(SimulationJob(config, machine.cluster.devices[0].kind, log_progress), machine, growth, faults, out, as_json)
        return
    machine = resolve_target(cluster or "here", config, os.environ, log_progress)
    _run_one_step(SimulationJob(config, machine.cluster.devices[0].kind, log_progress), machine, faults, trace, failing, out, as_json)


def _make_run_config(source: str, settings: list[str] | None, **flags: Any) -> RunConfig:
    if not source.endswith(".json") or source.startswith("hf:"):
        return make_config(settings=settings, model=source, **flags)
    from meshwright.core.plan import Plan

    given = [name for name in ("global_batch", "nproc", "mesh") if flags[name] is not None]
    if given:
        raise RequestError(f"{source} is simulated as it is, and --{given[0].replace('_', '-')} would change it: leave one of them out")
    return make_config(settings=settings, model=Plan.load(Path(source)).model, plan=source, seq=flags["seq"])


def _parse_disturbances(file: Path | None, slow: list[str], degrade: list[str], fail: list[str], jitter: float, seed: int | None) -> Disturbances:
    """The disturbances of a file, overridden and extended by those of the command line."""
    from meshwright.core.serialization import from_data, read_json
    from meshwright.simulate import Disturbances
    from meshwright.simulate.disturbances import parse_flags

    base = from_data(Disturbances, read_json(file), str(file)) if file is not None else Disturbances()
    base = base if seed is None else replace(base, seed=seed)
    slowed, links, died = parse_flags(slow, degrade, fail)
    return replace(base, slow={**base.slow, **slowed}, degrade=(*base.degrade, *links), fail={**base.fail, **died}, jitter=jitter or base.jitter)


@dataclass(frozen=True)
class _FailureOptions:
    """The flags for goodput under failures."""

    hours: float
    mtbf_unit: str
    restart: float | None
    checkpoint_s: float | None
    storage: str
    seed: int

    def study_goodput(self, simulated_step: SimulatedStep, job: SimulationJob) -> dict[str, Any]:
        from meshwright.simulate.goodput import FailureModel, study_intervals

        if self.hours <= 0:
            raise RequestError(f"--mtbf {self.hours:g}: give hours above 0, like --mtbf 50000")
        speed = parse_bytes(self.storage.removesuffix("/s"))
        if not speed:
            raise RequestError(f"--storage {self.storage}: give bytes a second above 0, like --storage 10GB")
        cluster, world = simulated_step.chosen.target.cluster, simulated_step.chosen.plan.world
        units = world if self.mtbf_unit == "device" else cluster.node_index(world - 1) + 1
        save = self.checkpoint_s if self.checkpoint_s is not None else job.checkpoint_bytes / speed
        found: dict[str, Any] = study_intervals(
            FailureModel(self.hours * 3600 / units, save, 60.0 if self.restart is None else self.restart), self.seed
        )
        step = simulated_step.simulation.step_s
        return {
            **found,
            "mtbf_hours": self.hours,
            "of": self.mtbf_unit,
            "units": units,
            "best_steps": max(round(found["intervals_s"]["best"] / step), 1),
        }


def _run_one_step(
    job: SimulationJob,
    target: SimulationTarget,
    disturbances: Disturbances,
    trace: Path | None,
    failure_options: _FailureOptions | None,
    output_dir: Path | None,
    as_json: bool,
) -> None:
    from meshwright.orchestrate.simulation import choose_plan, explain_does_not_fit, simulate_step, step_to_json

    done = simulate_step(job, choose_plan(job, target, log_progress), disturbances, log_progress)
    result = step_to_json(job, done, disturbances)
    if trace is not None:
        _write_trace(trace, done, result)
    if failure_options is not None:
        if done.simulation.lost is not None:
            raise RequestError("--mtbf needs a step that ends: leave --fail and links that are down out")
        result["goodput"] = failure_options.study_goodput(done, job)
        if output_dir is not None:
            result["goodput"]["figure"] = _write_goodput(output_dir, result)
    if as_json:
        print_json(result)
    else:
        _print_step(result)
        if failure_options is not None:
            _show_goodput(result["goodput"])
        if trace is not None:
            stdout.print(f"timeline: {trace} (chrome://tracing or ui.perfetto.dev)", markup=False, soft_wrap=True)
    if not done.chosen.estimate.fits:
        raise RequestError(explain_does_not_fit(job, done.chosen))


def _write_trace(path: Path, simulated_step: SimulatedStep, result: dict[str, Any]) -> None:
    from meshwright.observe.timeline import write_timeline

    names = {}
    for number, size in enumerate(simulated_step.simulation.rank_partition.class_sizes):
        names[f"rank {simulated_step.simulation.rank_partition.representatives[number]}" + (f" and {size - 1} alike" if size > 1 else "")] = (
            simulated_step.simulation.spans[number]
        )
    about = {key: result[key] for key in ("model", "cluster", "ranks", "mesh", "step_s", "disturbances")}
    write_timeline(path, names, {"otherData": about})


def _print_step(result: dict[str, Any]) -> None:
    ideal = result["cluster"]
    stdout.print(f"{result['model']} on {result['ranks']:,} ranks of {ideal}: {result['plan']}", markup=False, soft_wrap=True)
    lost = result["lost"]
    if lost is not None:
        text = f"Lost: {lost['ranks']} ranks stand still from {show_seconds(lost['since_s'])} on, waiting for {lost['waits_for']}; "
        stdout.print(f"{text}noticed at {show_seconds(lost['noticed_s'])}. {lost['policy'].capitalize()}.", markup=False, soft_wrap=True)
        stdout.print(f"Without it the step takes {show_seconds(result['undisturbed_s'])}.", markup=False)
        return
    rates = [f"step {show_seconds(result['step_s'])} ± {result['error']:.0%}"]
    rates += [f"{show_count(result['tokens_per_s'])} tokens/s"] if result["tokens_per_s"] else [f"{show_count(result['samples_per_s'])} samples/s"]
    rates += [f"MFU {result['mfu']:.1%}"] if result["mfu"] else []
    slower = result["step_s"] / result["undisturbed_s"] - 1 if result["undisturbed_s"] else 0.0
    rates += [f"{slower:+.1%} against {show_seconds(result['undisturbed_s'])} undisturbed"] if result["step_s"] != result["undisturbed_s"] else []
    stdout.print(", ".join(rates), markup=False)
    table = Table(box=None, header_style="bold")
    table.add_column("where the time goes")
    for column in ("seconds", "of step"):
        table.add_column(column, justify="right")
    for name, seconds in result["breakdown"].items():
        if seconds > 0:
            table.add_row(name, show_seconds(seconds), f"{seconds / result['step_s']:.1%}" if result["step_s"] else "")
    stdout.print(table)
    kinds = ", ".join(f"{name} {show_bytes(size)}" for name, size in result["memory_bytes"].items() if size and name != "total")
    fits = "fits" if result["fits"] else "does not fit"
    stdout.print(f"memory of the largest rank: {show_bytes(result['memory_bytes']['total'])} ({kinds}); {fits}: {result['reason']}", markup=False)
    closed = result["closed_form"]
    stdout.print(f"closed form: {show_seconds(closed['step_s'])}. {closed['why']}", markup=False)
    stdout.print(f"simulated as {result['classes']} kinds of ranks in {show_seconds(result['seconds'])}", markup=False)


def _show_goodput(goodput: dict[str, Any]) -> None:
    every = f"a failure every {show_seconds(goodput['failures_every_s'])} ({goodput['units']:,} {goodput['of']}s of {goodput['mtbf_hours']:g} h)"
    stdout.print(f"{every}, checkpoint {show_seconds(goodput['checkpoint_s'])}, restart {show_seconds(goodput['restart_s'])}", markup=False)
    table = Table(box=None, header_style="bold")
    table.add_column("checkpoint every")
    for column in ("interval", "goodput"):
        table.add_column(column, justify="right")
    for name in ("best", "young", "daly"):
        table.add_row(
            {"best": f"best: {goodput['best_steps']:,} steps"}.get(name, name.capitalize()),
            *_format_interval(goodput["intervals_s"][name], goodput["goodput"][name]),
        )
    for row in goodput["drawn"]:
        table.add_row(f"drawn, {row['failures']:,} failures", _format_interval(row["interval_s"], 0)[0], f"{row['goodput']:.2%} ± {row['error']:.2%}")
    stdout.print(table)


def _format_interval(seconds: float, fraction: float) -> tuple[str, str]:
    return show_seconds(seconds), f"{fraction:.2%}"


def _write_goodput(folder: Path, result: dict[str, Any]) -> str:
    from meshwright.observe.curves_figure import Panel, curves_figure

    found = result["goodput"]
    folder.mkdir(parents=True, exist_ok=True)
    curves = {
        "exact": [(seconds, 100 * share) for seconds, share in found["curve"]],
        "drawn": [(row["interval_s"], 100 * row["goodput"]) for row in found["drawn"]],
        "best": [(found["intervals_s"]["best"], 100 * found["goodput"]["best"])],
    }
    panel = Panel(
        "goodput by checkpoint interval",
        "between checkpoints",
        curves,
        show_seconds,
        lambda v: f"{v:.0f} %",
        True,
        False,
        frozenset({"drawn", "best"}),
    )
    path = folder / "goodput.svg"
    path.write_text(curves_figure([panel], f"{result['model']}, {result['ranks']:,} ranks of {result['cluster']}"), encoding="utf-8")
    return str(path)


def _run_scaling(job: SimulationJob, target: SimulationTarget, spec: Any, disturbances: Disturbances, output_dir: Path | None, as_json: bool) -> None:
    from meshwright.orchestrate.scaling import simulate_scaling, write_scaling

    rows = simulate_scaling(job, target, spec, disturbances, log_progress)
    if not any(row["samples_per_s"] for row in rows):
        raise RequestError(f"no number of ranks has a legal plan: {rows[-1]['reason']}")
    kind = "weak" if spec.weak else "strong"
    title = f"{job.task.name} on {target.cluster.name}, {kind} scaling"
    files = write_scaling(output_dir, rows, title) if output_dir is not None else {}
    if as_json:
        print_json({"model": job.task.name, "cluster": target.cluster.name, "scaling": kind, "points": rows, "files": files})
        return
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for column in ("ranks", "batch", "step", "samples/s", "efficiency", "MFU", "closed form"):
        table.add_column(column, justify="right")
    table.add_column("mesh")
    for row in rows:
        if not row["samples_per_s"]:
            table.add_row(f"{row['ranks']:,}", f"{row['global_batch']:,}", "–", "–", "–", "–", "–", f"[dim]{row['reason']}[/dim]")
            continue
        shares = (f"{row['efficiency']:.1%}", f"{row['mfu']:.1%}" if row["mfu"] else "–", show_seconds(row["predicted_s"]))
        fits = "" if row["fits"] else " (does not fit)"
        table.add_row(
            f"{row['ranks']:,}",
            f"{row['global_batch']:,}",
            show_seconds(row["step_s"]),
            show_count(row["samples_per_s"]),
            *shares,
            f"{row['mesh']}{fits}",
        )
    stdout.print(table)
    if files:
        stdout.print(f"written: {', '.join(files.values())}", soft_wrap=True)
