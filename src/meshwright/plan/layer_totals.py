"""Time, memory and communication of a micro-batch on one rank or stage, summed over its layers: the figures that lower bounds are made of.

Equal layers are priced once for each micro-batch size, and counted. Nothing here depends on one search's constraints, so all searches of one model
share the results (`LayerTotalsCache.of`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, Literal, NamedTuple, TypeVar

from meshwright.core.calibration import Rates
from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import CompileMode, Plan
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.core.tensor_policy import CollectiveSite
from meshwright.cost.compute_cost import ComputeCost
from meshwright.plan.memory_planner import RECOMPUTE_MODES
from meshwright.schedule import local_profile
from meshwright.schedule.buckets import OWN_BUCKET_DIVISOR

T = TypeVar("T")
StageLayers = tuple[tuple[str, ...], ...]  # names of the layers of each pipeline stage
RecomputeChoice = RecomputeMode | Literal["mixed"]  # mixed: an integer program chooses the mode of each unit (plan/recompute_planner.py)
RECOMPUTE_CHOICES: tuple[RecomputeChoice, ...] = (*RECOMPUTE_MODES, "mixed")


class RecomputeOption(NamedTuple):
    """What recomputing one unit saves (bytes) and costs: seconds of compute, and the calls and bytes of tensor-parallel collectives that it
    repeats."""

    bytes: float
    seconds: float
    collective_calls: int = 0
    collective_bytes: float = 0.0


@dataclass(frozen=True)
class LayerTotals:
    """Totals of one micro-batch over some layers, on a rank that holds those layers whole but for tensor parallelism."""

    recompute_seconds: Mapping[RecomputeChoice, float]  # seconds
    activation_bytes: Mapping[RecomputeChoice, float]  # bytes saved for backward
    forward: float
    backward: float
    parameters: float  # bytes
    trainable_bytes: float
    non_unit_bytes: float  # bytes of parameters outside all units
    gathered_units: float  # units that zero=3 all-gathers, one call each
    scattered_units: float  # those of them with gradients, which are reduce-scattered
    own_bucket_grads: float  # gradients large enough for a bucket of their own
    output_collectives: tuple[float, float]  # (calls, bytes) of tensor-parallel collectives at reduce sites
    input_collectives: tuple[float, float]  # (calls, bytes) of tensor-parallel collectives at copy sites
    largest_unit_bytes: float  # bytes of the largest unit's parameters
    recompute_options: tuple[tuple[tuple[RecomputeOption, ...], float], ...]  # (recompute options of a kind of unit, number of such units)
    additive_values: tuple[float, ...]  # all figures above that add up over layers

    @classmethod
    def from_values(
        cls, additive_values: tuple[float, ...], largest_unit_bytes: float, recompute_options: tuple[tuple[tuple[RecomputeOption, ...], float], ...]
    ) -> LayerTotals:
        """Build totals from `additive_values`: recompute seconds and saved bytes by recompute choice, then the other additive fields in their
        order above."""
        count = len(RECOMPUTE_CHOICES)
        again, kept = (dict(zip(RECOMPUTE_CHOICES, additive_values[at : at + count], strict=True)) for at in (0, count))
        forward, backward, parameters, trained, root, gathered, scattered, alone, *met = additive_values[2 * count :]
        return cls(
            again,
            kept,
            forward,
            backward,
            parameters,
            trained,
            root,
            gathered,
            scattered,
            alone,
            (met[0], met[1]),
            (met[2], met[3]),
            largest_unit_bytes,
            recompute_options,
            additive_values,
        )


def combine_totals(layer_totals: Sequence[LayerTotals], counts: Mapping[int, float]) -> LayerTotals:
    """The sum of totals, each multiplied by its count; `counts` maps an index into `layer_totals` to that count."""
    figures = [0.0] * (2 * len(RECOMPUTE_CHOICES) + 12)
    savers: dict[tuple[RecomputeOption, ...], float] = {}
    for kind, count in counts.items():
        figures = [sum_ + count * figure for sum_, figure in zip(figures, layer_totals[kind].additive_values, strict=True)]
        for ways, number in layer_totals[kind].recompute_options:
            savers[ways] = savers.get(ways, 0.0) + count * number
    return LayerTotals.from_values(
        tuple(figures), max((layer_totals[kind].largest_unit_bytes for kind in counts), default=0.0), tuple(savers.items())
    )


def combine_totals_each(layer_totals: Sequence[LayerTotals], counts_each: Sequence[Mapping[int, float]]) -> list[LayerTotals]:
    """One sum (`combine_totals`) for each mapping of counts; equal counts share one object."""
    found: dict[tuple[tuple[int, float], ...], LayerTotals] = {}
    keys = [tuple(sorted(counts.items())) for counts in counts_each]
    for key in keys:
        found[key] = found.get(key) or combine_totals(layer_totals, dict(key))
    return [found[key] for key in keys]


class IdentityKey(Generic[T]):
    """A dict key that compares the wrapped value by identity."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.value is self.value


