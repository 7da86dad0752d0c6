"""Simulates a pipeline whose ranks share CPU cores: in, a pipeline, its stage times and the number of cores; out, when each rank finishes.

All busy ranks get equal shares of the cores, none more than one core; messages in flight need none. So a step takes no less than with a core per
rank, no less than the total work divided by the cores, and more than both where ranks idle at one time and compete at another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cost.pipeline_cost import ActionGraph, PipelineSpec, StageTime, action_graph, action_times, schedule_period

_NEVER = float("inf")
_DONE_TOLERANCE = 1e-12  # relative: work left below this counts as done
_MIN_WORK_S = 1e-12  # seconds of work of an action that takes none
_SETTLING_ROUNDS = 4  # of micro-batches, after which the pipeline is in steady state


def oversubscribed_ends(pipeline: PipelineSpec, stages: Sequence[StageTime], cores: float) -> list[float]:
    """When each rank finishes its last action. Of many micro-batches a few are simulated, and the rest is extrapolated from the last increment."""

    def simulate(micro_batches: int) -> list[float]:
        return _SharedCoreSimulation(action_graph(pipeline, micro_batches), stages, cores).run()

    period = schedule_period(pipeline)
    settled = _SETTLING_ROUNDS * period + pipeline.micro_batches % period
    if pipeline.micro_batches <= settled + period:
        return simulate(pipeline.micro_batches)
    periods = (pipeline.micro_batches - settled) / period
    return [end + periods * (later - end) for end, later in zip(simulate(settled), simulate(settled + period), strict=True)]


@dataclass(slots=True)
class _RankProgress:
    rows: tuple[int, ...]
    next_action: int = 0
    free_at: float = 0.0  # when the previous action ended
    ready_at: float = _NEVER  # when the action's inputs have arrived
    work_left: float = 0.0  # seconds left of the current action; 0: not started


class _SharedCoreSimulation:
    """One simulation: build it, call `run` once, discard it."""

    def __init__(self, graph: ActionGraph, stages: Sequence[StageTime], cores: float) -> None:
        self.graph, self.cores = graph, cores
        self.work = [*(s.forward for s in stages), *(s.backward for s in stages), *(s.weight_grad for s in stages)]
        _, self.send_leads = action_times(stages)
        self.receive_times = [*(s.receive_times[0] for s in stages), *(s.receive_times[1] for s in stages), *[0.0] * len(stages)]
        self.end_times = [0.0, *[_NEVER] * len(graph.rows)]
        self.ranks = [_RankProgress(rows) for rows in graph.rank_rows]

    def run(self) -> list[float]:
        now, working = 0.0, [rank for rank in self.ranks if rank.rows]
        for rank in working:
            self._schedule_next(rank, now)
        while working:
            busy = [rank for rank in working if rank.work_left]
            core_share = min(1.0, self.cores / len(busy)) if busy else 1.0
            least_work = min((rank.work_left for rank in busy), default=_NEVER)
            next_start = min((rank.ready_at for rank in working if not rank.work_left), default=_NEVER)
            event_time = min(now + least_work / core_share, next_start)
            worked = min(least_work, (next_start - now) * core_share)
            for rank in busy:
                rank.work_left -= worked
                if rank.work_left <= _DONE_TOLERANCE * worked:
                    rank.work_left = 0.0
                    self._finish_action(rank, event_time)
            now = event_time
            for rank in working:
                if not rank.work_left and rank.ready_at <= now:
                    rank.work_left = max(self.work[self.graph.rows[rank.rows[rank.next_action] - 1][2]], _MIN_WORK_S)
                    rank.ready_at = _NEVER
            working = [rank for rank in working if rank.next_action < len(rank.rows)]
        return [rank.free_at for rank in self.ranks]

    def _finish_action(self, rank: _RankProgress, now: float) -> None:
        self.end_times[rank.rows[rank.next_action]] = rank.free_at = now
        rank.next_action += 1
        for other in self.ranks:
            if not other.work_left and other.ready_at == _NEVER:
                self._schedule_next(other, now)

    def _schedule_next(self, rank: _RankProgress, now: float) -> None:
        """Set when the rank's next action may start: a transfer starts when both its sender and its receiver are ready."""
        if rank.next_action < len(rank.rows):
            _, needs, kind = self.graph.rows[rank.rows[rank.next_action] - 1]
            if (sent_at := self.end_times[needs]) < _NEVER:
                rank.ready_at = max(max(rank.free_at, sent_at - self.send_leads[kind]) + self.receive_times[kind], now)
