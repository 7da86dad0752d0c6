"""`proxy NAME`: runs or simulates the communication of a training step, without the model."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from meshwright.cli.common import ClusterFlag, JsonFlag, NprocFlag, SetFlag, log_progress, make_config, print_json, require_torch, stdout
from meshwright.core.backends import backend_for, backend_traits
from meshwright.core.errors import MeshwrightError, RequestError
from meshwright.core.quantities import show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from meshwright.core.schedule import Schedule
    from meshwright.launch import LaunchedRank
    from meshwright.proxies.proxy_launch import ProxyOutcome
    from meshwright.simulate import Network

_TABLE_WIDTH = 124  # a narrower terminal wraps the table; truncated numbers would be useless
_MAX_DEFAULT_RANKS = 16  # most ranks started without --nproc


def proxy(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A proxy, or a schedule's FILE.json; with --plan, the plan's model.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="As the originals take them, like 64 8 for gpt2.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="The communication of this plan.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the schedule here instead of running it.")] = None,
    backend: Annotated[str | None, typer.Option("--backend", help="gloo, nccl, mpi, or sim: simulate it.")] = None,
    cluster: ClusterFlag = None,
    nproc: NprocFlag = None,
    compute: Annotated[Literal["wait", "real"], typer.Option("--compute", help="Wait, or multiply matrices of as many FLOPs.")] = "wait",
    scale_down: Annotated[float, typer.Option("--scale-down", help="Divide sizes and waits by this.")] = 1.0,
    warmup_steps: Annotated[
        int | None, typer.Option("--warm-up", min=0, help="Steps before the clock counts; the original's number by default.")
    ] = None,
    runs: Annotated[int | None, typer.Option("--runs", min=1, help="Timed steps; the original's number by default.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For --jitter.")] = 0,
    jitter: Annotated[float, typer.Option("--jitter", min=0.0, max=1.0, help="Vary computation by this share, the same for a seed.")] = 0.0,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option("--device", help="Where buffers lie; cuda for nccl, else cpu.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a timeline of the last step for Chrome or Perfetto.")] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write the table, rank by rank, as CSV.")] = None,
    settings: SetFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the communication of a training step, with computation as a wait: gpt2, bert, resnet50, resnet152, resnet152-strong, cosmoflow, dlrm,
    gpt3, gpt3-moe, gpt3-one-pipe-step, gpt3-moe-one-pipe-step, fsdp, hybrid-2d, hybrid-3d, hybrid-3d-moe, or any plan's.

    Example: meshwright proxy gpt3 --backend sim --cluster ideal

    Example: meshwright proxy gpt2 4 2 --nproc 4 --scale-down 64 --runs 20 --trace trace.json

    Example: meshwright proxy --plan plan.json --runs 20

    Example: mpirun -n 32 meshwright proxy gpt2 64 8
    """
    require_torch()
    from meshwright.launch import detect_launched_rank

    place = detect_launched_rank(os.environ)
    constraint = _ProxyRequest(name, list(arguments or []), plan, scale_down, settings or [], nproc, backend, cluster or "here", place)
    quiet = place is not None and place.rank > 0
    try:
        job = constraint.make_job()
        if output is not None:
            if not quiet:
                _write_schedule(job.schedule, output)
            return
        if quiet and backend == "sim":
            return
        policy = {
            "warm": job.warmup_steps if warmup_steps is None else warmup_steps, "runs": job.timed_steps if runs is None else runs,
            "seed": seed, "jitter": jitter, "compute": compute, "device": device,
        }  # fmt: skip
        outcome = _simulate(job, constraint, policy) if backend == "sim" else _run_on_ranks(job, constraint, policy)
    except MeshwrightError:
        if quiet:  # every rank finds the same error; rank 0 alone prints it
            raise typer.Exit(RequestError.exit_code) from None
        raise
    if outcome is not None:
        _report_outcome(job.schedule, outcome, policy, backend, trace, csv_path, as_json)


@dataclass(frozen=True)
class _ProxyJob:
    """The schedule to run, and how many warm-up and timed steps the original runs."""

    schedule: Schedule
    warmup_steps: int
    timed_steps: int


