"""What a micro-batch takes of one rank or one stage, summed over its layers: the figures that bounds are made of.

Layers that are alike are priced once for each size of micro-batch, and counted. Nothing here depends on the search that asks, so all searches of
one model share what was found (`Amounts.of`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, Literal, NamedTuple, TypeVar

from meshwright.core.calibration import Rates
from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import Compile, Plan
from meshwright.core.recompute import Recompute
from meshwright.core.tensor import Meet
from meshwright.cost.compute import ComputeCost
from meshwright.plan.memory import RECOMPUTES
from meshwright.schedule import local_profile
from meshwright.schedule.buckets import ALONE

T = TypeVar("T")
Layers = tuple[tuple[str, ...], ...]  # of each stage of a pipeline, by name
Choice = Recompute | Literal["mixed"]  # mixed: each unit as an integer program has it (plan/recompute.py)
CHOICES: tuple[Choice, ...] = (*RECOMPUTES, "mixed")


class Saver(NamedTuple):
    """What recomputing one unit saves, and what it costs: its work, and calls and bytes that tensor-parallel ranks meet for again."""

    bytes: float
    seconds: float
    calls: int = 0
    met: float = 0.0


@dataclass(frozen=True)
class Sum:
    """What one micro-batch takes in some layers together, on a rank that has them all but for tensor parallelism."""

    again: Mapping[Choice, float]  # seconds
    kept: Mapping[Choice, float]  # bytes saved for backward
    forward: float
    backward: float
    parameters: float  # bytes
    trained: float
    root: float  # bytes of parameters that are in no unit
    gathered: float  # units that zero=3 gathers, each in a call
    scattered: float  # those of them with gradients
    alone: float  # gradients that fill a bucket
    sums: tuple[float, float]  # calls and bytes of tensor-parallel ranks that end in it
    enters: tuple[float, float]  # and that begin in it
    unit: float  # bytes of the largest unit's parameters
    savers: tuple[tuple[tuple[Saver, ...], float], ...]  # the ways to recompute each kind of unit, and how many there are
    figures: tuple[float, ...]  # all of these that add up

    @classmethod
    def of(cls, figures: tuple[float, ...], unit: float, savers: tuple[tuple[tuple[Saver, ...], float], ...]) -> Sum:
        """`figures` has what recomputation takes and what is kept, by choice, and then the others in the order above."""
        count = len(CHOICES)
        again, kept = (dict(zip(CHOICES, figures[at : at + count], strict=True)) for at in (0, count))
        forward, backward, parameters, trained, root, gathered, scattered, alone, *met = figures[2 * count :]
        return cls(
            again, kept, forward, backward, parameters, trained, root, gathered, scattered, alone, (met[0], met[1]), (met[2], met[3]), unit, savers,
            figures,
        )  # fmt: skip


def total(rows: Sequence[Sum], counts: Mapping[int, float]) -> Sum:
    """So many of some rows."""
    figures = [0.0] * (2 * len(CHOICES) + 12)
    savers: dict[tuple[Saver, ...], float] = {}
    for kind, count in counts.items():
        figures = [sum_ + count * figure for sum_, figure in zip(figures, rows[kind].figures, strict=True)]
        for ways, number in rows[kind].savers:
            savers[ways] = savers.get(ways, 0.0) + count * number
    return Sum.of(tuple(figures), max((rows[kind].unit for kind in counts), default=0.0), tuple(savers.items()))


def totals(rows: Sequence[Sum], every: Sequence[Mapping[int, float]]) -> list[Sum]:
    """Several such sums; where the counts are the same, they are one object."""
    found: dict[tuple[tuple[int, float], ...], Sum] = {}
    keys = [tuple(sorted(counts.items())) for counts in every]
    for key in keys:
        found[key] = found.get(key) or total(rows, dict(key))
    return [found[key] for key in keys]


class Same(Generic[T]):
    """A value as a key: the same object is the same key."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


