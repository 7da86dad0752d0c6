"""The step: run a schedule on two streams, computation and communication, with measured rates, and sum up an Estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.mesh import INSIDE
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.schedule import Action
from meshwright.core.units import show_bytes
from meshwright.core.workload import Workload
from meshwright.cost.actions import ActionCost
from meshwright.cost.alike import alike
from meshwright.cost.classes import Class, capacity, classes
from meshwright.cost.collective import collective_seconds, message_seconds, sent_bytes, stolen_seconds
from meshwright.cost.compression import compression_seconds
from meshwright.cost.compute import model_flops
from meshwright.cost.crowding import shared
from meshwright.cost.folded import DEPTHS, even_buckets, narrowed, spare_blocks, with_blocks
from meshwright.cost.memory import host_bytes, peak_bytes
from meshwright.cost.pipeline import Order, Stage, finished, under_way
from meshwright.schedule import Place, local_profile, program
from meshwright.schedule.expand import crossings

HEADROOM = 0.92  # of a device's memory; the rest is for fragmentation and what others hold


def estimate(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration, timed: bool = True) -> Estimate:
    """Predict one plan. `profile` may be at any batch: it is moved to the plan's micro-batch. What is not `timed` tells of memory alone."""
    cluster = cluster.seated(plan.seats)
    every = classes(plan, cluster, calibration)
    clock = _pipelined(plan, profile, workload, cluster, calibration, every) if timed else _Clock()
    peaks = [(c, peak_of(plan, profile, workload, calibration, c)) for c in every]
    verdicts = [_verdict(sum(kinds.values()), capacity(cluster, plan, c)) for c, kinds in peaks]
    verdicts += [_host_verdict(plan, profile, workload, cluster)] if plan.memory.offload != "none" else []
    kinds = max((kinds for _, kinds in peaks), key=lambda k: sum(k.values()))
    fits, reason = next((v for v in verdicts if not v[0]), verdicts[0])
    step = clock.now
    samples = plan.global_batch / step if step else 0.0
    flops = model_flops(profile.at(plan.global_batch))
    peak = sum(len(c.ranks) * _peak_flops(plan, cluster, calibration, c) for c in every)
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
        notes=(calibration.basis,) if calibration.basis else (),
    )


def peak_of(plan: Plan, profile: ModelProfile, workload: Workload, calibration: Calibration, of: Class) -> dict[str, int]:
    """The most memory that a rank of a class needs, by kind."""
    micro, rates = profile.at(of.micro_batch(plan)), calibration.layout(plan.world, of.kind)
    places = [(p, ranks, e) for p, ranks in alike(plan, profile, of.stages).items() for e in range(plan.mesh.ep)]
    every = [
        peak_bytes(plan, local_profile(plan, micro, 0, p, e), workload.optimizer, rates, in_flight(plan, p, ranks), of.shard, p)
        for p, ranks, e in places
    ]
    return max(every, key=lambda k: sum(k.values()))


@dataclass(frozen=True)
class Room:
    """What a pipeline rank has for activations: the bytes, its part of the model, and how many micro-batches of which layer are under way."""

    rank: int
    bytes: int
    local: ModelProfile  # of the first rank that is like this one
    names: Sequence[str]  # what this rank's layers are called
    rates: Rates
    in_flight: Sequence[dict[str, int]]


def rooms(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration) -> Iterator[Room]:
    """Of every pipeline rank, on every kind of device."""
    late = "gradients" if plan.mesh.group_size("data") == 1 else ""  # they take the place of activations
    cluster = cluster.seated(plan.seats)
    for of in classes(plan, cluster, calibration):
        micro, rates = profile.at(of.micro_batch(plan)), calibration.layout(plan.world, of.kind)
        every = [(e, first, ranks) for e in range(plan.mesh.ep) for first, ranks in alike(plan, profile, of.stages).items()]
        for owner, first, ranks in every:
            local = local_profile(plan, micro, 0, first, owner)
            kinds = peak_bytes(plan, local, workload.optimizer, rates, shard=of.shard, pp_rank=first)
            left = _limit(capacity(cluster, plan, of)) - 1 - sum(size for kind, size in kinds.items() if kind not in ("activations", late))
            for rank in ranks:
                yield Room(rank, int(left / rates.held), local, _names(plan, profile, rank), rates, in_flight(plan, first, [rank]))


def _names(plan: Plan, profile: ModelProfile, rank: int) -> list[str]:
    """A pipeline rank's layers, in the order of the model's."""
    here = {name for index, stage in enumerate(plan.stages) if plan.stage_rank(index) == rank for name in stage.layers}
    return [name for name in profile.layer_names if name in here or not here]


