"""Heterogeneous devices, deciding half: shares with which a plan's ranks finish at the same time and fit, each on its own device.

[Note: heterogeneous shares]
A plan for heterogeneous devices decides four things beside its mesh, each independently: the device of each rank (`Plan.device_order`, by kind of
device), where the model is split into stages (`plan/stage_cuts.py`), how many samples of the batch each data rank takes (`balance.shares`), and
which fraction of the ZeRO-sharded state each rank holds (`balance.states`). Samples are distributed by a device's compute speed, states by its
optimizer speed and by the memory that is left beside the activations of those samples. For every plan some combinations are proposed, the equal
one among them, and the estimate decides: the choice is never worse than the equal split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.heterogeneous import device_labels, device_orders, is_heterogeneous
from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import BalancePolicy, Plan, Stage
from meshwright.core.workload import OPTIMIZER_STATES, Workload
from meshwright.cost.compute_cost import ComputeCost
from meshwright.cost.memory_cost import saved_activation_bytes
from meshwright.cost.pipeline_cost import in_flight_by_stage
from meshwright.cost.rank_classes import RankClass, memory_capacity
from meshwright.cost.step_cost import HEADROOM, pipeline_spec, rank_class_peak
from meshwright.plan.balance import TimeModel, capped_fractions, distribute_samples, monotone_interpolation
from meshwright.plan.pipeline_planner import build_stages
from meshwright.plan.search_space import PartitionCache
from meshwright.plan.stage_cuts import best_stage_cuts
from meshwright.schedule import local_profile

_SHARE_QUARTERS = (1, 2, 3, 4, 5, 6, 7, 8, 12)  # in quarters of an equal share


@dataclass(frozen=True)
class SearchInputs:
    """The inputs of a search."""

    profile: ModelProfile
    cluster: Cluster
    workload: Workload
    calibration: Calibration
    partition_cache: PartitionCache


def with_device_orders(plan: Plan, inputs: SearchInputs, reorder_devices: bool) -> Iterator[Plan]:
    """The plan with its ranks on devices in the given order and, with `reorder_devices`, in others."""
    orders = dict.fromkeys(order[: plan.world] for order in device_orders(inputs.cluster, inputs.calibration, plan.memory.precision))
    for order in orders if reorder_devices and not plan.rank_devices else [()]:
        yield replace(plan, device_order=order if order != tuple(range(plan.world)) else ())


def describe_shares(plan: Plan, cluster: Cluster) -> str:
    """What each device has, in words; devices of one kind with equal shares are named together."""
    devices, mesh = cluster.in_device_order(plan.device_order).devices[: plan.world], plan.mesh
    layers = [sum(len(s.layers) for i, s in enumerate(plan.stages) if plan.stage_rank(i) == rank) for rank in range(mesh.pp)]
    counts = Counter[str]()
    for rank, device in enumerate(devices):
        shares = [f"{plan.sample_range(mesh.data_rank(rank))[1]} of {plan.global_batch} samples"] * (mesh.data_parallel_size > 1)
        shares += [f"{layers[mesh.coordinate(rank, 'pp')]} of {sum(layers)} layers"] * (mesh.pp > 1)
        shares += [f"{plan.state_fraction(mesh.coordinate(rank, 'shard')):.0%} of the state"] * (plan.memory.zero > 0 and mesh.shard > 1)
        counts[f"{device.name} {', '.join(shares) or 'everything'}"] += 1
    unused = len(cluster.devices) - plan.world
    return "; ".join([f"{n} × {text}" if n > 1 else text for text, n in counts.items()] + [f"{unused} unused"] * (unused > 0))


def with_axis_orders(plan: Plan) -> Iterator[Plan]:
    """The plan in the default order, with stages farthest apart, and with the stages of each replica on neighbouring devices."""
    yield plan
    if plan.mesh.pp > 1 and plan.mesh.data_parallel_size > 1 and not plan.mesh.order:
        data = tuple(axis for axis in ("dp", "shard") if plan.mesh.degree(axis) > 1)
        yield replace(plan, mesh=replace(plan.mesh, order=(*data, "pp")))


def balanced_variants(plan: Plan, inputs: SearchInputs) -> Iterator[Plan]:
    """The plan with shares that suit its devices: some combinations of stages, samples and states, for the estimate to choose from. None where its
    devices are homogeneous."""
    cluster = inputs.cluster.in_device_order(plan.device_order)
    if not is_heterogeneous(cluster, inputs.calibration, plan.world):
        return
    options = [plan.stages, *_stage_options(plan, inputs, cluster)]
    for stages in (s for i, s in enumerate(options) if s not in options[:i]):
        staged = replace(plan, stages=stages)
        balance = _BalanceOptions(staged, inputs, cluster)
        for shares, by_memory in balance.share_options():
            for states in balance.state_options(shares, by_memory):
                if (stages, shares, states) != (plan.stages, plan.balance.shares, ()):
                    try:
                        yield replace(staged, balance=BalancePolicy(shares, states))
                    except RequestError:
                        continue


@dataclass(frozen=True)
class _RankCapacity:
    """Speed and memory of one rank: seconds by number of samples, and memory as fixed bytes, bytes for each sample and bytes of all ZeRO-sharded
    state."""

    time_model: TimeModel
    optimizer_rate: float  # optimizer elements per second
    memory_limit: float
    fixed_bytes: float
    bytes_per_sample: float
    state_bytes: float

    def max_samples(self, state_fraction: float) -> int:
        """The most samples that fit beside a fraction of the state."""
        free_bytes = self.memory_limit - self.fixed_bytes - state_fraction * self.state_bytes
        return max(int(free_bytes / self.bytes_per_sample), 0) if self.bytes_per_sample else 1 << 60

    def max_state_fraction(self, samples: int) -> float:
        """The largest fraction of the state that fits beside `samples`."""
        free_bytes = self.memory_limit - self.fixed_bytes - samples * self.bytes_per_sample
        return min(max(free_bytes / self.state_bytes, 0.0), 1.0) if self.state_bytes else 1.0


class _BalanceOptions:
    """Options for samples and states of one plan whose stages are fixed."""

    def __init__(self, plan: Plan, inputs: SearchInputs, cluster: Cluster) -> None:
        self.plan, self.inputs, self.cluster = plan, inputs, cluster
        self.labels = device_labels(cluster, inputs.calibration, plan.world)
        self.shards_state = plan.memory.zero > 0 and plan.mesh.shard > 1

    def share_options(self) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Yield (samples of each data rank, whether states go by memory): equal shares, shares by speed with equally sharded state, and shares by
        speed with state placed where memory is free. Ranks with collectives inside layers or sends between stages have micro-batches of one size,
        so their share is a multiple of the number of micro-batches."""
        plan = self.plan
        yield plan.balance.shares, True
        degree, unit = plan.mesh.data_parallel_size, plan.micro_batches if plan.mesh.data_parallel_size < plan.world else 1
        if degree == 1 or plan.mesh.ep > 1 or plan.global_batch % unit or plan.global_batch < degree * plan.micro_batches:
            return
        groups = [[self.rank_capacities[r] for r in ranks] for ranks in _group_ranks(plan.world, degree, plan.mesh.data_rank)]
        time_models = [_slowest_time_model({id(rank): rank.time_model for rank in ranks}.values(), unit) for ranks in groups]
        for state_fraction in (1.0 / plan.mesh.shard, 0.0) if self.shards_state else (0.0,):
            max_samples = [min(rank.max_samples(state_fraction) for rank in ranks) // unit for ranks in groups]
            shares = distribute_samples(plan.global_batch // unit, time_models, plan.micro_batches // unit, max_samples)
            if shares is not None and len(set(shares)) > 1:
                yield tuple(share * unit for share in shares), state_fraction == 0.0

    def state_options(self, shares: tuple[int, ...], by_memory: bool) -> Iterator[tuple[float, ...]]:
        """Yield fractions for each rank along the shard axis: equal, by optimizer speed as far as memory allows, and by memory."""
        yield ()
        plan = self.plan
        if not self.shards_state or not by_memory:
            return
        samples = shares or (plan.max_share,) * plan.mesh.data_parallel_size
        groups = _group_ranks(plan.world, plan.mesh.shard, lambda rank: plan.mesh.coordinate(rank, "shard"))
        limits = [min(self.rank_capacities[r].max_state_fraction(samples[plan.mesh.data_rank(r)]) for r in ranks) for ranks in groups]
        speeds = [min(self.rank_capacities[r].optimizer_rate for r in ranks) for ranks in groups]
        for weights in (speeds, limits):
            fractions = capped_fractions(weights, limits)
            if fractions is not None and max(fractions) - min(fractions) > 0.01:
                yield fractions

    @cached_property
    def rank_capacities(self) -> list[_RankCapacity]:
        """By rank; computed once for ranks on the same kind of device with the same stages."""
        by_key: dict[tuple[str, int, int], _RankCapacity] = {}
        capacities = []
        for rank in range(self.plan.world):
            key = (self.labels[rank] if self.labels else "", self.cluster.devices[rank].memory_bytes, self.plan.mesh.coordinate(rank, "pp"))
            if key not in by_key:
                by_key[key] = self._rank_capacity(rank, key[0], key[2])
            capacities.append(by_key[key])
        return capacities

    def _rank_capacity(self, rank: int, label: str, stage: int) -> _RankCapacity:
        plan, inputs = self.plan, self.inputs
        few, many = plan.micro_batches, 2 * max(plan.max_share, plan.micro_batches)  # samples

        def peak_bytes(samples: int, with_state: int) -> int:
            """Peak bytes with all of the ZeRO-sharded state, or with none."""
            states = (1.0,) + (0.0,) * (plan.mesh.shard - 1)
            variant = replace(plan, balance=BalancePolicy(plan.balance.shares, states)) if self.shards_state else plan
            rank_class = RankClass(label, (rank,), samples, (stage,), 0 if with_state else plan.mesh.shard - 1)
            return sum(rank_class_peak(variant, inputs.profile, inputs.workload, inputs.calibration, rank_class).values())

        stateless = peak_bytes(few, 0)
        per_sample = max(peak_bytes(many, 0) - stateless, 0) / (many - few)
        state = peak_bytes(few, 1) - stateless if self.shards_state else 0
        limit = HEADROOM * memory_capacity(self.cluster, plan, RankClass(label, (rank,), few, (stage,)))
        rates = inputs.calibration.rates_for(plan.world, label)
        fixed = stateless - few * per_sample
        return _RankCapacity(self._time_model(rates, stage), self._optimizer_rate(rates), limit, fixed, per_sample, float(state))

    def _time_model(self, rates: Rates, stage: int) -> TimeModel:
        """Seconds of forward and backward by a rank's samples, from several micro-batch sizes around that of an equal share."""
        plan, profile = self.plan, self.inputs.profile
        equal = max(plan.global_batch // plan.mesh.data_parallel_size // plan.micro_batches, 1)
        sizes = sorted({max(equal * quarters // 4, 1) for quarters in _SHARE_QUARTERS} | {1, 2})
        times = ((n, sum(_layer_seconds(plan, local_profile(plan, profile.at_batch(n), 0, stage), rates))) for n in sizes)
        return monotone_interpolation([(n * plan.micro_batches, plan.micro_batches * seconds) for n, seconds in times])

    def _optimizer_rate(self, rates: Rates) -> float:
        elements, memory = 1e7, self.plan.memory
        compute_cost = ComputeCost(rates, memory.precision)
        seconds = compute_cost.optimizer_seconds(elements, self.inputs.workload.optimizer, 4, memory.offload == "optimizer", 1)
        return elements / (rates.oversubscription * seconds)


def _group_ranks(world: int, num_groups: int, group_of: Callable[[int], int]) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    for rank in range(world):
        groups[group_of(rank)].append(rank)
    return groups


def _layer_seconds(plan: Plan, local: ModelProfile, rates: Rates) -> list[float]:
    """Seconds of each layer of a rank, forward and backward, with recomputation."""
    cost = ComputeCost(rates, plan.memory.precision, plan.compile != "none", frozenset(plan.memory.units))
    memo: dict[tuple[int, str, bool], float] = {}
    seconds = []
    for layer in local.layers:
        mode = plan.memory.recompute_mode(layer.name)
        recompute = cost.layer_seconds(layer, "forward", memo, mode == "selective") if mode != "none" else 0.0
        seconds.append(
            rates.oversubscription * (cost.layer_seconds(layer, "forward", memo) + cost.layer_seconds(layer, "backward", memo) + recompute)
        )
    return seconds


def _slowest_time_model(time_models: Collection[TimeModel], samples_per_unit: int) -> TimeModel:
    """The time model of ranks that take the same samples, in units of `samples_per_unit`."""
    return lambda units: max(seconds(units * samples_per_unit) for seconds in time_models)


def _stage_options(plan: Plan, inputs: SearchInputs, cluster: Cluster) -> Iterator[tuple[Stage, ...]]:
    """Stages split by the speed of each stage's slowest device: within its memory, and regardless of it."""
    pp, count = plan.mesh.pp, len(plan.stages)
    if pp == 1 or count < 2 or plan.placements:
        return
    sequence = plan.tensor.is_sequence_parallel
    boundaries = inputs.partition_cache.stage_boundaries(count, plan.mesh.tp, plan.mesh.cp, sequence)
    local = local_profile(inputs.partition_cache.sharding(plan.mesh, sequence), inputs.profile.at_batch(plan.max_micro_batch_size), 0)
    costs = _LayerCosts(plan, local, boundaries.layer_order, inputs)
    labels = device_labels(cluster, inputs.calibration, plan.world)
    ranks_by_pp = _group_ranks(plan.world, pp, lambda rank: plan.mesh.coordinate(rank, "pp"))
    seconds, sizes, memory_limits = [], [], []
    for stage in range(count):
        ranks = ranks_by_pp[plan.stage_rank(stage)]
        seconds.append(max((costs.layer_seconds(label) for label in {labels[r] if labels else "" for r in ranks}), key=sum))
        sizes.append(costs.layer_bytes(stage))
        capacity = min(memory_capacity(cluster, plan, RankClass("", (r,), 1, (0,))) for r in ranks)
        memory_limits.append((HEADROOM * capacity - costs.base_bytes) / (count // pp))
    for limits in (memory_limits, [float("inf")] * count):
        cuts = best_stage_cuts(seconds, sizes, limits, boundaries.cut_positions)
        if cuts is not None:
            yield build_stages(boundaries, cuts)


class _LayerCosts:
    """Seconds and bytes of each layer in a stage, in the order in which they are assigned to stages."""

    def __init__(self, plan: Plan, local: ModelProfile, layer_order: Sequence[str], inputs: SearchInputs) -> None:
        self.plan, self.local, self.layer_order, self.inputs = plan, local, layer_order, inputs
        self.base_bytes = max(rates.base_bytes for rates in inputs.calibration.layouts)

    def layer_seconds(self, label: str) -> list[float]:
        rates = self.inputs.calibration.rates_for(self.plan.world, label)
        return self._in_layer_order(_layer_seconds(self.plan, self.local, rates))

    def layer_bytes(self, stage: int) -> list[float]:
        plan, spec = self.plan, pipeline_spec(self.plan)
        rank = plan.stage_rank(stage)
        chunk = spec.stages(rank).index(stage)
        in_flight = max(counts[chunk] for counts in in_flight_by_stage(spec, rank))
        states, shards = OPTIMIZER_STATES[self.inputs.workload.optimizer] if plan.memory.offload == "none" else 0, plan.mesh.shard
        copies = {0: 2 + states, 1: 2 + states / shards, 2: 1 + (1 + states) / shards, 3: (2 + states) / shards}[plan.memory.zero]

        def layer_size(layer: LayerProfile) -> float:
            saved, _ = saved_activation_bytes(plan, layer, plan.memory.recompute_mode(layer.name))
            return copies * sum(t.bytes for t in layer.tensors) + in_flight * saved

        return self._in_layer_order([layer_size(layer) for layer in self.local.layers])

    def _in_layer_order(self, costs: Sequence[float]) -> list[float]:
        by_name = dict(zip((layer.name for layer in self.local.layers), costs, strict=True))
        return [by_name.get(name, 0.0) for name in self.layer_order]