class Amounts:
    """The sums of one model's layers."""

    @classmethod
    def of(cls, profile: ModelProfile, precision: str, units: tuple[str, ...], bucket_bytes: int) -> Amounts:
        """The one for this model, which many searches ask."""
        return profile.memo.once("amounts", (), (precision, units, bucket_bytes), lambda: cls(profile, precision, units, bucket_bytes))

    def __init__(self, profile: ModelProfile, precision: str, units: tuple[str, ...], bucket_bytes: int) -> None:
        self._profile, self._precision, self._units, self._bucket_bytes = profile, precision, frozenset(units), bucket_bytes
        self._sums, self._rows, self._folded, self._met_in = cache(self._summed), cache(self._priced), cache(self._fold), cache(self._meets_in)
        self._ranks: dict[tuple[int, str, int, bool], list[Sum]] = {}
        self._alive: dict[int, Same[Layers]] = {}

    def sums(self, samples: int, compiled: Compile, rates: Rates, cut: Plan, stages: Layers) -> list[Sum]:
        """What each stage takes; without `stages`, the whole model."""
        held = self._alive.setdefault(id(stages), Same(stages))
        return self._sums(samples, compiled, Same(rates), Same(cut), held)

    def ranks(self, parts: Sequence[Sum], schedule: str, stages: Sequence[Sequence[int]], ranks: int) -> list[Sum]:
        """The sums of each pipeline rank, which has these of the stages in `parts`; of the mean one where none are told."""
        key = (id(parts), schedule, ranks, bool(stages))  # `_sums` keeps the parts alive
        if key not in self._ranks:
            first = {id(part): stage for stage, part in reversed([*enumerate(parts)])}
            every: list[Mapping[int, float]] = [Counter(first[id(parts[stage])] for stage in mine) for mine in stages] or [{0: 1.0 / ranks}]
            self._ranks[key] = totals(parts, every)
        return self._ranks[key]

    def in_unit(self, module: str) -> bool:
        """Inside of a unit: what happens at a unit's own door is not repeated with it."""
        while module := module.rpartition(".")[0]:
            if module in self._units:
                return True
        return False

    def _summed(self, samples: int, compiled: Compile, rates: Same[Rates], cut: Same[Plan], stages: Same[Layers]) -> list[Sum]:
        rows, (_, counts, kind_of) = self._rows(samples, compiled, rates, cut), self._folded(cut)
        if not stages.value:
            return [total(rows, dict(enumerate(counts)))]
        return totals(rows, [Counter(kind_of[name] for name in names if name in kind_of) for names in stages.value])

    def _fold(self, cut: Same[Plan]) -> tuple[ModelProfile, tuple[int, ...], dict[str, int]]:
        """The model with one layer of each kind, how many there are, and of which kind each layer is. Alike: as much work, as much of it cut."""
        profile = self._profile
        kinds: dict[Hashable, list[int]] = {}
        for index, (whole, part) in enumerate(zip(profile.layers, local_profile(cut.value, profile, 0).layers, strict=True)):
            met = tuple(tuple((m.bytes, m.fixed) for m in meets) for meets in self._met_in(cut).get(whole.name, ()))
            held = (whole.activation_bytes, part.activation_bytes, whole.output_bytes)
            alike = (id(whole.kernels), part.parameters, *held, whole.name in self._units, met)
            kinds.setdefault(alike, []).append(index)
        first = [indices[0] for indices in kinds.values()]
        folded = replace(profile, layers=tuple(profile.layers[i] for i in first), slopes=tuple(profile.slopes[i] for i in first))
        kind_of = {profile.layers[index].name: number for number, indices in enumerate(kinds.values()) for index in indices}
        return folded, tuple(map(len, kinds.values())), kind_of

    def _priced(self, samples: int, compiled: Compile, rates: Same[Rates], cut: Same[Plan]) -> list[Sum]:
        """Each kind of layer, once."""
        layers = local_profile(cut.value, self._folded(cut)[0].at(samples), 0).layers
        price = ComputeCost(rates.value, self._precision, compiled != "none", self._units)
        memo: dict[tuple[int, str, bool], float] = {}
        return [self._row(layer, price, memo, samples, compiled, cut) for layer in layers]

    def _row(
        self, layer: LayerProfile, price: ComputeCost, memo: dict[tuple[int, str, bool], float], samples: int, compiled: Compile, cut: Same[Plan]
    ) -> Sum:
        unit = layer.name in self._units
        fused = compiled == "model" or (compiled == "blocks" and unit)
        saved = layer.activation_bytes - (layer.remade_bytes if fused else 0.0)
        forward, cheap = (price.layer(layer, "forward", memo, cheap=cheap) for cheap in (False, True))
        again: dict[Choice, float] = {"none": 0.0, "selective": cheap, "full": forward, "mixed": 0.0} if unit else dict.fromkeys(CHOICES, 0.0)
        kept: dict[Choice, float] = dict.fromkeys(RECOMPUTES, saved)
        if unit:
            kept |= {"selective": layer.output_bytes + layer.dear_bytes, "full": layer.output_bytes}
        kept["mixed"] = min(kept.values())
        sizes = [(t.bytes, t.trainable) for t in layer.tensors]
        whole, trained = float(sum(size for size, _ in sizes)), float(sum(size for size, train in sizes if train))
        alone = float(sum(train and size * ALONE >= self._bucket_bytes for size, train in sizes))
        calls = float(unit and bool(sizes)), float(unit and trained > 0)
        met = [(float(len(meets)), float(sum(m.at(samples) for m in meets))) for meets in self._met_in(cut).get(layer.name, ((), ()))]
        backward = price.layer(layer, "backward", memo)
        figures = (*(again[mode] for mode in CHOICES), *(kept[mode] for mode in CHOICES), forward, backward, whole, trained)
        return Sum.of(
            (*figures, 0.0 if unit else whole, *calls, alone, *met[0], *met[1]), whole if unit else 0.0,
            ((self._savers(layer.name, again, kept, samples, compiled, cut), 1.0),) if unit else (),
        )  # fmt: skip

    def _savers(
        self, layer: str, again: Mapping[Choice, float], kept: Mapping[Choice, float], samples: int, compiled: Compile, cut: Same[Plan]
    ) -> tuple[Saver, ...]:
        allowed = RECOMPUTES[2:] if compiled != "none" and cut.value.mesh.degree("tp") > 1 else RECOMPUTES[1:]  # as a plan would refuse itself
        sums, enters = self._met_in(cut).get(layer, ((), ()))
        forward = enters if cut.value.tensor.sequence else [m for m in sums if not m.final_in]
        repeated = [m.at(samples) for m in forward if self.in_unit(m.module)]
        met = len(repeated), float(sum(repeated))
        return tuple(Saver(kept["none"] - kept[m], again[m], *(met if m == "full" else ())) for m in allowed if kept["none"] > kept[m])

    def _meets_in(self, cut: Same[Plan]) -> dict[str, tuple[list[Meet], list[Meet]]]:
        """By layer: where its tensor-parallel ranks add up, and where they enter what is cut."""
        policy, layers = cut.value.tensor, set(self._profile.layer_names)
        found: dict[str, tuple[list[Meet], list[Meet]]] = {}
        for place, meets in enumerate((policy.sums, policy.enters)):
            for meet in (m for m in meets if bool(m.along) == policy.sequence):
                module = meet.module
                while module and module not in layers:
                    module = module.rpartition(".")[0]
                found.setdefault(module, ([], []))[place].append(meet)
        return found
