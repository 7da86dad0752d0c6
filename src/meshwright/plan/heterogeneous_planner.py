"""Heterogeneous devices, deciding half: shares with which a plan's ranks finish at the same time and fit, each on its own device.

[Note: heterogeneous shares]
A plan for heterogeneous devices decides four things beside its mesh, each independently: the device of each rank (`Plan.device_order`, by kind of
device), where the model is cut into stages (`plan/stage_cuts.py`), how many samples of the batch each data rank takes (`balance.shares`), and
which fraction of the ZeRO-sharded state each rank holds (`balance.states`). Samples are distributed by a device's compute speed, states by its
optimizer speed and by the memory that is left beside the activations of those samples. For every plan some combinations are proposed, the equal
one among them, and the estimate decides: the choice is never worse than the equal split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.heterogeneous import device_labels, device_orders, is_heterogeneous
from meshwright.core.model import ModelProfile
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
    device_order = dict.fromkeys(order[: plan.world] for order in device_orders(inputs.cluster, inputs.calibration, plan.memory.precision))
    for order in device_order if reorder_devices and not plan.rank_devices else [()]:
        yield replace(plan, device_order=order if order != tuple(range(plan.world)) else ())


def describe_shares(plan: Plan, cluster: Cluster) -> str:
    """What each device has, in words; devices of one kind with equal shares are named together."""
    devices = cluster.in_device_order(plan.device_order).devices[: plan.world]
    layers = [sum(len(s.layers) for i, s in enumerate(plan.stages) if plan.stage_rank(i) == at) for at in range(plan.mesh.pp)]
    counts: dict[str, int] = {}
    for rank, device in enumerate(devices):
        has = [f"{plan.sample_range(plan.mesh.data_rank(rank))[1]} of {plan.global_batch} samples"] * (plan.mesh.data_parallel_size > 1)
        has += [f"{layers[plan.mesh.coordinate(rank, 'pp')]} of {sum(layers)} layers"] * (plan.mesh.pp > 1)
        has += [f"{plan.state_fraction(plan.mesh.coordinate(rank, 'shard')):.0%} of the state"] * (plan.memory.zero > 0 and plan.mesh.shard > 1)
        text = f"{device.name} {', '.join(has) or 'everything'}"
        counts[text] = counts.get(text, 0) + 1
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
    cuts = list(_stage_options(plan, inputs, cluster))
    for cut in [plan.stages, *(c for i, c in enumerate(cuts) if c != plan.stages and c not in cuts[:i])]:
        staged = replace(plan, stages=cut)
        parts = _BalanceOptions(staged, inputs, cluster)
        for shares, roomy in parts.share_options():
            for states in parts.state_options(shares, roomy):
                if (cut, shares, states) != (plan.stages, plan.balance.shares, ()):
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
        return (
            max(int((self.memory_limit - self.fixed_bytes - state_fraction * self.state_bytes) / self.bytes_per_sample), 0)
            if self.bytes_per_sample
            else 1 << 60
        )

    def max_state_fraction(self, samples: int) -> float:
        """The largest fraction of the state that fits beside `samples`."""
        return (
            min(max((self.memory_limit - self.fixed_bytes - samples * self.bytes_per_sample) / self.state_bytes, 0.0), 1.0)
            if self.state_bytes
            else 1.0
        )


class _BalanceOptions:
    """Options for samples and states of one plan whose stages are fixed."""

    def __init__(self, plan: Plan, inputs: SearchInputs, cluster: Cluster) -> None:
        self.plan, self.inputs, self.cluster = plan, inputs, cluster
        self.labels = device_labels(cluster, inputs.calibration, plan.world)
        self.shards_state = plan.memory.zero > 0 and plan.mesh.shard > 1

    def share_options(self) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Yield (samples of each data rank, whether states go by memory): equal shares, shares by speed with equally sharded state, and shares by
        speed with state placed where memory is left. Ranks with collectives inside layers or sends between stages have micro-batches of one size,
        so their share is a multiple of the number of micro-batches."""
        plan = self.plan
        yield plan.balance.shares, True
        width, unit = plan.mesh.data_parallel_size, plan.micro_batches if plan.mesh.data_parallel_size < plan.world else 1
        if width == 1 or plan.mesh.ep > 1 or plan.global_batch % unit or plan.global_batch < width * plan.micro_batches:
            return
        paces = [
            _slowest_time_model({id(self.rank_capacities[r]): self.rank_capacities[r].time_model for r in ranks}.values(), unit)
            for ranks in self._ranks_by_data_rank
        ]
        parts = dict.fromkeys((1.0 / plan.mesh.shard, 0.0) if self.shards_state else (0.0,))
        for part in parts:
            most = [min(self.rank_capacities[r].max_samples(part) for r in ranks) // unit for ranks in self._ranks_by_data_rank]
            shares = distribute_samples(plan.global_batch // unit, paces, plan.micro_batches // unit, most)
            if shares is not None and len(set(shares)) > 1:
                yield tuple(share * unit for share in shares), part == 0.0

    def state_options(self, shares: tuple[int, ...], by_memory: bool) -> Iterator[tuple[float, ...]]:
        """Yield fractions for each rank along the shard axis: equal, by optimizer speed as far as memory allows, and by memory."""
        yield ()
        plan = self.plan
        if not self.shards_state or not by_memory:
            return
        samples = shares or (plan.max_share,) * plan.mesh.data_parallel_size
        groups: list[list[int]] = [[] for _ in range(plan.mesh.shard)]
        for rank in range(plan.world):
            groups[plan.mesh.coordinate(rank, "shard")].append(rank)
        most = [min(self.rank_capacities[r].max_state_fraction(samples[plan.mesh.data_rank(r)]) for r in ranks) for ranks in groups]
        speeds = [min(self.rank_capacities[r].optimizer_rate for r in ranks) for ranks in groups]
        for weights in (speeds, most):
            parts = capped_fractions(weights, most)
            if parts is not None and max(parts) - min(parts) > 0.01:
                yield parts

    @cached_property
    def _ranks_by_data_rank(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.plan.mesh.data_parallel_size)]
        for rank in range(self.plan.world):
            found[self.plan.mesh.data_rank(rank)].append(rank)
        return found

    @cached_property
    def rank_capacities(self) -> list[_RankCapacity]:
        """By rank; computed once for ranks on the same kind of device with the same stages."""
        known: dict[tuple[str, int, int], _RankCapacity] = {}
        found = []
        for rank in range(self.plan.world):
            label = self.labels[rank] if self.labels else ""
            key = (label, self.cluster.devices[rank].memory_bytes, self.plan.mesh.coordinate(rank, "pp"))
            if key not in known:
                known[key] = self._rank_capacity(rank, label, key[2])
            found.append(known[key])
        return found

    def _rank_capacity(self, rank: int, label: str, stage: int) -> _RankCapacity:
        plan, inputs = self.plan, self.inputs
        one, many = plan.micro_batches, 2 * max(plan.max_share, plan.micro_batches)

        def peak_bytes(samples: int, with_state: int) -> int:
            """Peak bytes with all of the ZeRO-sharded state, or with none."""
            whole = tuple(float(at == 0) for at in range(plan.mesh.shard))
            told = replace(plan, balance=BalancePolicy(plan.balance.shares, whole)) if self.shards_state else plan
            of = RankClass(label, (rank,), samples, (stage,), 0 if with_state else plan.mesh.shard - 1)
            return sum(rank_class_peak(told, inputs.profile, inputs.workload, inputs.calibration, of).values())

        few = peak_bytes(one, 0)
        each = max(peak_bytes(many, 0) - few, 0) / (many - one)
        state = peak_bytes(one, 1) - few if self.shards_state else 0
        limit = HEADROOM * memory_capacity(self.cluster, plan, RankClass(label, (rank,), one, (stage,)))
        rates = inputs.calibration.rates_for(plan.world, label)
        return _RankCapacity(self._time_model(rates, stage), self._optimizer_rate(rates), limit, few - one * each, each, float(state))

    def _time_model(self, rates: Rates, stage: int) -> TimeModel:
        """Seconds of forward and backward by a rank's samples, from several micro-batch sizes around that of an equal share."""
        plan, profile = self.plan, self.inputs.profile
        equal = max(plan.global_batch // plan.mesh.data_parallel_size // plan.micro_batches, 1)
        sizes = sorted({max(equal * part // 4, 1) for part in _SHARE_QUARTERS} | {1, 2})
        each = ((n, sum(_layer_seconds(plan, local_profile(plan, profile.at_batch(n), 0, stage), rates))) for n in sizes)
        return monotone_interpolation([(n * plan.micro_batches, plan.micro_batches * seconds) for n, seconds in each])

    def _optimizer_rate(self, rates: Rates) -> float:
        price = ComputeCost(rates, self.plan.memory.precision)
        elements = 1e7
        return elements / (
            rates.oversubscription * price.optimizer_seconds(elements, self.inputs.workload.optimizer, 4, self.plan.memory.offload == "optimizer", 1)
        )


def _layer_seconds(plan: Plan, local: ModelProfile, rates: Rates) -> list[float]:
    """Seconds of each layer of a rank, forward and backward, with recomputation."""
    price = ComputeCost(rates, plan.memory.precision, plan.compile != "none", frozenset(plan.memory.units))
    memo: dict[tuple[int, str, bool], float] = {}
    found = []
    for layer in local.layers:
        mode = plan.memory.recompute_mode(layer.name)
        again = price.layer_seconds(layer, "forward", memo, mode == "selective") if mode != "none" else 0.0
        found.append(rates.oversubscription * (price.layer_seconds(layer, "forward", memo) + price.layer_seconds(layer, "backward", memo) + again))
    return found


def _slowest_time_model(time_models: Collection[TimeModel], samples_per_unit: int) -> TimeModel:
    """The time model of ranks that take the same samples, in units of `samples_per_unit`."""
    return lambda samples: max(pace(samples * samples_per_unit) for pace in time_models)


def _stage_options(plan: Plan, inputs: SearchInputs, cluster: Cluster) -> Iterator[tuple[Stage, ...]]:
    """The model cut by the speed of each stage's slowest device: within its memory, and regardless of it."""
    pp, count = plan.mesh.pp, len(plan.stages)
    if pp == 1 or count < 2 or plan.placements:
        return
    sequence = plan.tensor.is_sequence_parallel
    boundaries = inputs.partition_cache.stage_boundaries(count, plan.mesh.tp, plan.mesh.cp, sequence)
    local = local_profile(inputs.partition_cache.sharding(plan.mesh, sequence), inputs.profile.at_batch(plan.max_micro_batch_size), 0)
    rows = _LayerCosts(plan, local, boundaries.layer_order, inputs)
    names = device_labels(cluster, inputs.calibration, plan.world)
    ranks: list[list[int]] = [[] for _ in range(pp)]
    for rank in range(plan.world):
        ranks[plan.mesh.coordinate(rank, "pp")].append(rank)
    seconds, sizes, rooms = [], [], []
    for stage in range(count):
        mine = ranks[plan.stage_rank(stage)]
        seconds.append(max((rows.layer_seconds(label) for label in {names[r] if names else "" for r in mine}), key=sum))
        sizes.append(rows.layer_bytes(stage))
        small = min(memory_capacity(cluster, plan, RankClass("", (r,), 1, (0,))) for r in mine)
        rooms.append((HEADROOM * small - rows.base_bytes) / (count // pp))
    for limits in (rooms, [float("inf")] * count):
        cuts = best_stage_cuts(seconds, sizes, limits, boundaries.cut_positions)
        if cuts is not None:
            yield build_stages(boundaries, cuts)


class _LayerCosts:
    """Seconds and bytes of each layer in a stage, in the order in which layers are cut."""

    def __init__(self, plan: Plan, local: ModelProfile, layer_order: Sequence[str], inputs: SearchInputs) -> None:
        self.plan, self.local, self.layer_order, self.inputs = plan, local, layer_order, inputs
        self.base_bytes = max(rates.base_bytes for rates in inputs.calibration.layouts)

    def layer_seconds(self, label: str) -> list[float]:
        rates = self.inputs.calibration.rates_for(self.plan.world, label)
        return self._in_layer_order(_layer_seconds(self.plan, self.local, rates))

    def layer_bytes(self, stage: int) -> list[float]:
        plan, order = self.plan, pipeline_spec(self.plan)
        rank = plan.stage_rank(stage)
        at = order.stages(rank).index(stage)
        under_way = max(counts[at] for counts in in_flight_by_stage(order, rank))
        states, shards = OPTIMIZER_STATES[self.inputs.workload.optimizer] if plan.memory.offload == "none" else 0, plan.mesh.shard
        times = {0: 2 + states, 1: 2 + states / shards, 2: 1 + (1 + states) / shards, 3: (2 + states) / shards}[plan.memory.zero]
        kept = (under_way * saved_activation_bytes(plan, layer, plan.memory.recompute_mode(layer.name))[0] for layer in self.local.layers)
        return self._in_layer_order(
            [times * sum(t.bytes for t in layer.tensors) + bytes_ for layer, bytes_ in zip(self.local.layers, kept, strict=True)]
        )

    def _in_layer_order(self, row: Sequence[float]) -> list[float]:
        by_name = dict(zip((layer.name for layer in self.local.layers), row, strict=True))
        return [by_name.get(name, 0.0) for name in self.layer_order]
