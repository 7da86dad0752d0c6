"""The simulator: published bounds, closed forms, bounds that always hold, and ranks alike folded without changing a number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_inputs import cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.calibration import AlphaBetaModel, Rates
from meshwright.core.cluster import Link
from meshwright.core.errors import RequestError
from meshwright.core.schedule import COMPUTE_OPS, Schedule, wire_factor
from meshwright.proxies import PROXIES
from meshwright.proxies.proxy_program import ProgramBuilder, build_schedule
from meshwright.schedule.pipeline_actions import pipeline_schedule
from meshwright.simulate import AlphaBetaNetwork, Disturbances, IdealNetwork, simulate

ALPHA, SPEED = 1e-4, 1e9
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def network(*, contended: bool = True, faster: float = 1.0, gap: float | None = None, ranks: int = 8) -> AlphaBetaNetwork:
    lines = {f"gloo/{op}": AlphaBetaModel(ALPHA, SPEED, gap) for op in OPS}
    return AlphaBetaNetwork(cluster(ranks, link=Link("wire", ALPHA, SPEED)), Rates(1, 1, {}, (), 0.0, lines), "gloo", contended, faster)


def proxy(name: str, world: int, **dims: Any) -> Schedule:
    return PROXIES[name].build(PROXIES[name].parse_config((), dims), world)


@pytest.mark.parametrize(("name", "seconds"), [("gpt3", 13.70), ("gpt3-moe", 21.48)])
def test_published_bounds_on_a_network_that_costs_nothing(name: str, seconds: float) -> None:
    """96 stages of 192 micro-batches; 384 and 1536 ranks are simulated as 96."""
    schedule = PROXIES[name].build(PROXIES[name].parse_config(), PROXIES[name].min_world(PROXIES[name].parse_config()))
    found = simulate(schedule, IdealNetwork())
    assert found.step_s == pytest.approx(seconds, rel=1e-3) and len(found.end_times) == 96


# Closed forms


@pytest.mark.parametrize(("ranks", "micro", "chunks"), [(1, 3, 1), (2, 4, 1), (4, 8, 1), (4, 8, 2), (3, 9, 3)])
def test_bubbles(ranks: int, micro: int, chunks: int) -> None:
    """(m + p - 1) (f + b), and with v chunks a rank only (p - 1) / v of it is lost."""
    forward, backward = 300.0, 600.0  # of a chunk, microseconds
    dims = {"stages": ranks, "shards": 1, "micro_batches": micro, "layers": ranks * chunks, "forward_us": forward, "backward_us": backward}
    whole = 1e-6 * (forward + backward)
    for order in ("gpipe", "1f1b") if chunks == 1 else ("interleaved",):
        found = simulate(proxy("gpt3", ranks, order=order, chunks=chunks, **dims), IdealNetwork()).step_s
        assert found == pytest.approx((micro * chunks + ranks - 1) * whole)


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved"])
def test_every_turn_is_taken_once(order: str) -> None:
    chunks = 2 if order == "interleaved" else 1
    for rank in range(4):
        found = pipeline_schedule(order, 4, rank, 8, chunks)
        assert len(found) == len(set(found)) == 2 * 8 * chunks
        for chunk in range(chunks):
            for micro in range(8):
                ahead, back = (found.index((phase, chunk, micro)) for phase in ("forward", "backward"))  # type: ignore[arg-type]
                assert ahead < back
    held = [max_ahead(pipeline_schedule(order, 4, rank, 8, chunks)) for rank in range(4)]
    assert held == ([8] * 4 if order == "gpipe" else sorted(held, reverse=True)) and (order != "1f1b" or held == [4, 3, 2, 1])


def max_ahead(found: list[Any]) -> int:
    """The most micro-batches that went forward and not yet back."""
    ahead = most = 0
    for turn in found:
        ahead += 1 if turn.phase == "forward" else -1
        most = max(most, ahead)
    return most


def one_after_the_other(op: str, calls: int, size: int, *, blocks: bool, seconds: float = 0.0) -> Schedule:
    out = ProgramBuilder()
    for number in range(calls):
        out.collective(f"call/{number}", op, "world", size, blocks=blocks)  # type: ignore[arg-type]
        out.compute(f"forward/{number}", seconds)
    return build_schedule("calls", 4, {"world": ((0, 1, 2, 3),)}, [out], lambda _: 0)


@pytest.mark.parametrize("op", OPS[:4])
def test_blocking_calls_take_alpha_and_beta_each(op: str) -> None:
    each = ALPHA + 4e6 * wire_factor(op, 4) / SPEED
    found = simulate(one_after_the_other(op, 3, 4_000_000, blocks=True, seconds=0.01), network())
    assert found.step_s == pytest.approx(3 * (each + 0.01))
    assert sum(s.exposed_s for s in found.spans_of(0)) == pytest.approx(3 * each)


def test_what_runs_beside_computation_is_hidden() -> None:
    each = ALPHA + 4e6 * wire_factor("all_reduce", 4) / SPEED
    found = simulate(one_after_the_other("all_reduce", 3, 4_000_000, blocks=False, seconds=0.01), network())
    assert found.step_s == pytest.approx(0.03) and sum(s.exposed_s for s in found.spans_of(0)) == 0 and each < 0.01
    slow = simulate(one_after_the_other("all_reduce", 3, 4_000_000, blocks=False, seconds=0.001), network())
    assert slow.step_s == pytest.approx(3 * each)  # the wire is busy all along; computation is hidden behind it


def test_the_shared_part_of_the_latency_passes_once() -> None:
    schedule = one_after_the_other("all_reduce", 5, 4_000_000, blocks=False)
    busy = 4e6 * 1.5 / SPEED
    assert simulate(schedule, network(gap=0.0)).step_s == pytest.approx(5 * busy + ALPHA)
    assert simulate(schedule, network(gap=ALPHA / 2)).step_s == pytest.approx(5 * (busy + ALPHA / 2) + ALPHA / 2)


def test_a_message_starts_when_both_are_there() -> None:
    early, late = ProgramBuilder(), ProgramBuilder()
    early.send("p2p/x", "pair", 1, 1_000_000, blocks=True)
    late.compute("forward", 0.5)
    late.receive("p2p/x/in", "pair", 0, 1_000_000, blocks=True)
    found = simulate(build_schedule("pair", 2, {"pair": ((0, 1),)}, [early, late], lambda rank: rank), network())
    assert found.step_s == pytest.approx(0.5 + ALPHA + 1e6 / SPEED)
    assert found.spans_of(0)[0].exposed_s == pytest.approx(found.step_s) and found.spans_of(1)[-1].exposed_s == pytest.approx(ALPHA + 1e6 / SPEED)


def test_both_directions_at_once() -> None:
    programs = []
    for place in (0, 1):
        out = ProgramBuilder()
        out.wait("wait", [out.send("p2p/x", "pair", 1 - place, 10**7), out.receive("p2p/x/in", "pair", 1 - place, 10**7)])
        programs.append(out)
    schedule = build_schedule("pair", 2, {"pair": ((0, 1),)}, programs, lambda rank: rank)
    assert simulate(schedule, network()).step_s == pytest.approx(ALPHA + 1e7 / SPEED)
    assert simulate(schedule, replace(network(), duplex=False)).step_s == pytest.approx(2 * (ALPHA + 1e7 / SPEED))


def test_a_rank_that_waits_for_ever_is_named() -> None:
    first, second = ProgramBuilder(), ProgramBuilder()
    for out, peer in ((first, 1), (second, 0)):
        out.receive("p2p/x/in", "pair", peer, 4, blocks=True)
        out.send("p2p/x", "pair", peer, 4)
    with pytest.raises(RequestError, match="rank 0 waits for ever at 'p2p/x/in', action 1 of 2"):
        simulate(build_schedule("pair", 2, {"pair": ((0, 1),)}, [first, second], lambda rank: rank), IdealNetwork())


# What always holds

drawn = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["gpt2", "gpt3", "gpt3-moe", "cosmoflow", "dlrm", "resnet152", "fsdp", "hybrid-3d"]),
        "scale_down": st.sampled_from([1, 16, 256]),
    }
)
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 4, "stages": 2}, "gpt3": {"stages": 2, "shards": 2}, "gpt3-moe": {"stages": 2, "experts": 2},
    "hybrid-3d": {"stages": 2, "shards": 2}, "fsdp": {"units": 3, "sharding": 4},
}  # fmt: skip


@given(drawn)
@settings(max_examples=20)
def test_never_below_the_bounds_and_folding_changes_nothing(case: dict[str, Any]) -> None:
    schedule = proxy(case["name"], 8, scale_down=case["scale_down"], **SHAPES.get(case["name"], {}))
    for wires in (network(), network(contended=False), network(gap=0.0)):
        found, apart = simulate(schedule, wires), simulate(schedule, wires, merge_ranks=False)
        assert found.step_s == pytest.approx(apart.step_s, rel=1e-12)
        assert [found.end_times[found.rank_partition.class_of[r]] for r in range(8)] == pytest.approx(list(apart.end_times), rel=1e-12)
        for rank in range(8):
            program, members = schedule.program_for(rank), schedule.groups_of(rank)
            assert found.step_s >= sum(a.seconds for a in program if a.op in COMPUTE_OPS) * (1 - 1e-9)
            sent = sum(a.bytes * wire_factor(a.op, len(members[a.axis])) for a in program if a.is_communication)
            assert not wires.contended or found.step_s >= sent / SPEED * (1 - 1e-9)


@given(drawn, st.floats(1.0, 50.0))
@settings(max_examples=20)
def test_without_contention_more_bandwidth_is_never_slower(case: dict[str, Any], faster: float) -> None:
    schedule = proxy(case["name"], 8, scale_down=case["scale_down"], **SHAPES.get(case["name"], {}))
    before, after = (simulate(schedule, network(contended=False, faster=f)).step_s for f in (1.0, faster))
    assert after <= before * (1 + 1e-9)
    assert simulate(schedule, IdealNetwork()).step_s <= after * (1 + 1e-9)


def test_a_seed_gives_one_trace() -> None:
    schedule = proxy("cosmoflow", 8)
    first, again, other = (simulate(schedule, network(), Disturbances(jitter=0.1, seed=seed)) for seed in (1, 1, 2))
    assert first.spans == again.spans and first.spans != other.spans
    assert len(first.end_times) == 8  # no two ranks are alike
    assert simulate(schedule, network()).step_s < first.step_s


def test_a_straggler_holds_up_the_others() -> None:
    schedule = proxy("resnet152", 8)
    alone, slow = simulate(schedule, network()), simulate(schedule, network(), Disturbances(slow={"3": 1.5}))
    assert len(alone.end_times) == 1 and len(slow.end_times) == 2
    assert slow.step_s == pytest.approx(1.5 * 0.357, rel=0.2) and slow.step_s > alone.step_s
