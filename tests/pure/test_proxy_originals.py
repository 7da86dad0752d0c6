"""Proxies beside the original C++ programs: every rank's calls in order, as the originals make them, transcribed here by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.core.schedule import COLLECTIVE_OPS, Schedule
from meshwright.proxies import PROXIES

Call = tuple[Any, ...]  # operation, ranks of the group or the peer's rank, floats, whether it blocks
GPT2_SIZES = 85_317_120, 19_677_440, 84_008_960
BERT_SIZES = 44_379_136, 12_596_224, 45_984_572


def build(name: str, world: int, **settings: Any) -> Schedule:
    return PROXIES[name].build(PROXIES[name].parse_config((), settings), world)


def calls(schedule: Schedule, rank: int) -> list[Call]:
    groups, found = schedule.groups_of(rank), []
    for action in schedule.program_for(rank):
        if action.op in COLLECTIVE_OPS:
            found.append((action.op, groups[action.axis], action.bytes // 4, action.is_blocking))
        elif action.is_communication or action.op == "recv":
            found.append((action.op, groups[action.axis][action.peer], action.bytes // 4, action.is_blocking))
    return found


def without_groups_of_one(made: list[Call]) -> list[Call]:
    """Without the calls that the guide names as left out on purpose."""
    return [call for call in made if not (isinstance(call[1], tuple) and len(call[1]) == 1)]


def gpt2_or_bert(rank: int, world: int, layers: int, stages: int, p2p: int, sizes: tuple[int, int, int], scale: int = 1) -> list[Call]:
    stage, made = rank % stages, []
    for forward in (True, False):
        source, target = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
        for _ in range(8):
            if target // stages == rank // stages and target >= 0:
                made.append(("send", target, p2p // scale, False))
            if source // stages == rank // stages and source >= 0:
                made.append(("recv", source, p2p // scale, False))
    first, middle, last = sizes
    each = [middle] * (layers // stages)
    if stage == 0:
        each[0] = first
    elif stage == stages - 1:
        each[-1] = last
    group = tuple(range(stage, world, stages))
    return made + [("all_reduce", group, n // scale, True) for n in each if len(group) > 1]  # these two skip groups of one themselves


@pytest.mark.parametrize("scale", [1, 8, 64])
@pytest.mark.parametrize(("name", "p2p", "sizes"), [("gpt2", 808_960, GPT2_SIZES), ("bert", 1_049_600, BERT_SIZES)])
@pytest.mark.parametrize(("world", "layers", "stages"), [(4, 8, 4), (4, 8, 2), (8, 16, 4)])
def test_gpt2_and_bert(name: str, p2p: int, sizes: tuple[int, int, int], world: int, layers: int, stages: int, scale: int) -> None:
    schedule = build(name, world, layers=layers, stages=stages, scale_down=float(scale))
    for rank in range(world):
        assert calls(schedule, rank) == gpt2_or_bert(rank, world, layers, stages, p2p, sizes, scale)


GPT2_BLOCK = [1280, 4915200, 1638400, 1280, 6553600, 6553600, 1280, 3840, 1280, 1280, 5120, 1280]
GPT2_TENSORS = [
    [64328960, 1310720, *GPT2_BLOCK],
    GPT2_BLOCK,
    [1280, 4915200, 1638400, 1280, 6553600, 6553600, 1280, 64328960, 1280, 3840, 1280, 1280, 5120, 1280, 1280],
]
BERT_TENSORS = [
    [31254528, 524288, 2048, *[1048576] * 4, 4194304, 4194304, *[1024] * 8, 4096, 1024, 1024, 1024],
    [*[1048576] * 4, 4194304, 4194304, *[1024] * 6, 4096, 1024, 1024, 1024],
    [*[1048576] * 4, 4194304, 4194304, 1048576, 1048576, 31254528, 2048, *[1024] * 6, 4096, *[1024] * 4, 30522, 1024, 1024, 1024, 2],
]


@pytest.mark.parametrize(("name", "tensors"), [("gpt2", GPT2_TENSORS), ("bert", BERT_TENSORS)])
def test_tensor_by_tensor(name: str, tensors: list[list[int]]) -> None:
    schedule = build(name, 4, layers=4, stages=2, gradients="tensor")
    first, middle, last = tensors
    for stage, each in ((0, [*first, *middle]), (1, [*middle, *last])):
        assert [a.bytes // 4 for a in schedule.program_for(stage) if a.op == "all_reduce"] == each


RESNET50_STAGES = [(64, 3, 64), (128, 4, 256), (256, 6, 512), (512, 3, 1024)]  # width, blocks, channels before


def resnet50_tensors() -> list[int]:
    """Last first: of each block the third, second and first convolution, then the projection of a stage's first block."""
    sizes = [1001, 2048 * 1001]
    for width, blocks, before in reversed(RESNET50_STAGES):
        wide = 4 * width
        for block in reversed(range(blocks)):
            sizes += [wide, wide, width * wide, width, width, 9 * width * width, width, width, (before if block == 0 else wide) * width]
            sizes += [wide, wide, before * wide] if block == 0 else []
    return [*sizes, 64, 64, 9408]


