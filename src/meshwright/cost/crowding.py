"""Ranks that share cores: what a pipeline takes when those of its ranks that wait leave their core to the others.

All ranks at work get as much of the cores as each other, and none more than one core. What is on its way needs none. So a step takes no less than
with a core for each rank, no less than all work needs of the cores, and longer than both where ranks wait at one time and crowd at another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cost.pipeline import Graph, Order, Stage, constants, graph_of, round_of

_NEVER = float("inf")
_ROUNDING = 1e-12  # relative: who has no more left than this is done
_INSTANT = 1e-12  # seconds of a turn that takes none
_ROUNDS = 4  # of micro-batches, after which the next is like the last


def shared(order: Order, stages: Sequence[Stage], cores: float) -> list[float]:
    """When each rank has done its last turn. Of many micro-batches a few are run, and the rest is added on as it grew last."""
    step = round_of(order)
    less = _ROUNDS * step + order.micro_batches % step
    if order.micro_batches <= less + step:
        return _Cores(graph_of(order, order.micro_batches), stages, cores).run()
    one, two = (_Cores(graph_of(order, number), stages, cores).run() for number in (less, less + step))
    more = (order.micro_batches - less) / step
    return [a + more * (b - a) for a, b in zip(one, two, strict=True)]


@dataclass(slots=True)
class _Rank:
    rows: tuple[int, ...]
    at: int = 0
    free: float = 0.0  # when the turn before was done
    starts: float = _NEVER  # when what the turn needs is here
    left: float = 0.0  # of the turn's work; 0: not begun


class _Cores:
    """One run; made, run and dropped."""

    def __init__(self, graph: Graph, stages: Sequence[Stage], cores: float) -> None:
        self.graph, self.cores = graph, cores
        self.work = [*(s.forward for s in stages), *(s.backward for s in stages), *(s.weights for s in stages)]
        _, self.early = constants(stages)
        self.takes = [*(s.takes[0] for s in stages), *(s.takes[1] for s in stages), *[0.0] * len(stages)]
        self.ends = [0.0, *[_NEVER] * len(graph.rows)]
        self.ranks = [_Rank(rows) for rows in graph.ranks]

    def run(self) -> list[float]:
        now, working = 0.0, [rank for rank in self.ranks if rank.rows]
        for rank in working:
            self._ask(rank, now)
        while working:
            busy = [rank for rank in working if rank.left]
            pace = min(1.0, self.cores / len(busy)) if busy else 1.0
            least = min((rank.left for rank in busy), default=_NEVER)
            starts = min((rank.starts for rank in working if not rank.left), default=_NEVER)
            then = min(now + least / pace, starts)
            worked = min(least, (starts - now) * pace)
            for rank in busy:
                rank.left -= worked
                if rank.left <= _ROUNDING * worked:
                    rank.left = 0.0
                    self._done(rank, then)
            now = then
            for rank in working:
                if not rank.left and rank.starts <= now:
                    rank.left = max(self.work[self.graph.rows[rank.rows[rank.at] - 1][2]], _INSTANT)
                    rank.starts = _NEVER
            working = [rank for rank in working if rank.at < len(rank.rows)]
        return [rank.free for rank in self.ranks]

    def _done(self, rank: _Rank, now: float) -> None:
        self.ends[rank.rows[rank.at]] = rank.free = now
        rank.at += 1
        for other in self.ranks:
            if not other.left and other.starts == _NEVER:
                self._ask(other, now)

    def _ask(self, rank: _Rank, now: float) -> None:
        """A message takes its time from when both ends are there."""
        if rank.at < len(rank.rows):
            _, needs, kind = self.graph.rows[rank.rows[rank.at] - 1]
            if (came := self.ends[needs]) < _NEVER:
                rank.starts = max(max(rank.free, came - self.early[kind]) + self.takes[kind], now)
