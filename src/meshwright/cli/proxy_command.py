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

from meshwright.cli import options
from meshwright.cli.console import log_progress, make_table, print_json, print_line, require_torch, stdout
from meshwright.cli.stop_signals import end_on_sigterm
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
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the original proxy, like 64 8 for gpt2.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Run the communication of the plan in this file.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the schedule to this file instead of running it.")] = None,
    backend: Annotated[str | None, typer.Option("--backend", help="gloo, nccl or mpi; sim simulates the schedule instead of running it.")] = None,
    cluster: options.Cluster = None,
    nproc: Annotated[int | None, typer.Option("--nproc", help="Number of ranks; by default what the proxy needs, or one per device.")] = None,
    compute: Annotated[Literal["wait", "real"], typer.Option("--compute", help="wait, or real: multiply matrices of as many FLOPs.")] = "wait",
    scale_down: Annotated[float, typer.Option("--scale-down", help="Divide message sizes and waits by this.")] = 1.0,
    warm_up: Annotated[int | None, typer.Option("--warm-up", min=0, help="Steps before the timed ones; as the original by default.")] = None,
    runs: Annotated[int | None, typer.Option("--runs", min=1, help="Number of timed steps; as the original by default.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of --jitter.")] = 0,
    jitter: Annotated[float, typer.Option("--jitter", min=0.0, max=1.0, help="Vary each computation at random by this fraction.")] = 0.0,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option("--device", help="Device of the buffers; cuda for nccl, otherwise cpu.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write a timeline of the last step to this file, for Chrome or Perfetto.")] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write the times of every collective, rank by rank, to this CSV file.")] = None,
    settings: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Run or simulate the communication of a training step without its model: waits replace computation.

    Proxies: gpt2, bert, resnet50, resnet152, resnet152-strong, cosmoflow, dlrm,
    gpt3, gpt3-moe, gpt3-one-pipe-step, gpt3-moe-one-pipe-step, fsdp,
    hybrid-2d, hybrid-3d, hybrid-3d-moe; or the communication of any plan (--plan).

    Examples:
      meshwright proxy gpt3 --backend sim --cluster ideal
      meshwright proxy gpt2 4 2 --nproc 4 --scale-down 64 --runs 20 --trace trace.json
      meshwright proxy --plan plan.json --runs 20
      meshwright proxy gpt2 4 2 --backend mpi --nproc 4 --scale-down 64
      mpirun -n 32 meshwright proxy gpt2 64 8
    """
    require_torch()
    from meshwright.launch import detect_launched_rank
    from meshwright.proxies.schedule_files import save_schedule

    launched = detect_launched_rank(os.environ)
    if launched is not None:
        end_on_sigterm()
    request = _ProxyRequest(name, list(arguments or []), plan, scale_down, settings or [], nproc, backend, cluster or "here", launched)
    quiet = launched is not None and launched.rank > 0
    try:
        job = request.make_job()
        if output is not None:
            if not quiet:
                save_schedule(job.schedule, output)
                print_line(f"written to {output}; run it with: meshwright proxy {output}")
            return
        if quiet and backend == "sim":
            return
        policy = {
            "warm": job.warmup_steps if warm_up is None else warm_up, "runs": job.timed_steps if runs is None else runs,
            "seed": seed, "jitter": jitter, "compute": compute, "device": device,
        }  # fmt: skip
        outputs = _output_options(trace, csv_path, as_json)
        outcome = _simulate(job, request, policy) if backend == "sim" else _run_on_ranks(job, request, policy, outputs)
    except MeshwrightError:
        if quiet:  # every rank raises the same error; only rank 0 prints it
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
    """What the command line asks to run."""

    name: str | None
    arguments: list[str]
    plan: Path | None
    scale_down: float
    settings: list[str]
    nproc: int | None
    backend: str | None
    cluster: str
    launched: LaunchedRank | None

    def make_job(self) -> _ProxyJob:
        from meshwright.orchestrate.config import parse_setting
        from meshwright.proxies import PROXIES, find_proxy
        from meshwright.proxies.schedule_files import load_schedule, scale_down

        if self.scale_down < 1:
            raise RequestError(f"--scale-down {self.scale_down:g}: message sizes and waits are divided by it; give 1 or more")
        if self.plan is not None:
            return _ProxyJob(scale_down(self._schedule_from_plan(), self.scale_down), 4, 32)
        if self.name is None:
            raise RequestError(f"the name of a proxy is missing: give one of {', '.join(PROXIES)}, or --plan FILE")
        if self.name.endswith(".json"):
            return _ProxyJob(scale_down(self._check_world(load_schedule(Path(self.name))), self.scale_down), 4, 32)
        settings = dict(parse_setting(text) for text in self.settings)
        if self.scale_down != 1:
            settings["scale_down"] = self.scale_down
        proxy = find_proxy(self.name)
        config = proxy.parse_config(self.arguments, settings)
        return _ProxyJob(proxy.build(config, self._resolve_world(proxy.name, proxy.min_world(config))), proxy.warm, proxy.runs)

    def _resolve_world(self, name: str, min_world: int) -> int:
        """The launched or requested number of ranks, or the fewest that the proxy needs (if few enough to start unasked), or one per device."""
        world = self._requested_world()
        if world is not None or self.backend == "sim":
            return world or min_world
        if min_world > _MAX_DEFAULT_RANKS:
            raise RequestError(f"{name} needs {min_world} ranks: use fewer stages, shards or experts, --backend sim, or --nproc {min_world}")
        from meshwright.describe.discover import discover

        return min_world if min_world > 1 else len(discover(os.environ).devices)

    def _requested_world(self) -> int | None:
        launched = self.launched
        if launched is not None and self.backend != "sim":
            if self.nproc not in (None, launched.world):
                raise RequestError(f"--nproc {self.nproc}, but {launched.launcher} started {launched.world} ranks: leave --nproc out")
            return launched.world
        kind, _, number = self.cluster.partition(":")
        if self.backend == "sim" and kind == "ideal" and number:
            if not number.isdigit() or not int(number):
                raise RequestError(f"--cluster {self.cluster}: write it like ideal:64")
            return int(number)
        return self.nproc

    def _check_world(self, schedule: Schedule) -> Schedule:
        if self._requested_world() not in (None, schedule.world):
            raise RequestError(f"{schedule.name} is for {schedule.world} ranks, not {self._requested_world()}: use {schedule.world}")
        if self.arguments:
            raise RequestError(f"unexpected argument '{self.arguments[0]}': only a named proxy takes arguments")
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
        config = options.make_config(settings=self.settings, model=self.name or plan.model, plan=str(self.plan))
        task = zoo.load(config.model, seq=config.seq, dropout=config.dropout, random_init=config.random_init)
        with Orchestrator(config, os.environ, log_progress) as orchestrator:
            cluster, calibration = orchestrator.cluster, orchestrator.calibration()
        log_progress(f"profiling {task.name}")
        profile = trace_task(task, precision=plan.memory.precision, device=plan.device)
        if needs_partitioning(plan):
            plan = fill_partitioning(plan, trace_dataflow(task, plan.memory.precision), profile)
        return self._check_world(priced_schedule(plan, profile, config.optimizer, cluster, calibration, clip=config.clip > 0))


def _output_options(trace: Path | None, csv_path: Path | None, as_json: bool) -> list[str]:
    files = {"--trace": trace, "--csv": csv_path}
    return [*(word for flag, path in files.items() if path is not None for word in (flag, str(path.resolve()))), *(["--json"] if as_json else [])]


def _run_on_ranks(job: _ProxyJob, request: _ProxyRequest, policy: dict[str, Any], outputs: list[str]) -> ProxyOutcome | None:
    """Run on real ranks: those that a launcher started, or newly launched ones. Ranks of mpirun write the outputs themselves."""
    import torch

    from meshwright.describe.discover import available_memory
    from meshwright.launch import default_backend
    from meshwright.proxies.proxy_launch import check_memory, launch_and_run, launch_by_mpirun, run_under_launcher
    from meshwright.proxies.schedule_runner import RunPolicy

    world, gpus = job.schedule.world, torch.cuda.device_count()
    backend = request.backend or default_backend(request.launched, "cuda" if gpus >= world and policy["device"] != "cpu" else "cpu")
    device = policy["device"] or backend_traits(backend).devices[0]
    policy.update(backend=backend, device=device)
    if device == "cuda" and not gpus:
        raise RequestError("--backend nccl and --device cuda need a GPU, and torch sees none: use --backend gloo")
    local_ranks = request.launched.local_world if request.launched is not None else world
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()
    check_memory(job.schedule, free, -(-local_ranks // gpus) if device == "cuda" else local_ranks)
    if request.launched is not None:
        return run_under_launcher(job.schedule, RunPolicy(**policy), request.launched, log_progress)
    if backend_traits(backend).launchers:
        options = [word for key, value in policy.items() for word in ("--warm-up" if key == "warm" else f"--{key}", str(value))]
        raise typer.Exit(launch_by_mpirun(job.schedule, [*options, *outputs], os.environ))
    return launch_and_run(job.schedule, RunPolicy(**policy), os.environ, log_progress)


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
    cluster = resolve_cluster(request.cluster, os.environ)
    if request.cluster == "here":
        with Orchestrator(options.make_config(), os.environ, log_progress) as orchestrator:
            calibration = orchestrator.calibration()
    elif world > (count := len(cluster.devices)):
        raise RequestError(f"--cluster {request.cluster} has {count} devices, fewer than the {world} ranks: use more nodes or fewer ranks")
    else:
        calibration = datasheet_calibration(cluster)
    kind = cluster.devices[0].kind
    return AlphaBetaNetwork(cluster, calibration.rates_for(world), backend_for(kind), duplex=kind == "cuda" or len(cluster.nodes) > 1)


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
        Console(width=max(stdout.width, _TABLE_WIDTH), highlight=False).print(_collectives_table(result["collectives"]))


def _collectives_table(rows: list[dict[str, Any]]) -> Table:
    """One row per collective, aggregated over all ranks."""
    columns = ("name", "operation", ">calls", ">bytes", ">median", ">p95", ">max", ">bandwidth", ">of step", ">exposed", ">hidden")
    table = make_table(*columns, caption="exposed: ranks wait for it and compute nothing; hidden: it overlaps computation", fold=True)
    for column in table.columns[2:]:
        column.no_wrap = True
    for row in rows:
        times = [show_seconds(row[key]) for key in ("median_s", "p95_s", "max_s")]
        rate = show_rate(row["bandwidth"], "B/s") if row["bandwidth"] else "–"
        parts = (f"{row['share']:.0%}", show_seconds(row["exposed_s"]), show_seconds(row["overlapped_s"]))
        table.add_row(row["name"], f"{row['op']} ×{row['group']}", str(row["calls"]), show_bytes(row["bytes"]), *times, rate, *parts)
    return table
