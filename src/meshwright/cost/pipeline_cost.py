"""A pipeline's time and what it holds, from the order in which its ranks really take their turns.

[Note: turns in time]
A turn begins when the rank has done the one before it and what the neighbouring stage sends has come; a message leaves when both ends are there, so
that it takes its time at the receiver. The longest way through all turns is the time. Of many micro-batches only as many are run as show how it
goes on: until each rank's turns are as much later than those of some micro-batches before as every other rank's, or until time grows by what the
rank with the most to do does, than which it will not grow faster. The rest is added on. GPipe's ranks do not wait for those after them, so there
the slowest forward and the slowest backward are added for each.
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
_MAX_FORWARD_ACTIONS = 40_000  # turns forward: for more of them the rest is added on as it grew last
_REPEATS_REQUIRED = 4  # micro-batches over which turns must repeat, where the order does so with each


class PipelineSpec(NamedTuple):
    """What says in which order the ranks of a pipeline take their turns."""

    schedule: str
    ranks: int
    micro_batches: int
    chunks: int = 1  # stages a rank

    @property
    def traits(self) -> ScheduleTraits:
        return schedule_traits(self.schedule)

    def stages(self, rank: int) -> tuple[int, ...]:
        """A rank's stages, in the order of its chunks."""
        return self.traits.stages_of(rank, self.ranks, self.chunks)


class StageTime(NamedTuple):
    """One micro-batch through one stage, in seconds; backward is cut in two where the schedule splits it."""

    forward: float
    backward: float
    weight_grad: float = 0.0
    receive_times: tuple[float, float] = (0.0, 0.0)  # messages: activations from the stage before, gradients from the one after
    send_overheads: tuple[float, float] = (0.0, 0.0)  # what handing them over costs the rank, within `forward` and `backward`: they leave before


