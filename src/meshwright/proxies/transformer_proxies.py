"""Proxies of GPT-2 and BERT (communication only) and of GPT-3, dense and with experts; the hybrid proxies are GPT-3 with other defaults.

Constants: microseconds were measured for one layer on one A100, sizes follow from the width. A block of width h has
12h² + 13h parameters; a dense GPT-3 layer is counted by its matrices alone, as in the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import RequestError
from meshwright.core.pipeline_schedules import PipelineSchedule, schedule_traits
from meshwright.core.schedule import Schedule
from meshwright.proxies.pipeline_proxy import GradientReduction, LayerPass, PipelineProxySpec, build_pipeline, two_per_layer
from meshwright.proxies.proxy_program import ProgramBuilder, ProxyConfig, RankGrid, build_schedule, require_multiple

RankOrder = Literal["pipeline", "tensor"]


@dataclass(frozen=True)
class PipelineProxyConfig(ProxyConfig):
    """A pipeline without computation. `hidden` × `tokens` is the size of a boundary activation."""

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
class BertProxyConfig(PipelineProxyConfig):
    layers: int = 24
    hidden: int = 1024
    tokens: int = 1025
    vocabulary: int = 30522
    positions: int = 512


def gpt2(config: PipelineProxyConfig, world: int) -> Schedule:
    """GPT-2: embeddings before the first block; an untied head and the final norm in the last. Tensors are in the original's order."""
    h, v = config.hidden, config.vocabulary
    matrices, vectors = [h, 3 * h * h, h * h, h, 4 * h * h, 4 * h * h, h], [3 * h, h, h, 4 * h, h]
    first = [v * h, config.positions * h, *matrices, *vectors]
    return _communication_only("gpt2", config, world, first, [*matrices, *vectors], [*matrices, v * h, h, *vectors, h])


def bert(config: BertProxyConfig, world: int) -> Schedule:
    """BERT: embeddings with token types and a norm; the pooler, both heads and the head's transform in the last block, in the original's order."""
    h, v = config.hidden, config.vocabulary
    matrices, vectors = [*[h * h] * 4, 4 * h * h, 4 * h * h], [*[h] * 6, 4 * h, h, h, h]
    first = [v * h, config.positions * h, 2 * h, *matrices, h, h, *vectors]
    last = [*matrices, h * h, h * h, v * h, 2 * h, *vectors, h, v, h, h, h, 2]
    return _communication_only("bert", config, world, first, [*matrices, *vectors], last)


