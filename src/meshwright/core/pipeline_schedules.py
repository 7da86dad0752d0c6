"""The traits of each pipeline schedule, one table entry each. `schedule/pipeline_actions.py` builds their actions,
`execute/pipeline_parallel.py` maps them to torch's classes, and all other code reads these traits instead of comparing names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import unknown_name_error

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


@dataclass(frozen=True)
class ScheduleTraits:
    """A schedule's virtual stages per rank, the form of its backward, and the numbers of micro-batches that it accepts."""

    stages_per_rank: int = 1  # unless a plan says otherwise
    any_stages_per_rank: bool = False  # a plan may say otherwise
    v_shaped: bool = False  # every second chunk of stages runs from the last rank back to the first, instead of round robin
    forward_first: bool = False  # all forwards come before the first backward
    splits_backward: bool = False  # gradients of inputs are computed first, those of weights later
    in_rounds: bool = False  # a stage runs a round of micro-batches before the rank's next stage runs the same ones
    fills_ranks: bool = False  # needs at least as many micro-batches as ranks
    in_flight: Callable[[int, int, int], int] | None = None  # (ranks, rank, micro-batches) → how many a stage holds; None: counted from the order
    searched: bool = True  # the planner considers it without being asked
    added_cost: float = 0.0  # relative gain required for each doubling of the stages per rank (see plan/objective.py)

    def micro_batches_per_round(self, ranks: int, micro_batches: int) -> int:
        """How many micro-batches a stage runs before the rank's next stage runs."""
        return micro_batches // max(1, micro_batches // ranks) if self.in_rounds else 1

    def accepted_micro_batches(self, ranks: int, micro_batches: int) -> int:
        """`micro_batches` if it makes whole rounds, otherwise the next multiple of `ranks`, which does."""
        is_accepted = not self.in_rounds or micro_batches % max(1, micro_batches // ranks) == 0
        return micro_batches if is_accepted else -(-micro_batches // ranks) * ranks

    def rank_of(self, stage: int, ranks: int) -> int:
        """The pipeline rank that holds a stage."""
        chunk, rank = divmod(stage, ranks)
        return ranks - 1 - rank if self.v_shaped and chunk % 2 else rank

    def stages_of(self, rank: int, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds, in their order."""
        odd = ranks - 1 - rank if self.v_shaped else rank
        return tuple(chunk * ranks + (odd if chunk % 2 else rank) for chunk in range(stages_per_rank))


SCHEDULES: Mapping[str, ScheduleTraits] = {
    "gpipe": ScheduleTraits(forward_first=True, in_flight=lambda _ranks, _rank, micro: micro, searched=False),  # no faster than 1f1b, more memory
    "1f1b": ScheduleTraits(fills_ranks=True, in_flight=lambda ranks, rank, micro: min(micro, ranks - rank)),
    "interleaved": ScheduleTraits(stages_per_rank=2, any_stages_per_rank=True, in_rounds=True, added_cost=0.01),
    "zero_bubble": ScheduleTraits(stages_per_rank=2, v_shaped=True, splits_backward=True, fills_ranks=True, added_cost=0.02),
}


def schedule_traits(schedule: str) -> ScheduleTraits:
    if schedule not in SCHEDULES:
        raise unknown_name_error("schedule", schedule, SCHEDULES)
    return SCHEDULES[schedule]
