"""Prices a training step: runs a plan's schedule on two streams, computation and communication, at measured rates, and sums up an `Estimate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

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
    rank_classes = find_rank_classes(plan, cluster, calibration)
    clock = _slowest_clock(plan, profile, workload.optimizer, cluster, calibration, rank_classes) if with_time else _Clock()
    peaks = [(c, rank_class_peak(plan, profile, workload, calibration, c)) for c in rank_classes]
    verdicts = [_fits_device(sum(kinds.values()), memory_capacity(cluster, plan, c)) for c, kinds in peaks]
    verdicts += [_fits_host(plan, profile, workload, cluster)] if plan.memory.offload != "none" else []
    kinds = max((kinds for _, kinds in peaks), key=lambda k: sum(k.values()))
    fits, reason = next((v for v in verdicts if not v[0]), verdicts[0])
    step = clock.now
    samples = plan.global_batch / step if step else 0.0
    flops = model_flops(profile.at_batch(plan.global_batch))
    peak = sum(len(c.ranks) * _peak_flops(plan, cluster, calibration, c) for c in rank_classes)
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
    peaks = []
    for pp_rank, ranks in equivalent_pipeline_ranks(plan, profile, rank_class.pipeline_ranks).items():
        in_flight = in_flight_by_layer(plan, pp_rank, ranks)
        for ep_rank in range(plan.mesh.ep):
            local = local_profile(plan, micro, 0, pp_rank, ep_rank)
            peaks.append(peak_bytes(plan, local, workload.optimizer, rates, in_flight, rank_class.shard, pp_rank, profile.largest_tensor_bytes))
    return max(peaks, key=lambda kinds: sum(kinds.values()))


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
    for rank_class in find_rank_classes(plan, cluster, calibration):
        micro, rates = profile.at_batch(rank_class.micro_batch(plan)), calibration.rates_for(plan.world, rank_class.rates_label)
        usable = _usable_bytes(memory_capacity(cluster, plan, rank_class)) - 1
        groups = equivalent_pipeline_ranks(plan, profile, rank_class.pipeline_ranks)
        for ep_rank, (first, ranks) in product(range(plan.mesh.ep), groups.items()):
            local = local_profile(plan, micro, 0, first, ep_rank)
            kinds = peak_bytes(plan, local, workload.optimizer, rates, shard=rank_class.shard, pp_rank=first)
            budget = int((usable - sum(size for kind, size in kinds.items() if kind not in ("activations", late))) / rates.memory_correction)
            for rank in ranks:
                names, in_flight = _local_layer_names(plan, profile, rank), in_flight_by_layer(plan, first, [rank])
                yield ActivationBudget(rank, budget, local, names, rates, in_flight)


def _local_layer_names(plan: Plan, profile: ModelProfile, rank: int) -> list[str]:
    """A pipeline rank's layers, in model order."""
    names = {name for index, stage in enumerate(plan.stages) if plan.stage_rank(index) == rank for name in stage.layers}
    return [name for name in profile.layer_names if name in names or not names]


def _memory_by_rank(plan: Plan, peaks: Sequence[tuple[RankClass, dict[str, int]]]) -> tuple[int, ...]:
    if len(peaks) == 1:
        return (sum(peaks[0][1].values()),) * plan.world
    totals = {rank: sum(kinds.values()) for rank_class, kinds in peaks for rank in rank_class.ranks}
    return tuple(totals.get(rank, 0) for rank in range(plan.world))


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
    pp_ranks = equivalent_pipeline_ranks(plan, profile, range(plan.mesh.pp))
    per_rank = max(offloaded_bytes(plan, local_profile(plan, profile, 0, pp_rank), workload.optimizer) for pp_rank in pp_ranks)
    for node in cluster.nodes:
        need, has = per_rank * min(len(node.devices), plan.world), node.memory_bytes
        if has and need > HEADROOM * has:
            return False, f"offload needs {show_bytes(need)} of a node's host memory, {node.name} has {show_bytes(has)}"
    return True, ""


