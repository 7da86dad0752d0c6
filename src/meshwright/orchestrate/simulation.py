"""A model or a plan, simulated on any cluster: decide, lower, simulate, and say where the time goes and how the closed form sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.core.errors import RequestError
from meshwright.core.estimate import Estimate
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Schedule
from meshwright.core.serial import to_data
from meshwright.core.strand import Flow
from meshwright.core.units import show_seconds
from meshwright.core.workload import OPTIMIZER_STATES, Precision, Workload
from meshwright.cost import estimate
from meshwright.cost.crews import priced_schedule
from meshwright.describe.flow import trace_flow
from meshwright.describe.trace import trace_task
from meshwright.orchestrate.config import RunConfig
from meshwright.orchestrate.job import retrace, settle
from meshwright.orchestrate.knobs import wishes_of
from meshwright.orchestrate.machines import Machine
from meshwright.orchestrate.orchestrator import Say
from meshwright.orchestrate.strategy import fill_cuts, needs_cuts
from meshwright.plan import Ranking, rank_plans, too_big
from meshwright.simulate import Disturbances, Fabric, Network, Simulation, simulate
from meshwright.simulate.breakdown import breakdown, by_kind

_MOST_APART = 5_000_000  # actions, where jitter keeps every rank to itself: some minutes


class Subject:
    """What is to be simulated, traced once for any number of clusters."""

    def __init__(self, config: RunConfig, device: str, say: Say) -> None:
        self.config, self.task = settle(config)
        self.given = Plan.load(Path(config.plan)) if config.plan != "auto" else None
        self.precision: Precision = self._precision(device)
        say(f"profiling {self.task.name}")
        self.profile: ModelProfile = trace_task(self.task, precision=self.precision, device=device)
        self._say = say

    def _precision(self, device: str) -> Precision:
        if self.given is not None:
            return self.given.memory.precision
        if self.config.precision == "best":
            raise RequestError("precision=best is chosen by plan and train: name one to simulate, like bf16")
        if self.config.precision == "auto":
            return "bf16" if device == "cuda" else "fp32"
        return self.config.precision

    @cached_property
    def flow(self) -> Flow:
        self._say("tracing its dataflow")
        return trace_flow(self.task, self.precision)

    @property
    def batch(self) -> int:
        return self.given.global_batch if self.given else self.config.global_batch or self.task.global_batch

    def workload(self, batch: int | None = None) -> Workload:
        return Workload(batch or self.batch, "train", self.precision, self.config.optimizer, self.config.objective)

    @property
    def state_bytes(self) -> int:
        """What a checkpoint holds: parameters and the optimizer's state."""
        return self.profile.parameter_bytes * (1 + OPTIMIZER_STATES[self.config.optimizer])


@dataclass(frozen=True)
class Decided:
    """A plan on a machine, and what the closed form makes of it."""

    plan: Plan
    estimate: Estimate
    machine: Machine
    ranking: Ranking | None = None  # where it was chosen


def decide(subject: Subject, machine: Machine, say: Say, *, batch: int | None = None, ranks: int | None = None) -> Decided:
    """The given plan, or the best one for all of the machine's devices."""
    config, workload, devices = subject.config, subject.workload(batch), len(machine.cluster.devices)
    if subject.given is not None:
        plan = fill_cuts(subject.given, subject.flow, subject.profile) if needs_cuts(subject.given) else subject.given
        if plan.world > devices:
            raise RequestError(f"{config.plan} is for {plan.world} ranks, the cluster has {devices} devices: name a larger one")
        return Decided(plan, estimate(plan, subject.profile, workload, machine.cluster, machine.calibration), machine)
    world = ranks or config.nproc or devices
    wishes = wishes_of(config, subject.flow if world > 1 or config.mesh else None)
    say(f"planning for {wishes.mesh.size if wishes.mesh else world} ranks")
    ranking = rank_plans(subject.profile, machine.cluster, workload, machine.calibration, replace(wishes, world=world))
    return Decided(ranking.best.plan, ranking.best.estimate, machine, ranking)


def refusal(subject: Subject, decided: Decided) -> str:
    """Why the plan does not fit, in one line, and what would help where it was chosen here."""
    if decided.ranking is None:
        return f"{decided.plan.summary()} {decided.estimate.reason}: plan {subject.task.name} anew, or name a larger --cluster"
    return too_big(decided.ranking, retrace(subject.config, subject.task, subject.precision))


@dataclass(frozen=True)
class Simulated:
    """A simulated step, with and without what was to go wrong in it."""

    decided: Decided
    schedule: Schedule
    found: Simulation
    calm: Simulation
    parts: dict[str, float]
    seconds: float  # that lowering and simulating took


