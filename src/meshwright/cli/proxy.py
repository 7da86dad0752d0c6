"""`proxy NAME`: run or simulate the communication of a training step, without the model."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from meshwright.cli.shared import ClusterFlag, Json, Nproc, Settings, make_config, need_torch, print_json, say, stdout
from meshwright.core.backends import backend_for, backend_traits
from meshwright.core.errors import MeshwrightError, RequestError
from meshwright.core.units import show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.core.schedule import Schedule
    from meshwright.launch import Place
    from meshwright.proxies.launch import Outcome
    from meshwright.simulate import Network

_TABLE_WIDTH = 124  # a narrower terminal wraps it; figures cut short would tell nothing
_MOST_RANKS = 16  # that are started unasked, however many a proxy would need


def proxy(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A proxy, or a schedule's FILE.json; with --plan, the plan's model.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="As the originals take them, like 64 8 for gpt2.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="The communication of this plan.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the schedule here instead of running it.")] = None,
    backend: Annotated[str | None, typer.Option("--backend", help="gloo, nccl, mpi, or sim: simulate it.")] = None,
    cluster: ClusterFlag = None,
    nproc: Nproc = None,
    compute: Annotated[Literal["wait", "real"], typer.Option("--compute", help="Wait, or multiply matrices of as many FLOPs.")] = "wait",
    scale_down: Annotated[float, typer.Option("--scale-down", help="Divide sizes and waits by this.")] = 1.0,
    warm: Annotated[int | None, typer.Option("--warm-up", min=0, help="Steps before the clock counts; the original's number by default.")] = None,
    runs: Annotated[int | None, typer.Option("--runs", min=1, help="Timed steps; the original's number by default.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For --jitter.")] = 0,
    jitter: Annotated[float, typer.Option("--jitter", min=0.0, max=1.0, help="Vary computation by this share, the same for a seed.")] = 0.0,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option("--device", help="Where buffers lie; cuda for nccl, else cpu.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a timeline of the last step for Chrome or Perfetto.")] = None,
    table: Annotated[Path | None, typer.Option("--csv", help="Write the table, rank by rank, as CSV.")] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """The communication of a training step, with computation as a wait: gpt2, bert, resnet50, resnet152, resnet152-strong, cosmoflow, dlrm,
    gpt3, gpt3-moe, gpt3-one-pipe-step, gpt3-moe-one-pipe-step, fsdp, hybrid-2d, hybrid-3d, hybrid-3d-moe, or any plan's.

    Example: meshwright proxy gpt3 --backend sim --cluster ideal

    Example: meshwright proxy gpt2 4 2 --nproc 4 --scale-down 64 --runs 20 --trace trace.json

    Example: meshwright proxy --plan plan.json --runs 20

    Example: mpirun -n 32 meshwright proxy gpt2 64 8
    """
    need_torch()
    from meshwright.launch import adopted

    place = adopted(os.environ)
    wish = _Wish(name, list(arguments or []), plan, scale_down, settings or [], nproc, backend, cluster or "here", place)
    quiet = place is not None and place.rank > 0
    try:
        job = wish.job()
        if output is not None:
            if not quiet:
                _write(job.schedule, output)
            return
        if quiet and backend == "sim":
            return
        policy = {
            "warm": job.warm if warm is None else warm, "runs": job.runs if runs is None else runs,
            "seed": seed, "jitter": jitter, "compute": compute, "device": device,
        }  # fmt: skip
        outcome = _simulated(job, wish, policy) if backend == "sim" else _ran(job, wish, policy)
    except MeshwrightError:
        if quiet:  # every rank finds the same mistake, and one says it
            raise typer.Exit(RequestError.exit_code) from None
        raise
    if outcome is not None:
        _finish(job.schedule, outcome, policy, backend, trace, table, as_json)


@dataclass(frozen=True)
class _Job:
    """What is to be run, and how often the original does."""

    schedule: Schedule
    warm: int
    runs: int


@dataclass(frozen=True)
class _Wish:
    """What was asked for on the command line."""

    name: str | None
    arguments: list[str]
    plan: Path | None
    scale_down: float
    settings: list[str]
    nproc: int | None
    backend: str | None
    cluster: str
    place: Place | None

    def job(self) -> _Job:
        from meshwright.proxies.files import load, scaled_down

        if self.scale_down < 1:
            raise RequestError(f"--scale-down {self.scale_down:g}: sizes and waits are divided by it; give 1 or more")
        if self.plan is not None:
            return _Job(scaled_down(self._planned(), self.scale_down), 4, 32)
        if self.name is None:
            from meshwright.proxies import PROXIES

            raise RequestError(f"which proxy? one of: {', '.join(PROXIES)}, or --plan FILE")
        if self.name.endswith(".json"):
            return _Job(scaled_down(self._fits(load(Path(self.name))), self.scale_down), 4, 32)
        return self._named()

    def _named(self) -> _Job:
        from meshwright.orchestrate.config import parse_setting
        from meshwright.proxies import find

        chosen = find(self.name or "")
        given = dict(parse_setting(text) for text in self.settings)
        if self.scale_down != 1:
            given["scale_down"] = self.scale_down
        dims = chosen.settle(self.arguments, given)
        return _Job(chosen.build(dims, self._world(chosen.name, chosen.smallest(dims))), chosen.warm, chosen.runs)

    def _world(self, name: str, smallest: int) -> int:
        """As many ranks as there are; as were asked for; or the fewest that will do, unless these are too many to start unasked."""
        given = self.given_world()
        if given is not None or self.backend == "sim":
            return given or smallest
        if smallest > 1:
            if smallest > _MOST_RANKS:
                raise RequestError(
                    f"{name} needs {smallest} ranks as asked: use fewer stages, shards or experts, --backend sim, or --nproc {smallest}"
                )
            return smallest
        from meshwright.describe.discover import discover

        return len(discover(os.environ).devices)

    def given_world(self) -> int | None:
        if self.place is not None and self.backend != "sim":
            if self.nproc not in (None, self.place.world):
                raise RequestError(f"--nproc {self.nproc}, but {self.place.launcher} started {self.place.world} ranks: leave --nproc out")
            return self.place.world
        kind, _, number = self.cluster.partition(":")
        if self.backend == "sim" and kind == "ideal" and number:
            if not number.isdigit() or not int(number):
                raise RequestError(f"--cluster {self.cluster}: write it like ideal:64")
            return int(number)
        return self.nproc

    def _fits(self, schedule: Schedule) -> Schedule:
        if self.given_world() not in (None, schedule.world):
            raise RequestError(f"{schedule.name} is for {schedule.world} ranks, not {self.given_world()}: use {schedule.world}")
        if self.arguments:
            raise RequestError(f"unexpected argument '{self.arguments[0]}': only a proxy with a name takes arguments")
        return schedule

    def _planned(self) -> Schedule:
        """The plan's own schedule, with computation priced on this machine."""
        from meshwright import zoo
        from meshwright.core.plan import Plan
        from meshwright.cost.crews import priced_schedule
        from meshwright.describe.flow import trace_flow
        from meshwright.describe.trace import trace_task
        from meshwright.orchestrate import Orchestrator
        from meshwright.orchestrate.strategy import fill_cuts, needs_cuts

        assert self.plan is not None
        plan = Plan.load(self.plan)
        config = make_config(settings=self.settings, model=self.name or plan.model, plan=str(self.plan))
        task = zoo.load(config.model, seq=config.seq, dropout=config.dropout, random_init=config.random_init)
        with Orchestrator(config, os.environ, say) as orchestrator:
            cluster, calibration = orchestrator.cluster, orchestrator.calibration()
        say(f"profiling {task.name}")
        profile = trace_task(task, precision=plan.memory.precision, device=plan.device)
        if needs_cuts(plan):
            plan = fill_cuts(plan, trace_flow(task, plan.memory.precision), profile)
        return self._fits(priced_schedule(plan, profile, config.optimizer, cluster, calibration, clip=config.clip > 0))


