"""Takes a RunConfig to a finished run on this machine: discovers, profiles, calibrates, plans, launches ranks, monitors and reports."""

from __future__ import annotations

import contextlib
import signal
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.core.calibration import Calibration
from meshwright.core.cluster import Cluster, Device
from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError, RunStopped
from meshwright.core.heterogeneous import with_measured_names
from meshwright.core.injected_fault import parse_injected_faults
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.phases import PhaseClock, process_start
from meshwright.core.plan import Plan
from meshwright.core.rank_devices import DEVICES_VARIABLE, assign_rank_devices, show_rank_devices
from meshwright.core.sample_coupling import batch_parts, describe_inexactness, explain_samples
from meshwright.core.serialization import to_data, write_json
from meshwright.core.task import Task
from meshwright.core.workload import Precision, Workload
from meshwright.cost import estimate
from meshwright.cost.calibration_correction import correct_calibration
from meshwright.cost.datasheet_rates import datasheet_calibration
from meshwright.describe import nvml
from meshwright.describe.cluster_resolver import resolve_cluster
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.discover import discover
from meshwright.describe.profile_tracer import trace_task
from meshwright.launch import ForkServer
from meshwright.observe import Recorder, RunFolder, create_run_folder, follow, follow_step_lines, write_report
from meshwright.orchestrate import calibrate
from meshwright.orchestrate.backend_selection import add_measured_routes, select_routes
from meshwright.orchestrate.checkpoint_interval import parse_interval
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.generations import call_ranks, prepared_recovery, restart_rows, script_recovery
from meshwright.orchestrate.job import make_retrace, resolve_job
from meshwright.orchestrate.knobs import check_given, constraints_from_config, script_environment
from meshwright.orchestrate.lr_defaults import fill_learning_rate
from meshwright.orchestrate.resume import MODEL_FOLDER, with_weights
from meshwright.orchestrate.run_inputs import PreparedRun, run_folder
from meshwright.orchestrate.run_watch import make_watch
from meshwright.orchestrate.sample_planning import rank_plans_traced
from meshwright.orchestrate.user_strategy import apply_strategy, fill_partitioning, load_strategy, needs_partitioning
from meshwright.plan import best_precision, check_precision, check_selective_recompute, explain, find_sample_coupling, refuse_unused

ProgressCallback = Callable[[str], None]
BEFORE_RESTART = "before the last restart"  # the phase of all generations but the last
_MIN_STEPS_TO_LEARN = 3  # timed steps, after the warm-up, below which a run does not correct the calibration