@dataclass
class _Clock:
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

    def extrapolate(self, before: _Clock, more: int) -> _Clock:
        """This clock advanced by `more` times the difference from `before`."""
        return _Clock(
            compute=self.compute + more * (self.compute - before.compute),
            network=self.network + more * (self.network - before.network),
            traffic=self.traffic + more * (self.traffic - before.traffic),
            breakdown={k: v + more * (v - before.breakdown[k]) for k, v in self.breakdown.items()},
            stage_seconds={k: v + more * (v - before.stage_seconds[k]) for k, v in self.stage_seconds.items()},
        )

    def is_steady(self, before: _Clock, first: _Clock) -> bool:
        """Whether the last two increments of the three clocks are equal in every figure."""

        def figures(clock: _Clock) -> list[float]:
            return [clock.compute, clock.network, clock.traffic, *clock.breakdown.values(), *clock.stage_seconds.values()]

        return all(abs((c - b) - (b - a)) <= 1e-9 * abs(c) for a, b, c in zip(figures(first), figures(before), figures(self), strict=True))

    def add_contention(self, seconds: float) -> None:
        """Add the compute time that an overlapped collective takes."""
        self.breakdown["communication"] += seconds
        self.compute += seconds

    def run_collective(self, action: Action, start: float, seconds: float, contention_s: float) -> None:
        if action.axis in INTRA_LAYER_AXES:  # another process group: not queued behind the overlapped collectives
            self.wait_until(start)
            self.end_times[action.name] = self.compute + seconds
        else:
            self.network = self.end_times[action.name] = max(self.network, self.compute, start) + seconds
        self.add_contention(contention_s)

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
    pipeline = pipeline_spec(plan)
    layers = [plan.stages[stage].layers for stage in pipeline.stages(rank)]
    return [{name: n for n, names in zip(counts, layers, strict=True) for name in names} for counts in max_in_flight(pipeline, equivalent_ranks)]


def _slowest_clock(
    plan: Plan, profile: ModelProfile, optimizer: str, cluster: Cluster, calibration: Calibration, rank_classes: Sequence[RankClass]
) -> _Clock:
    """The slowest pipeline rank's clock, including the time it waits for others (see [Note: pipeline step time]). On shared cores, waiting ranks
    leave their core to the others (`oversubscription.py`)."""
    rates = {c.rates_label: calibration.rates_for(plan.world, c.rates_label) for c in rank_classes}
    clocks, stages = _rank_clocks(plan, profile, optimizer, cluster, rates, rank_classes)
    slowest = max(clocks.values(), key=lambda clock: clock.now)
    if stages:
        oversubscription = min(r.oversubscription for r in rates.values())
        if oversubscription > 1.0:
            core_per_rank = {label: r.without_oversubscription for label, r in rates.items()}
            _, stages = _rank_clocks(plan, profile, optimizer, cluster, core_per_rank, rank_classes)
            ends = oversubscribed_ends(pipeline_spec(plan), stages, plan.mesh.pp / oversubscription)
        else:
            ends = finish_times(pipeline_spec(plan), stages)
        after_pipeline = {rank: clock.now - plan.micro_batches * sum(clock.stage_seconds.values()) for rank, clock in clocks.items()}
        slowest.end_at(max(ends[rank] + max(seconds, 0.0) for rank, seconds in after_pipeline.items()))
    return slowest


def _rank_clocks(
    plan: Plan, profile: ModelProfile, optimizer: str, cluster: Cluster, rates: Mapping[str, Rates], rank_classes: Sequence[RankClass]
) -> tuple[dict[int, _Clock], list[StageTime]]:
    """The clock of each pipeline rank, and the seconds of a micro-batch in each stage."""
    clocks: dict[int, _Clock] = {}
    stages: dict[int, StageTime] = {}
    for rank_class in rank_classes:
        micro, class_rates = profile.at_batch(rank_class.micro_batch(plan)), rates[rank_class.rates_label]
        for first, ranks in equivalent_pipeline_ranks(plan, profile, rank_class.pipeline_ranks).items():
            clock = _step_clock(plan, micro, optimizer, cluster, class_rates, first, rank_class.shard)
            for rank in ranks:
                if rank not in clocks or clock.now > clocks[rank].now:
                    clocks[rank] = clock
                    stages |= _stage_times(plan, micro, cluster, class_rates, clock, first, rank)
    return clocks, [stages[index] for index in range(len(plan.stages))] if stages else []