def _communication_only(
    name: str, config: PipelineProxyConfig, world: int, first_tensors: list[int], block_tensors: list[int], last_tensors: list[int]
) -> Schedule:
    require_multiple(name, world, _require_positive(name, "stages", config.stages), "stages")

    def gradient_reductions(layer: int) -> Sequence[GradientReduction]:
        tensors = first_tensors if layer == 0 else last_tensors if layer == config.layers - 1 else block_tensors
        sizes = tensors if config.gradients == "tensor" else [sum(tensors)]
        return [("grads/layer", "dp", config.float_bytes(n)) for n in sizes]

    grid, boundary_bytes = RankGrid(world // config.stages, 1, config.stages), config.float_bytes(config.tokens * config.hidden)
    data_dependent = not schedule_traits(config.order).forward_first  # other schedules are meaningless without data dependencies
    sizes = (config.layers, config.micro_batches, boundary_bytes, LayerPass(), LayerPass())
    return build_pipeline(PipelineProxySpec(name, grid, *sizes, gradient_reductions, config.order, config.chunks, data_dependent, config.overlap))


@dataclass(frozen=True)
class GPT3ProxyConfig(ProxyConfig):
    """A dense transformer over replicas, shards and stages. `layers` = 0 means one per stage and chunk, `micro_batches` = 0 means stages × scale."""

    stages: int = 96
    scale: int = 2  # micro-batches per stage
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
    def num_layers(self) -> int:
        return self.layers or self.stages * self.chunks

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches or self.stages * self.scale

    @property
    def boundary_bytes(self) -> int:
        return self.float_bytes(self.tokens * self.hidden)

    def layer_passes(self) -> tuple[LayerPass, LayerPass]:
        """The forward and backward pass of a layer on one rank. FLOPs: products with its 12h² weights, and attention over the sequence."""
        flops = self.scaled_flops((24.0 * self.tokens * self.hidden**2 + 4.0 * self.tokens**2 * self.hidden) / self.shards)
        collectives = two_per_layer("tp", "all_reduce", self.boundary_bytes)
        forward, backward = self.scaled_seconds(self.forward_us), self.scaled_seconds(self.backward_us)
        return LayerPass(forward, flops, collectives), LayerPass(backward, 2 * flops, collectives)

    def layer_gradients(self) -> list[GradientReduction]:
        h2 = self.hidden**2
        tensors = [3 * h2, h2, 4 * h2, 4 * h2] if self.gradients == "tensor" else [12 * h2]
        return [("grads/layer", "dp", self.float_bytes(n / self.shards)) for n in tensors]

    def grid(self, name: str, world: int) -> RankGrid:
        return _rank_grid(name, world, self.stages, self.shards, self.rank_order, "shards")


def gpt3(config: GPT3ProxyConfig, world: int, name: str = "gpt3") -> Schedule:
    gradients = config.layer_gradients()
    sizes = (config.num_layers, config.num_micro_batches, config.boundary_bytes, *config.layer_passes())
    spec = PipelineProxySpec(name, config.grid(name, world), *sizes, lambda _: gradients, config.order, config.chunks, overlap=config.overlap)
    return build_pipeline(spec)


@dataclass(frozen=True)
class MoEProxyConfig(GPT3ProxyConfig):
    """GPT-3 whose feed-forward parts are experts, one on each of `experts` ranks (`shards` is not used). Expert gradients are reduced among the ranks
    with the same expert, attention gradients among all ranks of a stage."""

    experts: int = 16
    forward_us: float = 22367.0  # attention
    backward_us: float = 44734.0
    expert_forward_us: float = 41293.0  # all of a layer's feed-forward work, shared by the experts
    expert_backward_us: float = 82586.0

    def layer_passes(self) -> tuple[LayerPass, LayerPass]:
        collectives = two_per_layer("experts", "all_to_all", self.float_bytes(self.tokens * self.hidden / self.experts) * self.experts)
        h2 = self.hidden**2
        flops = self.scaled_flops(self.tokens * (8.0 * h2 + 4.0 * self.tokens * self.hidden + 16.0 * h2 / self.experts))
        forward = self.scaled_seconds(self.forward_us + self.expert_forward_us / self.experts)
        backward = self.scaled_seconds(self.backward_us + self.expert_backward_us / self.experts)
        return LayerPass(forward, flops, collectives), LayerPass(backward, 2 * flops, collectives)

    def layer_gradients(self) -> list[GradientReduction]:
        h2 = self.hidden**2
        experts, attention = ([8 * h2], [4 * h2]) if self.gradients == "bucketed" else ([4 * h2, 4 * h2], [3 * h2, h2])
        reductions = [("grads/experts", "dp", self.float_bytes(n / self.experts)) for n in experts]
        return reductions + [("grads/attention", "replica", self.float_bytes(n)) for n in attention]

    def grid(self, name: str, world: int) -> RankGrid:
        return _rank_grid(name, world, self.stages, self.experts, self.rank_order, "experts")


def one_pipeline_step(config: GPT3ProxyConfig, world: int, name: str) -> Schedule:
    """The steady state of 1F1B for two neighbours: even stages compute forward and send activations, odd ones compute backward and send gradients."""
    grid, boundary_bytes = config.grid(name, world), config.boundary_bytes
    forward, backward = config.layer_passes()
    if grid.stages % 2:
        raise RequestError(f"{name}: {grid.stages} stages are odd, and they work in pairs: use {grid.stages + 1} stages")
    groups = grid.groups()
    programs = []
    for stage in range(grid.stages):
        even = stage % 2 == 0
        layer, peer, phase, other = (forward, stage + 1, "forward", "backward") if even else (backward, stage - 1, "backward", "forward")
        out = ProgramBuilder()
        received = out.receive(f"p2p/{other}/in", "pp_back" if even else "pp", peer, boundary_bytes)
        out.compute(phase, layer.seconds, layer.flops, op="forward" if even else "backward")
        for i, (kind, op, size) in enumerate(layer.collectives if grid.shards > 1 else ()):
            out.collective(f"{kind}/{phase}/{i}", op, "tp", size)
        sent = out.send(f"p2p/{phase}", "pp" if even else "pp_back", peer, boundary_bytes)
        out.wait("wait/crossings", (received, sent))
        programs.append(out)
    return build_schedule(name, grid.replicas * grid.shards * grid.stages, groups, programs, grid.stage)


def _rank_grid(name: str, world: int, stages: int, shards: int, rank_order: RankOrder, shards_name: str) -> RankGrid:
    unit = _require_positive(name, "stages", stages) * _require_positive(name, shards_name, shards)
    require_multiple(name, world, unit, f"stages × {shards_name} = {stages} × {shards}")
    return RankGrid(world // unit, shards, stages, rank_order)


def _require_positive(name: str, setting: str, number: int) -> int:
    if number < 1:
        raise RequestError(f"{name}: {setting}={number}: give at least 1")
    return number
