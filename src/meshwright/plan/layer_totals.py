"""Time, memory and communication of a micro-batch on one rank or stage, summed over its layers: the inputs of lower bounds.

Equal layers are priced once for each micro-batch size, and counted. Nothing here depends on one search's constraints, so all searches of one model
share the results (`LayerTotalsCache.of`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Generic, Literal, NamedTuple, TypeVar

from meshwright.core.calibration import Rates
from meshwright.core.model import LayerProfile, ModelProfile
from meshwright.core.plan import CompileMode, Plan, is_compiled
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
    """What recomputing one unit saves (bytes) and costs: compute seconds, and calls and bytes of the tensor-parallel collectives it repeats."""

    bytes: float
    seconds: float
    collective_calls: int = 0
    collective_bytes: float = 0.0


@dataclass(frozen=True)
class LayerTotals:
    """Totals of one micro-batch over some layers on one rank. Parameters are sharded by tensor parallelism, not by ZeRO."""

    recompute_seconds: Mapping[RecomputeChoice, float]  # seconds
    activation_bytes: Mapping[RecomputeChoice, float]  # bytes saved for backward
    forward: float
    backward: float
    parameters: float  # bytes
    trainable_bytes: float
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
        seconds, saved = (dict(zip(RECOMPUTE_CHOICES, additive_values[i : i + count], strict=True)) for i in (0, count))
        forward, backward, parameters, trainable, gathered, scattered, own_buckets, *sites = additive_values[2 * count :]
        collectives = gathered, scattered, own_buckets, (sites[0], sites[1]), (sites[2], sites[3])
        rest = largest_unit_bytes, recompute_options, additive_values
        return cls(seconds, saved, forward, backward, parameters, trainable, *collectives, *rest)


def combine_totals(layer_totals: Sequence[LayerTotals], counts: Mapping[int, float]) -> LayerTotals:
    """The sum of totals, each multiplied by its count; `counts` maps an index into `layer_totals` to that count."""
    values = [0.0] * (2 * len(RECOMPUTE_CHOICES) + 11)
    unit_counts: dict[tuple[RecomputeOption, ...], float] = {}
    for index, count in counts.items():
        values = [total + count * value for total, value in zip(values, layer_totals[index].additive_values, strict=True)]
        for options, number in layer_totals[index].recompute_options:
            unit_counts[options] = unit_counts.get(options, 0.0) + count * number
    largest_unit = max((layer_totals[index].largest_unit_bytes for index in counts), default=0.0)
    return LayerTotals.from_values(tuple(values), largest_unit, tuple(unit_counts.items()))


def combine_totals_each(layer_totals: Sequence[LayerTotals], counts_each: Sequence[Mapping[int, float]]) -> list[LayerTotals]:
    """One sum (`combine_totals`) for each mapping of counts; equal counts share one object."""
    keys = [tuple(sorted(counts.items())) for counts in counts_each]
    totals = {key: combine_totals(layer_totals, dict(key)) for key in dict.fromkeys(keys)}
    return [totals[key] for key in keys]


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
        self._cached_stage_totals, self._kind_totals = cache(self._compute_stage_totals), cache(self._compute_kind_totals)
        self._layer_kinds, self._collective_sites = cache(self._group_equal_layers), cache(self._find_collective_sites)
        self._rank_totals: dict[tuple[int, str, int, bool], list[LayerTotals]] = {}
        self._stages_by_id: dict[int, IdentityKey[StageLayers]] = {}

    def stage_totals(self, samples: int, compile_mode: CompileMode, rates: Rates, sharding: Plan, stages: StageLayers) -> list[LayerTotals]:
        """Totals of each stage; without `stages`, of the whole model."""
        stages_key = self._stages_by_id.setdefault(id(stages), IdentityKey(stages))
        return self._cached_stage_totals(samples, compile_mode, IdentityKey(rates), IdentityKey(sharding), stages_key)

    def rank_totals(self, stage_totals: Sequence[LayerTotals], schedule: str, stages: Sequence[Sequence[int]], ranks: int) -> list[LayerTotals]:
        """Totals of each pipeline rank, which holds the stages in its entry of `stages`; without `stages`, of the mean rank."""
        key = (id(stage_totals), schedule, ranks, bool(stages))  # ids stay valid: `_cached_stage_totals` keeps the lists alive
        if key not in self._rank_totals:
            first = {id(totals): stage for stage, totals in reversed([*enumerate(stage_totals)])}
            counts: list[Mapping[int, float]] = [Counter(first[id(stage_totals[stage])] for stage in rank_stages) for rank_stages in stages]
            self._rank_totals[key] = combine_totals_each(stage_totals, counts or [{0: 1.0 / ranks}])
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
        totals, (_, counts, kind_of) = self._kind_totals(samples, compile_mode, rates, sharding), self._layer_kinds(sharding)
        if not stages.value:
            return [combine_totals(totals, dict(enumerate(counts)))]
        return combine_totals_each(totals, [Counter(kind_of[name] for name in names if name in kind_of) for names in stages.value])

    def _group_equal_layers(self, sharding: IdentityKey[Plan]) -> tuple[ModelProfile, tuple[int, ...], dict[str, int]]:
        """The model with one layer of each kind, the number of layers of each kind, and the kind of each layer. Layers are of one kind if they
        have the same work and the same shards."""
        profile, sites = self._profile, self._collective_sites(sharding)
        kinds: dict[Hashable, list[int]] = {}
        for index, (layer, local) in enumerate(zip(profile.layers, local_profile(sharding.value, profile, 0).layers, strict=True)):
            collectives = tuple(tuple((site.bytes, site.is_batch_independent) for site in group) for group in sites.get(layer.name, ()))
            activations = (layer.activation_bytes, local.activation_bytes, layer.output_bytes)
            kinds.setdefault((id(layer.kernels), local.parameters, *activations, layer.name in self._units, collectives), []).append(index)
        first = [indices[0] for indices in kinds.values()]
        layers, per_sample = (tuple(layers[i] for i in first) for layers in (profile.layers, profile.per_sample_layers))
        kind_of = {profile.layers[index].name: kind for kind, indices in enumerate(kinds.values()) for index in indices}
        return replace(profile, layers=layers, per_sample_layers=per_sample), tuple(map(len, kinds.values())), kind_of

    def _compute_kind_totals(
        self, samples: int, compile_mode: CompileMode, rates: IdentityKey[Rates], sharding: IdentityKey[Plan]
    ) -> list[LayerTotals]:
        """The totals of one layer of each kind."""
        layers = local_profile(sharding.value, self._layer_kinds(sharding)[0].at_batch(samples), 0).layers
        cost = ComputeCost(rates.value, self._precision, compile_mode != "none", self._units)
        memo: dict[tuple[int, str, bool], float] = {}
        return [self._layer_totals(layer, partial(cost.layer_seconds, layer, memo=memo), samples, compile_mode, sharding) for layer in layers]

    def _layer_totals(
        self, layer: LayerProfile, seconds_of: Callable[..., float], samples: int, compile_mode: CompileMode, sharding: IdentityKey[Plan]
    ) -> LayerTotals:
        is_unit = layer.name in self._units
        fused = is_compiled(layer.name, compile_mode, sharding.value.mesh, is_unit)
        forward, cheap, backward = seconds_of("forward"), seconds_of("forward", cheap_only=True), seconds_of("backward")
        seconds: dict[RecomputeChoice, float] = dict.fromkeys(RECOMPUTE_CHOICES, 0.0)
        activations = layer.activation_bytes - (layer.compiler_recomputed_bytes if fused else 0.0)
        saved: dict[RecomputeChoice, float] = dict.fromkeys(RECOMPUTE_MODES, activations)
        if is_unit:
            seconds |= {"selective": cheap, "full": forward}
            saved |= {"selective": layer.output_bytes + layer.expensive_output_bytes, "full": layer.output_bytes}
        saved["mixed"] = min(saved.values())
        trainable = [t.bytes for t in layer.tensors if t.trainable]
        parameters, own_buckets = float(sum(t.bytes for t in layer.tensors)), sum(n * OWN_BUCKET_DIVISOR >= self._bucket_bytes for n in trainable)
        sites = self._collective_sites(sharding).get(layer.name, ((), ()))
        collectives = [figure for group in sites for figure in (len(group), sum(site.bytes_for(samples) for site in group))]
        by_choice = [row[choice] for row in (seconds, saved) for choice in RECOMPUTE_CHOICES]
        zero3_calls = is_unit and bool(layer.tensors), is_unit and sum(trainable) > 0
        values = (*by_choice, forward, backward, parameters, sum(trainable), *zero3_calls, own_buckets, *collectives)
        options = ((self._recompute_options(sites, seconds, saved, samples, compile_mode, sharding.value), 1.0),) if is_unit else ()
        return LayerTotals.from_values(tuple(map(float, values)), parameters if is_unit else 0.0, options)

    def _recompute_options(
        self,
        sites: tuple[Sequence[CollectiveSite], Sequence[CollectiveSite]],
        seconds: Mapping[RecomputeChoice, float],
        saved: Mapping[RecomputeChoice, float],
        samples: int,
        compile_mode: CompileMode,
        sharding: Plan,
    ) -> tuple[RecomputeOption, ...]:
        refuses_selective = compile_mode != "none" and sharding.mesh.degree("tp") > 1  # as Plan does for compiled tensor-parallel units
        reduce_sites, copy_sites = sites
        forward = copy_sites if sharding.tensor.is_sequence_parallel else [site for site in reduce_sites if not site.skipped_in_recompute]
        repeated = [site.bytes_for(samples) for site in forward if self.is_inside_unit(site.module)]
        collectives = {"full": (len(repeated), float(sum(repeated)))}
        modes = [mode for mode in RECOMPUTE_MODES[2 if refuses_selective else 1 :] if saved["none"] > saved[mode]]
        return tuple(RecomputeOption(saved["none"] - saved[mode], seconds[mode], *collectives.get(mode, ())) for mode in modes)

    def _find_collective_sites(self, sharding: IdentityKey[Plan]) -> dict[str, tuple[list[CollectiveSite], list[CollectiveSite]]]:
        """By layer: its reduce sites and its copy sites."""
        policy, layers = sharding.value.tensor, set(self._profile.layer_names)
        by_layer: dict[str, tuple[list[CollectiveSite], list[CollectiveSite]]] = {}
        for i, sites in enumerate((policy.reduce_sites, policy.copy_sites)):
            for site in (s for s in sites if bool(s.sequence_layout) == policy.is_sequence_parallel):
                module = site.module
                while module and module not in layers:
                    module = module.rpartition(".")[0]
                by_layer.setdefault(module, ([], []))[i].append(site)
        return by_layer
