"""The step: run a schedule on two streams, computation and communication, with measured rates, and sum up an Estimate."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.model import ModelProfile
from meshwright.core.plan import BalancePolicy, Plan
from meshwright.core.schedule import Action
from meshwright.core.units import show_bytes
from meshwright.core.workload import Workload
from meshwright.cost.actions import ActionCost
from meshwright.cost.collective import collective_seconds, sent_bytes
from meshwright.cost.compression import compression_seconds
from meshwright.cost.compute import model_flops
from meshwright.cost.memory import peak_bytes
from meshwright.schedule import Place, local_profile, program

HEADROOM = 0.92  # of a device's memory; the rest is for fragmentation and what others hold


def estimate(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration) -> Estimate:
    """Predict one plan. `profile` may be at any batch: it is moved to the plan's micro-batch."""
    micro = profile.at(plan.largest_micro_batch)
    rates = calibration.layout(plan.world)
    clock = _pipelined(plan, micro, workload, cluster, rates)
    places = [(p, e) for p in range(plan.mesh.pp) for e in range(plan.mesh.ep)]
    every = [peak_bytes(plan, local_profile(plan, micro, 0, p, e), workload.optimizer, rates, in_flight(plan, p)) for p, e in places]
    kinds = max(every, key=lambda k: sum(k.values()))
    need = sum(kinds.values())
    devices = cluster.devices[: plan.world]
    capacity = min(d.memory_bytes for d in devices)
    if devices[0].kind == "cpu":
        capacity = _cpu_share(cluster, plan.world)
    fits, reason = _verdict(need, capacity)
    step = clock.now
    samples = plan.global_batch / step if step else 0.0
    flops = model_flops(profile.at(plan.global_batch))
    peak = devices[0].peak_flops.get(plan.memory.precision) or max(
        (rate for key, points in rates.compute.items() if key.endswith(plan.memory.precision) for _, rate in points), default=0.0
    )
    return Estimate(
        step_s=step,
        breakdown=clock.breakdown,
        memory_bytes=(need,) * plan.world,
        memory_kinds=kinds,
        samples_per_s=samples,
        tokens_per_s=samples * profile.tokens_per_sample if profile.tokens_per_sample else None,
        mfu=flops / step / (peak * plan.world) if step and peak else None,
        fits=fits,
        reason=reason,
        error=calibration.error,
        traffic_bytes=clock.traffic,
    )


def _cpu_share(cluster: Cluster, world: int) -> int:
    """CPU ranks share what is free of their node's memory, however few of its devices are used."""
    shares = []
    for node in cluster.nodes:
        used = min(world, len(node.devices))
        if used:
            shares.append(sum(d.memory_bytes for d in node.devices) // used)
        world -= used
    return min(shares)


def _verdict(need: int, capacity: int) -> tuple[bool, str]:
    limit = int(capacity * HEADROOM)
    if need <= limit:
        return True, f"needs {show_bytes(need)} a device of {show_bytes(capacity)}"
    return False, f"needs {show_bytes(need)} a device, this one has {show_bytes(capacity)}"


@dataclass
class _Clock:
    """Two streams of one rank. Where they compete for the same cores, a collective also costs computation."""

    compute: float = 0.0
    network: float = 0.0
    traffic: float = 0.0
    finished: dict[str, float] = field(default_factory=dict)
    breakdown: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("forward", "backward", "optimizer", "communication"), 0.0))

    @property
    def now(self) -> float:
        return max(self.compute, self.network)

    def stall(self, until: float) -> None:
        if until > self.compute:
            self.breakdown["communication"] += until - self.compute
            self.compute = until


def in_flight(plan: Plan, pp_rank: int) -> int:
    """Micro-batches whose activations a pipeline rank holds at once, for each of its stages."""
    if plan.mesh.pp == 1:
        return 1
    return (
        plan.micro_batches if plan.schedule == "gpipe" else min(plan.micro_batches, plan.mesh.pp - pp_rank + (plan.schedule != "1f1b") * plan.mesh.pp)
    )


def _pipelined(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates) -> _Clock:
    """The slowest pipeline rank, and the time that it waits while the pipeline fills and drains."""
    clocks = [_steps(plan, profile, workload, cluster, rates, p) for p in range(plan.mesh.pp)]
    slowest = max(clocks, key=lambda c: c.now)
    if plan.mesh.pp > 1:
        stages = max(len(plan.stages) // plan.mesh.pp, 1)
        share = (plan.mesh.pp - 1) / (plan.micro_batches * stages) / (3 if plan.schedule == "zero_bubble" else 1)
        slowest.stall(slowest.now + share * (slowest.breakdown["forward"] + slowest.breakdown["backward"]))
    return slowest


def _steps(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int = 0) -> _Clock:
    """The whole step. Micro-batches after the second repeat each other, so only three are run and the rest is added on."""
    if plan.micro_batches <= 3 or plan.mesh.pp > 1:
        return _run(plan, profile, workload, cluster, rates, pp_rank)
    two, three = (_run(_shortened(plan, profile.batch, count), profile, workload, cluster, rates, pp_rank) for count in (2, 3))
    more = plan.micro_batches - 3
    return _Clock(
        compute=three.compute + more * (three.compute - two.compute),
        network=three.network + more * (three.network - two.network),
        traffic=three.traffic + more * (three.traffic - two.traffic),
        breakdown={k: v + more * (v - two.breakdown[k]) for k, v in three.breakdown.items()},
    )


def _shortened(plan: Plan, micro_batch: int, count: int) -> Plan:
    return replace(plan, micro_batches=count, global_batch=count * micro_batch * plan.mesh.data_width, balance=BalancePolicy())


def _run(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int) -> _Clock:
    clock = _Clock()
    clock.stall(compression_seconds(plan, local_profile(plan, profile, 0, pp_rank), rates))
    price = ActionCost(plan, workload.optimizer, rates)
    overlap = rates.overlap if "gradients" in plan.sync.overlap else 0.0
    actions = program(plan, profile, Place(pp=pp_rank))
    profile = local_profile(plan, profile, 0, pp_rank)
    for action in actions:
        start = max((clock.finished.get(w, 0.0) for w in action.waits), default=0.0)
        if action.communicates:
            _communicate(clock, action, start, collective_seconds(action, plan, cluster, rates), overlap)
            clock.traffic += sent_bytes(action, plan)
            continue
        clock.stall(start)
        seconds = price.seconds(profile, action)
        clock.breakdown[action.op] += seconds
        clock.compute += seconds
        clock.finished[action.name] = clock.compute
    clock.stall(clock.network)
    return clock


def _communicate(clock: _Clock, action: Action, start: float, seconds: float, overlap: float) -> None:
    begin = max(clock.network, clock.compute, start)
    clock.network = begin + seconds
    clock.finished[action.name] = clock.network
    stolen = seconds * (1.0 - overlap)
    clock.breakdown["communication"] += stolen
    clock.compute += stolen
