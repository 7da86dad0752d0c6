"""Simulates a model or a plan on any cluster: plans, lowers to a schedule, simulates, and compares the breakdown with the closed-form estimate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_seconds
from meshwright.core.schedule import Schedule
from meshwright.core.serialization import to_data
from meshwright.core.workload import OPTIMIZER_STATES, Precision, Workload
from meshwright.cost import estimate
from meshwright.cost.priced_schedule import priced_schedule
from meshwright.describe.dataflow_tracer import trace_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.job import make_retrace, resolve_job
from meshwright.orchestrate.knobs import constraints_from_config
from meshwright.orchestrate.orchestrator import ProgressCallback
from meshwright.orchestrate.simulation_target import SimulationTarget
from meshwright.orchestrate.user_strategy import fill_partitioning, needs_partitioning
from meshwright.plan import Ranking, explain_oom, rank_plans
from meshwright.simulate import Disturbances, FabricNetwork, Network, Simulation, simulate
from meshwright.simulate.step_breakdown import breakdown, closed_form_parts

_MAX_UNFOLDED_ACTIONS = 5_000_000  # limit with jitter, where no two ranks can be simulated as one class: some minutes


class SimulationJob:
    """The model or plan to simulate, traced once for any number of clusters."""

    def __init__(self, config: RunConfig, device: str, log_progress: ProgressCallback) -> None:
        self.config, self.task = resolve_job(config)
        self.given_plan = Plan.load(Path(config.plan)) if config.plan != "auto" else None
        self.precision: Precision = self._resolve_precision(device)
        log_progress(f"profiling {self.task.name}")
        self.profile: ModelProfile = trace_task(self.task, precision=self.precision, device=device)
        self._log_progress = log_progress

    def _resolve_precision(self, device: str) -> Precision:
        if self.given_plan is not None:
            return self.given_plan.memory.precision
        if self.config.precision == "best":
            raise RequestError("precision=best works with plan and train only: use a precision such as bf16 to simulate")
        if self.config.precision == "auto":
            return "bf16" if device == "cuda" else "fp32"
        return self.config.precision

    @cached_property
    def dataflow(self) -> Dataflow:
        self._log_progress("tracing its dataflow")
        return trace_dataflow(self.task, self.precision)

    @property
    def global_batch(self) -> int:
        return self.given_plan.global_batch if self.given_plan else self.config.global_batch or self.task.global_batch

    def workload(self, batch: int | None = None) -> Workload:
        return Workload(batch or self.global_batch, "train", self.precision, self.config.optimizer, self.config.objective)

    @property
    def checkpoint_bytes(self) -> int:
        """The size of a checkpoint: parameters and optimizer state."""
        return self.profile.parameter_bytes * (1 + OPTIMIZER_STATES[self.config.optimizer])


@dataclass(frozen=True)
class ChosenPlan:
    """A plan, the cluster it is for, and its closed-form estimate."""

    plan: Plan
    estimate: Estimate
    target: SimulationTarget
    ranking: Ranking | None = None  # None if the plan was given


def choose_plan(
    job: SimulationJob, target: SimulationTarget, log_progress: ProgressCallback, *, batch: int | None = None, ranks: int | None = None
) -> ChosenPlan:
    """The given plan, or the best one for `ranks`, the configured number of ranks, or all devices of the cluster."""
    config, workload, devices = job.config, job.workload(batch), len(target.cluster.devices)
    if job.given_plan is not None:
        plan = fill_partitioning(job.given_plan, job.dataflow, job.profile) if needs_partitioning(job.given_plan) else job.given_plan
        if plan.world > devices:
            raise RequestError(f"{config.plan} is for {plan.world} ranks, the cluster has {devices} devices: use a larger --cluster")
        return ChosenPlan(plan, estimate(plan, job.profile, workload, target.cluster, target.calibration), target)
    world = ranks or config.nproc or devices
    constraints = constraints_from_config(config, job.dataflow if world > 1 or config.mesh else None)
    log_progress(f"planning for {constraints.mesh.size if constraints.mesh else world} ranks")
    ranking = rank_plans(job.profile, target.cluster, workload, target.calibration, replace(constraints, world=world))
    return ChosenPlan(ranking.best.plan, ranking.best.estimate, target, ranking)


def explain_does_not_fit(job: SimulationJob, chosen: ChosenPlan) -> str:
    """Why the plan does not fit in memory and what would help, in one line."""
    if chosen.ranking is None:
        return f"{chosen.plan.summary()} {chosen.estimate.reason}: plan {job.task.name} anew, or name a larger --cluster"
    return explain_oom(chosen.ranking, make_retrace(job.config, job.task, job.precision))


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step, with and without the disturbances."""

    chosen: ChosenPlan
    schedule: Schedule
    simulation: Simulation
    undisturbed: Simulation
    breakdown: dict[str, float]
    elapsed_s: float  # wall time of lowering and simulating


