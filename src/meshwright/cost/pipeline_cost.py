"""A pipeline's step time and the micro-batches it holds in flight, from the schedule that its ranks execute.

[Note: pipeline step time]
An action starts when the rank's previous action has ended and the neighbouring stage's message has arrived; a transfer starts when both ends are
ready, so its time is counted at the receiver. The step time is the longest path through all actions. With many micro-batches, only enough are
simulated to reach a steady state: until every rank's actions are later by the same amount than those some micro-batches before, or until the time per
micro-batch equals the busiest rank's work, beyond which it does not grow. The rest is extrapolated. GPipe's ranks do not wait for later ones, so each
further micro-batch adds the slowest forward and the slowest backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import ge
from typing import NamedTuple

from meshwright.core.pipeline_schedules import ScheduleTraits, schedule_traits
from meshwright.schedule.pipeline_actions import PipelineAction, pipeline_schedule

_PHASE_INDEX = {"forward": 0, "backward": 1, "weights": 2}
_MAX_FORWARD_ACTIONS = 40_000  # forward actions: beyond this many, the rest is extrapolated from the last increment
_REPEATS_REQUIRED = 4  # micro-batches over which actions must repeat, where the schedule repeats with every micro-batch


class PipelineSpec(NamedTuple):
    """Determines the order of each pipeline rank's actions."""

    schedule: str
    ranks: int
    micro_batches: int
    chunks: int = 1  # stages per rank

    @property
    def traits(self) -> ScheduleTraits:
        return schedule_traits(self.schedule)

    def stages(self, rank: int) -> tuple[int, ...]:
        """A rank's stages, in the order of its chunks."""
        return self.traits.stages_of(rank, self.ranks, self.chunks)


class StageTime(NamedTuple):
    """Seconds of one micro-batch in one stage; backward is split in two where the schedule splits it."""

    forward: float
    backward: float
    weight_grad: float = 0.0
    receive_times: tuple[float, float] = (0.0, 0.0)  # messages: activations from the previous stage, gradients from the next one
    send_overheads: tuple[float, float] = (0.0, 0.0)  # the rank's cost of a send, within `forward` and `backward`; the message leaves before it


