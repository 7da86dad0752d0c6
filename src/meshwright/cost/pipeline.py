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
from meshwright.schedule.orders import Turn, turns

_PHASES = {"forward": 0, "backward": 1, "weights": 2}
_ENOUGH = 40_000  # turns forward: for more of them the rest is added on as it grew last
_SEEN = 4  # micro-batches over which turns must repeat, where the order does so with each


class Order(NamedTuple):
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


class Stage(NamedTuple):
    """One micro-batch through one stage, in seconds; backward is cut in two where the schedule splits it."""

    forward: float
    backward: float
    weights: float = 0.0
    takes: tuple[float, float] = (0.0, 0.0)  # messages: activations from the stage before, gradients from the one after
    sends: tuple[float, float] = (0.0, 0.0)  # what handing them over costs the rank, within `forward` and `backward`: they leave before


def finished(order: Order, stages: Sequence[Stage]) -> list[float]:
    """When each rank has done its last turn."""
    if order.traits.forward_first:
        return _linear(order, stages)
    unit, few = _period(order), _first_try(order)
    most = max(sum(sum(stages[s][:3]) + sum(stages[s].takes) for s in order.stages(rank)) for rank in range(order.ranks))
    before: tuple[int, float] | None = None
    while few < order.micro_batches:
        graph = _graph(order._replace(micro_batches=few), unit)
        ends = graph.ends(stages)
        left, last = order.micro_batches - few, graph.last(ends)
        for lag in (lag for lag in (unit, order.ranks) if left % lag == 0):
            if (more := graph.settled(ends, lag)) is not None:
                return [end + left // lag * more for end in last]
        slope = (max(last) - before[1]) / (few - before[0]) if before is not None else 0.0
        if abs(slope - most) <= 1e-9 * max(last) or few * len(stages) > _ENOUGH:
            return [end + left * max(most, slope) for end in last]
        before, step = (few, max(last)), max(unit, order.ranks)
        few += -(-few // (2 * step)) * step
    graph = _graph(order, unit)
    return graph.last(graph.ends(stages))


def least_seconds(order: Order, stages: Sequence[Stage], extra: Sequence[float] = (), after: Sequence[float] = ()) -> tuple[float, float]:
    """What no run is below: some rank's work, with what it has to do besides for each micro-batch and after the last, after the way in to it and,
    where gradients of weights do not come last, before the way out. And the mean of that over the ranks."""
    into = [0.0, *accumulate(stage.forward for stage in stages[: order.ranks])]
    out = [0.0, *accumulate(stage.backward for stage in stages[: order.ranks])]
    rest = after or [0.0] * order.ranks
    back = rest if order.traits.splits_backward else [max(way + rest[0], own) for way, own in zip(out, rest, strict=False)]
    works = [sum(sum(stages[s][:3]) for s in order.stages(rank)) + (extra[rank] if extra else 0.0) for rank in range(order.ranks)]
    every = [into[rank] + order.micro_batches * work + back[rank] for rank, work in enumerate(works)]
    return max(every), sum(every) / len(every)


def held(order: Order, rank: int) -> tuple[tuple[int, ...], ...]:
    """How many micro-batches each of a rank's stages holds at once, at the moments at which no other holds as many of all: whatever a stage
    keeps of one, the most that a rank keeps is among them."""
    if order.ranks == 1:
        return ((1,),)
    if (in_flight := order.traits.in_flight) is not None:
        return ((in_flight(order.ranks, rank, order.micro_batches),),)
    period = _period(order)
    most = min(order.micro_batches, 3 * -(-order.ranks // period) * period)  # from there on it only repeats
    return _held(order._replace(micro_batches=most), rank, period)


@lru_cache(maxsize=4096)
def _held(order: Order, rank: int, period: int) -> tuple[tuple[int, ...], ...]:
    counts, found = [0] * order.chunks, set()
    done = "weights" if order.traits.splits_backward else "backward"
    for turn in _turns(order, rank, period):
        if turn.phase == "forward":
            counts[turn.chunk] += 1
            found.add(tuple(counts))
        elif turn.phase == done:
            counts[turn.chunk] -= 1
    return largest(found)


def largest(counts: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those that no other one is at least as large as in everything."""
    found: list[tuple[int, ...]] = []
    for count in sorted(counts, reverse=True):  # one that is at least as large in everything comes before
        if not any(all(map(ge, other, count)) for other in found):
            found.append(count)
    return tuple(found)


def _turns(order: Order, rank: int, period: int) -> list[Turn]:
    return turns(order.schedule, order.ranks, rank, order.micro_batches, order.chunks, period)


def _period(order: Order) -> int:
    """After how many micro-batches a rank's order repeats itself."""
    return order.traits.micro_batches_per_round(order.ranks, order.micro_batches)


def _first_try(order: Order) -> int:
    """As many micro-batches as it takes for a pipeline to fill, and to repeat itself; as many are left over as repeat."""
    if order.traits.in_rounds:
        return 5 * _period(order)
    few = (3 if order.traits.splits_backward else 2) * order.ranks + _SEEN + 2
    return few + (order.micro_batches - few) % order.ranks


def _linear(order: Order, stages: Sequence[Stage]) -> list[float]:
    few = min(order.micro_batches, 2)
    runs = [(graph := _graph(order._replace(micro_batches=n), 1)).last(graph.ends(stages)) for n in range(1, few + 1)]
    return [last + (order.micro_batches - few) * (last - first) for first, last in zip(runs[0], runs[-1], strict=True)]


@dataclass(frozen=True)
class Graph:
    """All turns so that each comes after those that it waits for: (the rank's one before, the neighbour's, what it does). 0 is the start."""

    rows: tuple[tuple[int, int, int], ...]
    ranks: tuple[tuple[int, ...], ...]  # each rank's turns, as numbers of rows from 1 on
    orders: tuple[list[Turn], ...]
    stages: int

    def ends(self, stages: Sequence[Stage]) -> list[float]:
        """The end of each turn; the start is the first."""
        seconds, early = constants(stages)
        found = [0.0]
        for before, needs, kind in self.rows:
            start, arrives = found[before], found[needs] - early[kind]
            found.append((arrives if arrives > start else start) + seconds[kind])
        return found

    def last(self, ends: Sequence[float]) -> list[float]:
        return [ends[rows[-1]] for rows in self.ranks]

    def settled(self, ends: Sequence[float], lag: int) -> float | None:
        """By how much all that ranks do is later than it was `lag` micro-batches before: None if not by the same everywhere."""
        found = self._later(ends, lag, 0)
        others = (self._later(ends, lag, rank) for rank in range(1, len(self.ranks)))
        return found if found is not None and all(o is not None and abs(o - found) <= 1e-9 * ends[-1] for o in others) else None

    def _later(self, ends: Sequence[float], lag: int, rank: int) -> float | None:
        """By how much the last turns of a rank that repeat come later than those `lag` micro-batches before, if all do by as much."""
        rows, window = self.ranks[rank], _repeating(self.orders[rank], lag)
        if window is None:
            return None
        first, end, apart = window
        found = [ends[rows[at + apart]] - ends[rows[at]] for at in range(first, end)]
        return found[0] if max(found) - min(found) <= 1e-9 * ends[rows[end]] else None


def _repeating(order: Sequence[Turn], lag: int) -> tuple[int, int, int] | None:
    """(first, end, how far apart) of the last turns of a rank's order to come again `lag` micro-batches later, if they are enough to tell."""
    apart = lag * len(order) // (1 + max(turn.micro for turn in order))
    need = max(apart, _SEEN * apart // lag)

    def again(at: int) -> bool:
        phase, chunk, micro = order[at]
        return order[at + apart] == (phase, chunk, micro + lag)

    end = next((at for at in range(len(order) - apart - 1, -1, -1) if order[at].phase == "forward" and again(at)), -1) + 1
    first = end - need
    return (first, end, apart) if first >= 0 and all(map(again, range(first, end))) else None


def constants(stages: Sequence[Stage]) -> tuple[list[float], list[float]]:
    """By phase and stage: what a turn takes with the message before it, and how long before its neighbour's end that message has left."""
    forward = [stage.takes[0] + stage.forward for stage in stages]
    backward = [stage.takes[1] + stage.backward for stage in stages]
    ahead = [0.0, *(before.sends[0] for before, _ in pairwise(stages))]
    back = [*(after.sends[1] for _, after in pairwise(stages)), 0.0]
    return [*forward, *backward, *(stage.weights for stage in stages)], [*ahead, *back, *[0.0] * len(stages)]


def graph_of(order: Order, micro_batches: int) -> Graph:
    """Of so many micro-batches, taken in rounds as the order's own are."""
    return _graph(order._replace(micro_batches=micro_batches), _period(order))


def round_of(order: Order) -> int:
    """After so many micro-batches all ranks' turns repeat themselves."""
    return _period(order) if order.traits.in_rounds else order.ranks


@lru_cache(maxsize=64)
def _graph(order: Order, period: int) -> Graph:
    count = order.ranks * order.chunks
    orders = [_turns(order, rank, period) for rank in range(order.ranks)]
    todo = [list(_keyed(turns, order.stages(rank), count, order.micro_batches)) for rank, turns in enumerate(orders)]
    numbers = [0] * (3 * count * order.micro_batches + 1)  # of the rows, by key; the last key is of what needs nothing
    numbers[-1] = -1
    waiting = [-1] * len(numbers)
    rows: list[tuple[int, int, int]] = []
    found: list[list[int]] = [[] for _ in orders]
    awake = list(range(order.ranks - 1, -1, -1))
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
    return Graph(tuple(rows), tuple(map(tuple, found)), tuple(orders), count)


def _keyed(order: Sequence[Turn], mine: Sequence[int], stages: int, micro: int) -> Iterator[tuple[int, int, int]]:
    """Of each turn its key, the key of what must come from another stage before it (activations from the one before, gradients from the one
    after), and what it does."""
    nothing = 3 * stages * micro
    for phase, chunk, number in order:
        stage, place = mine[chunk], _PHASES[phase]
        kind = place * stages + stage
        key = kind * micro + number
        before, after = place == 0 and stage > 0, place == 1 and stage < stages - 1
        yield key, key - micro if before else key + micro if after else nothing, kind


def under_way(order: Order, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The same as `held` of several ranks whose stages are alike."""
    yield from largest({counts for rank in ranks for counts in held(order, rank)})
