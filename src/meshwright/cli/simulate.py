"""`simulate MODEL|plan.json`: the predicted step on any cluster, event by event; what goes wrong in it; how it scales; what failures leave of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from meshwright.cli.shared import ClusterFlag, GlobalBatch, Json, MeshFlag, Nproc, Seq, Settings, make_config, need_torch, print_json, say, stdout
from meshwright.core.errors import RequestError
from meshwright.core.units import parse_bytes, show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from meshwright.orchestrate import RunConfig
    from meshwright.orchestrate.machines import Machine
    from meshwright.orchestrate.simulation import Simulated, Subject
    from meshwright.simulate import Disturbances

Several = list[str] | None


def simulate(
    what: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help="Zoo name, hf:PATH, package.module:factory, or a plan.json.")],
    cluster: ClusterFlag = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a timeline for Chrome or Perfetto.")] = None,
    slow: Annotated[Several, typer.Option("--slow", help="RANK=FACTOR: its computation takes so many times as long.")] = None,
    jitter: Annotated[float, typer.Option("--jitter", help="Vary every computation by this share, the same for a seed.")] = 0.0,
    degrade: Annotated[Several, typer.Option("--degrade", help="LINK=FACTOR@SECONDS: what is left of its bandwidth; 0 is down.")] = None,
    fail: Annotated[Several, typer.Option("--fail", help="RANK@SECONDS: its device dies then.")] = None,
    disturb: Annotated[Path | None, typer.Option("--disturb", help="A JSON file of such: slow, jitter, seed, degrade, fail.")] = None,
    sizes: Annotated[str | None, typer.Option("--scale", help="A scaling curve: 8..4096 or 8,24,64 ranks.")] = None,
    weak: Annotated[bool, typer.Option("--weak", help="With --scale: a rank's part of the batch stays, not the global batch.")] = False,
    mtbf: Annotated[float | None, typer.Option("--mtbf", help="Goodput under failures: hours between two of one device.")] = None,
    mtbf_of: Annotated[Literal["device", "node"], typer.Option("--mtbf-of", help="Whose hours --mtbf gives.")] = "device",
    restart: Annotated[float | None, typer.Option("--restart", help="With --mtbf: seconds until the job runs again; 60 by default.")] = None,
    checkpoint: Annotated[float | None, typer.Option("--checkpoint", help="With --mtbf: seconds to write one; from --storage otherwise.")] = None,
    storage: Annotated[str | None, typer.Option("--storage", help="Bytes a second to where checkpoints go, all ranks together; 10GB.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for tables and figures of --scale and --mtbf.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of jitter and of drawn failures; 0 by default.")] = None,
    global_batch: GlobalBatch = None,
    seq: Seq = None,
    nproc: Nproc = None,
    mesh: MeshFlag = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """The step that a model or plan would take: time, MFU, memory, where the time goes, and the closed form's estimate beside it.

    Example: meshwright simulate gpt-tiny --cluster ideal:4 --mesh pp=2,dp=2 --trace trace.json

    Example: meshwright simulate gpt-tiny --cluster ideal --mesh dp=4 --slow 3=1.5

    Example: meshwright simulate vae --cluster ideal --mesh dp=1 --scale 1..8 --weak

    Example: meshwright simulate gpt-tiny --cluster ideal --mesh dp=4 --mtbf 50000 --checkpoint 30 --restart 120
    """
    need_torch()
    from meshwright.orchestrate.machines import find_machine
    from meshwright.orchestrate.simulation import Subject

    faults = _disturbances(disturb, slow or [], degrade or [], fail or [], jitter, seed)
    unused = {
        "--weak": weak and sizes is None,
        "--mtbf-of": mtbf is None and mtbf_of != "device",
        "-o": out is not None and sizes is None and mtbf is None,
    }
    unused |= {
        flag: mtbf is None and value is not None for flag, value in (("--restart", restart), ("--checkpoint", checkpoint), ("--storage", storage))
    }
    for flag in (flag for flag, idle in unused.items() if idle):
        needs = {"--weak": "--scale", "-o": "--scale or --mtbf"}.get(flag, "--mtbf")
        raise RequestError(f"{flag} says nothing without {needs}: give {needs} too, or leave it out")
    config = _config(what, settings, global_batch=global_batch, seq=seq, nproc=nproc, mesh=mesh)
    failing = _Failing(mtbf, mtbf_of, restart, checkpoint, storage or "10GB", seed or 0) if mtbf is not None else None
    if sizes is not None:
        from meshwright.orchestrate.scaling import Growth, parse_sizes

        if failing is not None or trace is not None:
            raise RequestError("--scale simulates many steps, --mtbf and --trace are of one: leave one of them out")
        growth = Growth(parse_sizes(sizes), weak)
        machine = find_machine(cluster or "here", config.model_copy(update={"mesh": None, "nproc": None}), os.environ, say)
        _scale(Subject(config, machine.cluster.devices[0].kind, say), machine, growth, faults, out, as_json)
        return
    machine = find_machine(cluster or "here", config, os.environ, say)
    _one(Subject(config, machine.cluster.devices[0].kind, say), machine, faults, trace, failing, out, as_json)


def _config(what: str, settings: list[str] | None, **flags: Any) -> RunConfig:
    if not what.endswith(".json") or what.startswith("hf:"):
        return make_config(settings=settings, model=what, **flags)
    from meshwright.core.plan import Plan

    given = [name for name in ("global_batch", "nproc", "mesh") if flags[name] is not None]
    if given:
        raise RequestError(f"{what} is simulated as it is, and --{given[0].replace('_', '-')} would change it: leave one of them out")
    return make_config(settings=settings, model=Plan.load(Path(what)).model, plan=what, seq=flags["seq"])


def _disturbances(file: Path | None, slow: list[str], degrade: list[str], fail: list[str], jitter: float, seed: int | None) -> Disturbances:
    """A file's, and those of the command line on top."""
    from meshwright.core.serial import from_data, read_json
    from meshwright.simulate import Disturbances
    from meshwright.simulate.disturb import parse

    base = from_data(Disturbances, read_json(file), str(file)) if file is not None else Disturbances()
    base = base if seed is None else replace(base, seed=seed)
    slowed, links, died = parse(slow, degrade, fail)
    return replace(base, slow={**base.slow, **slowed}, degrade=(*base.degrade, *links), fail={**base.fail, **died}, jitter=jitter or base.jitter)