@dataclass(frozen=True)
class _ProxyRequest:
    """The request of the command line."""

    name: str | None
    arguments: list[str]
    plan: Path | None
    scale_down: float
    settings: list[str]
    nproc: int | None
    backend: str | None
    cluster: str
    launched_rank: LaunchedRank | None

    def make_job(self) -> _ProxyJob:
        from meshwright.proxies.schedule_files import load_schedule, scale_down

        if self.scale_down < 1:
            raise RequestError(f"--scale-down {self.scale_down:g}: sizes and waits are divided by it; give 1 or more")
        if self.plan is not None:
            return _ProxyJob(scale_down(self._schedule_from_plan(), self.scale_down), 4, 32)
        if self.name is None:
            from meshwright.proxies import PROXIES

            raise RequestError(f"which proxy? one of: {', '.join(PROXIES)}, or --plan FILE")
        if self.name.endswith(".json"):
            return _ProxyJob(scale_down(self._check_world(load_schedule(Path(self.name))), self.scale_down), 4, 32)
        return self._make_named_job()

    def _make_named_job(self) -> _ProxyJob:
        from meshwright.orchestrate.config import parse_setting
        from meshwright.proxies import find_proxy

        chosen = find_proxy(self.name or "")
        given = dict(parse_setting(text) for text in self.settings)
        if self.scale_down != 1:
            given["scale_down"] = self.scale_down
        dims = chosen.parse_config(self.arguments, given)
        return _ProxyJob(chosen.build(dims, self._resolve_world(chosen.name, chosen.min_world(dims))), chosen.warm, chosen.runs)

    def _resolve_world(self, name: str, min_world: int) -> int:
        """The launched or requested number of ranks, or the fewest that the proxy needs (if few enough to start unasked), or one per device."""
        given = self.requested_world()
        if given is not None or self.backend == "sim":
            return given or min_world
        if min_world > 1:
            if min_world > _MAX_DEFAULT_RANKS:
                raise RequestError(
                    f"{name} needs {min_world} ranks as asked: use fewer stages, shards or experts, --backend sim, or --nproc {min_world}"
                )
            return min_world
        from meshwright.describe.discover import discover

        return len(discover(os.environ).devices)

    def requested_world(self) -> int | None:
        if self.launched_rank is not None and self.backend != "sim":
            if self.nproc not in (None, self.launched_rank.world):
                raise RequestError(
                    f"--nproc {self.nproc}, but {self.launched_rank.launcher} started {self.launched_rank.world} ranks: leave --nproc out"
                )
            return self.launched_rank.world
        kind, _, number = self.cluster.partition(":")
        if self.backend == "sim" and kind == "ideal" and number:
            if not number.isdigit() or not int(number):
                raise RequestError(f"--cluster {self.cluster}: write it like ideal:64")
            return int(number)
        return self.nproc

    def _check_world(self, schedule: Schedule) -> Schedule:
        if self.requested_world() not in (None, schedule.world):
            raise RequestError(f"{schedule.name} is for {schedule.world} ranks, not {self.requested_world()}: use {schedule.world}")
        if self.arguments:
            raise RequestError(f"unexpected argument '{self.arguments[0]}': only a proxy with a name takes arguments")
        return schedule

    def _schedule_from_plan(self) -> Schedule:
        """The plan's schedule, with compute times estimated for this machine."""
        from meshwright import zoo
        from meshwright.core.plan import Plan
        from meshwright.cost.priced_schedule import priced_schedule
        from meshwright.describe.dataflow_tracer import trace_dataflow
        from meshwright.describe.profile_tracer import trace_task
        from meshwright.orchestrate import Orchestrator
        from meshwright.orchestrate.user_strategy import fill_partitioning, needs_partitioning

        assert self.plan is not None
        plan = Plan.load(self.plan)
        config = make_config(settings=self.settings, model=self.name or plan.model, plan=str(self.plan))
        task = zoo.load(config.model, seq=config.seq, dropout=config.dropout, random_init=config.random_init)
        with Orchestrator(config, os.environ, log_progress) as orchestrator:
            cluster, calibration = orchestrator.cluster, orchestrator.calibration()
        log_progress(f"profiling {task.name}")
        profile = trace_task(task, precision=plan.memory.precision, device=plan.device)
        if needs_partitioning(plan):
            plan = fill_partitioning(plan, trace_dataflow(task, plan.memory.precision), profile)
        return self._check_world(priced_schedule(plan, profile, config.optimizer, cluster, calibration, clip=config.clip > 0))


