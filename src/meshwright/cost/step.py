"""The step: run a schedule on two streams, computation and communication, with measured rates, and sum up an Estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.mesh import Mesh
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action
from meshwright.core.units import show_bytes
from meshwright.core.workload import Workload
from meshwright.cost.actions import ActionCost
from meshwright.cost.alike import first_of_kind
from meshwright.cost.collective import collective_seconds, sent_bytes
from meshwright.cost.compression import compression_seconds
from meshwright.cost.compute import model_flops
from meshwright.cost.crowding import crowded
from meshwright.cost.folded import DEPTHS, even_buckets, narrowed, spare_blocks, with_blocks
from meshwright.cost.memory import peak_bytes
from meshwright.schedule import Place, local_profile, program

HEADROOM = 0.92  # of a device's memory; the rest is for fragmentation and what others hold


def estimate(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration) -> Estimate:
    """Predict one plan. `profile` may be at any batch: it is moved to the plan's micro-batch."""
    classes = _classes(plan)
    clock = _pipelined(plan, profile, workload, cluster, calibration, classes)
    peaks = [(c, _peak(plan, profile, workload, calibration, c)) for c in classes]
    verdicts = [_verdict(sum(kinds.values()), _capacity(cluster, plan, c)) for c, kinds in peaks]
    kinds = max((kinds for _, kinds in peaks), key=lambda k: sum(k.values()))
    fits, reason = next((v for v in verdicts if not v[0]), verdicts[0])
    step = clock.now
    samples = plan.global_batch / step if step else 0.0
    flops = model_flops(profile.at(plan.global_batch))
    peak = sum(len(c.ranks) * _peak_flops(plan, cluster, calibration, c) for c in classes)
    return Estimate(
        step_s=step,
        breakdown=clock.breakdown,
        memory_bytes=_by_rank(plan, peaks),
        memory_kinds=kinds,
        samples_per_s=samples,
        tokens_per_s=samples * profile.tokens_per_sample if profile.tokens_per_sample else None,
        mfu=flops / step / peak if step and peak else None,
        fits=fits,
        reason=reason,
        error=calibration.error,
        traffic_bytes=clock.traffic,
    )


