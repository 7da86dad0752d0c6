"""Proxies: the constants and totals of the originals, every order and rank order, what is refused, files, and plans as proxies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_inputs import blocks, plan, rates
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.errors import RequestError
from meshwright.core.schedule import COMPUTE_OPS, Schedule
from meshwright.cost.action_cost import ActionCost
from meshwright.proxies import PROXIES
from meshwright.proxies.data_parallel_proxies import RESNET50_BUCKETS, RESNET152_BUCKETS, resnet_tensors
from meshwright.proxies.proxy_program import RankGrid
from meshwright.proxies.schedule_files import load_schedule, save_schedule, scale_down
from meshwright.schedule.lower import lower
from meshwright.schedule.planned_ledger import ledger_name, plan_ledger
from meshwright.schedule.schedule_check import schedule_problems
from meshwright.simulate import IdealNetwork, simulate

MIB = 2**20
# Small enough to look at as a whole: 4 or 8 ranks.
SMALL: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (4, {"layers": 4, "stages": 2}),
    "bert": (8, {"layers": 4, "stages": 4}),
    "resnet50": (4, {}),
    "resnet152": (4, {}),
    "resnet152-strong": (4, {"table": [[4, 128, 119000, 23800]]}),
    "cosmoflow": (8, {}),
    "dlrm": (4, {}),
    "gpt3": (8, {"stages": 2, "shards": 2}),
    "gpt3-moe": (8, {"stages": 2, "experts": 2}),
    "gpt3-one-pipe-step": (4, {"stages": 2, "shards": 2}),
    "gpt3-moe-one-pipe-step": (4, {"stages": 2, "experts": 2}),
    "fsdp": (4, {"units": 3, "sharding": 2}),
    "hybrid-2d": (4, {"stages": 2}),
    "hybrid-3d": (8, {"stages": 2, "shards": 2}),
    "hybrid-3d-moe": (8, {"stages": 2, "experts": 2}),
}


def build(name: str, world: int | None = None, **settings: Any) -> Schedule:
    proxy = PROXIES[name]
    dims = proxy.parse_config((), settings)
    return proxy.build(dims, world or proxy.min_world(dims))


def counted(schedule: Schedule, rank: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
    """(name, operation) → calls and bytes of one rank."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for action in schedule.program_for(rank):
        if action.is_communication:
            calls, size = found.get((ledger_name(action.name), action.op), (0, 0))
            found[ledger_name(action.name), action.op] = calls + 1, size + action.bytes
    return found


def waits_us(schedule: Schedule, rank: int = 0) -> float:
    return sum(a.seconds for a in schedule.program_for(rank) if a.op in COMPUTE_OPS) * 1e6


# The originals' numbers