def _run_on_ranks(job: _ProxyJob, request: _ProxyRequest, policy: dict[str, Any]) -> ProxyOutcome | None:
    """Run on real ranks: those that a launcher started, or newly launched ones."""
    import torch

    from meshwright.describe.discover import available_memory
    from meshwright.launch import default_backend
    from meshwright.proxies.proxy_launch import check_memory, launch_and_run, run_under_launcher
    from meshwright.proxies.schedule_runner import RunPolicy

    world, gpus = job.schedule.world, torch.cuda.device_count()
    backend = request.backend or default_backend(request.launched_rank, "cuda" if gpus >= world and policy["device"] != "cpu" else "cpu")
    device = policy["device"] or backend_traits(backend).devices[0]
    policy.update(backend=backend, device=device)
    if device == "cuda" and not gpus:
        raise RequestError("--backend nccl and --device cuda need a GPU, and torch sees none: use --backend gloo")
    here = request.launched_rank.local_world if request.launched_rank is not None else world
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()
    check_memory(job.schedule, free, -(-here // gpus) if device == "cuda" else here)
    chosen = RunPolicy(**policy)
    if request.launched_rank is not None:
        return run_under_launcher(job.schedule, chosen, request.launched_rank, log_progress)
    if launchers := backend_traits(backend).launchers:
        raise RequestError(f"--backend {backend}: start it with {launchers[0]} -n {world} meshwright proxy …")
    return launch_and_run(job.schedule, chosen, os.environ, log_progress)


def _simulate(job: _ProxyJob, request: _ProxyRequest, policy: dict[str, Any]) -> ProxyOutcome:
    from meshwright.proxies.proxy_launch import simulate_schedule

    policy.update(backend="sim", warm=0, runs=1)
    count = sum(map(len, job.schedule.programs))
    log_progress(f"simulating {job.schedule.world} ranks, {len(job.schedule.programs)} of them different, {count:,} actions")
    return simulate_schedule(job.schedule, _make_network(request, job.schedule.world), jitter=policy["jitter"], seed=policy["seed"])


def _make_network(request: _ProxyRequest, world: int) -> Network:
    from meshwright.cost.datasheet_rates import datasheet_calibration
    from meshwright.describe.cluster_resolver import resolve_cluster
    from meshwright.orchestrate import Orchestrator
    from meshwright.simulate import AlphaBetaNetwork, IdealNetwork

    if request.cluster.partition(":")[0] == "ideal":
        return IdealNetwork()
    found = resolve_cluster(request.cluster, os.environ)
    if request.cluster == "here":
        with Orchestrator(make_config(), os.environ, log_progress) as orchestrator:
            measured = orchestrator.calibration()
    elif world > len(found.devices):
        raise RequestError(
            f"--cluster {request.cluster} has {len(found.devices)} devices, and {world} ranks are asked for: use more nodes or fewer ranks"
        )
    else:
        measured = datasheet_calibration(found)
    kind = found.devices[0].kind
    return AlphaBetaNetwork(found, measured.rates_for(world), backend_for(kind), duplex=kind == "cuda" or len(found.nodes) > 1)


def _write_schedule(schedule: Schedule, output: Path) -> None:
    from meshwright.proxies.schedule_files import save_schedule

    save_schedule(schedule, output)
    stdout.print(f"written to {output}; run it with: meshwright proxy {output}", markup=False, soft_wrap=True)


def _report_outcome(
    schedule: Schedule, outcome: ProxyOutcome, policy: dict[str, Any], backend: str | None, trace: Path | None, csv_path: Path | None, as_json: bool
) -> None:
    from meshwright.observe.timeline import write_timeline
    from meshwright.proxies.call_stats import csv_rows
    from meshwright.proxies.proxy_launch import simulate_schedule
    from meshwright.simulate import IdealNetwork

    about = {"proxy": schedule.name, "world": schedule.world, **policy}
    result = {**about, **outcome.result}
    if backend != "sim":
        result["ideal_s"] = simulate_schedule(schedule, IdealNetwork()).result["step_s"]["median"]
    if trace is not None:
        write_timeline(trace, outcome.spans, {"otherData": about})
    if csv_path is not None:
        with csv_path.open("w", newline="", encoding="utf-8") as file:
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
    """One row per collective, aggregated over all ranks."""
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
