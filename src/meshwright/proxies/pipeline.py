"""A pipeline of micro-batches with whatever a layer communicates on the way: what the GPT and BERT proxies and the hybrids share.

[Note: two names for one pipeline]
Activations go over the group `pp`, gradients over `pp_back`, which joins the same ranks. Messages of one group between two ranks arrive in the
order in which they were sent; in 1F1B and interleaved orders both directions are under way at once, and one group would mix them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.core.errors import RequestError
from meshwright.core.pipeline_schedules import SCHEDULES, schedule_traits
from meshwright.core.schedule import Op, Schedule
from meshwright.proxies.parts import Grid, Program, assemble
from meshwright.schedule.orders import Turn, check_order, turns

Meeting = tuple[str, Op, int]  # name, operation, bytes: blocking, among the shards of a stage
Gradient = tuple[str, str, int]  # name, group, bytes: an all-reduce


def twice(name: str, op: Op, size: int) -> tuple[Meeting, ...]:
    """A layer meets after attention and after its feed-forward part."""
    return ((name, op, size), (name, op, size))


@dataclass(frozen=True)
class Pass:
    """One layer in one direction."""

    seconds: float = 0.0
    flops: float = 0.0
    meetings: tuple[Meeting, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """Everything that decides the schedule. `gradients(layer)` lists what a layer of the model reduces."""

    name: str
    grid: Grid
    layers: int  # of the whole model
    micro: int
    crossing: int  # bytes between stages
    forward: Pass
    backward: Pass
    gradients: Callable[[int], Sequence[Gradient]]
    order: str = "gpipe"
    chunks: int = 1
    chained: bool = True  # a stage sends what it made of what it received; the proxies of communication alone exchange both at once
    overlap: bool = False  # gradients are reduced while the backward pass of earlier layers goes on


def build(pipe: Pipeline) -> Schedule:
    """One program for each stage of the grid; replicas and shards run the same."""
    stages = pipe.grid.stages * pipe.chunks
    if pipe.layers % stages:
        fewer = max(pipe.layers // stages, 1) * stages
        raise RequestError(f"{pipe.name}: {pipe.layers} layers do not divide over {stages} stages: use {fewer} layers, or other stages and chunks")
    if schedule_traits(pipe.order).splits_backward:
        whole = ", ".join(name for name, traits in SCHEDULES.items() if not traits.splits_backward)
        raise RequestError(f"{pipe.name}: order {pipe.order} splits backward, and a proxy's is whole: use one of {whole}")
    check_order(pipe.order, pipe.grid.stages, pipe.micro, pipe.chunks)
    groups = pipe.grid.groups()
    makers = [_Maker(pipe, place, {axis for axis, lists in groups.items() if len(lists[0]) > 1}) for place in range(pipe.grid.stages)]
    world = pipe.grid.replicas * pipe.grid.shards * pipe.grid.stages
    return assemble(pipe.name, world, groups, [m.program() for m in makers], pipe.grid.stage)


class _Maker:
    """Writes the program of one place in the pipeline."""

    def __init__(self, pipe: Pipeline, place: int, axes: set[str]) -> None:
        self.pipe, self.place, self.axes = pipe, place, axes
        self.each = pipe.layers // (pipe.grid.stages * pipe.chunks)
        self.out = Program()
        self.last_sent: dict[str, str] = {}
        self.launched: list[str] = []

    def program(self) -> Program:
        pipe = self.pipe
        for turn in turns(pipe.order, pipe.grid.stages, self.place, pipe.micro, pipe.chunks):
            (self._chained if pipe.chained else self._exchange)(turn)
        self.out.wait("wait/crossings", self.last_sent.values())
        if not pipe.overlap:
            for chunk in reversed(range(pipe.chunks)):
                for layer in reversed(range(self.each)):
                    self._reduce(chunk, layer, blocks=True)
        self.out.wait("wait/gradients", self.launched)
        return self.out

    def _neighbours(self, turn: Turn) -> tuple[int, int, str]:
        """Where a turn's input comes from and its output goes to, as places in the pipeline (-1: nowhere), and over which group."""
        stage = turn.chunk * self.pipe.grid.stages + self.place
        last = self.pipe.grid.stages * self.pipe.chunks - 1
        before, after = (stage - 1, stage + 1) if turn.phase == "forward" else (stage + 1, stage - 1)
        places = [s % self.pipe.grid.stages if 0 <= s <= last and self.pipe.grid.stages > 1 else -1 for s in (before, after)]
        return places[0], places[1], "pp" if turn.phase == "forward" else "pp_back"

    def _exchange(self, turn: Turn) -> None:
        """Send and receive at once, and wait for both."""
        source, target, axis = self._neighbours(turn)
        names = []
        if target >= 0:
            names.append(self.out.send(f"p2p/{turn.phase}/{turn.micro}", axis, target, self.pipe.crossing))
        if source >= 0:
            names.append(self.out.receive(f"p2p/{turn.phase}/{turn.micro}/in", axis, source, self.pipe.crossing))
        self.out.wait(f"wait/{turn.phase}/{turn.micro}", names)

    def _chained(self, turn: Turn) -> None:
        """Receive; wait for the send before this one, whose buffer is used again; compute; send on; meet."""
        source, target, axis = self._neighbours(turn)
        tag = f"{turn.phase}/{turn.micro}" + (f"/{turn.chunk}" if self.pipe.chunks > 1 else "")
        if source >= 0:
            self.out.receive(f"p2p/{tag}/in", axis, source, self.pipe.crossing, blocks=True)
        work = self.pipe.forward if turn.phase == "forward" else self.pipe.backward
        waits = [name] if target >= 0 and (name := self.last_sent.get(turn.phase)) else []
        ends = turn.phase == "backward" and self.pipe.overlap and turn.micro == self.pipe.micro - 1
        for number in range(self.each):
            if work.seconds or waits:
                self.out.compute(
                    f"{turn.phase}/{number}/{tag}", work.seconds, work.flops, op="forward" if turn.phase == "forward" else "backward", waits=waits
                )
            waits = []
            if ends:
                self._reduce(turn.chunk, self.each - 1 - number, blocks=False)
            if number == self.each - 1 and target >= 0:
                self.last_sent[turn.phase] = self.out.send(f"p2p/{tag}", axis, target, self.pipe.crossing)
            for at, (name, op, size) in enumerate(work.meetings if "tp" in self.axes else ()):
                self.out.call(f"{name}/{tag}/{number}/{at}", op, "tp", size)

    def _reduce(self, chunk: int, layer: int, *, blocks: bool) -> None:
        number = (chunk * self.pipe.grid.stages + self.place) * self.each + layer
        for at, (name, axis, size) in enumerate(self.pipe.gradients(number)):
            if axis in self.axes:
                made = self.out.call(f"{name}/{number}/{at}", "all_reduce", axis, size, blocks=blocks)
                self.launched += [] if blocks else [made]
