"""Prices a training step: runs a plan's schedule on two streams, computation and communication, at measured rates, and sums up an `Estimate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.estimate import Estimate
from meshwright.core.mesh import INTRA_LAYER_AXES
from meshwright.core.model import ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.quantities import show_bytes
from meshwright.core.schedule import Action
from meshwright.core.workload import Workload
from meshwright.cost.action_cost import ActionCost
from meshwright.cost.collective_cost import collective_seconds, contention_seconds, p2p_seconds, sent_bytes
from meshwright.cost.compression_cost import compression_seconds
from meshwright.cost.compute_cost import model_flops
from meshwright.cost.depth_extrapolation import SAMPLED_DEPTHS, buckets_repeat, removable_blocks, truncate_blocks, without_layers
from meshwright.cost.equivalent_stages import equivalent_pipeline_ranks
from meshwright.cost.memory_cost import offloaded_bytes, peak_bytes
from meshwright.cost.oversubscription import oversubscribed_ends
from meshwright.cost.pipeline_cost import PipelineSpec, StageTime, finish_times, max_in_flight
from meshwright.cost.rank_classes import RankClass, find_rank_classes, memory_capacity
from meshwright.schedule import MeshCoordinate, build_program, local_profile
from meshwright.schedule.step_actions import pipeline_sends

HEADROOM = 0.92  # share of a device's memory; the rest is for fragmentation and other processes


def estimate(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration, with_time: bool = True) -> Estimate:
    """Predict one plan. `profile` may be at any batch: it is rescaled to the plan's micro-batch. Without `with_time`, only memory is estimated."""
    cluster = cluster.in_device_order(plan.device_order)
    every = find_rank_classes(plan, cluster, calibration)
    clock = _slowest_clock(plan, profile, workload, cluster, calibration, every) if with_time else _StreamClock()
    peaks = [(c, rank_class_peak(plan, profile, workload, calibration, c)) for c in every]
    verdicts = [_fits_device(sum(kinds.values()), memory_capacity(cluster, plan, c)) for c, kinds in peaks]
    verdicts += [_fits_host(plan, profile, workload, cluster)] if plan.memory.offload != "none" else []
    kinds = max((kinds for _, kinds in peaks), key=lambda k: sum(k.values()))
    fits, reason = next((v for v in verdicts if not v[0]), verdicts[0])
    step = clock.now
    samples = plan.global_batch / step if step else 0.0
    flops = model_flops(profile.at_batch(plan.global_batch))
    peak = sum(len(c.ranks) * _peak_flops(plan, cluster, calibration, c) for c in every)
    return Estimate(
        step_s=step,
        breakdown=clock.breakdown,
        memory_bytes=_memory_by_rank(plan, peaks),
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


def rank_class_peak(plan: Plan, profile: ModelProfile, workload: Workload, calibration: Calibration, rank_class: RankClass) -> dict[str, int]:
    """Peak memory of a class's largest rank, by kind."""
    micro, rates = profile.at_batch(rank_class.micro_batch(plan)), calibration.rates_for(plan.world, rank_class.rates_label)
    places = [(p, ranks, e) for p, ranks in equivalent_pipeline_ranks(plan, profile, rank_class.pipeline_ranks).items() for e in range(plan.mesh.ep)]
    every = [
        peak_bytes(plan, local_profile(plan, micro, 0, p, e), workload.optimizer, rates, in_flight_by_layer(plan, p, ranks), rank_class.shard, p)
        for p, ranks, e in places
    ]
    return max(every, key=lambda k: sum(k.values()))


@dataclass(frozen=True)
class ActivationBudget:
    """A pipeline rank's memory for activations: the bytes, its part of the model, and its micro-batches in flight by layer."""

    rank: int
    bytes: int
    local_profile: ModelProfile  # of the first rank equivalent to this one
    layer_names: Sequence[str]  # names of this rank's layers
    rates: Rates
    in_flight: Sequence[dict[str, int]]


def activation_budgets(
    plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration
) -> Iterator[ActivationBudget]:
    """Budgets of every pipeline rank, on every device kind."""
    late = "gradients" if plan.mesh.group_size("data") == 1 else ""  # allocated while activations are freed
    cluster = cluster.in_device_order(plan.device_order)
    for of in find_rank_classes(plan, cluster, calibration):
        micro, rates = profile.at_batch(of.micro_batch(plan)), calibration.rates_for(plan.world, of.rates_label)
        every = [
            (e, first, ranks) for e in range(plan.mesh.ep) for first, ranks in equivalent_pipeline_ranks(plan, profile, of.pipeline_ranks).items()
        ]
        for owner, first, ranks in every:
            local = local_profile(plan, micro, 0, first, owner)
            kinds = peak_bytes(plan, local, workload.optimizer, rates, shard=of.shard, pp_rank=first)
            left = (
                _usable_bytes(memory_capacity(cluster, plan, of)) - 1 - sum(size for kind, size in kinds.items() if kind not in ("activations", late))
            )
            for rank in ranks:
                yield ActivationBudget(
                    rank,
                    int(left / rates.memory_correction),
                    local,
                    _local_layer_names(plan, profile, rank),
                    rates,
                    in_flight_by_layer(plan, first, [rank]),
                )


def _local_layer_names(plan: Plan, profile: ModelProfile, rank: int) -> list[str]:
    """A pipeline rank's layers, in model order."""
    here = {name for index, stage in enumerate(plan.stages) if plan.stage_rank(index) == rank for name in stage.layers}
    return [name for name in profile.layer_names if name in here or not here]


def _memory_by_rank(plan: Plan, peaks: Sequence[tuple[RankClass, dict[str, int]]]) -> tuple[int, ...]:
    if len(peaks) == 1:
        return (sum(peaks[0][1].values()),) * plan.world
    found = [0] * plan.world
    for of, kinds in peaks:
        for rank in of.ranks:
            found[rank] = sum(kinds.values())
    return tuple(found)


def _peak_flops(plan: Plan, cluster: Cluster, calibration: Calibration, rank_class: RankClass) -> float:
    """A device's peak FLOP/s: from its data sheet, or else the best measured rate."""
    curves = calibration.rates_for(plan.world, rank_class.rates_label).compute.items()
    measured = (rate for key, points in curves if key.endswith(plan.memory.precision) for _, rate in points)
    return cluster.devices[rank_class.ranks[0]].peak_flops.get(plan.memory.precision) or max(measured, default=0.0)


def _usable_bytes(capacity: int) -> int:
    return int(capacity * HEADROOM)


def _fits_device(need: int, capacity: int) -> tuple[bool, str]:
    if need <= _usable_bytes(capacity):
        return True, f"needs {show_bytes(need)} a device of {show_bytes(capacity)}"
    return False, f"needs {show_bytes(need)} a device, this one has {show_bytes(capacity)}"


def _fits_host(plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster) -> tuple[bool, str]:
    """Whether a node's memory holds what its ranks offload."""
    most = max(
        offloaded_bytes(plan, local_profile(plan, profile, 0, p), workload.optimizer)
        for p in equivalent_pipeline_ranks(plan, profile, range(plan.mesh.pp))
    )
    for node in cluster.nodes:
        need, has = most * min(len(node.devices), plan.world), node.memory_bytes
        if has and need > HEADROOM * has:
            return False, f"offload needs {show_bytes(need)} of a node's own memory, {node.name} has {show_bytes(has)}"
    return True, ""


@dataclass
class _StreamClock:
    """The two streams of one rank. Where they compete for the same cores, a collective also costs compute time."""

    compute: float = 0.0
    network: float = 0.0
    traffic: float = 0.0
    end_times: dict[str, float] = field(default_factory=dict)
    breakdown: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("forward", "backward", "optimizer", "communication"), 0.0))
    stage_seconds: dict[tuple[str, int], float] = field(default_factory=dict)  # in a pipeline: computation and contention by phase and stage

    @property
    def now(self) -> float:
        return max(self.compute, self.network)

    def extrapolate(self, before: _StreamClock, more: int) -> _StreamClock:
        """This clock advanced by `more` times the difference from `before`."""
        return _StreamClock(
            compute=self.compute + more * (self.compute - before.compute),
            network=self.network + more * (self.network - before.network),
            traffic=self.traffic + more * (self.traffic - before.traffic),
            breakdown={k: v + more * (v - before.breakdown[k]) for k, v in self.breakdown.items()},
            stage_seconds={k: v + more * (v - before.stage_seconds[k]) for k, v in self.stage_seconds.items()},
        )

    def is_steady(self, before: _StreamClock, first: _StreamClock) -> bool:
        """Whether the last two increments of the three clocks are equal in every figure."""

        def figures(clock: _StreamClock) -> list[float]:
            return [clock.compute, clock.network, clock.traffic, *clock.breakdown.values(), *clock.stage_seconds.values()]

        return all(abs((c - b) - (b - a)) <= 1e-9 * abs(c) for a, b, c in zip(figures(first), figures(before), figures(self), strict=True))

    def add_contention(self, seconds: float) -> None:
        """Add the compute time that an overlapped collective takes."""
        self.breakdown["communication"] += seconds
        self.compute += seconds

    def end_at(self, until: float) -> None:
        """End at `until`: wait, or scale everything down, where other ranks left more of a shared core than was assumed."""
        if until < self.now:
            self.breakdown = {k: v * until / self.now for k, v in self.breakdown.items()}
            self.compute = self.network = until
        self.wait_until(until)

    def wait_until(self, until: float) -> None:
        if until > self.compute:
            self.breakdown["communication"] += until - self.compute
            self.compute = until