def _by_rank(plan: Plan, peaks: Sequence[tuple[Class, dict[str, int]]]) -> tuple[int, ...]:
    if len(peaks) == 1:
        return (sum(peaks[0][1].values()),) * plan.world
    found = [0] * plan.world
    for of, kinds in peaks:
        for rank in of.ranks:
            found[rank] = sum(kinds.values())
    return tuple(found)


def _peak_flops(plan: Plan, cluster: Cluster, calibration: Calibration, of: Class) -> float:
    """What a device could do at most: by its data sheet, or else the best that was measured."""
    curves = calibration.layout(plan.world, of.kind).compute.items()
    measured = (rate for key, points in curves if key.endswith(plan.memory.precision) for _, rate in points)
    return cluster.devices[of.ranks[0]].peak_flops.get(plan.memory.precision) or max(measured, default=0.0)


def _limit(capacity: int) -> int:
    return int(capacity * HEADROOM)


def _verdict(need: int, capacity: int) -> tuple[bool, str]:
    if need <= _limit(capacity):
        return True, f"needs {show_bytes(need)} a device of {show_bytes(capacity)}"
    return False, f"needs {show_bytes(need)} a device, this one has {show_bytes(capacity)}"


def _host_verdict(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster) -> tuple[bool, str]:
    """Whether a node's memory holds what its ranks have moved there."""
    most = max(host_bytes(plan, local_profile(plan, profile, 0, p), workload.optimizer) for p in alike(plan, profile, range(plan.mesh.pp)))
    for node in cluster.nodes:
        need, has = most * min(len(node.devices), plan.world), node.memory_bytes
        if has and need > HEADROOM * has:
            return False, f"offload needs {show_bytes(need)} of a node's own memory, {node.name} has {show_bytes(has)}"
    return True, ""


@dataclass
class _Clock:
    """Two streams of one rank. Where they compete for the same cores, a collective also costs computation."""

    compute: float = 0.0
    network: float = 0.0
    traffic: float = 0.0
    finished: dict[str, float] = field(default_factory=dict)
    breakdown: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("forward", "backward", "optimizer", "communication"), 0.0))
    turns: dict[tuple[str, int], float] = field(default_factory=dict)  # of a pipeline: by phase and stage, what is computed and stolen

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
            turns={k: v + more * (v - before.turns[k]) for k, v in self.turns.items()},
        )

    def settled(self, before: _Clock, first: _Clock) -> bool:
        """Whether the last step of three was as long as the one before, in all that is counted."""

        def figures(clock: _Clock) -> list[float]:
            return [clock.compute, clock.network, clock.traffic, *clock.breakdown.values(), *clock.turns.values()]

        return all(abs((c - b) - (b - a)) <= 1e-9 * abs(c) for a, b, c in zip(figures(first), figures(before), figures(self), strict=True))

    def steal(self, seconds: float) -> None:
        """What a call beside computation takes from it."""
        self.breakdown["communication"] += seconds
        self.compute += seconds

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


