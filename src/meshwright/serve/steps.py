"""One forward pass of the engine, as data: which tokens of which sequences. The first rank decides, and sends it to the others. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, of which `start` are computed already. `pages` hold what is computed and what will be."""

    sequence: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...] = ()
    num_logits: int = 1  # logits are wanted after so many of its last tokens

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def generates(self) -> bool:
        """Whether it has one known token, and guesses of those that follow, if any: logits are wanted after each."""
        return self.num_logits == len(self.tokens)


@dataclass(frozen=True)
class Step:
    """Chunks that go through the model together, and sequences that have ended since the last step."""

    chunks: tuple[Chunk, ...] = ()
    ended: tuple[int, ...] = ()
    repeats: int = 1  # above 1: run so often, each time on the most likely tokens of the time before

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    def encode(self) -> list[int]:
        """The step as numbers."""
        numbers = [len(self.chunks), len(self.ended), self.repeats, *self.ended]
        for chunk in self.chunks:
            numbers += [chunk.sequence, chunk.start, len(chunk.tokens), len(chunk.pages), chunk.num_logits, *chunk.tokens, *chunk.pages]
        return numbers

    @staticmethod
    def decode(numbers: Sequence[int]) -> Step:
        source = iter(numbers)
        num_chunks, num_ended, repeats = _take(source, 3)
        ended = _take(source, num_ended)
        chunks = []
        for _ in range(num_chunks):
            sequence, start, num_tokens, num_pages, num_logits = _take(source, 5)
            chunks.append(Chunk(sequence, start, _take(source, num_tokens), _take(source, num_pages), num_logits))
        return Step(tuple(chunks), ended, repeats)


def _take(source: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(source) for _ in range(count))