class LayerTotalsCache:
    """Cached totals of one model's layers."""

    @classmethod
    def of(cls, profile: ModelProfile, precision: str, units: tuple[str, ...], bucket_bytes: int) -> LayerTotalsCache:
        """The instance for this model, shared by all its searches."""
        return profile.memo.get_or_compute("amounts", (), (precision, units, bucket_bytes), lambda: cls(profile, precision, units, bucket_bytes))

    def __init__(self, profile: ModelProfile, precision: str, units: tuple[str, ...], bucket_bytes: int) -> None:
        self._profile, self._precision, self._units, self._bucket_bytes = profile, precision, frozenset(units), bucket_bytes
        self._cached_stage_totals, self._kind_totals, self._layer_kinds, self._collective_sites = (
            cache(self._compute_stage_totals),
            cache(self._compute_kind_totals),
            cache(self._group_equal_layers),
            cache(self._find_collective_sites),
        )
        self._rank_totals: dict[tuple[int, str, int, bool], list[LayerTotals]] = {}
        self._stages_by_id: dict[int, IdentityKey[StageLayers]] = {}

    def stage_totals(self, samples: int, compile_mode: CompileMode, rates: Rates, sharding: Plan, stages: StageLayers) -> list[LayerTotals]:
        """Totals of each stage; without `stages`, of the whole model."""
        held = self._stages_by_id.setdefault(id(stages), IdentityKey(stages))
        return self._cached_stage_totals(samples, compile_mode, IdentityKey(rates), IdentityKey(sharding), held)

    def rank_totals(self, stage_totals: Sequence[LayerTotals], schedule: str, stages: Sequence[Sequence[int]], ranks: int) -> list[LayerTotals]:
        """Totals of each pipeline rank, which holds the stages in its entry of `stages`; without `stages`, of the mean rank."""
        key = (id(stage_totals), schedule, ranks, bool(stages))  # ids stay valid: `_cached_stage_totals` keeps the lists alive
        if key not in self._rank_totals:
            first = {id(part): stage for stage, part in reversed([*enumerate(stage_totals)])}
            every: list[Mapping[int, float]] = [Counter(first[id(stage_totals[stage])] for stage in mine) for mine in stages] or [{0: 1.0 / ranks}]
            self._rank_totals[key] = combine_totals_each(stage_totals, every)
        return self._rank_totals[key]

    def is_inside_unit(self, module: str) -> bool:
        """Whether a module is strictly inside a unit: collectives at the unit's own boundary are not repeated when it is recomputed."""
        while module := module.rpartition(".")[0]:
            if module in self._units:
                return True
        return False

    def _compute_stage_totals(
        self, samples: int, compile_mode: CompileMode, rates: IdentityKey[Rates], sharding: IdentityKey[Plan], stages: IdentityKey[StageLayers]
    ) -> list[LayerTotals]:
        rows, (_, counts, kind_of) = self._kind_totals(samples, compile_mode, rates, sharding), self._layer_kinds(sharding)
        if not stages.value:
            return [combine_totals(rows, dict(enumerate(counts)))]
        return combine_totals_each(rows, [Counter(kind_of[name] for name in names if name in kind_of) for names in stages.value])

    def _group_equal_layers(self, sharding: IdentityKey[Plan]) -> tuple[ModelProfile, tuple[int, ...], dict[str, int]]:
        """The model with one layer of each kind, the number of layers of each kind, and the kind of each layer. Layers are of one kind if they
        have the same work and the same shards."""
        profile = self._profile
        kinds: dict[Hashable, list[int]] = {}
        for index, (whole, part) in enumerate(zip(profile.layers, local_profile(sharding.value, profile, 0).layers, strict=True)):
            met = tuple(tuple((m.bytes, m.is_batch_independent) for m in sites) for sites in self._collective_sites(sharding).get(whole.name, ()))
            held = (whole.activation_bytes, part.activation_bytes, whole.output_bytes)
            alike = (id(whole.kernels), part.parameters, *held, whole.name in self._units, met)
            kinds.setdefault(alike, []).append(index)
        first = [indices[0] for indices in kinds.values()]
        folded = replace(
            profile, layers=tuple(profile.layers[i] for i in first), per_sample_layers=tuple(profile.per_sample_layers[i] for i in first)
        )
        kind_of = {profile.layers[index].name: number for number, indices in enumerate(kinds.values()) for index in indices}
        return folded, tuple(map(len, kinds.values())), kind_of

    def _compute_kind_totals(
        self, samples: int, compile_mode: CompileMode, rates: IdentityKey[Rates], sharding: IdentityKey[Plan]
    ) -> list[LayerTotals]:
        """The totals of one layer of each kind."""
        layers = local_profile(sharding.value, self._layer_kinds(sharding)[0].at_batch(samples), 0).layers
        price = ComputeCost(rates.value, self._precision, compile_mode != "none", self._units)
        memo: dict[tuple[int, str, bool], float] = {}
        return [self._totals_of_layer(layer, price, memo, samples, compile_mode, sharding) for layer in layers]

    def _totals_of_layer(
        self,
        layer: LayerProfile,
        compute_cost: ComputeCost,
        memo: dict[tuple[int, str, bool], float],
        samples: int,
        compile_mode: CompileMode,
        sharding: IdentityKey[Plan],
    ) -> LayerTotals:
        unit = layer.name in self._units
        fused = compile_mode == "model" or (compile_mode == "blocks" and unit)
        saved = layer.activation_bytes - (layer.compiler_recomputed_bytes if fused else 0.0)
        forward, cheap = (compute_cost.layer_seconds(layer, "forward", memo, cheap_only=cheap) for cheap in (False, True))
        again: dict[RecomputeChoice, float] = (
            {"none": 0.0, "selective": cheap, "full": forward, "mixed": 0.0} if unit else dict.fromkeys(RECOMPUTE_CHOICES, 0.0)
        )
        kept: dict[RecomputeChoice, float] = dict.fromkeys(RECOMPUTE_MODES, saved)
        if unit:
            kept |= {"selective": layer.output_bytes + layer.expensive_output_bytes, "full": layer.output_bytes}
        kept["mixed"] = min(kept.values())
        sizes = [(t.bytes, t.trainable) for t in layer.tensors]
        whole, trained = float(sum(size for size, _ in sizes)), float(sum(size for size, train in sizes if train))
        alone = float(sum(train and size * OWN_BUCKET_DIVISOR >= self._bucket_bytes for size, train in sizes))
        calls = float(unit and bool(sizes)), float(unit and trained > 0)
        met = [
            (float(len(sites)), float(sum(m.bytes_for(samples) for m in sites)))
            for sites in self._collective_sites(sharding).get(layer.name, ((), ()))
        ]
        backward = compute_cost.layer_seconds(layer, "backward", memo)
        figures = (*(again[mode] for mode in RECOMPUTE_CHOICES), *(kept[mode] for mode in RECOMPUTE_CHOICES), forward, backward, whole, trained)
        return LayerTotals.from_values(
            (*figures, 0.0 if unit else whole, *calls, alone, *met[0], *met[1]), whole if unit else 0.0,
            ((self._recompute_options(layer.name, again, kept, samples, compile_mode, sharding), 1.0),) if unit else (),
        )  # fmt: skip

    def _recompute_options(
        self,
        layer: str,
        recompute_seconds: Mapping[RecomputeChoice, float],
        activation_bytes: Mapping[RecomputeChoice, float],
        samples: int,
        compile_mode: CompileMode,
        sharding: IdentityKey[Plan],
    ) -> tuple[RecomputeOption, ...]:
        allowed = (
            RECOMPUTE_MODES[2:] if compile_mode != "none" and sharding.value.mesh.degree("tp") > 1 else RECOMPUTE_MODES[1:]
        )  # Plan refuses selective recomputation of compiled tensor-parallel units
        sums, enters = self._collective_sites(sharding).get(layer, ((), ()))
        forward = enters if sharding.value.tensor.is_sequence_parallel else [m for m in sums if not m.skipped_in_recompute]
        repeated = [m.bytes_for(samples) for m in forward if self.is_inside_unit(m.module)]
        met = len(repeated), float(sum(repeated))
        return tuple(
            RecomputeOption(activation_bytes["none"] - activation_bytes[m], recompute_seconds[m], *(met if m == "full" else ()))
            for m in allowed
            if activation_bytes["none"] > activation_bytes[m]
        )

    def _find_collective_sites(self, sharding: IdentityKey[Plan]) -> dict[str, tuple[list[CollectiveSite], list[CollectiveSite]]]:
        """By layer: its reduce sites and its copy sites."""
        policy, layers = sharding.value.tensor, set(self._profile.layer_names)
        found: dict[str, tuple[list[CollectiveSite], list[CollectiveSite]]] = {}
        for place, sites in enumerate((policy.reduce_sites, policy.copy_sites)):
            for site in (m for m in sites if bool(m.sequence_layout) == policy.is_sequence_parallel):
                module = site.module
                while module and module not in layers:
                    module = module.rpartition(".")[0]
                found.setdefault(module, ([], []))[place].append(site)
        return found
