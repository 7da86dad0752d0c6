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


def block_tensors(hidden: int) -> list[int]:
    """Sizes of the parameters of one block: two norms, attention and feed-forward, with their biases."""
    h = hidden
    return [h, 3 * h * h, h * h, h, 4 * h * h, 4 * h * h, h, 3 * h, h, h, 4 * h, h]


def gpt2(config: PipelineProxyConfig, world: int) -> Schedule:
    """GPT-2: embeddings before the first block; an untied head and the final norm after the last."""
    ends = ([config.vocabulary * config.hidden, config.positions * config.hidden], [config.vocabulary * config.hidden, config.hidden, config.hidden])
    return _communication_only("gpt2", config, world, *ends)


def bert(config: BertProxyConfig, world: int) -> Schedule:
    """BERT: embeddings with token types and a norm; the pooler, both heads and the head's transform at the end."""
    h, v = config.hidden, config.vocabulary
    first = [v * h, config.positions * h, 2 * h, h, h]
    last = [h * h, h, h * h, h, h, h, v * h, v, 2 * h, 2]
    return _communication_only("bert", config, world, first, last)


def _communication_only(name: str, config: PipelineProxyConfig, world: int, first_tensors: list[int], last_tensors: list[int]) -> Schedule:
    require_multiple(name, world, _require_positive(name, "stages", config.stages), "stages")

    def gradient_reductions(layer: int) -> Sequence[GradientReduction]:
        tensors = first_tensors * (layer == 0) + block_tensors(config.hidden) + last_tensors * (layer == config.layers - 1 and layer > 0)
        sizes = tensors if config.gradients == "tensor" else [sum(tensors)]
        return [("grads/layer", "dp", config.float_bytes(n)) for n in sizes]

    return build_pipeline(
        PipelineProxySpec(
            name,
            RankGrid(world // config.stages, 1, config.stages),
            config.layers,
            config.micro_batches,
            config.float_bytes(config.tokens * config.hidden),
            LayerPass(),
            LayerPass(),
            gradient_reductions,
            config.order,
            config.chunks,
            data_dependent=not schedule_traits(config.order).forward_first,  # other schedules are meaningless without data dependencies
            overlap=config.overlap,
        )
    )


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

    def layer_flops(self) -> float:
        """FLOPs of one layer's forward on all shards: products with its 12h² weights, and attention over the sequence."""
        return 24.0 * self.tokens * self.hidden**2 + 4.0 * self.tokens**2 * self.hidden


def gpt3(config: GPT3ProxyConfig, world: int, name: str = "gpt3") -> Schedule:
    grid = _rank_grid(name, world, config.stages, config.shards, config.rank_order, "shards")
    wide, h2 = config.float_bytes(config.tokens * config.hidden), config.hidden**2
    tensors = [3 * h2, h2, 4 * h2, 4 * h2]
    sizes = [n / config.shards for n in (tensors if config.gradients == "tensor" else [sum(tensors)])]
    flops = config.scaled_flops(config.layer_flops() / config.shards)
    sites = two_per_layer("tp", "all_reduce", wide)
    return build_pipeline(
        PipelineProxySpec(
            name,
            grid,
            config.num_layers,
            config.num_micro_batches,
            wide,
            LayerPass(config.scaled_seconds(config.forward_us), flops, sites),
            LayerPass(config.scaled_seconds(config.backward_us), 2 * flops, sites),
            lambda _: [("grads/layer", "dp", config.float_bytes(n)) for n in sizes],
            config.order,
            config.chunks,
            overlap=config.overlap,
        )
    )


@dataclass(frozen=True)
class MoEProxyConfig(GPT3ProxyConfig):
    """GPT-3 whose feed-forward parts are experts, one on each of `experts` ranks (`shards` is not used)."""

    experts: int = 16
    forward_us: float = 22367.0  # attention
    backward_us: float = 44734.0
    expert_forward_us: float = 41293.0  # all of a layer's feed-forward work, shared by the experts
    expert_backward_us: float = 82586.0

    def layer_passes(self) -> tuple[LayerPass, LayerPass]:
        """The forward and backward pass of a layer on one rank."""
        each = self.float_bytes(self.tokens * self.hidden / self.experts)
        sites = two_per_layer("experts", "all_to_all", each * self.experts)
        h2 = self.hidden**2
        flops = self.scaled_flops(self.tokens * (8.0 * h2 + 4.0 * self.tokens * self.hidden + 16.0 * h2 / self.experts))
        ahead = self.scaled_seconds(self.forward_us + self.expert_forward_us / self.experts)
        back = self.scaled_seconds(self.backward_us + self.expert_backward_us / self.experts)
        return LayerPass(ahead, flops, sites), LayerPass(back, 2 * flops, sites)


def gpt3_moe(config: MoEProxyConfig, world: int, name: str = "gpt3-moe") -> Schedule:
    """Expert gradients are reduced among the ranks with the same expert, attention gradients among all ranks of a stage."""
    grid = _rank_grid(name, world, config.stages, config.experts, config.rank_order, "experts")
    h2, whole = config.hidden**2, config.gradients == "bucketed"
    owned = [n / config.experts for n in ([8 * h2] if whole else [4 * h2, 4 * h2])]
    common = [4 * h2] if whole else [3 * h2, h2]
    gradients = [("grads/experts", "dp", config.float_bytes(n)) for n in owned] + [
        ("grads/attention", "replica", config.float_bytes(n)) for n in common
    ]
    crossing = config.float_bytes(config.tokens * config.hidden)
    pipe = PipelineProxySpec(
        name,
        grid,
        config.num_layers,
        config.num_micro_batches,
        crossing,
        *config.layer_passes(),
        lambda _: gradients,
        config.order,
        config.chunks,
        overlap=config.overlap,
    )
    return build_pipeline(pipe)


def gpt3_one_step(config: GPT3ProxyConfig, world: int) -> Schedule:
    wide, flops = config.float_bytes(config.tokens * config.hidden), config.scaled_flops(config.layer_flops() / config.shards)
    sites = two_per_layer("tp", "all_reduce", wide)
    passes = (
        LayerPass(config.scaled_seconds(config.forward_us), flops, sites),
        LayerPass(config.scaled_seconds(config.backward_us), 2 * flops, sites),
    )
    name = "gpt3-one-pipe-step"
    return _steady_step(name, _rank_grid(name, world, config.stages, config.shards, config.rank_order, "shards"), wide, *passes)


def gpt3_moe_one_step(config: MoEProxyConfig, world: int) -> Schedule:
    name = "gpt3-moe-one-pipe-step"
    grid = _rank_grid(name, world, config.stages, config.experts, config.rank_order, "experts")
    return _steady_step(name, grid, config.float_bytes(config.tokens * config.hidden), *config.layer_passes())


def _steady_step(name: str, grid: RankGrid, boundary_bytes: int, forward: LayerPass, backward: LayerPass) -> Schedule:
    """The steady state of 1F1B for two neighbours: even stages compute forward and send activations, odd ones compute backward and send gradients."""
    if grid.stages % 2:
        raise RequestError(f"{name}: {grid.stages} stages are odd, and they work in pairs: use {grid.stages + 1} stages")
    groups = grid.groups()
    programs = []
    for stage in range(grid.stages):
        even = stage % 2 == 0
        work, peer, phase = (forward, stage + 1, "forward") if even else (backward, stage - 1, "backward")
        out = ProgramBuilder()
        other = "backward" if even else "forward"
        arrives = out.receive(f"p2p/{other}/in", "pp_back" if even else "pp", peer, boundary_bytes)
        out.compute(phase, work.seconds, work.flops, op="forward" if even else "backward")
        for at, (kind, op, size) in enumerate(work.collectives if grid.shards > 1 else ()):
            out.collective(f"{kind}/{phase}/{at}", op, "tp", size)
        leaves = out.send(f"p2p/{phase}", "pp" if even else "pp_back", peer, boundary_bytes)
        out.wait("wait/crossings", (arrives, leaves))
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
