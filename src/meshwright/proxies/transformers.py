"""GPT-2 and BERT (communication alone), GPT-3 dense and with experts, and the hybrids that are GPT-3 with every knob free.

Where the constants come from: microseconds were measured for one layer on one A100, sizes follow from the width. A block of width h has
12h² + 13h parameters; a dense GPT-3 layer is counted by its matrices alone, as in the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import RequestError
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.core.schedule import Schedule
from meshwright.proxies.parts import Dims, Grid, Program, assemble, need_multiple
from meshwright.proxies.pipeline import Gradient, Pass, Pipeline, build, twice

RankOrder = Literal["pipeline", "tensor"]


@dataclass(frozen=True)
class PipelineDims(Dims):
    """A pipeline without computation. `hidden` and `tokens` make what crosses between stages."""

    layers: int = 48
    stages: int = 4
    micro_batches: int = 8
    hidden: int = 1280
    tokens: int = 632  # of a micro-batch
    vocabulary: int = 50257
    positions: int = 1024
    order: PipelineSchedule = "gpipe"
    chunks: int = 1
    overlap: bool = False


@dataclass(frozen=True)
class BertDims(PipelineDims):
    layers: int = 24
    hidden: int = 1024
    tokens: int = 1025
    vocabulary: int = 30522
    positions: int = 512


def block_tensors(hidden: int) -> list[int]:
    """The parameters of one block: two norms, attention and feed-forward, with their biases."""
    h = hidden
    return [h, 3 * h * h, h * h, h, 4 * h * h, 4 * h * h, h, 3 * h, h, h, 4 * h, h]


def gpt2(dims: PipelineDims, world: int) -> Schedule:
    """Embeddings before the first block; a head of its own and the last norm after the last."""
    ends = ([dims.vocabulary * dims.hidden, dims.positions * dims.hidden], [dims.vocabulary * dims.hidden, dims.hidden, dims.hidden])
    return _communication("gpt2", dims, world, *ends)


def bert(dims: BertDims, world: int) -> Schedule:
    """Embeddings with types and a norm; the pooler, both heads and the head's own transform at the end."""
    h, v = dims.hidden, dims.vocabulary
    first = [v * h, dims.positions * h, 2 * h, h, h]
    last = [h * h, h, h * h, h, h, h, v * h, v, 2 * h, 2]
    return _communication("bert", dims, world, first, last)


