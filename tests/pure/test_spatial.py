"""Blocks, halos and where they are gathered: exact arithmetic, decisions on real dataflow, and refusals in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests import architectures, convolutional
from torch import nn
from torch.nn import functional as F

from meshwright import zoo
from meshwright.core.dataflow import Dataflow, SlidingWindow
from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import Plan
from meshwright.core.serialization import from_data, to_data
from meshwright.core.spatial_policy import (
    SpatialPolicy,
    WindowOp,
    box_shape,
    choose_grid,
    halo_obstacle,
    is_local,
    local_box,
    parse_grid,
    plan_halo,
    volume,
)
from meshwright.describe.dataflow_tracer import trace_dataflow, trace_module_dataflow
from meshwright.describe.profile_tracer import trace_task
from meshwright.observe.wording import describe_plan, plan_setting_rows
from meshwright.plan.spatial_planner import choose_spatial
from meshwright.schedule import build_schedule, local_profile, plan_ledgers


def flow_of(model: nn.Module, *shape: int) -> Dataflow:
    return trace_module_dataflow(model, lambda m, b: m(b).square().mean(), torch.zeros(2, *shape))


def fates(model: nn.Module, *shape: int, ways: int = 2) -> tuple[SpatialPolicy, list[str]]:
    policy = choose_spatial(flow_of(model, *shape), ways)
    return policy, [gather.module for gather in policy.gathers]


# -- arithmetic --


@st.composite
def slides(draw: st.DrawFn) -> tuple[WindowOp, tuple[int, ...]]:
    """A window in two dims and a grid of ranks, as torch would have it."""
    grid = draw(st.sampled_from([(2, 1), (1, 2), (2, 2), (3, 2), (4, 1), (2, 3)]))
    numbers = [draw(st.tuples(st.integers(2, 17), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.integers(1, 2))) for _ in grid]
    made = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in numbers)
    sizes, kernel, stride, padding, dilation = zip(*numbers, strict=True)
    assume(min(made) >= 1)
    return WindowOp("m", "conv2d", SlidingWindow("conv", kernel, stride, padding, dilation), sizes, made, 4.0), grid


@given(case=slides())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_exchanges_bring_every_rank_what_its_window_needs(case: tuple[WindowOp, tuple[int, ...]]) -> None:
    """All ranks at once, on numbers that say where they come from: afterwards each has its part of the padded whole."""
    slide, grid = case
    assume(not halo_obstacle(slide, grid))
    whole = torch.arange(1, math.prod(slide.sizes) + 1).view(slide.sizes)
    at = lambda box: tuple(slice(*run) for run in box)  # noqa: E731
    ranks = range(math.prod(grid))
    every = [plan_halo(slide, grid, rank) for rank in ranks]
    buffers = [torch.zeros(r.shape, dtype=torch.int64) for r in every]
    for rank, mine in enumerate(every):
        buffers[rank][at(mine.own_box)] = whole[at(local_box(slide.sizes, grid, rank))]
    for dim in range(len(grid)):
        sent = {(r, e.peer): buffers[r][at(e.send_box)].clone() for r in ranks for e in every[r].exchanges if e.dim == dim and e.send_box}
        wanted = {(e.peer, r): e.recv_box for r in ranks for e in every[r].exchanges if e.dim == dim and e.recv_box}
        assert sent.keys() == wanted.keys()
        for (source, target), box in wanted.items():
            buffers[target][at(box)] = sent[source, target]
    window = slide.window
    for rank, mine in enumerate(every):
        given = buffers[rank][at(mine.window_box)]
        pads = [0 if ways > 1 else p for ways, p in zip(grid, window.padding, strict=True)]
        how = {"stride": window.stride, "dilation": window.dilation}
        kernel = torch.arange(1, math.prod(window.kernel) + 1).view(1, 1, *window.kernel).double()
        out = F.conv2d(given[None, None].double(), kernel, padding=pads, **how)
        full = F.conv2d(whole[None, None].double(), kernel, padding=window.padding, **how)[0, 0]
        assert torch.equal(out[0, 0], full[at(local_box(slide.output_sizes, grid, rank))])
        if is_local(slide, grid):
            own = whole[at(local_box(slide.sizes, grid, rank))]
            assert torch.equal(F.conv2d(own[None, None].double(), kernel, padding=pads, **how)[0, 0], out[0, 0])


def test_grids_are_as_square_as_it_goes() -> None:
    assert [choose_grid(n, 2) for n in (1, 2, 4, 6, 8)] == [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2)]
    assert [choose_grid(n, 3) for n in (2, 4, 8, 12)] == [(1, 2, 1), (1, 2, 2), (2, 2, 2), (3, 2, 2)]
    assert choose_grid(4, 1) == (4,)
    assert parse_grid("4x1") == (4, 1)
    for wrong in ("", "x", "2x0", "2,2"):
        with pytest.raises(RequestError, match="write ranks for each dim, like 2x2"):
            parse_grid(wrong)


@pytest.mark.parametrize(("sizes", "grid"), [((7, 5), (2, 2)), ((4, 9, 6), (1, 3, 2)), ((3,), (3,))])
def test_blocks_cover_all_positions_once(sizes: tuple[int, ...], grid: tuple[int, ...]) -> None:
    boxes = [local_box(sizes, grid, rank) for rank in range(math.prod(grid))]
    assert sum(map(volume, boxes)) == math.prod(sizes)
    places = {p for box in boxes for p in product(*(range(*run) for run in box))}
    assert len(places) == math.prod(sizes)
    assert min(min(box_shape(box)) for box in boxes) >= 1


# -- decisions --


def test_cosmoflow_is_cut_as_published() -> None:
    """2×2 blocks, borders before every convolution, all of the convolutions on blocks; dense layers by everybody."""
    policy = choose_spatial(trace_dataflow(zoo.load("cosmoflow")), 4)
    assert policy.grid == (1, 2, 2)
    assert [s.module for s in policy.window_ops] == [f"layers.{i}.conv" for i in range(5)]
    assert [(g.module, g.sizes) for g in policy.gathers] == [("layers.4", (4, 4, 4))]
    assert not policy.window_ops[0].needs_grad and all(s.needs_grad for s in policy.window_ops[1:])
    assert policy.layer_notes["layers.0.conv"] == "128x128x128 positions in blocks of 128x64x64, halo 0x1x1"
    assert policy.layer_notes["dense1"] == "replicated: view in the model reshapes positions; gathered after layers.4"
    plan = Plan("cosmoflow", 8, Mesh(cp=4), spatial=policy)
    assert from_data(Plan, to_data(plan), "plan") == plan
    assert plan.strategy == "spatial 1x2x2"
    assert "blocks are gathered after layers.4" in describe_plan(plan)[1]
    assert ("grid", "1x2x2") in [row[:2] for row in plan_setting_rows(plan)]


def test_a_gather_stands_before_what_needs_all_positions() -> None:
    conv = lambda: nn.Conv2d(2, 2, 3, padding=1)  # noqa: E731
    assert fates(nn.Sequential(conv(), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2)), 2, 8, 8)[1] == ["1"]
    assert fates(nn.Sequential(conv(), nn.Dropout(0.5), conv()), 2, 8, 8)[1] == ["0"]
    assert fates(nn.Sequential(conv(), nn.InstanceNorm2d(2), conv()), 2, 8, 8)[1] == ["0"]
    assert fates(nn.Sequential(conv(), nn.MaxPool2d(4), nn.MaxPool2d(2)), 2, 8, 8)[1] == ["1"]
    assert fates(nn.Sequential(conv(), nn.AvgPool2d(3, 1, 1, count_include_pad=False)), 2, 8, 8)[1] == ["0"]
    assert fates(nn.Sequential(conv(), nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")), 2, 8, 8)[1] == ["0"]
    far = choose_spatial(flow_of(nn.Sequential(conv(), nn.Conv2d(2, 2, 7, padding=3)), 2, 8, 8), 4, (4, 1))
    assert [g.module for g in far.gathers] == ["0"] and "reaches past the neighbour, who has 2 of 8 positions" in far.layer_notes["1"]
    assert fates(nn.Sequential(conv(), nn.Upsample(size=16)), 2, 8, 8)[1] == ["0"]
    assert fates(nn.Sequential(conv(), nn.Upsample(scale_factor=2)), 2, 8, 8)[1] == [""]
    every = [nn.LeakyReLU(), nn.ReLU6(inplace=True), nn.Hardswish(inplace=True), nn.ELU(inplace=True), nn.PReLU(2), nn.Mish(), nn.Threshold(0, 0)]
    assert fates(nn.Sequential(conv(), *every, conv(), nn.Flatten()), 2, 8, 8)[1] == ["8"]
    assert fates(nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.Flatten()), 2, 16)[1] == ["0"]


class Sized(nn.Module):
    """Two convolutions with something between them that looks at sizes."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(self.first(x)))