def test_resnet50() -> None:
    for mode, sizes in (("bucketed", [3104745, 4461568, 4462592, 4986880, 4468736, 4074560]), ("tensor", resnet50_tensors())):
        schedule = build("resnet50", 4, exchange="both", gradients=mode)
        for rank in range(4):
            reduced = [("all_reduce", (0, 1, 2, 3), n, True) for n in sizes]
            ring = [call for n in sizes for call in (("recv", (rank - 1) % 4, n, False), ("send", (rank + 1) % 4, n, True))]
            assert calls(schedule, rank) == reduced + ring
    assert len(resnet50_tensors()) == 161


def cosmoflow(rank: int, world: int) -> list[Call]:
    start, index = rank // 4 * 4, rank % 4
    group, everyone, made = tuple(range(start, start + 4)), tuple(range(world)), []

    def halo(n: int) -> list[Call]:
        return [(op, start + (index ^ bit), n, False) for op in ("send", "recv") for bit in (1, 2)]

    for n in (2097152, 1048576, 524288, 262144):
        made += halo(n)
    made += [("all_gather", group, 4 * n, True) for n in (65536, 256, 128)]
    made += [("reduce_scatter", group, 4 * n, True) for n in (128, 256, 65536)]
    made.append(("all_reduce", tuple(range(index, world, 4)), 1_050_737, False))
    for exchanged, n in ((131072, 3539456), (262144, 884992), (524288, 221312), (1048576, 55360), (0, 3488)):
        made += halo(exchanged) if exchanged else []
        made.append(("all_reduce", everyone, n, False))
    return made


def dlrm(rank: int, world: int) -> list[Call]:
    everyone = tuple(range(world))
    embeddings = ("all_to_all", everyone, 262144, True)
    return [embeddings, ("all_reduce", everyone, 728_065, False), ("all_reduce", everyone, 49_536, False), embeddings]


def gpt3(rank: int, world: int, stages: int = 2, shards: int = 4) -> list[Call]:
    replica, stage, n = rank // (stages * shards), rank % stages, 25_165_824
    group = tuple(replica * stages * shards + shard * stages + stage for shard in range(shards))
    made: list[Call] = []
    for first, step in ((0, 1), (stages - 1, -1)):
        for _ in range(2 * stages):
            made += [("recv", rank - step, n, True)] if stage != first else []
            made += [("send", rank + step, n, False)] if stage != stages - 1 - first else []
            made += [("all_reduce", group, n, True)] * 2
    return [*made, ("all_reduce", tuple(range(rank % (stages * shards), world, stages * shards)), 452_984_832, True)]


def gpt3_moe(rank: int, world: int, stages: int = 2, experts: int = 16) -> list[Call]:
    unit, stage, n = stages * experts, rank % stages, 25_165_824
    group = tuple(rank // unit * unit + expert * stages + stage for expert in range(experts))
    made: list[Call] = []
    for first, step in ((0, 1), (stages - 1, -1)):
        for _ in range(2 * stages):
            made += [("recv", rank - step, n, True)] if stage != first else []
            made += [("send", rank + step, n, False)] if stage != stages - 1 - first else []
            made += [("all_to_all", group, n, True)] * 2
    experts_alike = tuple(range(rank % unit, world, unit))
    return [*made, ("all_reduce", experts_alike, 75_497_472, True), ("all_reduce", tuple(range(stage, world, stages)), 603_979_776, True)]


def resnet152(rank: int, world: int) -> list[Call]:
    sizes = (6511592, 6567936, 5905920, 6113280, 6176256, 6112768, 6176256, 6112768, 5321216, 5194816)
    return [("all_reduce", tuple(range(world)), n, False) for n in sizes]


@pytest.mark.parametrize(
    ("name", "original", "worlds", "settings"),
    [
        ("cosmoflow", cosmoflow, (4, 8), {}),
        ("dlrm", dlrm, (1, 4), {}),
        ("resnet152", resnet152, (1, 4), {}),
        ("gpt3", gpt3, (8, 16), {"stages": 2}),
        ("gpt3-moe", gpt3_moe, (32, 64), {"stages": 2}),
    ],
)
def test_call_by_call(name: str, original: Callable[[int, int], list[Call]], worlds: tuple[int, ...], settings: dict[str, Any]) -> None:
    """In the smaller world, groups have one rank: calls on them are left out, and nothing else differs."""
    for world in worlds:
        schedule = build(name, world, **settings)
        for rank in range(world):
            assert calls(schedule, rank) == without_groups_of_one(original(rank, world)), (name, rank, world)
    small = original(0, worlds[0])
    assert len(without_groups_of_one(small)) < len(small)
