"""Recomputation unit by unit: the integer program's answer is the best of all there are, fits, and takes no longer than all units alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_inputs import calibration, cluster, layer, model, plan
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.core.estimate import Estimate
from meshwright.core.model import Kernel, LayerProfile, ModelProfile
from meshwright.core.plan import Plan
from meshwright.core.recompute_policy import RecomputeMode
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.cost.step_cost import HEADROOM
from meshwright.plan import Constraints, rank_plans
from meshwright.plan.memory_planner import RECOMPUTE_MODES
from meshwright.plan.recompute_planner import UnitClass, choose_mixed_recompute, solve_modes


def block(name: str, size: int, dear: int, work: float) -> LayerProfile:
    """Saves `size`, of which `dear` are products; element-wise work beside them."""
    made = layer(name, ((16, 16),), flops=work * 1e9, saved=size * 1e6, block="blocks.0")
    return replace(made, expensive_output_bytes=dear * 1e5, fusible_bytes=1e5, kernels=(*made.kernels, Kernel("memory", "forward", 0.0, work * 1e6)))


KINDS = st.tuples(st.integers(2, 5), st.integers(1, 9), st.sampled_from([0.5, 1.0, 2.0]))


def price(chosen: Plan, profile: ModelProfile, memory: float) -> Estimate:
    return estimate(chosen, profile, Workload(chosen.global_batch), cluster(1, memory), calibration(1))


def uniform(chosen: Plan, recompute: RecomputeMode) -> Plan:
    return replace(chosen, memory=replace(chosen.memory, recompute=recompute, layers={}))


@given(st.lists(KINDS, min_size=2, max_size=4), st.floats(0.01, 1.0))
@settings(max_examples=10, deadline=None)
def test_the_best_of_all_ways_to_recompute(kinds: list[tuple[int, int, float]], share: float) -> None:
    profile = model([block(f"blocks.{i}", *kind) for i, kind in enumerate(kinds)])
    plain = plan(profile, batch=8)
    most, least = (max(price(uniform(plain, mode), profile, 80e9).memory_bytes) for mode in ("none", "full"))
    memory = (least + share * (most - least)) / HEADROOM + 10
    every = []
    for modes in itertools.product(RECOMPUTE_MODES, repeat=len(kinds)):
        chosen = replace(plain, memory=replace(plain.memory, layers=dict(zip(profile.layer_names, modes, strict=True))))
        every.append(price(chosen, profile, memory))
    best = min((e.step_s for e in every if e.fits), default=None)
    found = choose_mixed_recompute(plain, profile, Workload(8), cluster(1, memory), calibration(1))
    if price(plain, profile, memory).fits:
        assert found is None
        return
    assert found is not None or best is None
    if found is not None and best is not None:
        priced = price(found, profile, memory)
        assert priced.fits
        assert priced.step_s <= best * 1.02, "the program counts some memory twice"
        full = price(uniform(plain, "full"), profile, memory)
        assert priced.step_s <= full.step_s * (1 + 1e-9) or not full.fits


COUNTED = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3))


@given(st.lists(COUNTED, min_size=1, max_size=3), st.floats(0.05, 1.0))
@example([(2, 1, 1, 1, 1, 3), (4, 1, 1, 4, 1, 3)], 0.5)
@settings(max_examples=30, deadline=None)
def test_counts_are_as_good_as_any(rows: list[tuple[int, ...]], share: float) -> None:
    """Several moments at which a rank may hold most, and kinds of blocks that differ in what they hold then."""
    kinds = [
        UnitClass(n, {"none": 0.0, "selective": cheap, "full": cheap + dear}, {"none": 10.0 + size, "selective": size, "full": 1.0},
             {"none": 0.0, "selective": 3.0, "full": 10.0 + size}, (one, two))
        for n, cheap, dear, size, one, two in rows
    ]  # fmt: skip
    everything = max(sum(k.count * k.saved_bytes["none"] * k.in_flight[at] for k in kinds) for at in (0, 1))
    room = math.floor(share * everything) + 0.5  # sizes are whole numbers, and the solver leaves a little room

    def fits(counts: Sequence[tuple[int, int, int]]) -> bool:
        back = max(k.rematerialized_bytes[m] for k, of in zip(kinds, counts, strict=True) for m, n in zip(RECOMPUTE_MODES, of, strict=True) if n)
        kept = [
            sum(k.in_flight[at] * k.saved_bytes[m] * n for k, of in zip(kinds, counts, strict=True) for m, n in zip(RECOMPUTE_MODES, of, strict=True))
            for at in (0, 1)
        ]
        return all(size + back <= room for size in kept)

    def seconds(counts: Sequence[tuple[int, ...]]) -> float:
        return sum(k.seconds[m] * n for k, of in zip(kinds, counts, strict=True) for m, n in zip(RECOMPUTE_MODES, of, strict=True))

    ways = [[(a, b, k.count - a - b) for a in range(k.count + 1) for b in range(k.count + 1 - a)] for k in kinds]
    best = min((seconds(counts) for counts in itertools.product(*ways) if fits(counts)), default=None)
    found = solve_modes(kinds, [room, room])
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        counts = [tuple(of.get(m, 0) for m in RECOMPUTE_MODES) for of in found]
        assert seconds(counts) == pytest.approx(best)
        assert fits(counts)  # type: ignore[arg-type]


def test_the_search_mixes_where_keeping_everything_does_not_fit() -> None:
    profile = model([block(f"blocks.{i}", 4, 9, 1.0) for i in range(12)])
    plain = plan(profile, batch=8)
    sizes = [max(price(uniform(plain, mode), profile, 80e9).memory_bytes) for mode in ("none", "selective")]
    memory = (0.7 * sizes[0] + 0.3 * sizes[1]) / HEADROOM
    ranking = rank_plans(profile, cluster(1, memory), Workload(8), calibration(1), Constraints(micro_batches=1))
    best = ranking.best
    assert best.estimate.fits and 0 < len(best.plan.memory.recompute_modes) < 12
    alike = [s for s in ranking.scored if not s.plan.memory.layers and s.estimate.fits]
    assert alike and all(best.estimate.step_s < s.estimate.step_s for s in alike)
    asked = rank_plans(profile, cluster(1, memory), Workload(8), calibration(1), Constraints(micro_batches=1, recompute="full"))
    assert not any(s.plan.memory.layers for s in asked.scored)
