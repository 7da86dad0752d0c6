"""Networks whose links are known: fair shares, bounds that always hold, and disturbances that break symmetry only where they reach."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_inputs import blocks, calibration, plan, rates
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.calibration import Rates
from meshwright.core.cluster import Cluster, Device, Link, Node
from meshwright.core.errors import RequestError
from meshwright.core.schedule import COMPUTE_OPS, Schedule, wire_factor
from meshwright.core.serialization import to_data
from meshwright.core.workload import Workload
from meshwright.cost import estimate
from meshwright.cost.action_cost import ActionCost
from meshwright.cost.priced_schedule import priced_schedule
from meshwright.describe.cluster_resolver import resolve_cluster
from meshwright.orchestrate.simulation_target import target_from_datasheets
from meshwright.proxies import PROXIES
from meshwright.proxies.proxy_program import ProgramBuilder, build_schedule
from meshwright.schedule.lower import lower
from meshwright.schedule.pipeline_actions import pipeline_schedule
from meshwright.simulate import (
    AlphaBetaNetwork,
    Disturbances,
    FabricNetwork,
    IdealNetwork,
    LinkDegradation,
    NonBlockingTopology,
    OverlapBehavior,
    simulate,
)
from meshwright.simulate.fair_sharing import FairSharing, Flow
from meshwright.simulate.rank_partition import LinkClasses
from meshwright.simulate.step_breakdown import breakdown, closed_form_parts

WORLD = 16
GOLDEN = Path(__file__).parents[1] / "golden" / "simulated.json"
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 4, "stages": 2}, "gpt3": {"stages": 2, "shards": 2}, "gpt3-moe": {"stages": 2, "experts": 2}, "cosmoflow": {}, "dlrm": {},
    "resnet152": {}, "fsdp": {"units": 3, "sharding": 4}, "hybrid-3d": {"stages": 2, "shards": 2},
}  # fmt: skip


def machines(ranks: int = WORLD, a_node: int = 4) -> Cluster:
    devices = tuple(Device("cuda", "made-up", i, 10**10) for i in range(a_node))
    nodes = tuple(Node(f"node{i}", devices, 8, 10**11, link=Link("inside", 5e-6, 4e9)) for i in range(ranks // a_node))
    return Cluster("made-up", nodes, Link("outside", 1e-5, 1e9))


def fabric(**choices: Any) -> FabricNetwork:
    return FabricNetwork.from_cluster(machines(), Rates(1, 1, {}, (), 0.0, async_dispatch=choices.pop("queued", False)), **choices)


proxies = st.builds(
    lambda name, down: PROXIES[name].build(PROXIES[name].parse_config((), {"scale_down": down, **SHAPES[name]}), WORLD),
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from([1, 16, 256]),
)
links = st.sampled_from(["outside/3", "outside/2/out", "inside/5", "outside", "inside/0/in"])
ranks = st.integers(0, WORLD - 1).map(str)


# Fair shares


@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
    st.lists(
        st.tuples(st.dictionaries(st.integers(0, 4), st.sampled_from([0.25, 1.0, 2.0]), max_size=3), st.floats(0.5, 20.0)), min_size=1, max_size=6
    ),
)
def test_shares_are_max_min_fair(capacity: list[float], drawn: list[tuple[dict[int, float], float]]) -> None:
    """No link is overfull, and whoever has less than it could use crosses a full link on which nobody has more."""
    loads = {number: tuple((link, load) for link, load in on.items() if link < len(capacity)) for number, (on, _) in enumerate(drawn)}
    sharing = FairSharing([LinkClasses(0.0, tuple(capacity), loads)])
    flows = [Flow(number, 1.0, most) for number, (_, most) in enumerate(drawn)]
    for flow in flows:
        sharing.add(flow, 0.0)
    used = [sum(load * f.rate for f in flows for link, load in loads[f.call_class] if link == at) for at in range(len(capacity))]
    assert all(u <= c * (1 + 1e-9) for u, c in zip(used, capacity, strict=True))
    for flow in flows:
        full = [link for link, _ in loads[flow.call_class] if used[link] >= capacity[link] * (1 - 1e-9)]
        rivals = [max(f.rate for f in flows if link in dict(loads[f.call_class])) for link in full]
        assert flow.rate == pytest.approx(flow.max_rate) or any(flow.rate >= most * (1 - 1e-9) for most in rivals)


def test_two_messages_over_one_link_take_turns_of_half_each() -> None:
    """Two ranks of a node send to one of another: its way in is shared, and what is left alone has it all."""
    programs = [ProgramBuilder(), ProgramBuilder(), ProgramBuilder()]
    programs[0].send("a", "three", 2, 10**9)
    programs[1].send("b", "three", 2, 2 * 10**9)
    programs[2].receive("a/in", "three", 0, 10**9)
    programs[2].receive("b/in", "three", 1, 2 * 10**9)
    schedule = build_schedule("shared", 8, {"three": ((0, 1, 4),)}, [*programs, ProgramBuilder()], lambda r: {0: 0, 1: 1, 4: 2}.get(r, 3))
    found = simulate(schedule, fabric())
    first, second = (span.end_s for span in found.spans_of(4))
    assert first == pytest.approx(1e-5 + 2.0) and second == pytest.approx(1e-5 + 3.0)
    alone = simulate(schedule, fabric(contended=False))
    assert [span.end_s for span in alone.spans_of(4)] == pytest.approx([1e-5 + 1.0, 1e-5 + 2.0])


# What always holds


@given(proxies, st.booleans())
@settings(max_examples=15)
def test_never_below_what_devices_compute_or_links_carry(schedule: Schedule, queued: bool) -> None:
    network = fabric(queued=queued)
    found = simulate(schedule, network)
    carried: dict[str, float] = {}
    for rank in range(WORLD):
        program, members = schedule.program_for(rank), schedule.groups_of(rank)
        assert found.step_s >= sum(a.seconds for a in program if a.op in COMPUTE_OPS) * (1 - 1e-9)
        for action in program:
            group = members.get(action.axis, ())
            first = action.is_collective and group[0] == rank
            if first or action.op == "send":
                met = group if first else (rank, group[action.peer])
                size = action.bytes if action.expected_bytes is None else action.expected_bytes
                for hop, share in network.link_loads(action.op, met).items():
                    carried[hop.key] = carried.get(hop.key, 0.0) + size * wire_factor(action.op, len(met)) * share / hop.bandwidth
    assert found.step_s >= max(carried.values()) * (1 - 1e-9)
    assert sum(breakdown(found).values()) == pytest.approx(found.step_s)


@given(proxies, st.floats(1.0, 50.0), st.booleans())
@settings(max_examples=15)
def test_without_contention_more_bandwidth_is_never_slower(schedule: Schedule, faster: float, queued: bool) -> None:
    before, after = (simulate(schedule, fabric(contended=False, queued=queued, bandwidth_scale=f)).step_s for f in (1.0, faster))
    assert after <= before * (1 + 1e-9)


@given(
    proxies,
    st.dictionaries(ranks, st.floats(0.5, 2.0), max_size=2),
    st.lists(st.tuples(links, st.sampled_from([0.0, 0.1, 0.5, 2.0]), st.floats(0.0, 1.0)), max_size=2),
    st.dictionaries(ranks, st.floats(0.0, 1.0), max_size=1),
    st.sampled_from([0.0, 0.3, 1.0]),
)
@settings(max_examples=40)
def test_folding_changes_nothing_whatever_goes_wrong(
    schedule: Schedule, slow: dict[str, float], changed: list[tuple[str, float, float]], fail: dict[str, float], steals: float
) -> None:
    network = fabric(overlap_by_rank=(OverlapBehavior(interference=steals),))
    step = simulate(schedule, network).step_s
    faults = Disturbances(
        slow, degrade=tuple(LinkDegradation(k, f, at * step) for k, f, at in changed), fail={r: at * step for r, at in fail.items()}
    )
    found, apart = simulate(schedule, network, faults), simulate(schedule, network, faults, merge_ranks=False)
    assert found.step_s == pytest.approx(apart.step_s, rel=1e-9)
    assert [found.end_times[found.rank_partition.class_of[r]] for r in range(WORLD)] == pytest.approx(list(apart.end_times), rel=1e-9)
    assert (found.lost is None) == (apart.lost is None)
    if found.lost is not None and apart.lost is not None:
        assert (found.lost.since_s, found.lost.num_stuck) == pytest.approx((apart.lost.since_s, apart.lost.num_stuck))


def test_a_straggler_sets_apart_only_those_it_meets() -> None:
    schedule = PROXIES["hybrid-3d"].build(PROXIES["hybrid-3d"].parse_config((), {"stages": 2, "shards": 2}), WORLD)
    calm, slow = simulate(schedule, fabric()), simulate(schedule, fabric(), Disturbances(slow={"5": 1.5}))
    assert len(calm.end_times) < len(slow.end_times) < WORLD and slow.step_s > calm.step_s
    assert breakdown(slow)["waiting"] + breakdown(slow)["bubble"] > breakdown(calm)["waiting"] + breakdown(calm)["bubble"]


# Links that change


def test_a_link_that_is_down_is_gone_around_or_waited_for() -> None:
    schedule = PROXIES["resnet152"].build(PROXIES["resnet152"].parse_config(), WORLD)
    calm = simulate(schedule, fabric()).step_s
    inside = simulate(schedule, fabric(), Disturbances(degrade=(LinkDegradation("inside/5", 0.0),)))
    outside = simulate(schedule, fabric(), Disturbances(degrade=(LinkDegradation("outside/3", 0.0),)))
    every = simulate(schedule, fabric(), Disturbances(degrade=(LinkDegradation("outside", 0.0, calm / 2),)))
    assert inside.lost is None and outside.lost is None and inside.step_s >= calm and outside.step_s >= calm
    assert every.lost is not None and every.lost.num_stuck == WORLD and every.lost.since_s >= calm / 2


def test_ways_around() -> None:
    flat = NonBlockingTopology(machines(8))
    keys = [hop.key for hop in flat.path(0, 5)]
    assert keys == ["outside/0/out", "outside/5/in"]
    around = [hop.key for hop in flat.path(0, 5, frozenset({"outside/0/out"}))]
    assert around == ["inside/0/out", "inside/1/in", "outside/1/out", "outside/5/in"]
    assert [hop.key for hop in flat.path(4, 5, frozenset({"inside/5/in"}))] == ["outside/4/out", "outside/5/in"]
    assert flat.path(0, 5, frozenset(flat.link_keys())) == ()


def test_a_device_that_dies_after_its_part_is_no_loss() -> None:
    schedule = PROXIES["resnet152"].build(PROXIES["resnet152"].parse_config(), WORLD)
    calm = simulate(schedule, fabric())
    late = simulate(schedule, fabric(), Disturbances(fail={"3": 2 * calm.step_s}))
    soon = simulate(schedule, fabric(), Disturbances(fail={"3": calm.step_s / 2}))
    assert late.lost is None and late.step_s == calm.step_s
    assert soon.lost is not None and soon.lost.since_s >= calm.step_s / 2 and soon.spans_of(3)[-1].end_s <= calm.step_s / 2


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ({"slow": {"16": 2.0}}, "slow 16: there is no such rank: ranks are 0 to 15"),
        ({"fail": {"-1": 2.0}}, "fail -1: there is no such rank"),
        ({"slow": {"1": -2.0}}, "give a factor above 0"),
        ({"fail": {"1": -2.0}}, "give seconds from 0 on"),
        ({"jitter": 2.0}, "from 0 to 1"),
        ({"degrade": (("outsid", 0.5, 0.0),)}, "did you mean 'outside'?"),
        ({"degrade": (("outside", -0.5, 0.0),)}, "give 0 (down) or more"),
    ],
)
def test_what_cannot_go_wrong_is_refused(faults: dict[str, Any], says: str) -> None:
    def refused() -> None:
        made = Disturbances(**{**faults, "degrade": tuple(LinkDegradation(*d) for d in faults.get("degrade", ()))})
        made.check(WORLD, NonBlockingTopology(machines()).link_keys())

    with pytest.raises(RequestError, match=re.escape(says)):
        refused()


# Closed forms


@pytest.mark.parametrize(("dp", "shard", "zero"), [(1, 1, 0), (2, 1, 0), (8, 1, 0), (1, 4, 1), (1, 4, 2), (1, 4, 3)])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_simulator_and_the_closed_form_agree_where_both_apply(dp: int, shard: int, zero: int, micro: int, recompute: str) -> None:
    """Computation and calls that share cores, so that nothing is hidden: what is left is a sum, which both must give."""
    profile = blocks(4, ((256, 256), (256,)), flops=1e9)
    made = plan(profile, dp=dp, shard=shard, zero=zero, micro=micro, recompute=recompute)
    ranks = made.world
    known = calibration(max(ranks, 2), overlap=0.0)
    one = Cluster("made-up", (Node("node", tuple(Device("cuda", "made-up", i, 10**11) for i in range(ranks)), 8, 10**12),))
    guess = estimate(made, profile, Workload(64), one, known)
    schedule = lower(made, profile, ActionCost(made, "adamw", known.rates_for(ranks)))
    found = simulate(schedule, AlphaBetaNetwork(one, known.rates_for(ranks), "gloo", overlap_by_rank=(OverlapBehavior(interference=1.0),)))
    assert found.step_s == pytest.approx(guess.step_s, rel=1e-9)
    for kind, seconds in closed_form_parts(breakdown(found)).items():
        assert seconds == pytest.approx(guess.breakdown[kind], rel=1e-6, abs=1e-12), kind


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("machine", "per_node", "ranks"), [("dgx-h100", 8, n) for n in (2, 8, 16, 128, 1024, 4096, 16_384)] + [("alps", 4, n) for n in (2, 4, 64, 4096)]
)
def test_estimate_and_simulation_of_a_data_parallel_step_agree_at_any_size(machine: str, per_node: int, ranks: int, zero: int) -> None:
    """Small messages and large: both price latency and bandwidth of a call by its group's place in the network."""
    profile = blocks(4, ((2048, 2048), (2048,)), flops=1e9, moved=1e6, saved=1e6)
    where = resolve_cluster(f"{machine}:{-(-ranks // per_node)}", {}, ranks=ranks)
    target = target_from_datasheets(where)
    made = plan(profile, batch=ranks, dp=1 if zero else ranks, shard=ranks if zero else 1, zero=zero)
    made = replace(made, device="cuda", backend="nccl")
    guess = estimate(made, profile, Workload(ranks), where, target.calibration)
    found = simulate(priced_schedule(made, profile, "adamw", where, target.calibration), target.make_network(made))
    assert guess.breakdown["communication"] > 0.3 * guess.step_s
    assert found.step_s == pytest.approx(guess.step_s, rel=0.03)