def finish_times(pipeline: PipelineSpec, stages: Sequence[StageTime]) -> list[float]:
    """When each rank has done its last turn."""
    if pipeline.traits.forward_first:
        return _gpipe_finish_times(pipeline, stages)
    unit, few = _repeat_period(pipeline), _initial_micro_batches(pipeline)
    most = max(sum(sum(stages[s][:3]) + sum(stages[s].receive_times) for s in pipeline.stages(rank)) for rank in range(pipeline.ranks))
    before: tuple[int, float] | None = None
    while few < pipeline.micro_batches:
        graph = _build_graph(pipeline._replace(micro_batches=few), unit)
        ends = graph.end_times(stages)
        left, last = pipeline.micro_batches - few, graph.finish_times(ends)
        for lag in (lag for lag in (unit, pipeline.ranks) if left % lag == 0):
            if (more := graph.steady_increment(ends, lag)) is not None:
                return [end + left // lag * more for end in last]
        slope = (max(last) - before[1]) / (few - before[0]) if before is not None else 0.0
        if abs(slope - most) <= 1e-9 * max(last) or few * len(stages) > _MAX_FORWARD_ACTIONS:
            return [end + left * max(most, slope) for end in last]
        before, step = (few, max(last)), max(unit, pipeline.ranks)
        few += -(-few // (2 * step)) * step
    graph = _build_graph(pipeline, unit)
    return graph.finish_times(graph.end_times(stages))


def lower_bound_seconds(
    pipeline: PipelineSpec, stages: Sequence[StageTime], extra: Sequence[float] = (), after_last: Sequence[float] = ()
) -> tuple[float, float]:
    """What no run is below: some rank's work, with what it has to do besides for each micro-batch and after the last, after the way in to it and,
    where gradients of weights do not come last, before the way out. And the mean of that over the ranks."""
    into = [0.0, *accumulate(stage.forward for stage in stages[: pipeline.ranks])]
    out = [0.0, *accumulate(stage.backward for stage in stages[: pipeline.ranks])]
    rest = after_last or [0.0] * pipeline.ranks
    back = rest if pipeline.traits.splits_backward else [max(way + rest[0], own) for way, own in zip(out, rest, strict=False)]
    works = [sum(sum(stages[s][:3]) for s in pipeline.stages(rank)) + (extra[rank] if extra else 0.0) for rank in range(pipeline.ranks)]
    every = [into[rank] + pipeline.micro_batches * work + back[rank] for rank, work in enumerate(works)]
    return max(every), sum(every) / len(every)


def in_flight_by_stage(pipeline: PipelineSpec, rank: int) -> tuple[tuple[int, ...], ...]:
    """How many micro-batches each of a rank's stages holds at once, at the moments at which no other holds as many of all: whatever a stage
    keeps of one, the most that a rank keeps is among them."""
    if pipeline.ranks == 1:
        return ((1,),)
    if (in_flight := pipeline.traits.in_flight) is not None:
        return ((in_flight(pipeline.ranks, rank, pipeline.micro_batches),),)
    period = _repeat_period(pipeline)
    most = min(pipeline.micro_batches, 3 * -(-pipeline.ranks // period) * period)  # from there on it only repeats
    return _in_flight_by_stage(pipeline._replace(micro_batches=most), rank, period)


@lru_cache(maxsize=4096)
def _in_flight_by_stage(pipeline: PipelineSpec, rank: int, period: int) -> tuple[tuple[int, ...], ...]:
    counts, found = [0] * pipeline.chunks, set()
    done = "weights" if pipeline.traits.splits_backward else "backward"
    for action in _rank_actions(pipeline, rank, period):
        if action.phase == "forward":
            counts[action.chunk] += 1
            found.add(tuple(counts))
        elif action.phase == done:
            counts[action.chunk] -= 1
    return pareto_maxima(found)


def pareto_maxima(counts: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those that no other one is at least as large as in everything."""
    found: list[tuple[int, ...]] = []
    for count in sorted(counts, reverse=True):  # one that is at least as large in everything comes before
        if not any(all(map(ge, other, count)) for other in found):
            found.append(count)
    return tuple(found)


def _rank_actions(pipeline: PipelineSpec, rank: int, period: int) -> list[PipelineAction]:
    return pipeline_schedule(pipeline.schedule, pipeline.ranks, rank, pipeline.micro_batches, pipeline.chunks, period)


def _repeat_period(pipeline: PipelineSpec) -> int:
    """After how many micro-batches a rank's order repeats itself."""
    return pipeline.traits.micro_batches_per_round(pipeline.ranks, pipeline.micro_batches)


def _initial_micro_batches(pipeline: PipelineSpec) -> int:
    """As many micro-batches as it takes for a pipeline to fill, and to repeat itself; as many are left over as repeat."""
    if pipeline.traits.in_rounds:
        return 5 * _repeat_period(pipeline)
    few = (3 if pipeline.traits.splits_backward else 2) * pipeline.ranks + _REPEATS_REQUIRED + 2
    return few + (pipeline.micro_batches - few) % pipeline.ranks


def _gpipe_finish_times(pipeline: PipelineSpec, stages: Sequence[StageTime]) -> list[float]:
    few = min(pipeline.micro_batches, 2)
    runs = [(graph := _build_graph(pipeline._replace(micro_batches=n), 1)).finish_times(graph.end_times(stages)) for n in range(1, few + 1)]
    return [last + (pipeline.micro_batches - few) * (last - first) for first, last in zip(runs[0], runs[-1], strict=True)]


@dataclass(frozen=True)
class ActionGraph:
    """All turns so that each comes after those that it waits for: (the rank's one before, the neighbour's, what it does). 0 is the start."""

    rows: tuple[tuple[int, int, int], ...]
    rank_rows: tuple[tuple[int, ...], ...]  # each rank's turns, as numbers of rows from 1 on
    rank_actions: tuple[list[PipelineAction], ...]
    stages: int

    def end_times(self, stages: Sequence[StageTime]) -> list[float]:
        """The end of each turn; the start is the first."""
        seconds, early = action_times(stages)
        found = [0.0]
        for before, needs, kind in self.rows:
            start, arrives = found[before], found[needs] - early[kind]
            found.append((arrives if arrives > start else start) + seconds[kind])
        return found

    def finish_times(self, ends: Sequence[float]) -> list[float]:
        return [ends[rows[-1]] for rows in self.rank_rows]

    def steady_increment(self, ends: Sequence[float], lag: int) -> float | None:
        """By how much all that ranks do is later than it was `lag` micro-batches before: None if not by the same everywhere."""
        found = self._rank_increment(ends, lag, 0)
        others = (self._rank_increment(ends, lag, rank) for rank in range(1, len(self.rank_rows)))
        return found if found is not None and all(o is not None and abs(o - found) <= 1e-9 * ends[-1] for o in others) else None

    def _rank_increment(self, ends: Sequence[float], lag: int, rank: int) -> float | None:
        """By how much the last turns of a rank that repeat come later than those `lag` micro-batches before, if all do by as much."""
        rows, window = self.rank_rows[rank], _repeating_window(self.rank_actions[rank], lag)
        if window is None:
            return None
        first, end, apart = window
        found = [ends[rows[at + apart]] - ends[rows[at]] for at in range(first, end)]
        return found[0] if max(found) - min(found) <= 1e-9 * ends[rows[end]] else None


def _repeating_window(actions: Sequence[PipelineAction], lag: int) -> tuple[int, int, int] | None:
    """(first, end, how far apart) of the last turns of a rank's order to come again `lag` micro-batches later, if they are enough to tell."""
    apart = lag * len(actions) // (1 + max(action.micro_batch for action in actions))
    need = max(apart, _REPEATS_REQUIRED * apart // lag)

    def repeats(at: int) -> bool:
        phase, chunk, micro = actions[at]
        return actions[at + apart] == (phase, chunk, micro + lag)

    end = next((at for at in range(len(actions) - apart - 1, -1, -1) if actions[at].phase == "forward" and repeats(at)), -1) + 1
    first = end - need
    return (first, end, apart) if first >= 0 and all(map(repeats, range(first, end))) else None


def action_times(stages: Sequence[StageTime]) -> tuple[list[float], list[float]]:
    """By phase and stage: what a turn takes with the message before it, and how long before its neighbour's end that message has left."""
    forward = [stage.receive_times[0] + stage.forward for stage in stages]
    backward = [stage.receive_times[1] + stage.backward for stage in stages]
    ahead = [0.0, *(before.send_overheads[0] for before, _ in pairwise(stages))]
    back = [*(after.send_overheads[1] for _, after in pairwise(stages)), 0.0]
    return [*forward, *backward, *(stage.weight_grad for stage in stages)], [*ahead, *back, *[0.0] * len(stages)]


def action_graph(pipeline: PipelineSpec, micro_batches: int) -> ActionGraph:
    """Of so many micro-batches, taken in rounds as the order's own are."""
    return _build_graph(pipeline._replace(micro_batches=micro_batches), _repeat_period(pipeline))


def schedule_period(pipeline: PipelineSpec) -> int:
    """After so many micro-batches all ranks' turns repeat themselves."""
    return _repeat_period(pipeline) if pipeline.traits.in_rounds else pipeline.ranks


@lru_cache(maxsize=64)
def _build_graph(pipeline: PipelineSpec, period: int) -> ActionGraph:
    count = pipeline.ranks * pipeline.chunks
    orders = [_rank_actions(pipeline, rank, period) for rank in range(pipeline.ranks)]
    todo = [list(_action_keys(actions, pipeline.stages(rank), count, pipeline.micro_batches)) for rank, actions in enumerate(orders)]
    numbers = [0] * (3 * count * pipeline.micro_batches + 1)  # of the rows, by key; the last key is of what needs nothing
    numbers[-1] = -1
    waiting = [-1] * len(numbers)
    rows: list[tuple[int, int, int]] = []
    found: list[list[int]] = [[] for _ in orders]
    awake = list(range(pipeline.ranks - 1, -1, -1))
    while awake:
        rank = awake.pop()
        before = found[rank][-1] if found[rank] else 0
        for at in range(len(found[rank]), len(todo[rank])):
            key, needs, kind = todo[rank][at]
            if not numbers[needs]:
                waiting[needs] = rank
                break
            rows.append((before, max(numbers[needs], 0), kind))
            before = numbers[key] = len(rows)
            found[rank].append(before)
            if waiting[key] >= 0:
                awake.append(waiting[key])
    return ActionGraph(tuple(rows), tuple(map(tuple, found)), tuple(orders), count)


def _action_keys(actions: Sequence[PipelineAction], rank_stages: Sequence[int], stages: int, micro_batches: int) -> Iterator[tuple[int, int, int]]:
    """Of each turn its key, the key of what must come from another stage before it (activations from the one before, gradients from the one
    after), and what it does."""
    nothing = 3 * stages * micro_batches
    for phase, chunk, number in actions:
        stage, place = rank_stages[chunk], _PHASE_INDEX[phase]
        kind = place * stages + stage
        key = kind * micro_batches + number
        before, after = place == 0 and stage > 0, place == 1 and stage < stages - 1
        yield key, key - micro_batches if before else key + micro_batches if after else nothing, kind


def max_in_flight(pipeline: PipelineSpec, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The same as `in_flight_by_stage` of several ranks whose stages are alike."""
    yield from pareto_maxima({counts for rank in ranks for counts in in_flight_by_stage(pipeline, rank)})