def pipeline_spec(plan: Plan) -> PipelineSpec:
    return PipelineSpec(plan.schedule, plan.mesh.pp, plan.micro_batches, max(len(plan.stages) // plan.mesh.pp, 1))


def in_flight_by_layer(plan: Plan, rank: int, equivalent_ranks: Sequence[int]) -> list[dict[str, int]]:
    """Micro-batches whose activations a pipeline rank holds at once, by layer, at the moments that may need most, over all `equivalent_ranks`."""
    if plan.mesh.pp == 1 or not plan.stages:
        return [{}]
    order = pipeline_spec(plan)
    layers = [plan.stages[stage].layers for stage in order.stages(rank)]
    return [{name: n for n, names in zip(counts, layers, strict=True) for name in names} for counts in max_in_flight(order, equivalent_ranks)]


def _slowest_clock(
    plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, calibration: Calibration, rank_classes: Sequence[RankClass]
) -> _StreamClock:  # fmt: skip
    """The slowest pipeline rank's clock, including the time it waits for others (see [Note: pipeline step time]). On shared cores, waiting ranks
    leave their core to the others (`oversubscription.py`)."""
    rates = {of.rates_label: calibration.rates_for(plan.world, of.rates_label) for of in rank_classes}
    clocks, stages = _rank_clocks(plan, profile, workload, cluster, rates, rank_classes)
    slowest = max(clocks.values(), key=lambda c: c.now)
    if stages:
        crowding = min(part.oversubscription for part in rates.values())
        if crowding > 1.0:
            alone = {kind: part.without_oversubscription for kind, part in rates.items()}
            ends = oversubscribed_ends(
                pipeline_spec(plan), _rank_clocks(plan, profile, workload, cluster, alone, rank_classes)[1], plan.mesh.pp / crowding
            )
        else:
            ends = finish_times(pipeline_spec(plan), stages)
        ahead = {rank: clock.now - plan.micro_batches * sum(clock.stage_seconds.values()) for rank, clock in clocks.items()}
        slowest.end_at(max(ends[rank] + max(rest, 0.0) for rank, rest in ahead.items()))
    return slowest


def _rank_clocks(
    plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Mapping[str, Rates], rank_classes: Sequence[RankClass]
) -> tuple[dict[int, _StreamClock], list[StageTime]]:  # fmt: skip
    """The clock of each pipeline rank, and the seconds of a micro-batch in each stage."""
    clocks: dict[int, _StreamClock] = {}
    stages: dict[int, StageTime] = {}
    for of in rank_classes:
        micro = profile.at_batch(of.micro_batch(plan))
        for first, ranks in equivalent_pipeline_ranks(plan, profile, of.pipeline_ranks).items():
            clock = _step_clock(plan, micro, workload, cluster, rates[of.rates_label], first, of.shard)
            for rank in ranks:
                if rank not in clocks or clock.now > clocks[rank].now:
                    clocks[rank] = clock
                    stages |= _stage_times(plan, micro, cluster, rates[of.rates_label], clock, first, rank)
    return clocks, [stages[index] for index in range(len(plan.stages))] if stages else []


def _stage_times(
    plan: Plan, profile: ModelProfile, cluster: Cluster, rates: Rates, clock: _StreamClock, representative: int, rank: int
) -> dict[int, StageTime]:
    """Seconds of one micro-batch in a rank's stages and of the messages to them; the stages are equivalent to those of `representative`, whose
    clock is given."""
    if plan.mesh.pp == 1 or not plan.stages:
        return {}
    order, found = pipeline_spec(plan), {}
    for index, like in zip(order.stages(rank), order.stages(representative), strict=True):
        forward, backward, weights = (clock.stage_seconds.get((phase, like), 0.0) for phase in ("forward", "backward", "weights"))
        takes = (
            _boundary_seconds(plan, profile, cluster, rates, index - 1, index),
            _boundary_seconds(plan, profile, cluster, rates, index + 1, index),
        )
        sends = (
            _boundary_seconds(plan, profile, cluster, rates, index, index + 1),
            _boundary_seconds(plan, profile, cluster, rates, index, index - 1),
        )
        found[index] = StageTime(forward, backward, weights, takes, (_p2p_overhead(plan, rates, sends[0]), _p2p_overhead(plan, rates, sends[1])))
    return found


def _boundary_seconds(plan: Plan, profile: ModelProfile, cluster: Cluster, rates: Rates, source: int, target: int) -> float:
    """Seconds of the messages from a stage to a neighbour for one micro-batch; neighbours on one rank send nothing."""
    if not (0 <= source < len(plan.stages) and 0 <= target < len(plan.stages)):
        return 0.0
    ranks = plan.stage_rank(source), plan.stage_rank(target)
    phase, kind = ("forward", "activations") if source < target else ("backward", "gradients")
    sent = [a for a in pipeline_sends(plan, profile, MeshCoordinate(pp=ranks[0]), phase, 0) if a.name.startswith(f"{kind}/{source}/")]
    return sum(p2p_seconds(action, plan, cluster, rates, *ranks) for action in sent)


def _overlap_share(plan: Plan, rates: Rates) -> float:
    return rates.overlap if "gradients" in plan.sync.overlap else 0.0


def _p2p_overhead(plan: Plan, rates: Rates, message: float) -> float:
    """Compute time that sending a message of `message` seconds costs the sender: as measured, or else its exposed part. 0 on a GPU, whose copy
    engines and NICs do it."""
    if rates.async_dispatch or not message:
        return 0.0
    return rates.fixed.get("p2p", (1.0 - _overlap_share(plan, rates)) * message)


def _step_clock(
    plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int = 0, shard: int = 0
) -> _StreamClock:
    """One rank's step. For a deep model a few blocks are simulated and the rest extrapolated, where each adds the same (see
    [Note: depth extrapolation])."""
    here = set(_local_layer_names(plan, profile, pp_rank))
    if plan.mesh.pp > 1:
        plan = without_layers(plan, profile, {name for stage in plan.stages for name in stage.layers} - here)
    spare = removable_blocks(plan, profile, here)
    few = [truncate_blocks(plan, profile, spare, depth) for depth in SAMPLED_DEPTHS] if spare else []
    if few and buckets_repeat(plan, profile, few, len(spare) - SAMPLED_DEPTHS[2], pp_rank):
        runs = [_micro_batches_clock(*pair, workload, cluster, rates, pp_rank, shard) for pair in few]
        if runs[2].is_steady(runs[1], runs[0]):
            return runs[2].extrapolate(runs[1], len(spare) - SAMPLED_DEPTHS[2])
    return _micro_batches_clock(plan, profile, workload, cluster, rates, pp_rank, shard)


def _micro_batches_clock(
    plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int, shard: int = 0
) -> _StreamClock:
    """The clock of all micro-batches. Those after the second repeat, so three are simulated and the rest is extrapolated."""
    if plan.micro_batches <= 3 and plan.mesh.pp == 1:
        return _run_actions(plan, profile, workload, cluster, rates, pp_rank, shard)
    two, three = (_run_actions(plan, profile, workload, cluster, rates, pp_rank, shard, count) for count in (2, 3))
    whole = (
        three.extrapolate(two, plan.micro_batches - 3)
        if plan.micro_batches > 3
        else _run_actions(plan, profile, workload, cluster, rates, pp_rank, shard)
    )
    whole.stage_seconds = {turn: seconds - two.stage_seconds[turn] for turn, seconds in three.stage_seconds.items()}
    return whole


def _run_actions(
    plan: Plan, profile: ModelProfile, workload: Workload, cluster: Cluster, rates: Rates, pp_rank: int, shard: int = 0, micro_batches: int = 0
) -> _StreamClock:
    clock = _StreamClock()
    clock.wait_until(compression_seconds(plan, local_profile(plan, profile, 0, pp_rank), rates))
    price = ActionCost(plan, workload.optimizer, rates, shard)
    actions = build_program(plan, profile, MeshCoordinate(pp=pp_rank, shard=shard), micro_batches=micro_batches)
    profile = local_profile(plan, profile, 0, pp_rank)
    turned = _StageTimer(plan, profile, pp_rank)
    calls: dict[tuple[str, str, int, int, int | None], tuple[float, float, float]] = {}  # memo: equal calls are priced once
    for action in actions:
        start = max((clock.end_times.get(w, 0.0) for w in action.depends_on), default=0.0)
        before = clock.compute
        if action.is_communication:
            key = (action.op, action.axis, action.group_size, action.bytes, action.expected_bytes)
            if key not in calls:
                seconds = collective_seconds(action, plan, cluster, rates)
                stolen = seconds if action.axis in INTRA_LAYER_AXES else contention_seconds(action, plan, rates, seconds)
                calls[key] = seconds, sent_bytes(action, plan), stolen
            if action.op == "send" and action.axis == "pp":
                clock.add_contention(_p2p_overhead(plan, rates, turned.message_seconds(action, cluster, rates)))
            else:
                _run_collective(clock, action, start, calls[key][0], calls[key][2])
            clock.traffic += calls[key][1]
            turned.record(clock, action, clock.compute - before)
            continue
        clock.wait_until(start)
        seconds = price.seconds(profile, action)
        clock.breakdown[action.op] += seconds
        clock.compute += seconds
        clock.end_times[action.name] = clock.compute
        turned.record(clock, action, clock.compute - before, seconds)
    clock.wait_until(clock.network)
    return clock


class _StageTimer:
    """Attributes an action's time to a phase and stage of a pipeline rank: those of the last computed layer; for messages, those in their name."""

    def __init__(self, plan: Plan, profile: ModelProfile, pp_rank: int) -> None:
        self._plan, self._pp_rank = plan, pp_rank
        of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers} if plan.mesh.pp > 1 else {}
        self._stages = [of.get(layer.name, pp_rank) for layer in profile.layers]
        self._current: tuple[str, int] | None = None

    def record(self, clock: _StreamClock, action: Action, seconds: float, computed: float = 0.0) -> None:
        if self._plan.mesh.pp == 1:
            return
        if action.op == "send" and action.axis == "pp":
            self._current = self._phase_and_stage(action)
        elif action.layer >= 0:
            self._current = "forward" if action.name.startswith("forward/") else "backward", self._stages[action.layer]
        elif action.op == "optimizer":
            self._current = None
        if self._current is None:
            return
        later = computed / 2 if action.op == "backward" and self._plan.splits_backward else 0.0  # a matmul's two gradients cost the same
        clock.stage_seconds[self._current] = clock.stage_seconds.get(self._current, 0.0) + seconds - later
        if later:
            weights = "weights", self._current[1]
            clock.stage_seconds[weights] = clock.stage_seconds.get(weights, 0.0) + later

    def message_seconds(self, action: Action, cluster: Cluster, rates: Rates) -> float:
        phase, stage = self._phase_and_stage(action)
        other = self._plan.stage_rank(stage + (1 if phase == "forward" else -1))
        return p2p_seconds(action, self._plan, cluster, rates, self._pp_rank, other)

    @staticmethod
    def _phase_and_stage(action: Action) -> tuple[str, int]:
        kind, stage, *_ = action.name.split("/")
        return "forward" if kind == "activations" else "backward", int(stage)


def _run_collective(clock: _StreamClock, action: Action, start: float, seconds: float, contention_s: float) -> None:
    if action.axis in INTRA_LAYER_AXES:  # another process group: not queued behind the overlapped collectives
        clock.wait_until(start)
        clock.end_times[action.name] = clock.compute + seconds
        clock.add_contention(contention_s)
        return
    begin = max(clock.network, clock.compute, start)
    clock.network = begin + seconds
    clock.end_times[action.name] = clock.network
    clock.add_contention(contention_s)
