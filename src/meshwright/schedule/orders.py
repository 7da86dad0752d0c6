"""In which order a pipeline rank takes micro-batches forward and backward: GPipe, 1F1B, interleaved. Pure lists; nothing is run here."""

from __future__ import annotations

from typing import Literal, NamedTuple

from meshwright.core.errors import RequestError, unknown

Order = Literal["gpipe", "1f1b", "interleaved"]
ORDERS = ("gpipe", "1f1b", "interleaved")


class Turn(NamedTuple):
    """One micro-batch through one chunk of a rank, in one direction. A chunk is the rank's n-th stage."""

    phase: Literal["forward", "backward"]
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
    rounds = max(1, micro // ranks)
    if order == "interleaved" and micro % rounds:
        raise RequestError(f"order interleaved takes micro-batches in rounds of {ranks}, {micro} are given: use {-(-micro // ranks) * ranks}")


def turns(order: str, ranks: int, rank: int, micro: int, chunks: int = 1) -> list[Turn]:
    """The turns of one rank. Everything forward and then everything back (gpipe), or as few forward as keep the others busy, and from then on
    one forward and one back (1f1b); interleaved is 1f1b over several stages a rank, in rounds."""
    check_order(order, ranks, micro, chunks)
    a_round = micro // max(1, micro // ranks) if order == "interleaved" else micro
    total = micro * chunks

    def turn(phase: Literal["forward", "backward"], index: int) -> Turn:
        chunk = index // a_round % chunks
        number = index // (a_round * chunks) * a_round + index % a_round
        return Turn(phase, chunk if phase == "forward" else chunks - 1 - chunk, number)

    if order == "gpipe":
        ahead = total
    elif order == "1f1b":
        ahead = ranks - rank - 1
    else:
        ahead = (chunks - 1) * a_round + 2 * (ranks - 1 - rank)
    ahead = min(ahead, total)
    found = [turn("forward", i) for i in range(ahead)]
    for i in range(total - ahead):
        found += [turn("forward", ahead + i), turn("backward", i)]
    return found + [turn("backward", i) for i in range(total - ahead, total)]
