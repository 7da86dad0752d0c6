"""Pipeline schedules: the order in which a pipeline rank runs micro-batches forward and backward (GPipe, 1F1B, interleaved, zero bubble)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from meshwright.core.errors import RequestError
from meshwright.core.pipeline_schedules import schedule_traits

PipelinePhase = Literal["forward", "backward", "weights"]  # zero bubble splits backward: input gradients first, weight gradients later


class PipelineAction(NamedTuple):
    """One micro-batch through one chunk of a rank, in one phase. A chunk is the rank's n-th stage."""

    phase: PipelinePhase
    chunk: int
    micro_batch: int


def check_pipeline_order(order: str, ranks: int, num_micro_batches: int, chunks: int) -> None:
    """Raise a RequestError if the order cannot run these numbers; it names the number to change."""
    traits = schedule_traits(order)
    if num_micro_batches < 1:
        raise RequestError(f"{num_micro_batches} micro-batches: give at least 1")
    if chunks != (per_rank := traits.stages_per_rank) and not traits.any_stages_per_rank:
        needs = f"{per_rank} stage{'s' * (per_rank > 1)} a rank"
        raise RequestError(f"order {order} has {needs}, {chunks} chunks are given: use order=interleaved or chunks={per_rank}")
    if (accepted := traits.accepted_micro_batches(ranks, num_micro_batches)) != num_micro_batches:
        raise RequestError(f"order {order} takes micro-batches in rounds of {ranks}, {num_micro_batches} are given: use {accepted}")


def pipeline_schedule(order: str, ranks: int, rank: int, num_micro_batches: int, chunks: int = 1, per_round: int = 0) -> list[PipelineAction]:
    """The pipeline actions of one rank. A chunk runs `per_round` micro-batches before the next chunk does; 0: the schedule's default."""
    check_pipeline_order(order, ranks, per_round or num_micro_batches, chunks)
    traits = schedule_traits(order)
    per_round = per_round or traits.micro_batches_per_round(ranks, num_micro_batches)
    if traits.splits_backward:
        schedule = _zbv_schedule(ranks, rank, max(num_micro_batches, 2 * ranks - 1))
        return [action for action in schedule if action.micro_batch < num_micro_batches]
    if traits.forward_first:
        return _1f1b(num_micro_batches * chunks, num_micro_batches, chunks, per_round)
    # As few forwards as keep the other ranks busy.
    warmup = (chunks - 1) * per_round + 2 * (ranks - 1 - rank) if traits.in_rounds else ranks - 1 - rank
    return _1f1b(warmup, num_micro_batches, chunks, per_round)


def _1f1b(warmup: int, num_micro_batches: int, chunks: int, per_round: int) -> list[PipelineAction]:
    """`warmup` forwards, then one forward and one backward at a time, then the remaining backwards."""
    total = num_micro_batches * chunks
    warmup = min(warmup, total)

    def action(phase: Literal["forward", "backward"], index: int) -> PipelineAction:
        chunk = index // per_round % chunks
        micro_batch = index // (per_round * chunks) * per_round + index % per_round
        return PipelineAction(phase, chunk if phase == "forward" else chunks - 1 - chunk, micro_batch)

    actions = [action("forward", i) for i in range(warmup)]
    for i in range(total - warmup):
        actions += [action("forward", warmup + i), action("backward", i)]
    return actions + [action("backward", i) for i in range(total - warmup, total)]


def _zbv_schedule(ranks: int, rank: int, num_micro_batches: int) -> Iterator[PipelineAction]:
    """Two chunks per rank, the second in reverse order of ranks (a V). Weight gradients fill the time in which a rank would wait: in the steady
    state each directly follows its backward, at the end they come after the backwards that others wait for."""
    count: Counter[tuple[PipelinePhase, int]] = Counter()

    def run(phase: PipelinePhase, chunk: int) -> PipelineAction:
        count[phase, chunk] += 1
        return PipelineAction(phase, chunk, count[phase, chunk] - 1)

    ranks_to_turn = ranks - rank  # of the V
    yield from (run("forward", 0) for _ in range(2 * ranks_to_turn - 1))
    for _ in range(rank):
        yield from (run("forward", 1), run("forward", 0))
    for _ in range(ranks_to_turn):
        yield from (run("forward", 1), run("backward", 1), run("weights", 1))
    while count["forward", 1] < num_micro_batches:
        if count["forward", 0] < num_micro_batches:
            yield run("forward", 0)
        yield from (run("backward", 0), run("weights", 0))
        yield from (run("forward", 1), run("backward", 1), run("weights", 1))
    for _ in range(rank):
        yield from (run("backward", 0), run("backward", 1))
    for _ in range(ranks_to_turn):
        yield from (run("backward", 0), run("weights", 0))
    for chunk in (1, 0):
        yield from (run("weights", chunk) for _ in range(num_micro_batches - count["weights", chunk]))
