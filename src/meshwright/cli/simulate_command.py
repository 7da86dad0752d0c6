"""`simulate MODEL|plan.json`: simulates a step on any cluster, with disturbances, as a scaling curve, or as goodput under failures."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from meshwright.cli import options
from meshwright.cli.console import log_progress, make_table, print_json, print_line, require_torch, stdout
from meshwright.core.errors import RequestError
from meshwright.core.quantities import parse_bytes, show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from meshwright.orchestrate import RunConfig
    from meshwright.orchestrate.scaling import ScalingSpec
    from meshwright.orchestrate.simulation import SimulatedStep, SimulationJob
    from meshwright.orchestrate.simulation_target import SimulationTarget
    from meshwright.simulate import Disturbances

_Repeated = list[str] | None


def simulate(
    source: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help="A model of the zoo, hf:PATH, package.module:factory, or a plan.json.")],
    cluster: options.Cluster = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a timeline of the step to this file, for Chrome or Perfetto.")] = None,
    slow: Annotated[_Repeated, typer.Option("--slow", help="RANK=FACTOR: the rank computes FACTOR times as long. Repeatable.")] = None,
    jitter: Annotated[float, typer.Option("--jitter", help="Vary each computation at random by this fraction (standard deviation).")] = 0.0,
    degrade: Annotated[_Repeated, typer.Option("--degrade", help="LINK=FACTOR@SECONDS: scale its bandwidth from then on; 0 is down.")] = None,
    fail: Annotated[_Repeated, typer.Option("--fail", help="RANK@SECONDS: the rank's device fails at that time. Repeatable.")] = None,
    disturb: Annotated[Path | None, typer.Option("--disturb", help="A JSON file with the keys slow, jitter, seed, degrade, fail.")] = None,
    scale: Annotated[str | None, typer.Option("--scale", help="Simulate a scaling curve over these ranks: 8..4096 or 8,24,64.")] = None,
    weak: Annotated[bool, typer.Option("--weak", help="With --scale: keep the batch of a rank fixed instead of the global batch.")] = False,
    mtbf: Annotated[float | None, typer.Option("--mtbf", help="Compute goodput under failures: hours between failures of a device.")] = None,
    mtbf_of: Annotated[Literal["device", "node"], typer.Option("--mtbf-of", help="Whether --mtbf is of a device or a node.")] = "device",
    restart: Annotated[float | None, typer.Option("--restart", help="With --mtbf: seconds until the job runs again; 60 by default.")] = None,
    checkpoint: Annotated[float | None, typer.Option("--checkpoint", help="With --mtbf: seconds to write one; by default from --storage.")] = None,
    storage: Annotated[str | None, typer.Option("--storage", help="With --mtbf: bytes/s that all ranks write together; 10GB by default.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for tables and figures of --scale and --mtbf.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of jitter and of sampled failures; 0 by default.")] = None,
    global_batch: options.GlobalBatch = None,
    seq: options.Seq = None,
    nproc: options.Nproc = None,
    mesh: options.Mesh = None,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Simulate a training step on any cluster: step time, MFU, memory, time breakdown; also scaling curves, disturbances and goodput.

    Examples:
      meshwright simulate gpt-tiny --cluster ideal:4 --mesh pp=2,dp=2 --trace trace.json
      meshwright simulate gpt-tiny --cluster ideal --mesh dp=4 --slow 3=1.5
      meshwright simulate vae --cluster ideal --mesh dp=1 --scale 1..8 --weak
      meshwright simulate gpt-tiny --cluster ideal --mesh dp=4 --mtbf 50000 --checkpoint 30 --restart 120
    """
    require_torch()
    from meshwright.orchestrate.scaling import ScalingSpec, parse_rank_counts
    from meshwright.orchestrate.simulation import SimulationJob
    from meshwright.orchestrate.simulation_target import resolve_target

    disturbances = _parse_disturbances(disturb, slow or [], degrade or [], fail or [], jitter, seed)
    needs_mtbf = {"--mtbf-of": mtbf_of != "device", "--restart": restart, "--checkpoint": checkpoint, "--storage": storage}
    for flag, is_unused, needed in (
        ("--weak", weak and scale is None, "--scale"),
        ("-o", out is not None and scale is None and mtbf is None, "--scale or --mtbf"),
        *((flag, mtbf is None and value not in (None, False), "--mtbf") for flag, value in needs_mtbf.items()),
    ):
        if is_unused:
            raise RequestError(f"{flag} has no effect without {needed}: give {needed} too, or leave it out")
    config = _make_run_config(source, settings, global_batch=global_batch, seq=seq, nproc=nproc, mesh=mesh)
    failures = _FailureOptions(mtbf, mtbf_of, restart, checkpoint, storage or "10GB", seed or 0) if mtbf is not None else None
    if scale is not None and (failures is not None or trace is not None):
        raise RequestError("--scale simulates many steps, --mtbf and --trace are for one step: leave one of them out")
    spec = ScalingSpec(parse_rank_counts(scale), weak) if scale is not None else None
    # With --scale the cluster is not limited to the ranks of one mesh.
    target_config = config if spec is None else config.model_copy(update={"mesh": None, "nproc": None})
    target = resolve_target(cluster or "here", target_config, os.environ, log_progress)
    job = SimulationJob(config, target.cluster.devices[0].kind, log_progress)
    if spec is not None:
        _run_scaling(job, target, spec, disturbances, out, as_json)
    else:
        _run_one_step(job, target, disturbances, trace, failures, out, as_json)