@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (2, 4), (4, 7), (4, 16), (8, 16)])
def test_zero_bubble_loses_only_the_way_in(stages: int, micro: int) -> None:
    """With all three parts of a chunk equally long: 6 m + p - 1 instead of 1F1B's 6 (m + p - 1)."""
    found = simulate(bent(stages, micro), IdealNetwork())
    assert found.step_s == pytest.approx(6 * micro + stages - 1)


@pytest.mark.parametrize(("stages", "micro"), [(2, 2), (4, 4), (3, 5), (4, 9)])
def test_zero_bubble_takes_every_turn_once_in_order(stages: int, micro: int) -> None:
    for rank in range(stages):
        found = pipeline_schedule("zero_bubble", stages, rank, micro, 2)
        assert len(found) == len(set(found)) == 6 * micro
        for chunk in (0, 1):
            for number in range(micro):
                places = [found.index((phase, chunk, number)) for phase in ("forward", "backward", "weights")]  # type: ignore[arg-type]
                assert places == sorted(places)


def bent(stages: int, micro: int) -> Schedule:
    """A pipeline folded into a V, with messages that cost nothing."""
    programs = []
    for rank in range(stages):
        out = ProgramBuilder()
        for turn in pipeline_schedule("zero_bubble", stages, rank, micro, 2):
            stage, name = (rank, 2 * stages - 1 - rank)[turn.chunk], f"{turn.phase}/{turn.chunk}/{turn.micro_batch}"
            way, axis = (1, "pp") if turn.phase == "forward" else (-1, "pp_back")
            ends = [min(s, 2 * stages - 1 - s) if 0 <= s < 2 * stages and turn.phase != "weights" else rank for s in (stage - way, stage + way)]
            if ends[0] != rank:
                out.receive(f"in/{name}", axis, ends[0], 1, blocks=True)
            out.compute(name, 1.0)
            if ends[1] != rank:
                out.send(f"out/{name}", axis, ends[1], 1)
        programs.append(out)
    group = (tuple(range(stages)),)
    return build_schedule("bent", stages, {"pp": group, "pp_back": group}, programs, lambda rank: rank)


# The same seed gives the same trace


def test_the_golden_trace() -> None:
    """Kept in a file: another machine, process or version must give the very same numbers for this seed."""
    schedule = PROXIES["gpt3"].build(PROXIES["gpt3"].parse_config((), {"stages": 2, "shards": 2, "layers": 4, "micro_batches": 2}), 4)
    faults = Disturbances(slow={"1": 1.25}, jitter=0.1, seed=7, degrade=(LinkDegradation("inside/2", 0.5, 0.01),))
    found = [simulate(schedule, FabricNetwork.from_cluster(machines(4, 2), rates(1)), faults) for _ in range(2)]
    assert found[0].spans == found[1].spans
    kept = json.loads(GOLDEN.read_text())
    assert [[to_data(span) for span in spans] for spans in found[0].spans] == kept