@pytest.mark.parametrize(
    ("function", "whole"),
    [
        (lambda x: x / x.shape[1], False),
        (lambda x: x.view(x.size(0), *x.shape[1:]), True),
        (lambda x: x / x.shape[2], True),
        (lambda x: x * x.size(-1), True),
        (lambda x: x / x.numel(), True),
        (lambda x: x + torch.ones(8, 8), True),
        (lambda x: x + torch.ones(2, 1, 1), False),
        (lambda x: x + x.transpose(2, 3), True),
        (lambda x: x.softmax(1), False),
        (lambda x: x.softmax(2), True),
        (lambda x: torch.cat(x.split(1, dim=1), 1), False),
        (lambda x: x * x.mean((2, 3), keepdim=True), True),
        (lambda x: x * x.mean(1, keepdim=True), False),
        (lambda x: x[:, :, ::1, :] + x.flip(3), True),
    ],
)
def test_code_that_would_see_a_block_is_given_the_whole(function: Callable[[torch.Tensor], torch.Tensor], whole: bool) -> None:
    assert fates(Sized(function), 2, 8, 8)[1] == (["first"] if whole else [""])


def test_a_module_whose_calls_cannot_be_told_apart_is_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.squeeze = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, stride=2, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.squeeze(self.conv(x))
            return self.conv(torch.cat([x.flip(2), x.flip(3)], 3)[:, :, :, ::2].contiguous())  # whole, of the size of a block of the first call's

    with pytest.raises(RequestError, match="cp=4: nothing in this model can be sharded"):
        fates(Twice(), 2, 8, 8, ways=4)