def _stage_times(
    plan: Plan, profile: ModelProfile, cluster: Cluster, rates: Rates, clock: _Clock, representative: int, rank: int
) -> dict[int, StageTime]:
    """Seconds of one micro-batch in a rank's stages and of the messages to them; `clock` is of the equivalent pipeline rank `representative`."""
    if plan.mesh.pp == 1 or not plan.stages:
        return {}
    pipeline, stages = pipeline_spec(plan), {}

    def message(source: int, target: int) -> float:
        return _boundary_seconds(plan, profile, cluster, rates, source, target)

    for index, equivalent in zip(pipeline.stages(rank), pipeline.stages(representative), strict=True):
        forward, backward, weights = (clock.stage_seconds.get((phase, equivalent), 0.0) for phase in ("forward", "backward", "weights"))
        receives = message(index - 1, index), message(index + 1, index)
        overheads = _p2p_overhead(plan, rates, message(index, index + 1)), _p2p_overhead(plan, rates, message(index, index - 1))
        stages[index] = StageTime(forward, backward, weights, receives, overheads)
    return stages


def _boundary_seconds(plan: Plan, profile: ModelProfile, cluster: Cluster, rates: Rates, source: int, target: int) -> float:
    """Seconds of the messages from a stage to a neighbour for one micro-batch; neighbours on one rank send nothing."""
    if not (0 <= source < len(plan.stages) and 0 <= target < len(plan.stages)):
        return 0.0
    ranks = plan.stage_rank(source), plan.stage_rank(target)
    phase, kind = ("forward", "activations") if source < target else ("backward", "gradients")
    sends = [a for a in pipeline_sends(plan, profile, MeshCoordinate(pp=ranks[0]), phase, 0) if a.name.startswith(f"{kind}/{source}/")]
    return sum(p2p_seconds(action, plan, cluster, rates, *ranks) for action in sends)


def _p2p_overhead(plan: Plan, rates: Rates, message: float) -> float:
    """Compute time that a message of `message` seconds costs its sender: as measured, or else its exposed part; 0 on a GPU (copy engines, NICs)."""
    if rates.async_dispatch or not message:
        return 0.0
    return rates.fixed.get("p2p", (1.0 - (rates.overlap if "gradients" in plan.sync.overlap else 0.0)) * message)


def _step_clock(plan: Plan, profile: ModelProfile, optimizer: str, cluster: Cluster, rates: Rates, pp_rank: int = 0, shard: int = 0) -> _Clock:
    """One rank's step. Of a deep model's blocks a few are simulated, where each further one adds the same (see [Note: depth extrapolation])."""
    names = set(_local_layer_names(plan, profile, pp_rank))
    if plan.mesh.pp > 1:
        plan = without_layers(plan, profile, {name for stage in plan.stages for name in stage.layers} - names)
    removable = removable_blocks(plan, profile, names)
    truncated = [truncate_blocks(plan, profile, removable, depth) for depth in SAMPLED_DEPTHS] if removable else []
    extra_blocks = len(removable) - SAMPLED_DEPTHS[2]
    if truncated and buckets_repeat(plan, profile, truncated, extra_blocks, pp_rank):
        clocks = [_micro_batches_clock(*pair, optimizer, cluster, rates, pp_rank, shard) for pair in truncated]
        if clocks[2].is_steady(clocks[1], clocks[0]):
            return clocks[2].extrapolate(clocks[1], extra_blocks)
    return _micro_batches_clock(plan, profile, optimizer, cluster, rates, pp_rank, shard)