@pytest.mark.parametrize(("name", "total"), [("gpt2", 1_074_488_320), ("bert", 367_480_636)])
def test_all_layers_together_are_the_model(name: str, total: int) -> None:
    dims: Any = PROXIES[name].parse_config()
    schedule = build(name, 2 * dims.stages)
    sizes = [counted(schedule, stage)["grads/layer", "all_reduce"] for stage in range(dims.stages)]
    assert sum(calls for calls, _ in sizes) == dims.layers
    assert sum(size for _, size in sizes) == 4 * total
    each = [[a.bytes // 4 for a in schedule.program_for(stage) if a.op == "all_reduce"] for stage in range(dims.stages)]
    first, middle, last = {"gpt2": (85_317_120, 19_677_440, 84_008_960), "bert": (44_379_136, 12_596_224, 45_984_572)}[name]
    assert first in each[0] and last in each[-1] and set(each[1]) == {middle}


@pytest.mark.parametrize(("name", "floats"), [("gpt2", 808_960), ("bert", 1_049_600)])
def test_what_crosses_between_stages(name: str, floats: int) -> None:
    schedule = build(name, 4)
    assert counted(schedule, 0) == {("p2p/forward", "send"): (8, 8 * 4 * floats)}  # one replica reduces nothing
    assert set(counted(schedule, 1)) == {("p2p/forward", "send"), ("p2p/backward", "send")}
    assert waits_us(schedule) == 0


@pytest.mark.parametrize(
    ("name", "buckets", "blocks", "classes", "tensors"),
    [("resnet50", RESNET50_BUCKETS, (3, 4, 6, 3), 1001, 161), ("resnet152", RESNET152_BUCKETS, (3, 8, 36, 3), 1000, 467)],
)
def test_buckets_hold_what_the_tensors_do(name: str, buckets: tuple[int, ...], blocks: Any, classes: int, tensors: int) -> None:
    whole = resnet_tensors(blocks, classes)
    assert len(whole) == tensors and sum(whole) == sum(buckets)
    for mode, calls in (("bucketed", len(buckets)), ("tensor", tensors)):
        found = counted(build(name, 2, gradients=mode))
        assert sum(c for c, _ in found.values()) == calls and sum(size for _, size in found.values()) == 4 * sum(buckets)


def test_resnets() -> None:
    assert waits_us(build("resnet152", 2)) == pytest.approx(119000 + 10 * 23800)
    for world, forward, backward in ((256, 119000, 23800), (512, 63000, 12600), (1024, 36000, 7200), (2048, 27667, 5533)):
        assert waits_us(build("resnet152-strong", world)) == pytest.approx(forward + 10 * backward)
    ring = build("resnet50", 3, exchange="ring")
    assert [a.peer for a in ring.program_for(2) if a.op == "send"] == [0] * 6 and [a.peer for a in ring.program_for(2) if a.op == "recv"] == [1] * 6


def test_cosmoflow() -> None:
    schedule = build("cosmoflow", 8)
    found = counted(schedule)
    assert waits_us(schedule) == pytest.approx(31202 + 62408)
    assert found["halo/forward", "send"] == (8, 4 * 2 * (2097152 + 1048576 + 524288 + 262144))
    assert found["halo/backward", "send"] == (8, 4 * 2 * (131072 + 262144 + 524288 + 1048576))
    assert [found[f"gather/{layer}", "all_gather"][1] for layer in (5, 6, 7)] == [16 * n for n in (65536, 256, 128)]
    assert [found[f"scatter/{step}", "reduce_scatter"][1] for step in (0, 1, 2)] == [16 * n for n in (128, 256, 65536)]
    assert found["grads/dense", "all_reduce"] == (1, 4 * 1_050_737)
    assert [found[f"grads/conv{i}", "all_reduce"][1] // 4 for i in (4, 3, 2, 1, 0)] == [3539456, 884992, 221312, 55360, 3488]
    assert {a.peer for a in schedule.program_for(6) if a.op == "send"} == {2 ^ 1, 2 ^ 2}  # rank 6 is the third of its group


def test_dlrm() -> None:
    schedule = build("dlrm", 8)
    assert waits_us(schedule) == pytest.approx(3091)
    found = counted(schedule)
    assert found["embeddings/forward", "all_to_all"] == found["embeddings/backward", "all_to_all"] == (1, 4 * 262144)
    assert found["grads/top", "all_reduce"] == (1, 4 * 728_065) and found["grads/bottom", "all_reduce"] == (1, 4 * 49_536)


def test_gpt3() -> None:
    schedule = build("gpt3", 768)
    first, inner = counted(schedule, 0), counted(schedule, 1)
    assert first["p2p/forward", "send"] == inner["p2p/backward", "send"] == (192, 192 * 96 * MIB)
    assert first["tp/forward", "all_reduce"] == first["tp/backward", "all_reduce"] == (384, 384 * 96 * MIB)
    assert first["grads/layer", "all_reduce"] == (1, 1728 * MIB)
    assert waits_us(schedule) == pytest.approx(192 * (15915 + 31830))
    groups = schedule.groups_of(96 * 4 + 96 + 7)  # second replica, second shard, stage 7
    assert groups["tp"] == tuple(384 + 96 * shard + 7 for shard in range(4)) and groups["pp"] == tuple(range(480, 576)) and groups["dp"] == (103, 487)


def test_gpt3_with_experts() -> None:
    schedule = build("gpt3-moe", 2 * 1536)
    found = counted(schedule)
    assert found["experts/forward", "all_to_all"] == (384, 384 * 4 * 16 * 1_572_864)
    assert found["grads/attention", "all_reduce"] == (1, 4 * 603_979_776) and found["grads/experts", "all_reduce"] == (1, 4 * 75_497_472)
    assert waits_us(schedule) == pytest.approx(192 * (22367 + 44734 + (41293 + 82586) / 16))
    assert (len(schedule.groups_of(0)["replica"]), len(schedule.groups_of(0)["dp"])) == (32, 2)


@pytest.mark.parametrize("name", ["gpt3-one-pipe-step", "gpt3-moe-one-pipe-step"])
def test_one_step_of_the_pipeline(name: str) -> None:
    schedule = build(name)
    for stage, phase in ((0, "forward"), (1, "backward"), (94, "forward"), (95, "backward")):
        assert {a.op for a in schedule.program_for(stage) if a.op in COMPUTE_OPS} == {phase}
        assert counted(schedule, stage)[f"p2p/{phase}", "send"] == (1, 96 * MIB)
    with pytest.raises(RequestError, match="use 4 stages"):
        build(name, stages=3)


# Every shape


@pytest.mark.parametrize("mode", ["bucketed", "tensor"])
@pytest.mark.parametrize("name", SMALL)
def test_whoever_meets_agrees(name: str, mode: str) -> None:
    world, settings = SMALL[name]
    schedule = build(name, world, gradients=mode, **settings)
    assert list(schedule_problems(schedule)) == []
    simulate(schedule, IdealNetwork())  # and nobody waits for ever


@given(
    name=st.sampled_from(["gpt2", "gpt3", "gpt3-moe"]),
    order=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    stages=st.integers(1, 4),
    rounds=st.integers(1, 3),
    chunks=st.integers(1, 3),
    replicas=st.integers(1, 2),
    overlap=st.booleans(),
    ranks=st.sampled_from(["pipeline", "tensor"]),
)
def test_every_order_ends(name: str, order: str, stages: int, rounds: int, chunks: int, replicas: int, overlap: bool, ranks: str) -> None:
    chunks = chunks if order == "interleaved" else 1
    settings: dict[str, Any] = {"order": order, "stages": stages, "chunks": chunks, "micro_batches": rounds * stages, "overlap": overlap}
    settings |= {"layers": 2 * stages * chunks}
    if name != "gpt2":
        settings |= {"rank_order": ranks, "experts" if name == "gpt3-moe" else "shards": 2}
    schedule = build(name, stages * replicas * (1 if name == "gpt2" else 2), **settings)
    assert list(schedule_problems(schedule)) == []
    assert simulate(schedule, IdealNetwork()).step_s >= 0


@pytest.mark.parametrize("order", ["pipeline", "tensor"])
def test_rank_orders_join_the_same_number_in_other_places(order: Any) -> None:
    groups = RankGrid(2, 2, 3, order).groups()
    assert groups["pp" if order == "pipeline" else "tp"][0] == ((0, 1, 2) if order == "pipeline" else (0, 1))
    for lists in groups.values():
        assert sorted(rank for group in lists for rank in group) == list(range(12))


@pytest.mark.parametrize("name", SMALL)
def test_scaled_down_sizes_and_waits_shrink_together(name: str) -> None:
    world, settings = SMALL[name]
    whole, small = build(name, world, **settings), build(name, world, scale_down=16, **settings)
    assert waits_us(small) == pytest.approx(waits_us(whole) / 16)
    for key, (calls, size) in counted(small).items():
        assert calls == counted(whole)[key][0] and size == pytest.approx(counted(whole)[key][1] / 16, abs=64 * calls)
    assert list(schedule_problems(scale_down(whole, 1000))) == []


# Refused


@pytest.mark.parametrize(
    ("name", "world", "settings", "says"),
    [
        ("gpt2", 6, {}, "6 ranks are not a multiple of stages = 4: use 4 ranks"),
        ("gpt2", 4, {"layers": 9}, "9 layers do not divide over 4 stages: use 8 layers"),
        ("gpt3", 100, {}, "not a multiple of stages × shards = 96 × 4 = 384: use 384 ranks"),
        ("gpt3-moe", 8, {"stages": 2}, "multiple of stages × experts = 2 × 16 = 32"),
        ("gpt3", 8, {"stages": 2, "shards": 2, "order": "1f1b", "chunks": 2}, "use order=interleaved or chunks=1"),
        ("gpt3", 0, {"stages": 0}, "stages=0: give at least 1"),
        ("resnet152-strong", 4, {}, r"4 ranks are not in its table \(256, 512, 1024, 2048\)"),
        ("cosmoflow", 6, {}, "6 ranks are not a multiple of shards = 4"),
        ("cosmoflow", 6, {"shards": 3}, "shards=3 is not a power of two: use 2"),
        ("cosmoflow", 4, {"gathers": [1]}, "gathers has 1 entries, 8 layers with 5 convolutions need 3"),
        ("dlrm", 3, {}, "3 ranks do not divide 262144"),
        ("fsdp", 6, {"sharding": 4}, "6 ranks are not a multiple of sharding = 4"),
        ("gpt3", 384, {"scale_down": 0.5}, "give 1 or more"),
        ("gpt3", 384, {"tokens": -1}, "tokens=-1: give 0 or more"),
        ("gpt3", 384, {"order": "gpip"}, "did you mean 'gpipe'"),
        ("gpt3", 384, {"stage": 2}, "did you mean 'stages'"),
    ],
)
def test_a_wrong_request_says_what_to_change(name: str, world: int, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        build(name, world, **settings)


def test_arguments_stand_in_the_order_of_the_originals() -> None:
    dims: Any = PROXIES["gpt2"].parse_config(["64", "8"])
    assert (dims.layers, dims.stages, dims.micro_batches) == (64, 8, 8)
    assert PROXIES["gpt3"].parse_config(["4", "3"]).num_micro_batches == 12  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="takes 2 arguments"):
        PROXIES["gpt3"].parse_config(["1", "2", "3"])


# Files and plans


def test_a_schedule_survives_its_file(tmp_path: Path) -> None:
    schedule = build("cosmoflow", 4)
    save_schedule(schedule, tmp_path / "schedule.json")
    assert load_schedule(tmp_path / "schedule.json") == schedule


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: replace(a, bytes=a.bytes + 4) if a.op == "all_reduce" else a, "makes other collectives"),
        (lambda a: replace(a, op="wait") if a.op == "recv" else a, "differ"),
        (lambda a: replace(a, depends_on=("nothing",)), "which does not come before it"),
        (lambda a: replace(a, axis="nowhere") if a.is_communication else a, "in no group called 'nowhere'"),
        (lambda a: replace(a, peer=9) if a.op == "send" else a, "not another member"),
        (lambda a: replace(a, name="same", depends_on=()), "two actions are called 'same'"),
    ],
)
def test_an_unsound_schedule_is_refused(change: Any, says: str, tmp_path: Path) -> None:
    schedule = build("cosmoflow", 4)
    bad = replace(schedule, programs=(tuple(change(a) for a in schedule.programs[0]), *schedule.programs[1:]))
    save_schedule(bad, tmp_path / "bad.json")
    with pytest.raises(RequestError, match=rf"bad.json: .*{says}"):
        load_schedule(tmp_path / "bad.json")


@pytest.mark.parametrize(("degrees", "micro"), [({"dp": 2}, 1), ({"shard": 4, "zero": 3}, 2), ({"dp": 2, "shard": 2, "zero": 2}, 2), ({}, 1)])
def test_a_plan_as_a_schedule_sends_what_its_ledger_says(degrees: dict[str, int], micro: int) -> None:
    profile = blocks(3)
    made = plan(profile, batch=16, micro=micro, **degrees)
    schedule = lower(made, profile, ActionCost(made, "adamw", rates(2)))
    assert list(schedule_problems(schedule)) == []
    expected = Counter({(x.name, x.op): x.bytes for x in plan_ledger(made, profile, clip=False) if x.phase == "step"})
    assert Counter({key: size for key, (_, size) in counted(schedule).items()}) == expected
    computed = sum(a.seconds for a in schedule.program_for(0))
    assert simulate(schedule, IdealNetwork()).step_s == pytest.approx(computed) and computed > 0