def _ran(job: _Job, wish: _Wish, policy: dict[str, Any]) -> Outcome | None:
    """Over real ranks: those that a launcher started, or our own."""
    import torch

    from meshwright.describe.discover import available_memory
    from meshwright.launch import default_backend
    from meshwright.proxies.launch import adopted_run, check_memory, launched
    from meshwright.proxies.runner import RunPolicy

    world, gpus = job.schedule.world, torch.cuda.device_count()
    backend = wish.backend or default_backend(wish.place, "cuda" if gpus >= world and policy["device"] != "cpu" else "cpu")
    device = policy["device"] or backend_traits(backend).devices[0]
    policy.update(backend=backend, device=device)
    if device == "cuda" and not gpus:
        raise RequestError("--backend nccl and --device cuda need a GPU, and torch sees none: use --backend gloo")
    here = wish.place.local_world if wish.place is not None else world
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()
    check_memory(job.schedule, free, -(-here // gpus) if device == "cuda" else here)
    chosen = RunPolicy(**policy)
    if wish.place is not None:
        return adopted_run(job.schedule, chosen, wish.place, say)
    if launchers := backend_traits(backend).launchers:
        raise RequestError(f"--backend {backend}: start it with {launchers[0]} -n {world} meshwright proxy …")
    return launched(job.schedule, chosen, os.environ, say)


def _simulated(job: _Job, wish: _Wish, policy: dict[str, Any]) -> Outcome:
    from meshwright.proxies.launch import simulated

    policy.update(backend="sim", warm=0, runs=1)
    count = sum(map(len, job.schedule.programs))
    say(f"simulating {job.schedule.world} ranks, {len(job.schedule.programs)} of them different, {count:,} actions")
    return simulated(job.schedule, _network(wish, job.schedule.world), jitter=policy["jitter"], seed=policy["seed"])


def _network(wish: _Wish, world: int) -> Network:
    from meshwright.cost.sheets import from_sheets
    from meshwright.describe.clusters import resolve
    from meshwright.orchestrate import Orchestrator
    from meshwright.simulate import Ideal, Linked

    if wish.cluster.partition(":")[0] == "ideal":
        return Ideal()
    found = resolve(wish.cluster, os.environ)
    if wish.cluster == "here":
        with Orchestrator(make_config(), os.environ, say) as orchestrator:
            measured = orchestrator.calibration()
    elif world > len(found.devices):
        raise RequestError(
            f"--cluster {wish.cluster} has {len(found.devices)} devices, and {world} ranks are asked for: use more nodes or fewer ranks"
        )
    else:
        measured = from_sheets(found)
    kind = found.devices[0].kind
    return Linked(found, measured.layout(world), backend_for(kind), duplex=kind == "cuda" or len(found.nodes) > 1)


def _write(schedule: Schedule, output: Path) -> None:
    from meshwright.proxies.files import save

    save(schedule, output)
    stdout.print(f"written to {output}; run it with: meshwright proxy {output}", markup=False, soft_wrap=True)


def _finish(
    schedule: Schedule, outcome: Outcome, policy: dict[str, Any], backend: str | None, trace: Path | None, table: Path | None, as_json: bool
) -> None:
    from meshwright.observe.timeline import write_timeline
    from meshwright.proxies.launch import simulated
    from meshwright.proxies.tally import csv_rows
    from meshwright.simulate import Ideal

    about = {"proxy": schedule.name, "world": schedule.world, **policy}
    result = {**about, **outcome.result}
    if backend != "sim":
        result["ideal_s"] = simulated(schedule, Ideal()).result["step_s"]["median"]
    if trace is not None:
        write_timeline(trace, outcome.spans, {"otherData": about})
    if table is not None:
        with table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(csv_rows(result))
    if as_json:
        print_json(result)
        return
    step = result["step_s"]
    tail = f", p95 {show_seconds(step['p95'])}, max {show_seconds(step['max'])}" if policy["runs"] > 1 else ""
    ideal = f"; {show_seconds(result['ideal_s'])} if communication cost nothing" if "ideal_s" in result and policy["compute"] == "wait" else ""
    stdout.print(f"{schedule.name} on {schedule.world} ranks, {policy['backend']}: step {show_seconds(step['median'])}{tail}{ideal}", markup=False)
    if result["collectives"]:
        Console(width=max(stdout.width, _TABLE_WIDTH), highlight=False).print(collectives_table(result["collectives"]))


def collectives_table(rows: list[dict[str, Any]]) -> Table:
    """One line a collective, over all ranks."""
    table = Table(box=None, header_style="bold", caption="exposed: ranks stood still for it; hidden: they did not", caption_justify="left")
    for column in ("name", "operation"):
        table.add_column(column, overflow="fold")
    for column in ("calls", "bytes", "median", "p95", "max", "bandwidth", "of step", "exposed", "hidden"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        times = [show_seconds(row[key]) for key in ("median_s", "p95_s", "max_s")]
        speed = show_rate(row["bandwidth"], "B/s") if row["bandwidth"] else "–"
        ends = (speed, f"{row['share']:.0%}", show_seconds(row["exposed_s"]), show_seconds(row["overlapped_s"]))
        table.add_row(row["name"], f"{row['op']} ×{row['group']}", str(row["calls"]), show_bytes(row["bytes"]), *times, *ends)
    return table