def finish_times(pipeline: PipelineSpec, stages: Sequence[StageTime]) -> list[float]:
    """When each rank finishes its last action (see [Note: pipeline step time])."""
    if pipeline.traits.forward_first:
        return _gpipe_finish_times(pipeline, stages)
    period, simulated = _repeat_period(pipeline), _initial_micro_batches(pipeline)
    busiest = max(sum(sum(stages[s][:3]) + sum(stages[s].receive_times) for s in pipeline.stages(rank)) for rank in range(pipeline.ranks))
    before: tuple[int, float] | None = None
    while simulated < pipeline.micro_batches:
        graph = _build_graph(pipeline._replace(micro_batches=simulated), period)
        ends = graph.end_times(stages)
        remaining, finish = pipeline.micro_batches - simulated, graph.finish_times(ends)
        for lag in (lag for lag in (period, pipeline.ranks) if remaining % lag == 0):
            if (increment := graph.steady_increment(ends, lag)) is not None:
                return [end + remaining // lag * increment for end in finish]
        slope = (max(finish) - before[1]) / (simulated - before[0]) if before is not None else 0.0
        if abs(slope - busiest) <= 1e-9 * max(finish) or simulated * len(stages) > _MAX_FORWARD_ACTIONS:
            return [end + remaining * max(busiest, slope) for end in finish]
        before, step = (simulated, max(finish)), max(period, pipeline.ranks)
        simulated += -(-simulated // (2 * step)) * step
    graph = _build_graph(pipeline, period)
    return graph.finish_times(graph.end_times(stages))


def lower_bound_seconds(
    pipeline: PipelineSpec, stages: Sequence[StageTime], extra: Sequence[float] = (), after_last: Sequence[float] = ()
) -> tuple[float, float]:
    """Lower bounds on the step time, as (maximum, mean) over the ranks: a rank's fill time, its work with `extra` seconds per micro-batch, and
    `after_last` seconds; plus its drain time, unless weight gradients come last."""
    fill = [0.0, *accumulate(stage.forward for stage in stages[: pipeline.ranks])]
    drain = [0.0, *accumulate(stage.backward for stage in stages[: pipeline.ranks])]
    after = after_last or [0.0] * pipeline.ranks
    end = after if pipeline.traits.splits_backward else [max(d + after[0], a) for d, a in zip(drain, after, strict=False)]
    work = [sum(sum(stages[s][:3]) for s in pipeline.stages(rank)) + (extra[rank] if extra else 0.0) for rank in range(pipeline.ranks)]
    bounds = [fill[rank] + pipeline.micro_batches * seconds + end[rank] for rank, seconds in enumerate(work)]
    return max(bounds), sum(bounds) / len(bounds)


def in_flight_by_stage(pipeline: PipelineSpec, rank: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches that each of a rank's stages holds, at the Pareto-maximal moments: whatever the bytes per micro-batch of each stage, the
    rank's peak is among them."""
    if pipeline.ranks == 1:
        return ((1,),)
    if (in_flight := pipeline.traits.in_flight) is not None:
        return ((in_flight(pipeline.ranks, rank, pipeline.micro_batches),),)
    period = _repeat_period(pipeline)
    micro_batches = min(pipeline.micro_batches, 3 * -(-pipeline.ranks // period) * period)  # from there on the counts repeat
    return _in_flight_by_stage(pipeline._replace(micro_batches=micro_batches), rank, period)


@lru_cache(maxsize=4096)
def _in_flight_by_stage(pipeline: PipelineSpec, rank: int, period: int) -> tuple[tuple[int, ...], ...]:
    counts, moments = [0] * pipeline.chunks, set()
    freeing_phase = "weights" if pipeline.traits.splits_backward else "backward"
    for action in _rank_actions(pipeline, rank, period):
        if action.phase == "forward":
            counts[action.chunk] += 1
            moments.add(tuple(counts))
        elif action.phase == freeing_phase:
            counts[action.chunk] -= 1
    return pareto_maxima(moments)


def pareto_maxima(counts: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The tuples that no other tuple dominates (is at least as large in every entry)."""
    maxima: list[tuple[int, ...]] = []
    for count in sorted(counts, reverse=True):  # a dominating tuple comes earlier in this order
        if not any(all(map(ge, other, count)) for other in maxima):
            maxima.append(count)
    return tuple(maxima)


def _rank_actions(pipeline: PipelineSpec, rank: int, period: int) -> list[PipelineAction]:
    return pipeline_schedule(pipeline.schedule, pipeline.ranks, rank, pipeline.micro_batches, pipeline.chunks, period)


def _repeat_period(pipeline: PipelineSpec) -> int:
    """Number of micro-batches after which a rank's order of actions repeats."""
    return pipeline.traits.micro_batches_per_round(pipeline.ranks, pipeline.micro_batches)


def _initial_micro_batches(pipeline: PipelineSpec) -> int:
    """Micro-batches to simulate first: enough to fill the pipeline and repeat; the number left is a multiple of the period."""
    if pipeline.traits.in_rounds:
        return 5 * _repeat_period(pipeline)
    fewest = (3 if pipeline.traits.splits_backward else 2) * pipeline.ranks + _REPEATS_REQUIRED + 2
    return fewest + (pipeline.micro_batches - fewest) % pipeline.ranks


def _gpipe_finish_times(pipeline: PipelineSpec, stages: Sequence[StageTime]) -> list[float]:
    simulated = min(pipeline.micro_batches, 2)
    graphs = [_build_graph(pipeline._replace(micro_batches=n), 1) for n in range(1, simulated + 1)]
    one, two = (graph.finish_times(graph.end_times(stages)) for graph in (graphs[0], graphs[-1]))
    return [last + (pipeline.micro_batches - simulated) * (last - first) for first, last in zip(one, two, strict=True)]


@dataclass(frozen=True)
class ActionGraph:
    """All actions in topological order, each as (row of the rank's previous action, row of the neighbour's action it needs, kind)."""

    rows: tuple[tuple[int, int, int], ...]
    rank_rows: tuple[tuple[int, ...], ...]  # each rank's actions, as row numbers from 1; row 0 is the start
    rank_actions: tuple[list[PipelineAction], ...]

    def end_times(self, stages: Sequence[StageTime]) -> list[float]:
        """The end of each action; the first entry is the start."""
        seconds, send_leads = action_times(stages)
        ends = [0.0]
        for before, needs, kind in self.rows:
            start, arrives = ends[before], ends[needs] - send_leads[kind]
            ends.append((arrives if arrives > start else start) + seconds[kind])
        return ends

    def finish_times(self, ends: Sequence[float]) -> list[float]:
        return [ends[rows[-1]] for rows in self.rank_rows]

    def steady_increment(self, ends: Sequence[float], lag: int) -> float | None:
        """How much later all ranks' actions are than `lag` micro-batches before; None if not by the same amount everywhere."""
        first = self._rank_increment(ends, lag, 0)
        others = (self._rank_increment(ends, lag, rank) for rank in range(1, len(self.rank_rows)))
        return first if first is not None and all(other is not None and abs(other - first) <= 1e-9 * ends[-1] for other in others) else None

    def _rank_increment(self, ends: Sequence[float], lag: int, rank: int) -> float | None:
        """How much later a rank's last repeating actions are than those `lag` micro-batches before; None if not all by the same amount."""
        rows, window = self.rank_rows[rank], _repeating_window(self.rank_actions[rank], lag)
        if window is None:
            return None
        first, end, distance = window
        increments = [ends[rows[i + distance]] - ends[rows[i]] for i in range(first, end)]
        return increments[0] if max(increments) - min(increments) <= 1e-9 * ends[rows[end]] else None


def _repeating_window(actions: Sequence[PipelineAction], lag: int) -> tuple[int, int, int] | None:
    """(first, end, distance in actions) of the last actions in a rank's order that recur `lag` micro-batches later; None if there are too few."""
    distance = lag * len(actions) // (1 + max(action.micro_batch for action in actions))

    def repeats(i: int) -> bool:
        phase, chunk, micro_batch = actions[i]
        return actions[i + distance] == (phase, chunk, micro_batch + lag)

    end = next((i for i in range(len(actions) - distance - 1, -1, -1) if actions[i].phase == "forward" and repeats(i)), -1) + 1
    first = end - max(distance, _REPEATS_REQUIRED * distance // lag)
    return (first, end, distance) if first >= 0 and all(map(repeats, range(first, end))) else None


def action_times(stages: Sequence[StageTime]) -> tuple[list[float], list[float]]:
    """By phase and stage: seconds of an action including the message it receives, and how long before the neighbour's end that message left."""
    forward = [stage.receive_times[0] + stage.forward for stage in stages]
    backward = [stage.receive_times[1] + stage.backward for stage in stages]
    ahead = [0.0, *(before.send_overheads[0] for before, _ in pairwise(stages))]
    back = [*(after.send_overheads[1] for _, after in pairwise(stages)), 0.0]
    return [*forward, *backward, *(stage.weight_grad for stage in stages)], [*ahead, *back, *[0.0] * len(stages)]


def action_graph(pipeline: PipelineSpec, micro_batches: int) -> ActionGraph:
    """The graph of `micro_batches` micro-batches, in rounds of the schedule's own size."""
    return _build_graph(pipeline._replace(micro_batches=micro_batches), _repeat_period(pipeline))


def schedule_period(pipeline: PipelineSpec) -> int:
    """Number of micro-batches after which all ranks' actions repeat."""
    return _repeat_period(pipeline) if pipeline.traits.in_rounds else pipeline.ranks


@lru_cache(maxsize=64)
def _build_graph(pipeline: PipelineSpec, period: int) -> ActionGraph:
    num_stages = pipeline.ranks * pipeline.chunks
    actions = [_rank_actions(pipeline, rank, period) for rank in range(pipeline.ranks)]
    keys = [list(_action_keys(actions[rank], pipeline.stages(rank), num_stages, pipeline.micro_batches)) for rank in range(pipeline.ranks)]
    row_of = [0] * (3 * num_stages * pipeline.micro_batches + 1)  # rows by key; the last key stands for no dependency
    row_of[-1] = -1
    waiting = [-1] * len(row_of)
    rows: list[tuple[int, int, int]] = []
    rank_rows: list[list[int]] = [[] for _ in actions]
    runnable = list(range(pipeline.ranks - 1, -1, -1))
    while runnable:
        rank = runnable.pop()
        before = rank_rows[rank][-1] if rank_rows[rank] else 0
        for i in range(len(rank_rows[rank]), len(keys[rank])):
            key, needs, kind = keys[rank][i]
            if not row_of[needs]:
                waiting[needs] = rank
                break
            rows.append((before, max(row_of[needs], 0), kind))
            before = row_of[key] = len(rows)
            rank_rows[rank].append(before)
            if waiting[key] >= 0:
                runnable.append(waiting[key])
    return ActionGraph(tuple(rows), tuple(map(tuple, rank_rows)), tuple(actions))


def _action_keys(actions: Sequence[PipelineAction], rank_stages: Sequence[int], stages: int, micro_batches: int) -> Iterator[tuple[int, int, int]]:
    """For each action: its key, the key of the action on another stage that it needs (the previous stage's activations or the next one's
    gradients), and its kind."""
    no_dependency = 3 * stages * micro_batches
    for phase, chunk, micro_batch in actions:
        stage = rank_stages[chunk]
        kind = _PHASE_INDEX[phase] * stages + stage
        key = kind * micro_batches + micro_batch
        before, after = phase == "forward" and stage > 0, phase == "backward" and stage < stages - 1
        yield key, key - micro_batches if before else key + micro_batches if after else no_dependency, kind


def max_in_flight(pipeline: PipelineSpec, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """`in_flight_by_stage` over several ranks with equivalent stages."""
    yield from pareto_maxima({counts for rank in ranks for counts in in_flight_by_stage(pipeline, rank)})
