"""In which order a pipeline rank takes micro-batches forward and backward: GPipe, 1F1B, interleaved, zero bubble. Pure lists; nothing is run here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from meshwright.core.errors import RequestError, unknown

ORDERS = ("gpipe", "1f1b", "interleaved")
Phase = Literal["forward", "backward", "weights"]  # zero bubble's backward is in two: what goes back first, gradients of weights later


class Turn(NamedTuple):
    """One micro-batch through one chunk of a rank, in one direction. A chunk is the rank's n-th stage."""

    phase: Phase
    chunk: int
    micro: int


def check_order(order: str, ranks: int, micro: int, chunks: int) -> None:
    """What an order cannot do, with the number to change."""
    if order not in ORDERS:
        raise unknown("order", order, ORDERS)
    if micro < 1:
        raise RequestError(f"{micro} micro-batches: give at least 1")
    if chunks > 1 and order != "interleaved":
        raise RequestError(f"order {order} has one stage a rank, {chunks} chunks are given: use order=interleaved or chunks=1")
    if order == "interleaved" and micro % max(1, micro // ranks):
        raise RequestError(f"order interleaved takes micro-batches in rounds of {ranks}, {micro} are given: use {-(-micro // ranks) * ranks}")


def a_round(ranks: int, micro: int) -> int:
    """How many micro-batches interleaved takes through one stage before it turns to the next."""
    return micro // max(1, micro // ranks)


def turns(order: str, ranks: int, rank: int, micro: int, chunks: int = 1, together: int = 0) -> list[Turn]:
    """The turns of one rank. Everything forward and then everything back (gpipe), or as few forward as keep the others busy, and from then on
    one forward and one back (1f1b); interleaved is 1f1b over several stages a rank, in rounds of as many as go `together`: if it is not said,
    as many as this number of micro-batches makes."""
    check_order(order, ranks, together or micro, chunks)
    together = (together or a_round(ranks, micro)) if order == "interleaved" else micro
    total = micro * chunks

    def turn(phase: Literal["forward", "backward"], index: int) -> Turn:
        chunk = index // together % chunks
        number = index // (together * chunks) * together + index % together
        return Turn(phase, chunk if phase == "forward" else chunks - 1 - chunk, number)

    if order == "gpipe":
        ahead = total
    elif order == "1f1b":
        ahead = ranks - rank - 1
    else:
        ahead = (chunks - 1) * together + 2 * (ranks - 1 - rank)
    ahead = min(ahead, total)
    found = [turn("forward", i) for i in range(ahead)]
    for i in range(total - ahead):
        found += [turn("forward", ahead + i), turn("backward", i)]
    return found + [turn("backward", i) for i in range(total - ahead, total)]


def zero_bubble(ranks: int, rank: int, micro: int) -> list[Turn]:
    """Two chunks a rank, the second on the way back (a V). Gradients of weights are what fills the time in which a rank would wait: in the
    middle each follows its backward at once, at the end they come after the backwards that others wait for."""
    return [turn for turn in _bent(ranks, rank, max(micro, 2 * ranks - 1)) if turn.micro < micro]


def _bent(ranks: int, rank: int, micro: int) -> Iterator[Turn]:
    done: dict[tuple[Phase, int], int] = {}

    def take(phase: Phase, chunk: int) -> Turn:
        done[phase, chunk] = done.get((phase, chunk), -1) + 1
        return Turn(phase, chunk, done[phase, chunk])

    def count(phase: Phase, chunk: int) -> int:
        return done.get((phase, chunk), -1) + 1

    left = ranks - rank  # ranks from here to the bend
    yield from (take("forward", 0) for _ in range(2 * left - 1))
    for _ in range(rank):
        yield from (take("forward", 1), take("forward", 0))
    for _ in range(left):
        yield from (take("forward", 1), take("backward", 1), take("weights", 1))
    while count("forward", 1) < micro:
        if count("forward", 0) < micro:
            yield take("forward", 0)
        yield from (take("backward", 0), take("weights", 0))
        yield from (take("forward", 1), take("backward", 1), take("weights", 1))
    for _ in range(rank):
        yield from (take("backward", 0), take("backward", 1))
    for _ in range(left):
        yield from (take("backward", 0), take("weights", 0))
    for chunk in (1, 0):
        yield from (take("weights", chunk) for _ in range(micro - count("weights", chunk)))