def simulate_step(job: SimulationJob, chosen: ChosenPlan, disturbances: Disturbances, log_progress: ProgressCallback) -> SimulatedStep:
    start = time.perf_counter()
    plan, target, config = chosen.plan, chosen.target, job.config
    log_progress(f"scheduling {plan.summary()}")
    schedule = priced_schedule(plan, job.profile, config.optimizer, target.cluster, target.calibration, clip=config.clip > 0)
    num_actions = sum(map(len, schedule.programs))
    network = target.make_network(plan)
    _check_disturbances(disturbances, schedule, network, num_actions)
    log_progress(f"simulating {plan.world:,} ranks in {len(schedule.programs)} classes, {num_actions:,} actions")
    undisturbed = simulate(schedule, network)
    simulation = simulate(schedule, network, disturbances) if disturbances else undisturbed
    return SimulatedStep(chosen, schedule, simulation, undisturbed, breakdown(simulation), time.perf_counter() - start)


def _check_disturbances(disturbances: Disturbances, schedule: Schedule, network: Network, num_actions: int) -> None:
    disturbances.check(schedule.world, network.topology.link_keys() if isinstance(network, FabricNetwork) else None)
    per_rank, world = num_actions / len(schedule.programs), schedule.world
    if disturbances.jitter and per_rank * world > _MAX_UNFOLDED_ACTIONS:
        max_ranks = max(int(_MAX_UNFOLDED_ACTIONS / per_rank), 1)
        raise RequestError(f"--jitter simulates all {world} ranks, {per_rank * world:,.0f} actions: use {max_ranks} ranks or fewer, or --slow")


def step_to_json(job: SimulationJob, result: SimulatedStep, disturbances: Disturbances) -> dict[str, Any]:
    """The object that `simulate --json` prints for one step."""
    plan, predicted, simulation = result.chosen.plan, result.chosen.estimate, result.simulation
    step = simulation.step_s if simulation.lost is None else None
    samples = plan.global_batch / step if step else None
    tokens = job.profile.tokens_per_sample
    return {
        "model": plan.model,
        "cluster": result.chosen.target.cluster.name,
        "ranks": plan.world,
        "mesh": str(plan.mesh),
        "plan": plan.summary(),
        "global_batch": plan.global_batch,
        "step_s": step,
        "samples_per_s": samples,
        "tokens_per_s": samples * tokens if samples and tokens else None,
        "mfu": predicted.mfu * predicted.step_s / step if step and predicted.mfu else None,
        "memory_bytes": {"total": max(predicted.memory_bytes), **predicted.memory_kinds},
        "fits": predicted.fits,
        "reason": predicted.reason,
        "breakdown": result.breakdown,
        "error": predicted.error,
        "closed_form": {"step_s": predicted.step_s, "breakdown": dict(predicted.breakdown), "why": explain_difference(result) if step else ""},
        "disturbances": to_data(disturbances),
        "undisturbed_s": result.undisturbed.step_s,
        "lost": lost_to_json(result, disturbances),
        "classes": len(simulation.end_times),
        "seconds": result.elapsed_s,
    }


def explain_difference(result: SimulatedStep) -> str:
    """Why the simulation and the closed form differ, largest part first."""
    predicted, plan, cluster = result.chosen.estimate, result.chosen.plan, result.chosen.target.cluster
    simulated, closed = closed_form_parts(result.breakdown), predicted.breakdown
    if not predicted.step_s or abs(result.simulation.step_s - predicted.step_s) <= 1e-3 * predicted.step_s:
        return "They agree."
    reasons = []
    if plan.mesh.pp > 1:
        reasons.append("the closed form adds work outside the pipeline schedule to its end, the simulation runs every action in order")
    if len(cluster.nodes) > 1 and cluster.link != cluster.nodes[0].link:
        reasons.append("the closed form prices every call at the slowest link, the simulation at its group's own links, which calls share")
    if len(result.schedule.programs) > plan.mesh.pp:
        reasons.append("the closed form breaks down the slowest rank, the simulation averages over ranks")
    parts = sorted(((name, simulated[name] - closed.get(name, 0.0)) for name in simulated), key=lambda part: -abs(part[1]))
    differ = ", ".join(f"{name} {'+' if d > 0 else '−'}{show_seconds(abs(d))}" for name, d in parts if abs(d) > 1e-3 * predicted.step_s)
    because = "; ".join(reasons)
    return f"Simulated minus closed form: {differ}." + (f" {because[0].upper()}{because[1:]}." if because else "")


def lost_to_json(result: SimulatedStep, disturbances: Disturbances) -> Mapping[str, Any] | None:
    """For a step that does not end: since when, when the timeout detects it and what follows; None for a step that ends."""
    lost, timeout = result.simulation.lost, result.chosen.plan.sync.timeout_s
    if lost is None:
        return None
    return {
        "since_s": lost.since_s,
        "ranks": lost.num_stuck,
        "waits_for": lost.waiting_on,
        "noticed_s": lost.since_s + timeout,
        "policy": f"the step is lost: ranks give up after {timeout:g} s in one call (timeout_s), the job restarts from its last checkpoint"
        + (f" without rank {', '.join(disturbances.fail)}" if disturbances.fail else ""),
    }
