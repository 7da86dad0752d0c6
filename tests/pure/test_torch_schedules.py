"""Our pipeline orders are the ones that torch's schedules run: rank by rank, the same computations in the same order, with nothing left out.

Torch's lists also hold communication, pauses (None) and reductions of gradients. Ours hold computation alone, so these are dropped. GPipe and 1F1B
are run on a stage that only takes notes: the list that `Schedule1F1B.pipeline_order` shows has micro-batches 1 to n on the last rank, and what it
runs has 0 to n - 1. The other two run the list that they show.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from meshwright.core.errors import RequestError
from meshwright.core.pipeline_schedules import SCHEDULES, PipelineSchedule, schedule_traits
from meshwright.execute.pipeline_parallel import _SCHEDULES as TORCH_CLASSES
from meshwright.schedule.pipeline_actions import check_pipeline_order, pipeline_schedule

Computation = tuple[str, int, int]  # F, B (all of backward), I (gradients of inputs) or W (of weights); the stage; the micro-batch

_PRIVATE = ("_Action", "_ComputationType", "PipelineScheduleSingle", "_PipelineScheduleRuntime")
if missing := [name for name in _PRIVATE if not hasattr(torch_schedules, name)]:
    pytest.skip(f"torch {torch.__version__} has no {', '.join(missing)} in its pipeline schedules", allow_module_level=True)

SIZES = [(2, 2), (2, 3), (2, 8), (3, 3), (3, 7), (4, 4), (4, 8), (4, 10), (4, 12), (5, 11), (8, 16)]  # pipeline ranks, micro-batches
CASES = [
    (schedule, each, ranks, micro)
    for schedule, traits in SCHEDULES.items()
    for each in ((1, 2, 3, 4) if traits.any_stages_per_rank else (traits.stages_per_rank,))
    for ranks, micro in SIZES
    if traits.accepted_micro_batches(ranks, micro) == micro
]


class NotingStage:
    """A pipeline stage for torch's schedules that computes and sends nothing, and notes what it is asked to compute."""

    is_first, is_last, device, submod, has_backward = False, False, torch.device("cpu"), nn.Identity(), True

    def __init__(self, index: int, count: int, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, count, rank, ranks
        self.computed: list[Computation] = []

    def forward_one_chunk(self, micro: int, *_: Any, **__: Any) -> None:
        self.computed.append(("F", self.stage_index, micro))

    def backward_one_chunk(self, micro: int, **_: Any) -> None:
        self.computed.append(("B", self.stage_index, micro))

    def _nothing(self, *_: Any, **__: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing
    perform_reduce_grad = _prepare_forward_infra = _prepare_backward_infra = _get_init_p2p_neighbors_ops = _nothing


def torch_schedule(schedule: str, each: int, ranks: int, rank: int, micro: int) -> Any:
    """Torch's object for one rank, of the class that a run uses."""
    stages = [NotingStage(index, ranks * each, rank, ranks) for index in schedule_traits(schedule).stages_of(rank, ranks, each)]
    kind = TORCH_CLASSES[schedule]
    single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, micro, loss_fn=lambda *_: None)


def of_torch(schedule: str, each: int, ranks: int, rank: int, micro: int) -> list[Computation]:
    """What torch computes on one rank, in order."""
    made = torch_schedule(schedule, each, ranks, rank, micro)
    if isinstance(made, torch_schedules.PipelineScheduleSingle):
        made._step_microbatches([()] * micro, [{}] * micro, [None] * micro, [])
        return list(made._stage.computed)  # type: ignore[attr-defined]
    listed = [(action.computation_type.value, action.stage_index, action.microbatch_index) for action in made.pipeline_order_with_comms[rank]]
    return [action for action in listed if action[0] in ("F", "B", "I", "W")]


def of_ours(schedule: str, each: int, ranks: int, rank: int, micro: int) -> list[Computation]:
    """The same from our order."""
    traits = schedule_traits(schedule)
    stages = traits.stages_of(rank, ranks, each)
    letters = {"forward": "F", "backward": "I" if traits.splits_backward else "B", "weights": "W"}
    return [(letters[turn.phase], stages[turn.chunk], turn.micro_batch) for turn in pipeline_schedule(schedule, ranks, rank, micro, each)]


@pytest.mark.parametrize(("schedule", "each", "ranks", "micro"), CASES)
def test_every_rank_computes_what_torch_does_in_the_same_order(schedule: str, each: int, ranks: int, micro: int) -> None:
    for rank in range(ranks):
        ours = of_ours(schedule, each, ranks, rank, micro)
        assert ours == of_torch(schedule, each, ranks, rank, micro), f"rank {rank}"
        assert len(ours) == (3 if SCHEDULES[schedule].splits_backward else 2) * each * micro


@pytest.mark.parametrize(("schedule", "each", "ranks", "micro"), [case for case in CASES if case[1] > 1])
def test_stages_are_on_the_ranks_that_torch_puts_them_on(schedule: str, each: int, ranks: int, micro: int) -> None:
    placed = torch_schedule(schedule, each, ranks, 0, micro).stage_index_to_group_rank
    traits = SCHEDULES[schedule]
    assert placed == {stage: traits.rank_of(stage, ranks) for stage in range(ranks * each)}
    assert all(stage in traits.stages_of(rank, ranks, each) for stage, rank in placed.items())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_torch_refuses_the_numbers_of_micro_batches_that_we_refuse(schedule: str, ranks: int) -> None:
    """But for zero_bubble with fewer micro-batches than ranks: torch builds an order for them, a plan refuses them as it does for 1f1b."""
    traits = SCHEDULES[schedule]
    for micro in range(1, 3 * ranks + 2):
        refused = traits.accepted_micro_batches(ranks, micro) != micro or (traits.fills_ranks and micro < ranks)
        if refused and not traits.splits_backward:
            with pytest.raises(ValueError, match=r"(?i)number of microbatches"):
                torch_schedule(schedule, traits.stages_per_rank, ranks, 0, micro)
        else:
            torch_schedule(schedule, traits.stages_per_rank, ranks, 0, micro)


def test_the_comparison_can_tell_schedules_apart() -> None:
    assert of_ours("gpipe", 1, 4, 0, 8) != of_torch("1f1b", 1, 4, 0, 8)
    assert of_ours("interleaved", 2, 4, 0, 8) != of_torch("interleaved", 2, 4, 1, 8)
    assert of_ours("interleaved", 2, 4, 0, 8) != of_torch("zero_bubble", 2, 4, 0, 8)


def test_a_schedule_has_one_entry_in_each_table() -> None:
    assert list(SCHEDULES) == list(get_args(PipelineSchedule)) == list(TORCH_CLASSES)
    with pytest.raises(RequestError, match="unknown schedule 'zigzag'"):
        check_pipeline_order("zigzag", 2, 2, 1)