def test_refusals_are_one_line() -> None:
    for name in ("Bert", "Llama"):
        model = architectures.build(name)
        flow = trace_module_dataflow(model, architectures.loss(name), architectures.batch(name, 2, 0))
        with pytest.raises(RequestError, match=r"cp=2: this model has no convolution: use context parallelism of sequences, or --mesh dp=2"):
            choose_spatial(flow, 2)
    vit = trace_module_dataflow(architectures.build("ViT"), architectures.loss("ViT"), architectures.batch("ViT", 2, 0))
    with pytest.raises(RequestError, match=r"cp=2: .*: use --mesh dp=2"):
        choose_spatial(vit, 2)
    with pytest.raises(RequestError, match="spatial=3x1 is not a grid of cp=4 ranks over at most 2 dims: use 2x2"):
        choose_spatial(flow_of(nn.Conv2d(2, 2, 3), 2, 8, 8), 4, (3, 1))
    with pytest.raises(RequestError, match="cp=4: nothing in this model can be sharded"):
        choose_spatial(flow_of(nn.Conv2d(2, 2, 3, padding=1), 2, 1, 8), 4)
    policy = choose_spatial(flow_of(nn.Conv2d(2, 2, 3, padding=1), 2, 8, 8), 2)
    for mesh, message in ((Mesh(cp=2, tp=(2,)), "not go with tp yet"), (Mesh(cp=2, pp=2), "not go with pp yet"), (Mesh(cp=4), "plan again")):
        with pytest.raises(RequestError, match=message):
            Plan("t", 4, mesh, micro_batches=2, spatial=policy)


# -- what it costs --


def test_work_and_memory_shrink_and_every_rank_has_its_own_ledger() -> None:
    task = zoo.load("cosmoflow-tiny")
    flow, profile = trace_dataflow(task), trace_task(task)
    plan = Plan("t", 8, Mesh(cp=3), spatial=choose_spatial(flow, 3, (3, 1)))
    alone = {layer.name: layer for layer in profile.layers}
    for layer in local_profile(plan, profile, 0).layers:
        whole = alone[layer.name]
        part = 1 / 3 if layer.name in ("layers.0", "layers.1") else 1.0
        if layer.name in ("layers.0", "layers.1", "dense1"):
            assert layer.flops_forward == pytest.approx(whole.flops_forward * part)
            assert layer.activation_bytes == pytest.approx(whole.activation_bytes * part)
    ledgers = plan_ledgers(plan, profile)
    assert list(ledgers) == ["0", "1", "2"]
    halos: list[Any] = [sum(line.calls for line in lines if line.name.startswith("halo/")) for lines in ledgers.values()]
    assert halos[1] == 2 * halos[0] == 2 * halos[2]  # the one in the middle has two neighbours
    assert len(build_schedule(plan, profile).programs) == 3


def test_zoo_and_users_networks_are_cut() -> None:
    for name in convolutional.NAMES:
        flow = trace_module_dataflow(convolutional.build(name).double(), convolutional.loss, convolutional.batch(name, 2, 0))
        policy = choose_spatial(flow, 4)
        assert policy.grid == (2, 2) and len(policy.window_ops) >= 4
