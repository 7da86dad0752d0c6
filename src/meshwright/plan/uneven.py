"""Unequal devices, deciding half: the parts that make a plan's ranks end at one moment and fit, each on its own device.

[Note: parts for unlike devices]
A plan for unlike devices decides four things beside its mesh, each apart from the others: on which device each rank is (`Plan.seats`, by kinds of
devices), where the model is cut into stages (`plan/cuts.py`), how many samples of the batch each data rank takes (`balance.shares`), and what part of
the state that ZeRO cuts each rank holds (`balance.states`). Samples go by how fast a device computes, states by how fast it steps them and by what
memory is left beside the activations of those samples. For every plan some combinations are offered, the equal one among them, and the estimate
decides: what is chosen is never worse than the equal split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.core.calibration import Calibration, Rates
from meshwright.core.cluster import Cluster
from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile
from meshwright.core.plan import BalancePolicy, Plan, Stage
from meshwright.core.unlike import are_unlike, labels, seatings
from meshwright.core.workload import OPTIMIZER_STATES, Workload
from meshwright.cost.classes import Class, capacity
from meshwright.cost.compute import ComputeCost
from meshwright.cost.memory import kept_bytes
from meshwright.cost.pipeline import held
from meshwright.cost.step import HEADROOM, order_of, peak_of
from meshwright.plan.balance import Pace, deal, fill, rising
from meshwright.plan.cuts import best_cuts
from meshwright.plan.pipeline import stages_at
from meshwright.plan.space import Cutter
from meshwright.schedule import local_profile

_AROUND = (1, 2, 3, 4, 5, 6, 7, 8, 12)  # quarters of an equal share


@dataclass(frozen=True)
class Inputs:
    """What a search is about."""

    profile: ModelProfile
    cluster: Cluster
    workload: Workload
    calibration: Calibration
    cutter: Cutter


def reseated(plan: Plan, found: Inputs, reorder: bool) -> Iterator[Plan]:
    """The same plan with its ranks on the devices in this order and, if that may be, in others."""
    seats = dict.fromkeys(order[: plan.world] for order in seatings(found.cluster, found.calibration, plan.memory.precision))
    for order in seats if reorder and not plan.places else [()]:
        yield replace(plan, seats=order if order != tuple(range(plan.world)) else ())


def in_parts(plan: Plan, cluster: Cluster) -> str:
    """Which device has what, in words; devices of one kind that have as much are named together."""
    devices = cluster.seated(plan.seats).devices[: plan.world]
    layers = [sum(len(s.layers) for i, s in enumerate(plan.stages) if plan.stage_rank(i) == at) for at in range(plan.mesh.pp)]
    counts: dict[str, int] = {}
    for rank, device in enumerate(devices):
        has = [f"{plan.share(plan.mesh.data_rank(rank))[1]} of {plan.global_batch} samples"] * (plan.mesh.data_width > 1)
        has += [f"{layers[plan.mesh.coordinate(rank, 'pp')]} of {sum(layers)} layers"] * (plan.mesh.pp > 1)
        has += [f"{plan.state_part(plan.mesh.coordinate(rank, 'shard')):.0%} of the state"] * (plan.memory.zero > 0 and plan.mesh.shard > 1)
        text = f"{device.name} {', '.join(has) or 'everything'}"
        counts[text] = counts.get(text, 0) + 1
    unused = len(cluster.devices) - plan.world
    return "; ".join([f"{n} × {text}" if n > 1 else text for text, n in counts.items()] + [f"{unused} unused"] * (unused > 0))


def turned(plan: Plan) -> Iterator[Plan]:
    """With stages far apart, as by default, and with the stages of each replica on neighbouring devices."""
    yield plan
    if plan.mesh.pp > 1 and plan.mesh.data_width > 1 and not plan.mesh.order:
        data = tuple(axis for axis in ("dp", "shard") if plan.mesh.degree(axis) > 1)
        yield replace(plan, mesh=replace(plan.mesh, order=(*data, "pp")))


def dealt_out(plan: Plan, found: Inputs) -> Iterator[Plan]:
    """The plan with parts that suit its devices: some combinations of stages, samples and states, for the estimate to choose from. Nothing where
    its devices are alike."""
    cluster = found.cluster.seated(plan.seats)
    if not are_unlike(cluster, found.calibration, plan.world):
        return
    cuts = list(_stages(plan, found, cluster))
    for cut in [plan.stages, *(c for i, c in enumerate(cuts) if c != plan.stages and c not in cuts[:i])]:
        staged = replace(plan, stages=cut)
        parts = _Parts(staged, found, cluster)
        for shares, roomy in parts.shares():
            for states in parts.states(shares, roomy):
                if (cut, shares, states) != (plan.stages, plan.balance.shares, ()):
                    try:
                        yield replace(staged, balance=BalancePolicy(shares, states))
                    except RequestError:
                        continue


@dataclass(frozen=True)
class _Seat:
    """What one rank can do: seconds of its samples, and bytes as a sum of what is fixed, of each sample and of all of the state that ZeRO cuts."""

    pace: Pace
    steps: float  # elements of the optimizer a second
    limit: float
    fixed: float
    sample: float
    state: float

    def samples(self, part: float) -> int:
        """The most that fit beside a part of the state."""
        return max(int((self.limit - self.fixed - part * self.state) / self.sample), 0) if self.sample else 1 << 60

    def part(self, samples: int) -> float:
        """The most of the state that fits beside samples."""
        return min(max((self.limit - self.fixed - samples * self.sample) / self.state, 0.0), 1.0) if self.state else 1.0


class _Parts:
    """Samples and states of one plan whose stages are settled."""

    def __init__(self, plan: Plan, found: Inputs, cluster: Cluster) -> None:
        self.plan, self.found, self.cluster = plan, found, cluster
        self.labels = labels(cluster, found.calibration, plan.world)
        self.cuts = plan.memory.zero > 0 and plan.mesh.shard > 1

    def shares(self) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Samples for each data rank: equal, by speed where the state is cut equally, and by speed where it goes to who has room for it (`roomy`).
        Ranks that meet inside layers or between stages have micro-batches of one size, and take whole numbers of each."""
        plan = self.plan
        yield plan.balance.shares, True
        width, unit = plan.mesh.data_width, plan.micro_batches if plan.mesh.data_width < plan.world else 1
        if width == 1 or plan.mesh.ep > 1 or plan.global_batch % unit or plan.global_batch < width * plan.micro_batches:
            return
        paces = [_slowest({id(self.seats[r]): self.seats[r].pace for r in ranks}.values(), unit) for ranks in self._data_ranks]
        parts = dict.fromkeys((1.0 / plan.mesh.shard, 0.0) if self.cuts else (0.0,))
        for part in parts:
            most = [min(self.seats[r].samples(part) for r in ranks) // unit for ranks in self._data_ranks]
            shares = deal(plan.global_batch // unit, paces, plan.micro_batches // unit, most)
            if shares is not None and len(set(shares)) > 1:
                yield tuple(share * unit for share in shares), part == 0.0

    def states(self, shares: tuple[int, ...], roomy: bool) -> Iterator[tuple[float, ...]]:
        """Parts for each rank along the shard axis: equal, by how fast they are stepped as far as memory allows, and by memory."""
        yield ()
        plan = self.plan
        if not self.cuts or not roomy:
            return
        samples = shares or (plan.largest_share,) * plan.mesh.data_width
        groups: list[list[int]] = [[] for _ in range(plan.mesh.shard)]
        for rank in range(plan.world):
            groups[plan.mesh.coordinate(rank, "shard")].append(rank)
        most = [min(self.seats[r].part(samples[plan.mesh.data_rank(r)]) for r in ranks) for ranks in groups]
        speeds = [min(self.seats[r].steps for r in ranks) for ranks in groups]
        for weights in (speeds, most):
            parts = fill(weights, most)
            if parts is not None and max(parts) - min(parts) > 0.01:
                yield parts

    @cached_property
    def _data_ranks(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.plan.mesh.data_width)]
        for rank in range(self.plan.world):
            found[self.plan.mesh.data_rank(rank)].append(rank)
        return found

    @cached_property
    def seats(self) -> list[_Seat]:
        """By rank; ranks on one kind of device that have the same stages are worked out once."""
        known: dict[tuple[str, int, int], _Seat] = {}
        found = []
        for rank in range(self.plan.world):
            label = self.labels[rank] if self.labels else ""
            key = (label, self.cluster.devices[rank].memory_bytes, self.plan.mesh.coordinate(rank, "pp"))
            if key not in known:
                known[key] = self._seat(rank, label, key[2])
            found.append(known[key])
        return found

    def _seat(self, rank: int, label: str, stage: int) -> _Seat:
        plan, inputs = self.plan, self.found
        one, many = plan.micro_batches, 2 * max(plan.largest_share, plan.micro_batches)

        def need(samples: int, part: int) -> int:
            """With all of the state, or with none."""
            whole = tuple(float(at == 0) for at in range(plan.mesh.shard))
            told = replace(plan, balance=BalancePolicy(plan.balance.shares, whole)) if self.cuts else plan
            of = Class(label, (rank,), samples, (stage,), 0 if part else plan.mesh.shard - 1)
            return sum(peak_of(told, inputs.profile, inputs.workload, inputs.calibration, of).values())

        few = need(one, 0)
        each = max(need(many, 0) - few, 0) / (many - one)
        state = need(one, 1) - few if self.cuts else 0
        limit = HEADROOM * capacity(self.cluster, plan, Class(label, (rank,), one, (stage,)))
        rates = inputs.calibration.layout(plan.world, label)
        return _Seat(self._pace(rates, stage), self._stepped(rates), limit, few - one * each, each, float(state))

    def _pace(self, rates: Rates, stage: int) -> Pace:
        """Seconds of forward and backward by a rank's samples, from some sizes of micro-batches around that of an equal share."""
        plan, profile = self.plan, self.found.profile
        equal = max(plan.global_batch // plan.mesh.data_width // plan.micro_batches, 1)
        sizes = sorted({max(equal * part // 4, 1) for part in _AROUND} | {1, 2})
        each = ((n, sum(_seconds(plan, local_profile(plan, profile.at(n), 0, stage), rates))) for n in sizes)
        return rising([(n * plan.micro_batches, plan.micro_batches * seconds) for n, seconds in each])

    def _stepped(self, rates: Rates) -> float:
        price = ComputeCost(rates, self.plan.memory.precision)
        elements = 1e7
        return elements / (rates.crowding * price.optimizer(elements, self.found.workload.optimizer, 4, self.plan.memory.offload == "optimizer", 1))


def _seconds(plan: Plan, local: ModelProfile, rates: Rates) -> list[float]:
    """What each layer of a rank takes, forward and backward, computing again included."""
    price = ComputeCost(rates, plan.memory.precision, plan.compile != "none", frozenset(plan.memory.units))
    memo: dict[tuple[int, str, bool], float] = {}
    found = []
    for layer in local.layers:
        mode = plan.memory.mode(layer.name)
        again = price.layer(layer, "forward", memo, mode == "selective") if mode != "none" else 0.0
        found.append(rates.crowding * (price.layer(layer, "forward", memo) + price.layer(layer, "backward", memo) + again))
    return found


def _slowest(paces: Collection[Pace], unit: int) -> Pace:
    """Of ranks that take the same samples, by so many at a time."""
    return lambda samples: max(pace(samples * unit) for pace in paces)


def _stages(plan: Plan, found: Inputs, cluster: Cluster) -> Iterator[tuple[Stage, ...]]:
    """The model cut by the pace of each stage's slowest device: as far as its memory allows, and without regard to it."""
    pp, count = plan.mesh.pp, len(plan.stages)
    if pp == 1 or count < 2 or plan.placements:
        return
    sequence = plan.tensor.sequence
    doors = found.cutter.doors(count, plan.mesh.tp, plan.mesh.cp, sequence)
    local = local_profile(found.cutter.parts(plan.mesh, sequence), found.profile.at(plan.largest_micro_batch), 0)
    rows = _Rows(plan, local, doors.order, found)
    names = labels(cluster, found.calibration, plan.world)
    ranks: list[list[int]] = [[] for _ in range(pp)]
    for rank in range(plan.world):
        ranks[plan.mesh.coordinate(rank, "pp")].append(rank)
    seconds, sizes, rooms = [], [], []
    for stage in range(count):
        mine = ranks[plan.stage_rank(stage)]
        seconds.append(max((rows.seconds(label) for label in {names[r] if names else "" for r in mine}), key=sum))
        sizes.append(rows.sizes(stage))
        small = min(capacity(cluster, plan, Class("", (r,), 1, (0,))) for r in mine)
        rooms.append((HEADROOM * small - rows.base) / (count // pp))
    for limits in (rooms, [float("inf")] * count):
        cuts = best_cuts(seconds, sizes, limits, doors.places)
        if cuts is not None:
            yield stages_at(doors, cuts)


class _Rows:
    """What each layer takes of a stage's time and memory, in the order in which layers are cut."""

    def __init__(self, plan: Plan, local: ModelProfile, order: Sequence[str], found: Inputs) -> None:
        self.plan, self.local, self.order, self.found = plan, local, order, found
        self.base = max(rates.base_bytes for rates in found.calibration.layouts)

    def seconds(self, label: str) -> list[float]:
        rates = self.found.calibration.layout(self.plan.world, label)
        return self._ordered(_seconds(self.plan, self.local, rates))

    def sizes(self, stage: int) -> list[float]:
        plan, order = self.plan, order_of(self.plan)
        rank = plan.stage_rank(stage)
        at = order.stages(rank).index(stage)
        under_way = max(counts[at] for counts in held(order, rank))
        states, shards = OPTIMIZER_STATES[self.found.workload.optimizer] if plan.memory.offload == "none" else 0, plan.mesh.shard
        times = {0: 2 + states, 1: 2 + states / shards, 2: 1 + (1 + states) / shards, 3: (2 + states) / shards}[plan.memory.zero]
        kept = (under_way * kept_bytes(plan, layer, plan.memory.mode(layer.name))[0] for layer in self.local.layers)
        return self._ordered([times * sum(t.bytes for t in layer.tensors) + bytes_ for layer, bytes_ in zip(self.local.layers, kept, strict=True)])

    def _ordered(self, row: Sequence[float]) -> list[float]:
        by_name = dict(zip((layer.name for layer in self.local.layers), row, strict=True))
        return [by_name.get(name, 0.0) for name in self.order]