def _make_run_config(source: str, settings: list[str] | None, **flags: Any) -> RunConfig:
    if not source.endswith(".json") or source.startswith("hf:"):
        return options.make_config(settings=settings, model=source, **flags)
    from meshwright.core.plan import Plan

    for name in ("global_batch", "nproc", "mesh"):
        if flags[name] is not None:
            raise RequestError(f"{source} is simulated as it is, and --{name.replace('_', '-')} would change it: leave one of them out")
    return options.make_config(settings=settings, model=Plan.load(Path(source)).model, plan=source, seq=flags["seq"])


def _parse_disturbances(file: Path | None, slow: list[str], degrade: list[str], fail: list[str], jitter: float, seed: int | None) -> Disturbances:
    """The disturbances of a file, overridden and extended by those of the command line."""
    from meshwright.core.serialization import from_data, read_json
    from meshwright.simulate import Disturbances
    from meshwright.simulate.disturbances import parse_flags

    base = from_data(Disturbances, read_json(file), str(file)) if file is not None else Disturbances()
    base = replace(base, seed=base.seed if seed is None else seed, jitter=jitter or base.jitter)
    slowdowns, degradations, failures = parse_flags(slow, degrade, fail)
    return replace(base, slow={**base.slow, **slowdowns}, degrade=(*base.degrade, *degradations), fail={**base.fail, **failures})


@dataclass(frozen=True)
class _FailureOptions:
    """The options of --mtbf: goodput under failures."""

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
        storage_rate = parse_bytes(self.storage.removesuffix("/s"))
        if not storage_rate:
            raise RequestError(f"--storage {self.storage}: give bytes a second above 0, like --storage 10GB")
        cluster, world = simulated_step.chosen.target.cluster, simulated_step.chosen.plan.world
        units = world if self.mtbf_unit == "device" else cluster.node_index(world - 1) + 1
        checkpoint_s = self.checkpoint_s if self.checkpoint_s is not None else job.checkpoint_bytes / storage_rate
        failures = FailureModel(self.hours * 3600 / units, checkpoint_s, 60.0 if self.restart is None else self.restart)
        study: dict[str, Any] = study_intervals(failures, self.seed)
        best_steps = max(round(study["intervals_s"]["best"] / simulated_step.simulation.step_s), 1)
        return {**study, "mtbf_hours": self.hours, "of": self.mtbf_unit, "units": units, "best_steps": best_steps}