@dataclass(frozen=True)
class _Class:
    """Ranks on one kind of device, which the first of them stands for; all ranks, of no kind in particular, where they are alike."""

    kind: str
    ranks: Sequence[int]
    share: int  # samples of the largest
    stages: Sequence[int]  # the pipeline ranks among them

    def micro_batch(self, plan: Plan) -> int:
        return -(-self.share // plan.micro_batches)


def _classes(plan: Plan) -> list[_Class]:
    if not plan.places:
        return [_Class("", range(plan.world), plan.largest_share, range(plan.mesh.pp))]
    found: dict[str, list[int]] = {}
    for rank in range(plan.world):
        found.setdefault(plan.seen_by(rank).device, []).append(rank)
    mesh = plan.mesh
    return [
        _Class(kind, ranks, max(plan.share(mesh.data_rank(r))[1] for r in ranks), sorted({mesh.coordinate(r, "pp") for r in ranks}))
        for kind, ranks in found.items()
    ]


def _peak(plan: Plan, profile: ModelProfile, workload: Workload, calibration: Calibration, of: _Class) -> dict[str, int]:
    """The most memory that a rank of a class needs, by kind."""
    micro, rates = profile.at(of.micro_batch(plan)), calibration.layout(plan.world, of.kind)
    places = [(p, e) for p in first_of_kind(plan, profile, of.stages) for e in range(plan.mesh.ep)]
    every = [peak_bytes(plan, local_profile(plan, micro, 0, p, e), workload.optimizer, rates, in_flight(plan, p)) for p, e in places]
    return max(every, key=lambda k: sum(k.values()))


def _by_rank(plan: Plan, peaks: Sequence[tuple[_Class, dict[str, int]]]) -> tuple[int, ...]:
    if len(peaks) == 1:
        return (sum(peaks[0][1].values()),) * plan.world
    found = [0] * plan.world
    for of, kinds in peaks:
        for rank in of.ranks:
            found[rank] = sum(kinds.values())
    return tuple(found)


def _peak_flops(plan: Plan, cluster: Cluster, calibration: Calibration, of: _Class) -> float:
    """What a device could do at most: by its data sheet, or else the best that was measured."""
    curves = calibration.layout(plan.world, of.kind).compute.items()
    measured = (rate for key, points in curves if key.endswith(plan.memory.precision) for _, rate in points)
    return cluster.devices[of.ranks[0]].peak_flops.get(plan.memory.precision) or max(measured, default=0.0)


def _capacity(cluster: Cluster, plan: Plan, of: _Class) -> int:
    """Memory for a rank. CPU ranks share what is free of their node's memory, however few of its devices are used."""
    devices = cluster.devices
    if devices[of.ranks[0]].kind != "cpu":
        return cluster.least_memory(plan.world) if not of.kind else min(devices[rank].memory_bytes for rank in of.ranks)
    shares, first = [], 0
    for node in cluster.nodes:
        used = sum(device.kind == "cpu" for device in node.devices[: max(plan.world - first, 0)])
        if used:
            shares.append(sum(d.memory_bytes for d in node.devices if d.kind == "cpu") // used)
        first += len(node.devices)
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

    def extended(self, before: _Clock, more: int) -> _Clock:
        """With as many more of what is between `before` and this one."""
        return _Clock(
            compute=self.compute + more * (self.compute - before.compute),
            network=self.network + more * (self.network - before.network),
            traffic=self.traffic + more * (self.traffic - before.traffic),
            breakdown={k: v + more * (v - before.breakdown[k]) for k, v in self.breakdown.items()},
        )

    def settled(self, before: _Clock, first: _Clock) -> bool:
        """Whether the last step of three was as long as the one before, in all that is counted."""

        def figures(clock: _Clock) -> list[float]:
            return [clock.compute, clock.network, clock.traffic, *clock.breakdown.values()]

        return all(abs((c - b) - (b - a)) <= 1e-9 * abs(c) for a, b, c in zip(figures(first), figures(before), figures(self), strict=True))

    def last(self, until: float) -> None:
        """End then: wait, or, where others left more of a shared core than was thought, with all in proportion."""
        if until < self.now:
            self.breakdown = {k: v * until / self.now for k, v in self.breakdown.items()}
            self.compute = self.network = until
        self.stall(until)

    def stall(self, until: float) -> None:
        if until > self.compute:
            self.breakdown["communication"] += until - self.compute
            self.compute = until


class _Piped(Protocol):
    """What says how many micro-batches are under way: a plan, or one to be."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def micro_batches(self) -> int: ...

    @property
    def schedule(self) -> str: ...


def in_flight(plan: _Piped, pp_rank: int) -> int:
    """Micro-batches whose activations a pipeline rank holds at once, for each of its stages."""
    if plan.mesh.pp == 1:
        return 1
    return (
        plan.micro_batches if plan.schedule == "gpipe" else min(plan.micro_batches, plan.mesh.pp - pp_rank + (plan.schedule != "1f1b") * plan.mesh.pp)
    )


def _pipelined(
    plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration, classes: Sequence[_Class]
) -> _Clock:  # fmt: skip
    """The slowest pipeline rank, and the time that it waits while the pipeline fills and drains."""
    clocks = [
        _steps(plan, profile.at(c.micro_batch(plan)), workload, cluster, calibration.layout(plan.world, c.kind), p)
        for c in classes
        for p in first_of_kind(plan, profile, c.stages)
    ]
    slowest = max(clocks, key=lambda c: c.now)
    if plan.mesh.pp > 1:
        stages = max(len(plan.stages) // plan.mesh.pp, 1)
        share = (plan.mesh.pp - 1) / (plan.micro_batches * stages) / (3 if plan.schedule == "zero_bubble" else 1)
        bubble = share * max(c.breakdown["forward"] + c.breakdown["backward"] for c in clocks)
        slowest.last(crowded(slowest.now + bubble, [c.now for c in clocks], calibration.layout(plan.world).crowding))
    return slowest


def _steps(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int = 0) -> _Clock:
    """The whole step. Of a deep model some blocks are run and the rest is added on, where these add the same (see [Note: folding a step])."""
    here = {name for i, stage in enumerate(plan.stages) if plan.stage_rank(i) == pp_rank for name in stage.layers} or set(profile.layer_names)
    if plan.mesh.pp > 1:
        plan = narrowed(plan, {name for stage in plan.stages for name in stage.layers} - here)
    spare = spare_blocks(plan, profile, here)
    few = [with_blocks(plan, profile, spare, depth) for depth in DEPTHS] if spare else []
    if few and even_buckets(plan, profile, few, len(spare) - DEPTHS[2], pp_rank):
        runs = [_repeated(*pair, workload, cluster, rates, pp_rank) for pair in few]
        if runs[2].settled(runs[1], runs[0]):
            return runs[2].extended(runs[1], len(spare) - DEPTHS[2])
    return _repeated(plan, profile, workload, cluster, rates, pp_rank)


def _repeated(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int) -> _Clock:
    """Micro-batches after the second repeat each other, so only three are run and the rest is added on."""
    if plan.micro_batches <= 3:
        return _run(plan, profile, workload, cluster, rates, pp_rank)
    two, three = (_run(plan, profile, workload, cluster, rates, pp_rank, count) for count in (2, 3))
    return three.extended(two, plan.micro_batches - 3)


def _run(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int, micro_batches: int = 0) -> _Clock:
    clock = _Clock()
    clock.stall(compression_seconds(plan, local_profile(plan, profile, 0, pp_rank), rates))
    price = ActionCost(plan, workload.optimizer, rates)
    overlap = rates.overlap if "gradients" in plan.sync.overlap else 0.0
    actions = program(plan, profile, Place(pp=pp_rank), micro_batches=micro_batches)
    profile = local_profile(plan, profile, 0, pp_rank)
    calls: dict[tuple[str, str, int, int, int | None], tuple[float, float]] = {}  # equal calls are priced once
    for action in actions:
        start = max((clock.finished.get(w, 0.0) for w in action.waits), default=0.0)
        if action.communicates:
            key = (action.op, action.axis, action.group, action.bytes, action.likely)
            if key not in calls:
                calls[key] = collective_seconds(action, plan, cluster, rates), sent_bytes(action, plan)
            _communicate(clock, action, start, calls[key][0], overlap)
            clock.traffic += calls[key][1]
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