def order_of(plan: Plan) -> Order:
    return Order(plan.schedule, plan.mesh.pp, plan.micro_batches, max(len(plan.stages) // plan.mesh.pp, 1))


def in_flight(plan: Plan, rank: int, alike: Sequence[int]) -> list[dict[str, int]]:
    """Micro-batches whose activations a pipeline rank holds at once, by layer, at the moments that may need most; `alike` ranks have such layers."""
    if plan.mesh.pp == 1 or not plan.stages:
        return [{}]
    order = order_of(plan)
    layers = [plan.stages[stage].layers for stage in order.stages(rank)]
    return [{name: n for n, names in zip(counts, layers, strict=True) for name in names} for counts in under_way(order, alike)]


def _pipelined(
    plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration, every: Sequence[Class]
) -> _Clock:  # fmt: skip
    """The slowest pipeline rank, with the time for which it waits for the others (see [Note: turns in time]). Ranks that wait leave their core to
    those who share it (`crowding.py`)."""
    rates = {of.kind: calibration.layout(plan.world, of.kind) for of in every}
    clocks, stages = _turning(plan, profile, workload, cluster, rates, every)
    slowest = max(clocks.values(), key=lambda c: c.now)
    if stages:
        crowding = min(part.crowding for part in rates.values())
        if crowding > 1.0:
            alone = {kind: part.alone for kind, part in rates.items()}
            ends = shared(order_of(plan), _turning(plan, profile, workload, cluster, alone, every)[1], plan.mesh.pp / crowding)
        else:
            ends = finished(order_of(plan), stages)
        ahead = {rank: clock.now - plan.micro_batches * sum(clock.turns.values()) for rank, clock in clocks.items()}
        slowest.last(max(ends[rank] + max(rest, 0.0) for rank, rest in ahead.items()))
    return slowest


def _turning(
    plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Mapping[str, Rates], every: Sequence[Class]
) -> tuple[dict[int, _Clock], list[Stage]]:  # fmt: skip
    """What each of its ranks does, and what a micro-batch takes in each stage."""
    clocks: dict[int, _Clock] = {}
    stages: dict[int, Stage] = {}
    for of in every:
        micro = profile.at(of.micro_batch(plan))
        for first, ranks in alike(plan, profile, of.stages).items():
            clock = _steps(plan, micro, workload, cluster, rates[of.kind], first, of.shard)
            for rank in ranks:
                if rank not in clocks or clock.now > clocks[rank].now:
                    clocks[rank] = clock
                    stages |= _stages(plan, micro, cluster, rates[of.kind], clock, first, rank)
    return clocks, [stages[index] for index in range(len(plan.stages))] if stages else []


def _stages(plan: Plan, profile: ModelProfile, cluster: Cluster, rates: Rates, clock: _Clock, first: int, rank: int) -> dict[int, Stage]:
    """What one micro-batch takes in a rank's stages, which are like those of `first`, whose clock this is, and on the way to them."""
    if plan.mesh.pp == 1 or not plan.stages:
        return {}
    order, found = order_of(plan), {}
    for index, like in zip(order.stages(rank), order.stages(first), strict=True):
        forward, backward, weights = (clock.turns.get((phase, like), 0.0) for phase in ("forward", "backward", "weights"))
        takes = (_message(plan, profile, cluster, rates, index - 1, index), _message(plan, profile, cluster, rates, index + 1, index))
        sends = (_message(plan, profile, cluster, rates, index, index + 1), _message(plan, profile, cluster, rates, index, index - 1))
        found[index] = Stage(forward, backward, weights, takes, (_handing(plan, rates, sends[0]), _handing(plan, rates, sends[1])))
    return found


def _message(plan: Plan, profile: ModelProfile, cluster: Cluster, rates: Rates, source: int, target: int) -> float:
    """Seconds of what a stage sends to a neighbour for one micro-batch; neighbours on one rank send nothing."""
    if not (0 <= source < len(plan.stages) and 0 <= target < len(plan.stages)):
        return 0.0
    ranks = plan.stage_rank(source), plan.stage_rank(target)
    phase, kind = ("forward", "activations") if source < target else ("backward", "gradients")
    sent = [a for a in crossings(plan, profile, Place(pp=ranks[0]), phase, 0) if a.name.startswith(f"{kind}/{source}/")]
    return sum(message_seconds(action, plan, cluster, rates, *ranks) for action in sent)


def _overlap(plan: Plan, rates: Rates) -> float:
    return rates.overlap if "gradients" in plan.sync.overlap else 0.0


def _handing(plan: Plan, rates: Rates, message: float) -> float:
    """What a message of so many seconds takes from the sender's computation: as measured, or else what a call does not hide. A GPU's copy engines
    and network cards do it beside."""
    if rates.queued or not message:
        return 0.0
    return rates.fixed.get("handing", (1.0 - _overlap(plan, rates)) * message)


def _steps(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int = 0, shard: int = 0) -> _Clock:
    """The whole step. Of a deep model some blocks are run and the rest is added on, where these add the same (see [Note: folding a step])."""
    here = set(_names(plan, profile, pp_rank))
    if plan.mesh.pp > 1:
        plan = narrowed(plan, profile, {name for stage in plan.stages for name in stage.layers} - here)
    spare = spare_blocks(plan, profile, here)
    few = [with_blocks(plan, profile, spare, depth) for depth in DEPTHS] if spare else []
    if few and even_buckets(plan, profile, few, len(spare) - DEPTHS[2], pp_rank):
        runs = [_repeated(*pair, workload, cluster, rates, pp_rank, shard) for pair in few]
        if runs[2].settled(runs[1], runs[0]):
            return runs[2].extended(runs[1], len(spare) - DEPTHS[2])
    return _repeated(plan, profile, workload, cluster, rates, pp_rank, shard)


def _repeated(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int, shard: int = 0) -> _Clock:
    """Micro-batches after the second repeat each other, so only three are run and the rest is added on."""
    if plan.micro_batches <= 3 and plan.mesh.pp == 1:
        return _run(plan, profile, workload, cluster, rates, pp_rank, shard)
    two, three = (_run(plan, profile, workload, cluster, rates, pp_rank, shard, count) for count in (2, 3))
    whole = three.extended(two, plan.micro_batches - 3) if plan.micro_batches > 3 else _run(plan, profile, workload, cluster, rates, pp_rank, shard)
    whole.turns = {turn: seconds - two.turns[turn] for turn, seconds in three.turns.items()}
    return whole


def _run(
    plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int, shard: int = 0, micro_batches: int = 0
) -> _Clock:
    clock = _Clock()
    clock.stall(compression_seconds(plan, local_profile(plan, profile, 0, pp_rank), rates))
    price = ActionCost(plan, workload.optimizer, rates, shard)
    actions = program(plan, profile, Place(pp=pp_rank, shard=shard), micro_batches=micro_batches)
    profile = local_profile(plan, profile, 0, pp_rank)
    turned = _Turned(plan, profile, pp_rank)
    calls: dict[tuple[str, str, int, int, int | None], tuple[float, float, float]] = {}  # equal calls are priced once
    for action in actions:
        start = max((clock.finished.get(w, 0.0) for w in action.waits), default=0.0)
        before = clock.compute
        if action.communicates:
            key = (action.op, action.axis, action.group, action.bytes, action.likely)
            if key not in calls:
                seconds = collective_seconds(action, plan, cluster, rates)
                stolen = seconds if action.axis in INSIDE else stolen_seconds(action, plan, rates, seconds)
                calls[key] = seconds, sent_bytes(action, plan), stolen
            if action.op == "send" and action.axis == "pp":
                clock.steal(_handing(plan, rates, turned.message(action, cluster, rates)))
            else:
                _communicate(clock, action, start, calls[key][0], calls[key][2])
            clock.traffic += calls[key][1]
            turned.note(clock, action, clock.compute - before)
            continue
        clock.stall(start)
        seconds = price.seconds(profile, action)
        clock.breakdown[action.op] += seconds
        clock.compute += seconds
        clock.finished[action.name] = clock.compute
        turned.note(clock, action, clock.compute - before, seconds)
    clock.stall(clock.network)
    return clock


class _Turned:
    """Which turn of a pipeline rank an action's time belongs to: that of the last layer that was computed, but for messages, which are named."""

    def __init__(self, plan: Plan, local: ModelProfile, pp_rank: int) -> None:
        self._plan, self._pp_rank = plan, pp_rank
        of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers} if plan.mesh.pp > 1 else {}
        self._stages = [of.get(layer.name, pp_rank) for layer in local.layers]
        self._turn: tuple[str, int] | None = None

    def note(self, clock: _Clock, action: Action, seconds: float, computed: float = 0.0) -> None:
        if self._plan.mesh.pp == 1:
            return
        if action.op == "send" and action.axis == "pp":
            self._turn = self._crossing(action)
        elif action.layer >= 0:
            self._turn = "forward" if action.name.startswith("forward/") else "backward", self._stages[action.layer]
        elif action.op == "optimizer":
            self._turn = None
        if self._turn is None:
            return
        later = computed / 2 if action.op == "backward" and self._plan.splits_backward else 0.0  # a product's two are alike
        clock.turns[self._turn] = clock.turns.get(self._turn, 0.0) + seconds - later
        if later:
            weights = "weights", self._turn[1]
            clock.turns[weights] = clock.turns.get(weights, 0.0) + later

    def message(self, action: Action, cluster: Cluster, rates: Rates) -> float:
        phase, stage = self._crossing(action)
        other = self._plan.stage_rank(stage + (1 if phase == "forward" else -1))
        return message_seconds(action, self._plan, cluster, rates, self._pp_rank, other)

    @staticmethod
    def _crossing(action: Action) -> tuple[str, int]:
        kind, stage, *_ = action.name.split("/")
        return "forward" if kind == "activations" else "backward", int(stage)


def _communicate(clock: _Clock, action: Action, start: float, seconds: float, stolen: float) -> None:
    if action.axis in INSIDE:  # another group's call: it does not queue behind what travels beside computation
        clock.stall(start)
        clock.finished[action.name] = clock.compute + seconds
        clock.steal(stolen)
        return
    begin = max(clock.network, clock.compute, start)
    clock.network = begin + seconds
    clock.finished[action.name] = clock.network
    clock.steal(stolen)