def _run_one_step(
    job: SimulationJob, target: SimulationTarget, disturbances: Disturbances, trace: Path | None, failures: _FailureOptions | None,
    out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from meshwright.orchestrate.simulation import choose_plan, explain_does_not_fit, simulate_step, step_to_json

    simulated = simulate_step(job, choose_plan(job, target, log_progress), disturbances, log_progress)
    result = step_to_json(job, simulated, disturbances)
    if trace is not None:
        _write_trace(trace, simulated, result)
    if failures is not None:
        if simulated.simulation.lost is not None:
            raise RequestError("--mtbf needs a step that completes: leave out --fail, and --degrade with factor 0")
        result["goodput"] = failures.study_goodput(simulated, job)
        if out is not None:
            result["goodput"]["figure"] = _write_goodput(out, result)
    if as_json:
        print_json(result)
    else:
        _print_step(result)
        if failures is not None:
            _show_goodput(result["goodput"])
        if trace is not None:
            print_line(f"timeline: {trace} (chrome://tracing or ui.perfetto.dev)")
    if not simulated.chosen.estimate.fits:
        raise RequestError(explain_does_not_fit(job, simulated.chosen))


def _write_trace(path: Path, simulated: SimulatedStep, result: dict[str, Any]) -> None:
    from meshwright.observe.timeline import write_timeline

    simulation, classes = simulated.simulation, simulated.simulation.rank_partition
    names = [f"rank {rank}{f' and {n - 1} alike' if n > 1 else ''}" for rank, n in zip(classes.representatives, classes.class_sizes, strict=True)]
    about = {key: result[key] for key in ("model", "cluster", "ranks", "mesh", "step_s", "disturbances")}
    write_timeline(path, dict(zip(names, simulation.spans, strict=True)), {"otherData": about})


def _print_step(result: dict[str, Any]) -> None:
    print_line(f"{result['model']} on {result['ranks']:,} ranks of {result['cluster']}: {result['plan']}")
    lost, step_s, undisturbed_s = result["lost"], result["step_s"], result["undisturbed_s"]
    if lost is not None:
        waiting = f"Lost: {lost['ranks']} ranks wait from {show_seconds(lost['since_s'])} on, for {lost['waits_for']}"
        print_line(f"{waiting}; noticed at {show_seconds(lost['noticed_s'])}. {lost['policy'].capitalize()}.")
        print_line(f"Without the failure the step takes {show_seconds(undisturbed_s)}.")
        return
    rates = [f"step {show_seconds(step_s)} ± {result['error']:.0%}"]
    rates += [f"{show_count(result['tokens_per_s'])} tokens/s"] if result["tokens_per_s"] else [f"{show_count(result['samples_per_s'])} samples/s"]
    rates += [f"MFU {result['mfu']:.1%}"] if result["mfu"] else []
    slower = step_s / undisturbed_s - 1 if undisturbed_s else 0.0
    rates += [f"{slower:+.1%} against {show_seconds(undisturbed_s)} undisturbed"] if step_s != undisturbed_s else []
    print_line(", ".join(rates))
    table = make_table("where the time goes", ">seconds", ">of step")
    for name, seconds in result["breakdown"].items():
        if seconds > 0:
            table.add_row(name, show_seconds(seconds), f"{seconds / step_s:.1%}" if step_s else "")
    stdout.print(table)
    kinds = ", ".join(f"{name} {show_bytes(size)}" for name, size in result["memory_bytes"].items() if size and name != "total")
    fits = "fits" if result["fits"] else "does not fit"
    total, closed = show_bytes(result["memory_bytes"]["total"]), result["closed_form"]
    stdout.print(f"memory of the largest rank: {total} ({kinds}); {fits}: {result['reason']}", markup=False)
    stdout.print(f"closed-form estimate: {show_seconds(closed['step_s'])}. {closed['why']}", markup=False)
    print_line(f"simulated as {result['classes']} rank classes in {show_seconds(result['seconds'])}")


def _show_goodput(goodput: dict[str, Any]) -> None:
    units = f"{goodput['units']:,} {goodput['of']}s of {goodput['mtbf_hours']:g} h"
    costs = f"checkpoint {show_seconds(goodput['checkpoint_s'])}, restart {show_seconds(goodput['restart_s'])}"
    print_line(f"a failure every {show_seconds(goodput['failures_every_s'])} ({units}), {costs}")
    table = make_table("checkpoint every", ">interval", ">goodput")
    for name, title in (("best", f"best: {goodput['best_steps']:,} steps"), ("young", "Young"), ("daly", "Daly")):
        table.add_row(title, show_seconds(goodput["intervals_s"][name]), f"{goodput['goodput'][name]:.2%}")
    for row in goodput["drawn"]:
        share = f"{row['goodput']:.2%} ± {row['error']:.2%}"
        table.add_row(f"sampled, {row['failures']:,} failures", show_seconds(row["interval_s"]), share)
    stdout.print(table)


def _write_goodput(folder: Path, result: dict[str, Any]) -> str:
    from meshwright.observe.curves_figure import Panel, curves_figure

    goodput = result["goodput"]
    curves = {
        "exact": [(seconds, 100 * share) for seconds, share in goodput["curve"]],
        "sampled": [(row["interval_s"], 100 * row["goodput"]) for row in goodput["drawn"]],
        "best": [(goodput["intervals_s"]["best"], 100 * goodput["goodput"]["best"])],
    }
    title, dots = "goodput by checkpoint interval", frozenset({"sampled", "best"})
    panel = Panel(title, "between checkpoints", curves, show_seconds, lambda v: f"{v:.0f} %", log_x=True, dots=dots)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "goodput.svg"
    path.write_text(curves_figure([panel], f"{result['model']}, {result['ranks']:,} ranks of {result['cluster']}"), encoding="utf-8")
    return str(path)


def _run_scaling(job: SimulationJob, target: SimulationTarget, spec: ScalingSpec, disturbed: Disturbances, out: Path | None, as_json: bool) -> None:
    from meshwright.orchestrate.scaling import simulate_scaling, write_scaling

    rows = simulate_scaling(job, target, spec, disturbed, log_progress)
    if not any(row["samples_per_s"] for row in rows):
        raise RequestError(f"no plan is possible at any of these numbers of ranks: {rows[-1]['reason']}")
    kind = "weak" if spec.weak else "strong"
    title = f"{job.task.name} on {target.cluster.name}, {kind} scaling"
    files = write_scaling(out, rows, title) if out is not None else {}
    if as_json:
        print_json({"model": job.task.name, "cluster": target.cluster.name, "scaling": kind, "points": rows, "files": files})
        return
    table = make_table(">ranks", ">batch", ">step", ">samples/s", ">efficiency", ">MFU", ">closed form", "mesh", title=title)
    for row in rows:
        cells = ["–"] * 5 + [f"[dim]{row['reason']}[/dim]"]
        if row["samples_per_s"]:
            mfu = f"{row['mfu']:.1%}" if row["mfu"] else "–"
            rates = [show_seconds(row["step_s"]), show_count(row["samples_per_s"]), f"{row['efficiency']:.1%}", mfu]
            cells = [*rates, show_seconds(row["predicted_s"]), f"{row['mesh']}{'' if row['fits'] else ' (does not fit)'}"]
        table.add_row(f"{row['ranks']:,}", f"{row['global_batch']:,}", *cells)
    stdout.print(table)
    if files:
        print_line(f"written: {', '.join(files.values())}")