def run(subject: Subject, decided: Decided, disturbed: Disturbances, say: Say) -> Simulated:
    begun = time.perf_counter()
    plan, machine = decided.plan, decided.machine
    say(f"scheduling {plan.summary()}")
    config = subject.config
    schedule = priced_schedule(plan, subject.profile, config.optimizer, machine.cluster, machine.calibration, clip=config.clip > 0)
    count = sum(map(len, schedule.programs))
    network = machine.network(plan)
    _check(disturbed, schedule, network, count)
    say(f"simulating {plan.world:,} ranks, {len(schedule.programs)} of them different, {count:,} actions")
    calm = simulate(schedule, network)
    found = simulate(schedule, network, disturbed) if disturbed else calm
    return Simulated(decided, schedule, found, calm, breakdown(found), time.perf_counter() - begun)


def _check(disturbed: Disturbances, schedule: Schedule, network: Network, count: int) -> None:
    disturbed.check(schedule.world, network.topology.links() if isinstance(network, Fabric) else None)
    each = count / len(schedule.programs)
    if disturbed.jitter and each * schedule.world > _MOST_APART:
        most = max(int(_MOST_APART / each), 1)
        raise RequestError(f"--jitter keeps {schedule.world} ranks apart, {each * schedule.world:,.0f} actions: use {most} ranks or fewer, or --slow")


def as_data(subject: Subject, done: Simulated, disturbed: Disturbances) -> dict[str, Any]:
    """What `--json` prints of one step."""
    plan, guess, found = done.decided.plan, done.decided.estimate, done.found
    step = found.step_s if found.lost is None else None
    samples = plan.global_batch / step if step else None
    tokens = subject.profile.tokens_per_sample
    return {
        "model": plan.model,
        "cluster": done.decided.machine.cluster.name,
        "ranks": plan.world,
        "mesh": str(plan.mesh),
        "plan": plan.summary(),
        "global_batch": plan.global_batch,
        "step_s": step,
        "samples_per_s": samples,
        "tokens_per_s": samples * tokens if samples and tokens else None,
        "mfu": guess.mfu * guess.step_s / step if step and guess.mfu else None,
        "memory_bytes": {"total": max(guess.memory_bytes), **guess.memory_kinds},
        "fits": guess.fits,
        "reason": guess.reason,
        "breakdown": done.parts,
        "error": guess.error,
        "closed_form": {"step_s": guess.step_s, "breakdown": dict(guess.breakdown), "why": explained(done) if step else ""},
        "disturbances": to_data(disturbed),
        "undisturbed_s": done.calm.step_s,
        "lost": lost_as_data(done, disturbed),
        "classes": len(found.ends),
        "seconds": done.seconds,
    }


def explained(done: Simulated) -> str:
    """Why the simulation and the closed form differ, largest part first."""
    guess, plan, machine = done.decided.estimate, done.decided.plan, done.decided.machine
    simulated, closed = by_kind(done.parts), guess.breakdown
    if not guess.step_s or abs(done.found.step_s - guess.step_s) <= 1e-3 * guess.step_s:
        return "They agree."
    reasons = []
    if plan.mesh.pp > 1:
        reasons.append("the closed form adds what ranks do besides to the end of their turns, the simulation walks through all of it")
    if len(machine.cluster.nodes) > 1 and machine.cluster.link != machine.cluster.nodes[0].link:
        reasons.append("the closed form prices every call at the slowest link, a simulated call crosses its own group's links and shares them")
    if len(done.schedule.programs) > plan.mesh.pp:
        reasons.append("the closed form's parts are those of the slowest rank, the simulation's are the mean of unlike ranks")
    parts = sorted(((name, simulated[name] - closed.get(name, 0.0)) for name in simulated), key=lambda part: -abs(part[1]))
    differ = ", ".join(f"{name} {'+' if by > 0 else '−'}{show_seconds(abs(by))}" for name, by in parts if abs(by) > 1e-3 * guess.step_s)
    because = "; ".join(reasons)
    return f"Simulated minus closed form: {differ}." + (f" {because[0].upper()}{because[1:]}." if because else "")


def lost_as_data(done: Simulated, disturbed: Disturbances) -> Mapping[str, Any] | None:
    """What a step that does not end means: when it is noticed, and what follows."""
    lost, timeout = done.found.lost, done.decided.plan.sync.timeout_s
    if lost is None:
        return None
    return {
        "since_s": lost.since,
        "ranks": lost.ranks,
        "waits_for": lost.waits_for,
        "noticed_s": lost.since + timeout,
        "policy": f"the step is lost: ranks give up after {timeout:g} s in one call (timeout_s), the job restarts from its last checkpoint"
        + (f" without rank {', '.join(disturbed.fail)}" if disturbed.fail else ""),
    }