class Orchestrator:
    """Drives one run. `log_progress` receives a line for each phase; `environ` is the only environment it reads."""

    def __init__(self, config: RunConfig, environ: Mapping[str, str], log_progress: ProgressCallback) -> None:
        self.config, self.environ, self.log_progress = with_weights(config), environ, log_progress
        self._fork_server: ForkServer | None = None
        self.launches_ranks = True  # False: ranks run already, so the plan cannot choose their devices
        self._uncorrected_calibration: Calibration | None = None  # as probed, without the corrections from earlier runs
        self.phases = PhaseClock(process_start())
        parse_interval(config.checkpoint_every)
        parse_interval(config.snapshot_every, "snapshot_every")
        parse_injected_faults(config.inject, steps=config.steps if config.epochs is None else None)
        self.cluster = self._discover()
        parse_injected_faults(config.inject, world=len(self.cluster.devices))
        self.phases.mark("import")

    def __enter__(self) -> Orchestrator:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fork_server is not None:
            self._fork_server.close()

    # -- describe --

    def _discover(self) -> Cluster:
        ranks = self.config.nproc
        if self.config.mesh is not None:
            size = Mesh.parse(self.config.mesh).size
            if ranks not in (None, size):
                raise RequestError(f"--nproc {ranks} and --mesh {self.config.mesh} ({size} ranks) disagree: change one of them")
            ranks = size
        if self.config.plan != "auto":
            ranks = Plan.load(Path(self.config.plan)).world
        if self.config.cluster != "here":
            if self.config.devices is not None:
                raise RequestError(f"--devices is for this machine, and --cluster {self.config.cluster} is another: leave one of them out")
            return resolve_cluster(self.config.cluster, self.environ, ranks=ranks)
        cluster = discover(self.environ, ranks=ranks, devices=self.config.devices)
        return self._limit_to_free_memory(cluster) if any(d.kind == "cuda" for d in cluster.devices) else cluster

    def _limit_to_free_memory(self, cluster: Cluster) -> Cluster:
        """The cluster with each GPU's memory limited to what is free, since other processes may use the card."""
        free = [g.memory_free for g in nvml.list_gpus(self.environ.get("CUDA_VISIBLE_DEVICES"))]
        node = cluster.nodes[0]
        ranks_per_gpu = Counter(d.index for d in node.devices if d.kind == "cuda")

        def limited(device: Device) -> Device:
            if device.kind == "cpu" or device.index >= len(free) or not free[device.index]:
                return device
            return replace(device, memory_bytes=min(device.memory_bytes, free[device.index] // ranks_per_gpu[device.index]))

        return replace(cluster, nodes=(replace(node, devices=tuple(map(limited, node.devices))), *cluster.nodes[1:]))

    def fork_server(self, threads: int | None = None) -> ForkServer:
        """The fork server, started on first use; restarted only if another number of threads is needed."""
        node = self.cluster.nodes[0]
        threads = threads or self.cluster.threads_per_rank(len(node.devices)) or max(node.cores // len(node.devices), 1)
        if self._fork_server is not None and self._fork_server.threads != threads:
            self._fork_server.close()
            self._fork_server = None
        if self._fork_server is None:
            env = dict(self.environ)
            indices = dict.fromkeys(d.index for d in self.cluster.devices if d.kind == "cuda")
            if indices:
                env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
                gpus = nvml.list_gpus(self.environ.get("CUDA_VISIBLE_DEVICES"))
                uuids = [gpus[i].uuid for i in indices if i < len(gpus)]
                if uuids:
                    env["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
            self._fork_server = ForkServer(threads, env, ("meshwright.orchestrate.rank_entrypoints",))
        return self._fork_server

    def calibration(self, *, remeasure: bool = False, quick: bool = True) -> Calibration:
        """This machine's calibration, from the cache or measured; for another cluster, its data-sheet rates."""
        if self.config.cluster != "here":
            return calibrate.without_network(self.cluster, self.environ) if self.cluster.name == "ideal" else datasheet_calibration(self.cluster)
        cached = None if remeasure else self._cached_calibration()
        if cached is not None:
            return cached
        measured = calibrate.probe(self.cluster, self.fork_server(), self.config.backend, quick=quick, log_progress=self.log_progress)
        calibrate.save_to_cache(measured, self.cluster, self.environ)
        return measured

    def _cached_calibration(self) -> Calibration | None:
        """The cached calibration of these devices or of the whole machine; None if it lacks a rank count that a probe would measure,
        or if other processes disturbed it and have stopped."""
        machine = discover(self.environ, devices=self.config.devices)
        cached = calibrate.load_cached(self.cluster, self.environ) or calibrate.load_cached(machine, self.environ)
        measured = {r.ranks for r in cached.layouts} | {len(machine.devices)} if cached is not None else set()
        if cached is None or not measured.issuperset(calibrate.probed_rank_counts(self.cluster)):
            return None
        return None if calibrate.is_outdated(cached) else cached

    def learn_from_run(self, prepared: PreparedRun, result: dict[str, Any], steps: int) -> None:
        """Store what the run measured to correct later plans, unless it had too few steps; adds what was stored to `result["correction"]`."""
        plan, profile, uncorrected = prepared.plan, prepared.profile, self._uncorrected_calibration
        if uncorrected is None or steps < _MIN_STEPS_TO_LEARN:
            return
        predicted = estimate(plan, profile, self.workload(prepared.task), self.cluster, uncorrected)
        clusters = (self.cluster, discover(self.environ, devices=self.config.devices))
        records = (calibrate.record_run(uncorrected, plan, profile, predicted, result["measured"], c, self.environ) for c in clusters)
        record = next((r for r in records if r is not None), None)
        result["correction"] = {"uncorrected_step_s": predicted.step_s, "record": to_data(record) if record else None}

    # -- plan --

    def workload(self, task: Task) -> Workload:
        precision: Precision = "bf16" if all(d.kind == "cuda" for d in self.cluster.devices) else "fp32"
        if self.config.precision != "auto" and self.config.precision != "best":
            precision = self.config.precision
        batch = self.config.global_batch or task.global_batch
        return Workload(batch, "train", precision, self.config.optimizer, self.config.objective, self.config.price, self.config.watts)

    def dataflow(self, task: Task, workload: Workload) -> Dataflow | None:
        """The model's dataflow; None on a single device without placements, where nothing needs it."""
        if len(self.cluster.devices) == 1 and not self.config.placements:
            return None
        return trace_dataflow(task, workload.precision)

    def prepare(self, *, runs: bool = False) -> PreparedRun:
        """Plan the run, probing a machine that has no calibration. With `runs`, the fork server imports what its ranks need meanwhile."""
        strategy = load_strategy(self.config.strategy) if self.config.strategy is not None else None
        if strategy is not None and self.config.plan != "auto":
            raise RequestError(f"--plan {self.config.plan} runs unchanged, and strategy={self.config.strategy} changes it: leave one of them out")
        self.config, task = resolve_job(self.config)
        if self.config.cluster == "here" and (runs or self._cached_calibration() is None):
            self.fork_server()
        workload = self.workload(task)
        if task.note:
            self.log_progress(f"{task.name}: {task.note}")
        self.log_progress(f"profiling {task.name}")
        profile = trace_task(task, precision=workload.precision, device=self.cluster.devices[0].kind)
        self.config, rate = fill_learning_rate(self.config, task, (t.shape for t in profile.tensors if t.trainable))
        flow = self.dataflow(task, workload) if self.config.plan == "auto" else None
        self.phases.mark("trace")
        self._uncorrected_calibration = self.calibration()
        self.phases.mark("probe")
        kinds = calibrate.layer_kinds_key(profile)
        calibration = correct_calibration(self._uncorrected_calibration, task.name, kinds, workload.precision)  # see [Note: corrections]
        self.cluster = with_measured_names(self.cluster, calibration)
        if self.config.plan != "auto":
            plan = Plan.load(Path(self.config.plan))
            if needs_partitioning(plan):  # written by hand, without tensor-parallel shards or pipeline stages
                plan = fill_partitioning(plan, trace_dataflow(task, plan.memory.precision), profile)
            if plan.samples.loss == "unknown" and batch_parts(plan) > 1:
                plan = replace(plan, samples=find_sample_coupling(trace_dataflow(task, plan.memory.precision)))
            self._check_plan(plan, workload, task, profile)
            predicted = estimate(plan, profile, workload, self.cluster, calibration)
            self.phases.mark("plan")
            why = "\n".join([f"Given by {self.config.plan}: {plan.summary()}.", *explain_samples(plan)])
            self._say_inexact(plan)
            return PreparedRun(self.config, task, self.cluster, profile, plan, predicted, why, None, rate)
        self.log_progress("planning")
        constraints, no_routes = replace(constraints_from_config(self.config, flow), reorder=self.launches_ranks), ""
        if self.config.backend == "auto":
            constraints, no_routes = add_measured_routes(constraints, self.cluster, calibration)
        trace = partial(trace_dataflow, task, workload.precision)
        ranking = rank_plans_traced(profile, self.cluster, workload, calibration, constraints, trace)
        if self.config.precision == "best":
            kind = self.cluster.devices[0].kind
            ranking = best_precision(ranking, lambda other: (trace_task(task, precision=other, device=kind), flow and trace_dataflow(task, other)))
            profile, flow = ranking.profile, ranking.constraints.flow
        why = explain(ranking, make_retrace(self.config, task, ranking.workload.precision))
        if strategy is not None:
            ranking, change = apply_strategy(ranking, strategy, lambda plan: flow or trace_dataflow(task, plan.memory.precision))
            why = f"{change}\n{why}"
        if self.config.backend == "auto":
            ranking, routes = (ranking, no_routes) if no_routes else select_routes(ranking, self.config.clip > 0)
            why = f"{why}\n{routes}"
        self.phases.mark("plan")
        self._say_inexact(ranking.best.plan)
        return PreparedRun(self.config, task, self.cluster, profile, ranking.best.plan, ranking.best.estimate, why, ranking, rate)

    def _say_inexact(self, plan: Plan) -> None:
        if inexact := describe_inexactness(plan):
            self.log_progress(inexact)

    def _check_plan(self, plan: Plan, workload: Workload, task: Task, profile: ModelProfile) -> None:
        """Raise RequestError unless a given plan is for this model and devices and agrees with every other setting."""
        config, file = self.config, self.config.plan
        if plan.model != task.name:
            raise RequestError(f"{file} is for {plan.model}, the request is for {task.name}: train {plan.model}, or plan {task.name}")
        check_given(plan, config)
        refuse_unused(plan.mesh, config.schedule, config.placements)
        names = [layer.name for layer in profile.layers]
        for unit in plan.memory.units:
            if not any(name == unit or name.startswith(f"{unit}.") for name in names):
                raise RequestError(f"{file}: memory.units names '{unit}', which {task.name} does not have: use names such as {names[:3]}")
        check_precision(plan.memory.precision, self.cluster)
        check_selective_recompute(plan.memory, profile)
        if config.global_batch not in (None, plan.global_batch):
            raise RequestError(f"{file} has global_batch {plan.global_batch}, the request {config.global_batch}: change one of them")
        kind, rank_devices = self.cluster.devices[0].kind, assign_rank_devices(self.cluster, plan.world)
        if (plan.device, plan.rank_devices) != (kind, rank_devices):
            planned, here = show_rank_devices(plan.rank_devices, plan.world, plan.device), show_rank_devices(rank_devices, plan.world, kind)
            raise RequestError(f"{file} is for {planned}, and {here} would be used: plan again here, or change --devices")
        if workload.precision != plan.memory.precision and config.precision not in ("auto", "best"):
            raise RequestError(f"{file} has precision {plan.memory.precision}, the request {config.precision}: change one of them")

    # -- run --

    def train(self, prepared: PreparedRun, console: Console) -> dict[str, Any]:
        """Launch the plan's ranks, show their progress, write the run folder; returns the result."""
        self._require_local_cluster()
        fork_server = self.fork_server(prepared.plan.threads or None)
        mark_restart = partial(self.phases.mark, BEFORE_RESTART)
        with run_folder(prepared, self.log_progress) as folder, prepared_recovery(prepared, fork_server, self.log_progress, mark_restart) as recovery:
            monitor = LiveMonitor(folder, console, self.config.log_interval)
            watch = partial(make_watch, folder, prepared, self.log_progress)
            ranks = call_ranks(folder, fork_server, prepared.plan.world, "train_rank", {}, monitor, recovery, watch)
        if ranks[0]["stopped"] is not None:
            say_stopped(folder, ranks[0]["stopped"], self.log_progress)
            raise RunStopped(ranks[0]["stopped"]["signal"])
        result = finish_run(folder, prepared, ranks, self.phases)
        self.learn_from_run(prepared, result, len(ranks[0]["times"]))
        return result

    def run_script(self, script: str, arguments: list[str], console: Console) -> dict[str, Any]:
        """Run a user's own script on every device; `mw.prepare` inside it plans and applies the plan."""
        if not Path(script).is_file():
            raise RequestError(f"{script}: no such file")
        self._require_local_cluster()
        environment = {**script_environment(self.config), "MESHWRIGHT_SNAPSHOT_EVERY": str(self.config.snapshot_every)}
        if rank_devices := assign_rank_devices(self.cluster, len(self.cluster.devices)):
            environment[DEVICES_VARIABLE] = ",".join(rank_devices)
        world = Mesh.parse(self.config.mesh).size if self.config.mesh and not self.config.nproc else len(self.cluster.devices)
        self.calibration()
        folder = create_run_folder(Path(self.config.run_dir), self.config.name, prefix=Path(script).stem)
        write_json(folder.path / "job.json", {"script": script, "arguments": arguments})
        write_json(folder.path / "cluster.json", self.cluster)
        kwargs = {"script": script, "arguments": arguments, "environment": environment}
        with script_recovery(self.config, self.fork_server()) as recovery:
            seconds = call_ranks(folder, self.fork_server(), world, "run_script", kwargs, nullcontext(), recovery)
        return {"run": str(folder.path), "ranks": len(seconds), "seconds": max(seconds), "restarts": restart_rows(folder)}

    def _require_local_cluster(self) -> None:
        if self.config.cluster != "here":
            raise RequestError(f"train runs on this machine, not on --cluster {self.config.cluster}: leave --cluster out, or use plan or simulate")


def say_stopped(folder: RunFolder, stopped: Mapping[str, Any], log_progress: ProgressCallback) -> None:
    """Record that a run was told to stop, and say how it goes on."""
    with contextlib.suppress(RequestError):
        with Recorder(folder.path, 0) as recorder:
            recorder.event("stop", stopped["step"], reason=f"stopped by {signal.Signals(stopped['signal']).name}")
        write_report(folder)
    step, saved, go_on = stopped["step"], stopped["saved"], f"meshwright train --resume {folder.path}"
    if saved == step:
        log_progress(f"stopped after step {step}; to go on: {go_on}")
    else:
        log_progress(f"stopped after step {step}, which was not saved{f'; to go on from step {saved}: {go_on}' if saved is not None else ''}")


def finish_run(folder: RunFolder, prepared: PreparedRun, rank_results: list[dict[str, Any]], phases: PhaseClock) -> dict[str, Any]:
    """Write result.json and report.html from what the ranks measured; returns the result. Time since planning that rank 0 does not account for is
    that of launching ranks."""
    first = rank_results[0]
    phases.mark("launch")
    launch_s = max(phases.seconds.pop("launch") - sum(first["phases"].values()), 0.0)
    step, p95 = median_step(first["times"] or _recorded_times(folder, first["first_step"]))  # None if too few steps were timed: JSON has no NaN
    predicted, plan, task = prepared.estimate, prepared.plan, prepared.task
    samples = plan.global_batch / step if step else None
    earlier = _earlier_losses(folder, first["first_step"])
    restarts = restart_rows(folder)
    result = {
        "run": str(folder.path),
        "plan": to_data(plan),
        "losses": [*earlier, *first["losses"]],
        "first_step": first["first_step"] - len(earlier),  # of the losses
        "checkpoint": first["checkpoint"],
        "model": str(folder.path / MODEL_FOLDER) if prepared.config.export and (folder.path / MODEL_FOLDER).is_dir() else None,
        "validation": [*(_earlier_validations(folder, first["first_step"]) if restarts else ()), *first["validation"]],
        "skipped_steps": [*_earlier_skipped(folder, first["first_step"]), *first["skipped_steps"]],
        "predicted": {"step_s": predicted.step_s, "memory_bytes": list(predicted.memory_bytes)},
        "measured": {
            "step_s": step,
            "p95_step_s": p95,
            "memory_bytes": [r["memory_bytes"] for r in rank_results],
            "samples_per_s": samples,
            "tokens_per_s": samples * task.tokens_per_sample if samples and task.tokens_per_sample else None,
            "mfu": predicted.mfu * predicted.step_s / step if predicted.mfu and step else None,
            "exposed_communication_s": first["exposed"].get("exposed_s"),
            "communication_s": first["exposed"].get("communication_s"),
        },
        "state_digest": first["state_digest"],  # None unless digest=true
        "faults": [to_data(f) for f in folder.faults()],
        "restarts": restarts,
        "seconds": first["seconds"] + phases.seconds.get(BEFORE_RESTART, 0.0),
        "phases": {**phases.seconds, "launch": launch_s, **first["phases"]},
    }
    try:
        write_json(folder.path / "result.json", result)
        write_report(folder)
    except (OSError, RequestError) as error:
        result["unwritten"] = f"the training finished, but its result could not be written to {folder.path}: {getattr(error, 'strerror', error)}"
    result["report"] = str(folder.path / "report.html")
    return result


def _earlier_losses(folder: RunFolder, first_step: int) -> list[float]:
    """Losses of the steps up to `first_step`, as far back as the folder has them without a gap: of a run that went on."""
    losses = {r["step"]: r["loss"] for r in folder.metrics() if "loss" in r and r["step"] < first_step} if first_step else {}
    earliest = first_step
    while earliest - 1 in losses:
        earliest -= 1
    return [losses[step] for step in range(earliest, first_step)]


def _earlier_validations(folder: RunFolder, first_step: int) -> list[dict[str, float]]:
    losses = {r["step"]: r["validation_loss"] for r in folder.metrics() if "validation_loss" in r and r["step"] < first_step}
    return [{"step": step, "loss": loss} for step, loss in sorted(losses.items())]


def _earlier_skipped(folder: RunFolder, first_step: int) -> list[int]:
    """The steps before `first_step` that on_nan left out."""
    return sorted({event.step for event in folder.events() if event.kind == "skipped" and event.step < first_step})


def _recorded_times(folder: RunFolder, first_step: int) -> list[float]:
    """Seconds of the steps before the last restart, where too few came after it."""
    return [r["step_s"] for r in folder.metrics() if "step_s" in r and r["step"] < first_step] if restart_rows(folder) else []


def median_step(times: list[float]) -> tuple[float | None, float | None]:
    """(median, 95th percentile) of step times; None if no step was timed."""
    return (statistics.median(times), sorted(times)[int(0.95 * len(times))]) if times else (None, None)


class LiveMonitor:
    """Context manager that shows a run folder on the console from a thread: a live view, or one line every `log_interval` steps."""

    def __init__(self, folder: RunFolder, console: Console, log_interval: int = 0) -> None:
        self._stop_event = threading.Event()
        target, extra = (follow_step_lines, (log_interval,)) if log_interval else (follow, ())
        self._thread = threading.Thread(target=target, args=(folder, self._stop_event.is_set, console, *extra), daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join(timeout=3)