@dataclass(frozen=True)
class _Failing:
    """What was asked about failures."""

    hours: float
    whose: str
    restart: float | None
    save: float | None
    storage: str
    seed: int

    def study(self, done: Simulated, subject: Subject) -> dict[str, Any]:
        from meshwright.simulate.goodput import Failures, study

        if self.hours <= 0:
            raise RequestError(f"--mtbf {self.hours:g}: give hours above 0, like --mtbf 50000")
        speed = parse_bytes(self.storage.removesuffix("/s"))
        if not speed:
            raise RequestError(f"--storage {self.storage}: give bytes a second above 0, like --storage 10GB")
        cluster, world = done.decided.machine.cluster, done.decided.plan.world
        units = world if self.whose == "device" else cluster.node_index(world - 1) + 1
        save = self.save if self.save is not None else subject.state_bytes / speed
        found: dict[str, Any] = study(Failures(self.hours * 3600 / units, save, 60.0 if self.restart is None else self.restart), self.seed)
        step = done.found.step_s
        return {**found, "mtbf_hours": self.hours, "of": self.whose, "units": units, "best_steps": max(round(found["intervals_s"]["best"] / step), 1)}


def _one(
    subject: Subject, machine: Machine, faults: Disturbances, trace: Path | None, failing: _Failing | None, out: Path | None, as_json: bool
) -> None:
    from meshwright.orchestrate.simulation import as_data, decide, refusal, run

    done = run(subject, decide(subject, machine, say), faults, say)
    result = as_data(subject, done, faults)
    if trace is not None:
        _write_trace(trace, done, result)
    if failing is not None:
        if done.found.lost is not None:
            raise RequestError("--mtbf needs a step that ends: leave --fail and links that are down out")
        result["goodput"] = failing.study(done, subject)
        if out is not None:
            result["goodput"]["figure"] = _write_goodput(out, result)
    if as_json:
        print_json(result)
    else:
        _show(result)
        if failing is not None:
            _show_goodput(result["goodput"])
        if trace is not None:
            stdout.print(f"timeline: {trace} (chrome://tracing or ui.perfetto.dev)", markup=False, soft_wrap=True)
    if not done.decided.estimate.fits:
        raise RequestError(refusal(subject, done.decided))


def _write_trace(path: Path, done: Simulated, result: dict[str, Any]) -> None:
    from meshwright.observe.timeline import write_timeline

    names = {}
    for number, size in enumerate(done.found.fold.sizes):
        names[f"rank {done.found.fold.first[number]}" + (f" and {size - 1} alike" if size > 1 else "")] = done.found.spans[number]
    about = {key: result[key] for key in ("model", "cluster", "ranks", "mesh", "step_s", "disturbances")}
    write_timeline(path, names, {"otherData": about})


def _show(result: dict[str, Any]) -> None:
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


def _show_goodput(found: dict[str, Any]) -> None:
    every = f"a failure every {show_seconds(found['failures_every_s'])} ({found['units']:,} {found['of']}s of {found['mtbf_hours']:g} h)"
    stdout.print(f"{every}, checkpoint {show_seconds(found['checkpoint_s'])}, restart {show_seconds(found['restart_s'])}", markup=False)
    table = Table(box=None, header_style="bold")
    table.add_column("checkpoint every")
    for column in ("interval", "goodput"):
        table.add_column(column, justify="right")
    for name in ("best", "young", "daly"):
        table.add_row(
            {"best": f"best: {found['best_steps']:,} steps"}.get(name, name.capitalize()), *_pair(found["intervals_s"][name], found["goodput"][name])
        )
    for row in found["drawn"]:
        table.add_row(f"drawn, {row['failures']:,} failures", _pair(row["interval_s"], 0)[0], f"{row['goodput']:.2%} ± {row['error']:.2%}")
    stdout.print(table)


def _pair(seconds: float, share: float) -> tuple[str, str]:
    return show_seconds(seconds), f"{share:.2%}"


def _write_goodput(folder: Path, result: dict[str, Any]) -> str:
    from meshwright.observe.curves import Panel, curves_figure

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


def _scale(subject: Subject, machine: Machine, growth: Any, faults: Disturbances, out: Path | None, as_json: bool) -> None:
    from meshwright.orchestrate.scaling import scale, write_scaling

    rows = scale(subject, machine, growth, faults, say)
    if not any(row["samples_per_s"] for row in rows):
        raise RequestError(f"no number of ranks has a legal plan: {rows[-1]['reason']}")
    kind = "weak" if growth.weak else "strong"
    title = f"{subject.task.name} on {machine.cluster.name}, {kind} scaling"
    files = write_scaling(out, rows, title) if out is not None else {}
    if as_json:
        print_json({"model": subject.task.name, "cluster": machine.cluster.name, "scaling": kind, "points": rows, "files": files})
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