def _micro_batches_clock(plan: Plan, profile: ModelProfile, optimizer: str, cluster: Cluster, rates: Rates, pp_rank: int, shard: int = 0) -> _Clock:
    """The clock of all micro-batches. Those after the second repeat, so three are simulated and the rest is extrapolated."""

    def run(micro_batches: int = 0) -> _Clock:
        return _run_actions(plan, profile, optimizer, cluster, rates, pp_rank, shard, micro_batches)

    if plan.micro_batches <= 3 and plan.mesh.pp == 1:
        return run()
    two, three = run(2), run(3)
    clock = three.extrapolate(two, plan.micro_batches - 3) if plan.micro_batches > 3 else run()
    clock.stage_seconds = {key: seconds - two.stage_seconds[key] for key, seconds in three.stage_seconds.items()}
    return clock


def _run_actions(
    plan: Plan, profile: ModelProfile, optimizer: str, cluster: Cluster, rates: Rates, pp_rank: int, shard: int = 0, micro_batches: int = 0
) -> _Clock:
    actions = build_program(plan, profile, MeshCoordinate(pp=pp_rank, shard=shard), micro_batches=micro_batches)
    profile, clock = local_profile(plan, profile, 0, pp_rank), _Clock()
    clock.wait_until(compression_seconds(plan, profile, rates))
    action_cost, stage_timer = ActionCost(plan, optimizer, rates, shard), _StageTimer(plan, profile, pp_rank)
    calls: dict[tuple[str, str, int, int, int | None], tuple[float, float, float]] = {}  # memo: equal calls are priced once
    for action in actions:
        start = max((clock.end_times.get(w, 0.0) for w in action.depends_on), default=0.0)
        before = clock.compute
        if action.is_communication:
            key = (action.op, action.axis, action.group_size, action.bytes, action.expected_bytes)
            if key not in calls:
                seconds = collective_seconds(action, plan, cluster, rates)
                contention = seconds if action.axis in INTRA_LAYER_AXES else contention_seconds(action, plan, rates, seconds)
                calls[key] = seconds, sent_bytes(action, plan), contention
            seconds, sent, contention = calls[key]
            if action.op == "send" and action.axis == "pp":
                clock.add_contention(_p2p_overhead(plan, rates, stage_timer.message_seconds(action, cluster, rates)))
            else:
                clock.run_collective(action, start, seconds, contention)
            clock.traffic += sent
            stage_timer.record(clock, action, clock.compute - before)
            continue
        clock.wait_until(start)
        seconds = action_cost.seconds(profile, action)
        clock.breakdown[action.op] += seconds
        clock.compute += seconds
        clock.end_times[action.name] = clock.compute
        stage_timer.record(clock, action, clock.compute - before, seconds)
    clock.wait_until(clock.network)
    return clock


class _StageTimer:
    """Attributes an action's time to a phase and stage of a pipeline rank: those of the last computed layer; for messages, those in their name."""

    def __init__(self, plan: Plan, profile: ModelProfile, pp_rank: int) -> None:
        self._plan, self._pp_rank = plan, pp_rank
        stages = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers} if plan.mesh.pp > 1 else {}
        self._stages = [stages.get(layer.name, pp_rank) for layer in profile.layers]
        self._current: tuple[str, int] | None = None

    def record(self, clock: _Clock, action: Action, seconds: float, computed: float = 0.0) -> None:
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
        weight_grad = computed / 2 if action.op == "backward" and self._plan.splits_backward else 0.0  # a matmul's two gradients cost the same
        clock.stage_seconds[self._current] = clock.stage_seconds.get(self._current, 0.0) + seconds - weight_grad
        if weight_grad:
            weights = "weights", self._current[1]
            clock.stage_seconds[weights] = clock.stage_seconds.get(weights, 0.0) + weight_grad

    def message_seconds(self, action: Action, cluster: Cluster, rates: Rates) -> float:
        phase, stage = self._phase_and_stage(action)
        target = self._plan.stage_rank(stage + (1 if phase == "forward" else -1))
        return p2p_seconds(action, self._plan, cluster, rates, self._pp_rank, target)

    @staticmethod
    def _phase_and_stage(action: Action) -> tuple[str, int]:
        kind, stage, *_ = action.name.split("/")
        return "forward" if kind == "activations" else "backward", int(stage)