def _communication(name: str, dims: PipelineDims, world: int, first: list[int], last: list[int]) -> Schedule:
    need_multiple(name, world, _positive(name, "stages", dims.stages), "stages")

    def gradients(layer: int) -> Sequence[Gradient]:
        tensors = first * (layer == 0) + block_tensors(dims.hidden) + last * (layer == dims.layers - 1 and layer > 0)
        sizes = tensors if dims.gradients == "tensor" else [sum(tensors)]
        return [("grads/layer", "dp", dims.floats(n)) for n in sizes]

    return build(
        Pipeline(
            name,
            Grid(world // dims.stages, 1, dims.stages),
            dims.layers,
            dims.micro_batches,
            dims.floats(dims.tokens * dims.hidden),
            Pass(),
            Pass(),
            gradients,
            dims.order,
            dims.chunks,
            chained=not schedule_traits(dims.order).forward_first,  # other orders have no sense without what a stage makes of what it received
            overlap=dims.overlap,
        )
    )


@dataclass(frozen=True)
class GPT3Dims(Dims):
    """A dense transformer over replicas, shards and stages. 0 for `layers` is one a stage and chunk, for `micro_batches` stages × scale."""

    stages: int = 96
    scale: int = 2  # micro-batches for each stage
    shards: int = 4
    layers: int = 0
    micro_batches: int = 0
    hidden: int = 12288
    tokens: int = 2048  # of a micro-batch
    forward_us: float = 15915.0  # one layer of one micro-batch on one shard
    backward_us: float = 31830.0
    order: PipelineSchedule = "gpipe"
    chunks: int = 1
    rank_order: RankOrder = "pipeline"
    overlap: bool = False  # reduce gradients while earlier layers still compute

    @property
    def all_layers(self) -> int:
        return self.layers or self.stages * self.chunks

    @property
    def micro(self) -> int:
        return self.micro_batches or self.stages * self.scale

    def layer_flops(self) -> float:
        """Of one layer's forward on all shards: products with its 12h² weights, and attention over the sequence."""
        return 24.0 * self.tokens * self.hidden**2 + 4.0 * self.tokens**2 * self.hidden


def gpt3(dims: GPT3Dims, world: int, name: str = "gpt3") -> Schedule:
    grid = _grid(name, world, dims.stages, dims.shards, dims.rank_order, "shards")
    wide, h2 = dims.floats(dims.tokens * dims.hidden), dims.hidden**2
    tensors = [3 * h2, h2, 4 * h2, 4 * h2]
    sizes = [n / dims.shards for n in (tensors if dims.gradients == "tensor" else [sum(tensors)])]
    flops = dims.flops(dims.layer_flops() / dims.shards)
    meetings = twice("tp", "all_reduce", wide)
    return build(
        Pipeline(
            name,
            grid,
            dims.all_layers,
            dims.micro,
            wide,
            Pass(dims.seconds(dims.forward_us), flops, meetings),
            Pass(dims.seconds(dims.backward_us), 2 * flops, meetings),
            lambda _: [("grads/layer", "dp", dims.floats(n)) for n in sizes],
            dims.order,
            dims.chunks,
            overlap=dims.overlap,
        )
    )


@dataclass(frozen=True)
class MoEDims(GPT3Dims):
    """GPT-3 whose feed-forward parts are experts, one on each of `experts` ranks (`shards` is not used)."""

    experts: int = 16
    forward_us: float = 22367.0  # attention
    backward_us: float = 44734.0
    expert_forward_us: float = 41293.0  # all of a layer's feed-forward work, shared by the experts
    expert_backward_us: float = 82586.0

    def work(self) -> tuple[Pass, Pass]:
        """A layer forward and backward on one rank."""
        each = self.floats(self.tokens * self.hidden / self.experts)
        meetings = twice("experts", "all_to_all", each * self.experts)
        h2 = self.hidden**2
        flops = self.flops(self.tokens * (8.0 * h2 + 4.0 * self.tokens * self.hidden + 16.0 * h2 / self.experts))
        ahead = self.seconds(self.forward_us + self.expert_forward_us / self.experts)
        back = self.seconds(self.backward_us + self.expert_backward_us / self.experts)
        return Pass(ahead, flops, meetings), Pass(back, 2 * flops, meetings)


def gpt3_moe(dims: MoEDims, world: int, name: str = "gpt3-moe") -> Schedule:
    """Experts are reduced among those who hold the same one, attention among all of a stage."""
    grid = _grid(name, world, dims.stages, dims.experts, dims.rank_order, "experts")
    h2, whole = dims.hidden**2, dims.gradients == "bucketed"
    owned = [n / dims.experts for n in ([8 * h2] if whole else [4 * h2, 4 * h2])]
    common = [4 * h2] if whole else [3 * h2, h2]
    gradients = [("grads/experts", "dp", dims.floats(n)) for n in owned] + [("grads/attention", "replica", dims.floats(n)) for n in common]
    crossing = dims.floats(dims.tokens * dims.hidden)
    pipe = Pipeline(
        name, grid, dims.all_layers, dims.micro, crossing, *dims.work(), lambda _: gradients, dims.order, dims.chunks, overlap=dims.overlap
    )
    return build(pipe)


def gpt3_one_step(dims: GPT3Dims, world: int) -> Schedule:
    wide, flops = dims.floats(dims.tokens * dims.hidden), dims.flops(dims.layer_flops() / dims.shards)
    meetings = twice("tp", "all_reduce", wide)
    passes = Pass(dims.seconds(dims.forward_us), flops, meetings), Pass(dims.seconds(dims.backward_us), 2 * flops, meetings)
    name = "gpt3-one-pipe-step"
    return _one_step(name, _grid(name, world, dims.stages, dims.shards, dims.rank_order, "shards"), wide, *passes)


def gpt3_moe_one_step(dims: MoEDims, world: int) -> Schedule:
    name = "gpt3-moe-one-pipe-step"
    grid = _grid(name, world, dims.stages, dims.experts, dims.rank_order, "experts")
    return _one_step(name, grid, dims.floats(dims.tokens * dims.hidden), *dims.work())


def _one_step(name: str, grid: Grid, crossing: int, ahead: Pass, back: Pass) -> Schedule:
    """The steady state of 1F1B for two neighbours: even stages compute forward and send on, odd ones compute backward and send back."""
    if grid.stages % 2:
        raise RequestError(f"{name}: {grid.stages} stages are odd, and they work in pairs: use {grid.stages + 1} stages")
    groups = grid.groups()
    programs = []
    for stage in range(grid.stages):
        even = stage % 2 == 0
        work, peer, phase = (ahead, stage + 1, "forward") if even else (back, stage - 1, "backward")
        out = Program()
        other = "backward" if even else "forward"
        arrives = out.receive(f"p2p/{other}/in", "pp_back" if even else "pp", peer, crossing)
        out.compute(phase, work.seconds, work.flops, op="forward" if even else "backward")
        for at, (kind, op, size) in enumerate(work.meetings if grid.shards > 1 else ()):
            out.call(f"{kind}/{phase}/{at}", op, "tp", size)
        leaves = out.send(f"p2p/{phase}", "pp" if even else "pp_back", peer, crossing)
        out.wait("wait/crossings", (arrives, leaves))
        programs.append(out)
    return assemble(name, grid.replicas * grid.shards * grid.stages, groups, programs, grid.stage)


def _grid(name: str, world: int, stages: int, shards: int, order: RankOrder, what: str) -> Grid:
    unit = _positive(name, "stages", stages) * _positive(name, what, shards)
    need_multiple(name, world, unit, f"stages × {what} = {stages} × {shards}")
    return Grid(world // unit, shards, stages, order)


def _positive(name: str, what: str, number: int) -> int:
    if number < 1:
        raise RequestError(f"{name}: {what}={number}: give at least 1")
    return number
