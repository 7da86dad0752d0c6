"""Pipeline schedules: the order in which a pipeline rank runs micro-batches forward and backward (GPipe, 1F1B, interleaved, zero bubble). Pure
lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from meshwright.core.errors import RequestError
from meshwright.core.pipeline_schedules import schedule_traits

PipelinePhase = Literal["forward", "backward", "weights"]  # zero bubble splits backward: input gradients first, weight gradients later


class PipelineAction(NamedTuple):
    """One micro-batch through one chunk of a rank, in one phase. A chunk is the rank's n-th stage."""

    phase: PipelinePhase
    chunk: int
    micro_batch: int


class PipelineRank(NamedTuple):
    """One rank of a pipeline, and the micro-batches that it runs."""

    ranks: int
    rank: int
    micro: int
    chunks: int
    per_round: int  # micro-batches that a chunk runs before the next one does, where the schedule goes in rounds


def check_pipeline_order(order: str, ranks: int, num_micro_batches: int, chunks: int) -> None:
    """Raise a RequestError if the order cannot run these numbers; it names the number to change."""
    traits = schedule_traits(order)
    if num_micro_batches < 1:
        raise RequestError(f"{num_micro_batches} micro-batches: give at least 1")
    if chunks != (own := traits.stages_per_rank) and not traits.any_stages_per_rank:
        raise RequestError(f"order {order} has {own} stage{'s' * (own > 1)} a rank, {chunks} chunks are given: use order=interleaved or chunks={own}")
    if (accepted := traits.accepted_micro_batches(ranks, num_micro_batches)) != num_micro_batches:
        raise RequestError(f"order {order} takes micro-batches in rounds of {ranks}, {num_micro_batches} are given: use {accepted}")


def pipeline_schedule(order: str, ranks: int, rank: int, num_micro_batches: int, chunks: int = 1, per_round: int = 0) -> list[PipelineAction]:
    """The pipeline actions of one rank. A round has `per_round` micro-batches; 0: as many as the schedule derives from their number."""
    check_pipeline_order(order, ranks, per_round or num_micro_batches, chunks)
    per_round = per_round or schedule_traits(order).micro_batches_per_round(ranks, num_micro_batches)
    return _BUILDERS[order](PipelineRank(ranks, rank, num_micro_batches, chunks, per_round))


def _gpipe(at: PipelineRank) -> list[PipelineAction]:
    """All forwards, then all backwards."""
    return _alternating(at, at.micro * at.chunks)


def _1f1b(at: PipelineRank) -> list[PipelineAction]:
    """As few forwards as keep the other ranks busy, then one forward and one backward at a time."""
    return _alternating(at, at.ranks - at.rank - 1)


def _interleaved(at: PipelineRank) -> list[PipelineAction]:
    """1F1B over several stages per rank, in rounds."""
    return _alternating(at, (at.chunks - 1) * at.per_round + 2 * (at.ranks - 1 - at.rank))


def _alternating(at: PipelineRank, ahead: int) -> list[PipelineAction]:
    """`ahead` forwards, then one forward and one backward at a time, then the remaining backwards."""
    total = at.micro * at.chunks
    ahead = min(ahead, total)

    def turn(phase: Literal["forward", "backward"], index: int) -> PipelineAction:
        chunk = index // at.per_round % at.chunks
        number = index // (at.per_round * at.chunks) * at.per_round + index % at.per_round
        return PipelineAction(phase, chunk if phase == "forward" else at.chunks - 1 - chunk, number)

    found = [turn("forward", i) for i in range(ahead)]
    for i in range(total - ahead):
        found += [turn("forward", ahead + i), turn("backward", i)]
    return found + [turn("backward", i) for i in range(total - ahead, total)]


def _zero_bubble(at: PipelineRank) -> list[PipelineAction]:
    """Two chunks per rank, the second in reverse order of ranks (a V). Weight gradients fill the time in which a rank would wait: in the steady
    state each directly follows its backward, at the end they come after the backwards that others wait for."""
    return [action for action in _zbv_schedule(at.ranks, at.rank, max(at.micro, 2 * at.ranks - 1)) if action.micro_batch < at.micro]


def _zbv_schedule(ranks: int, rank: int, num_micro_batches: int) -> Iterator[PipelineAction]:
    done: dict[tuple[PipelinePhase, int], int] = {}

    def take(phase: PipelinePhase, chunk: int) -> PipelineAction:
        done[phase, chunk] = done.get((phase, chunk), -1) + 1
        return PipelineAction(phase, chunk, done[phase, chunk])

    def count(phase: PipelinePhase, chunk: int) -> int:
        return done.get((phase, chunk), -1) + 1

    left = ranks - rank  # ranks from here to the turn of the V
    yield from (take("forward", 0) for _ in range(2 * left - 1))
    for _ in range(rank):
        yield from (take("forward", 1), take("forward", 0))
    for _ in range(left):
        yield from (take("forward", 1), take("backward", 1), take("weights", 1))
    while count("forward", 1) < num_micro_batches:
        if count("forward", 0) < num_micro_batches:
            yield take("forward", 0)
        yield from (take("backward", 0), take("weights", 0))
        yield from (take("forward", 1), take("backward", 1), take("weights", 1))
    for _ in range(rank):
        yield from (take("backward", 0), take("backward", 1))
    for _ in range(left):
        yield from (take("backward", 0), take("weights", 0))
    for chunk in (1, 0):
        yield from (take("weights", chunk) for _ in range(num_micro_batches - count("weights", chunk)))


_BUILDERS: dict[str, Callable[[PipelineRank], list[PipelineAction]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
}
