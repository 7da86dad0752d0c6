"""Builds the schedule of a pipeline of micro-batches with each layer's collectives, for the GPT, BERT and hybrid proxies.

[Note: two groups for one pipeline]
Activations go over the group `pp`, gradients over `pp_back`, which has the same ranks. Messages of one group between two ranks are matched in the
order of their sends; 1F1B and interleaved schedules send in both directions concurrently, and one group would mix these up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.core.errors import RequestError
from meshwright.core.pipeline_schedules import SCHEDULES, schedule_traits
from meshwright.core.schedule import Op, Schedule
from meshwright.proxies.proxy_program import ProgramBuilder, RankGrid, build_schedule
from meshwright.schedule.pipeline_actions import PipelineAction, check_pipeline_order, pipeline_schedule

LayerCollective = tuple[str, Op, int]  # name, operation, bytes: a blocking call among the shards of a stage
GradientReduction = tuple[str, str, int]  # name, group, bytes: an all-reduce


def two_per_layer(name: str, op: Op, size: int) -> tuple[LayerCollective, ...]:
    """Two equal collectives of a layer: one after attention, one after the feed-forward part."""
    return ((name, op, size), (name, op, size))


@dataclass(frozen=True)
class LayerPass:
    """The forward or backward pass of one layer: its computation and collectives."""

    seconds: float = 0.0
    flops: float = 0.0
    collectives: tuple[LayerCollective, ...] = ()


@dataclass(frozen=True)
class PipelineProxySpec:
    """Everything that determines the schedule. `gradients(layer)` lists the gradient reductions of a layer of the model."""

    name: str
    grid: RankGrid
    layers: int  # of the whole model
    micro_batches: int
    boundary_bytes: int  # bytes of a boundary activation
    forward: LayerPass
    backward: LayerPass
    gradients: Callable[[int], Sequence[GradientReduction]]
    schedule: str = "gpipe"
    chunks: int = 1
    data_dependent: bool = True  # a stage receives, computes, then sends; if False, it sends and receives at once (communication only)
    overlap: bool = False  # reduce gradients while the backward of earlier layers runs


def build_pipeline(spec: PipelineProxySpec) -> Schedule:
    """One program for each stage of the grid; its replicas and shards run the same one."""
    stages = spec.grid.stages * spec.chunks
    if spec.layers % stages:
        fewer = max(spec.layers // stages, 1) * stages
        raise RequestError(f"{spec.name}: {spec.layers} layers do not divide over {stages} stages: use {fewer} layers, or other stages and chunks")
    if schedule_traits(spec.schedule).splits_backward:
        others = ", ".join(name for name, traits in SCHEDULES.items() if not traits.splits_backward)
        raise RequestError(f"{spec.name}: order {spec.schedule} splits backward, which proxies do not: use one of {others}")
    check_pipeline_order(spec.schedule, spec.grid.stages, spec.micro_batches, spec.chunks)
    groups = spec.grid.groups()
    axes = {axis for axis, lists in groups.items() if len(lists[0]) > 1}
    programs = [_StageProgramBuilder(spec, stage, axes).program() for stage in range(spec.grid.stages)]
    return build_schedule(spec.name, spec.grid.replicas * spec.grid.shards * spec.grid.stages, groups, programs, spec.grid.stage)


class _StageProgramBuilder:
    """Builds the program of one pipeline stage."""

    def __init__(self, spec: PipelineProxySpec, stage_index: int, axes: set[str]) -> None:
        self.spec, self.stage_index, self.axes = spec, stage_index, axes
        self.layers_per_chunk = spec.layers // (spec.grid.stages * spec.chunks)
        self.builder = ProgramBuilder()
        self.last_sent: dict[str, str] = {}
        self.async_reductions: list[str] = []

    def program(self) -> ProgramBuilder:
        pipe = self.spec
        for action in pipeline_schedule(pipe.schedule, pipe.grid.stages, self.stage_index, pipe.micro_batches, pipe.chunks):
            (self._receive_compute_send if pipe.data_dependent else self._exchange_at_once)(action)
        self.builder.wait("wait/crossings", self.last_sent.values())
        if not pipe.overlap:
            for chunk in range(pipe.chunks):
                for layer in range(self.layers_per_chunk):
                    self._reduce_layer(chunk, layer, blocks=True)  # first layer first, as the originals do
        self.builder.wait("wait/gradients", self.async_reductions)
        return self.builder

    def _neighbours(self, action: PipelineAction) -> tuple[int, int, str]:
        """The stages that an action receives from and sends to (-1: none), and the group of its messages."""
        stage = action.chunk * self.spec.grid.stages + self.stage_index
        last = self.spec.grid.stages * self.spec.chunks - 1
        before, after = (stage - 1, stage + 1) if action.phase == "forward" else (stage + 1, stage - 1)
        source, target = (s % self.spec.grid.stages if 0 <= s <= last and self.spec.grid.stages > 1 else -1 for s in (before, after))
        return source, target, "pp" if action.phase == "forward" else "pp_back"

    def _exchange_at_once(self, action: PipelineAction) -> None:
        """Send and receive concurrently, and wait for both."""
        source, target, axis = self._neighbours(action)
        names = []
        if target >= 0:
            names.append(self.builder.send(f"p2p/{action.phase}/{action.micro_batch}", axis, target, self.spec.boundary_bytes))
        if source >= 0:
            names.append(self.builder.receive(f"p2p/{action.phase}/{action.micro_batch}/in", axis, source, self.spec.boundary_bytes))
        self.builder.wait(f"wait/{action.phase}/{action.micro_batch}", names)

    def _receive_compute_send(self, action: PipelineAction) -> None:
        """Receive; wait for the previous send, whose buffer is reused; compute; send; run the layer's collectives."""
        source, target, axis = self._neighbours(action)
        tag = f"{action.phase}/{action.micro_batch}" + (f"/{action.chunk}" if self.spec.chunks > 1 else "")
        if source >= 0:
            self.builder.receive(f"p2p/{tag}/in", axis, source, self.spec.boundary_bytes, blocks=True)
        op: Op = "forward" if action.phase == "forward" else "backward"
        layer = self.spec.forward if op == "forward" else self.spec.backward
        waits = [name] if target >= 0 and (name := self.last_sent.get(action.phase)) else []
        reduces = action.phase == "backward" and self.spec.overlap and action.micro_batch == self.spec.micro_batches - 1
        for number in range(self.layers_per_chunk):
            if layer.seconds or waits:
                self.builder.compute(f"{action.phase}/{number}/{tag}", layer.seconds, layer.flops, op=op, waits=waits)
            waits = []
            if reduces:
                self._reduce_layer(action.chunk, self.layers_per_chunk - 1 - number, blocks=False)
            if number == self.layers_per_chunk - 1 and target >= 0:
                self.last_sent[action.phase] = self.builder.send(f"p2p/{tag}", axis, target, self.spec.boundary_bytes)
            for i, (name, collective, size) in enumerate(layer.collectives if "tp" in self.axes else ()):
                self.builder.collective(f"{name}/{tag}/{number}/{i}", collective, "tp", size)

    def _reduce_layer(self, chunk: int, layer: int, *, blocks: bool) -> None:
        number = (chunk * self.spec.grid.stages + self.stage_index) * self.layers_per_chunk + layer
        for i, (name, axis, size) in enumerate(self.spec.gradients(number)):
            if axis in self.axes:
                reduction = self.builder.collective(f"{name}/{number}/{i}", "all_reduce", axis, size, blocks=blocks)
                self.async_reductions += [] if blocks else [reduction]
