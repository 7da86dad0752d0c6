"""Guesses of the next tokens, which the model checks in one pass: more than one token a step where text repeats itself. No torch.

[Note: speculation]
A sequence that generates computes its last token and some guesses at once. The model's token after each is chosen as always, from the same logits and
the same random numbers, and guesses are kept as long as they are what was chosen. So an answer is the same as without, whatever the guesses are.
"""

from __future__ import annotations

from collections.abc import Sequence as Series
from typing import Protocol

from meshwright.serve.scheduler import Sequence

_NGRAMS = (4, 3, 2)  # tokens that must have been there before; the longest first
_GOOD_RATE = 0.5  # of guesses that are kept: above it all are made
_POOR_RATE = 0.15  # below it guesses are made now and then only
_PAUSE_STEPS = 12
_SMOOTHING = 0.15  # of the rate, by guess


class Proposer(Protocol):
    """Makes guesses for sequences that generate."""

    def propose(self, sequences: Series[Sequence], most: Series[int]) -> dict[int, tuple[int, ...]]:
        """By sequence id, at most so many guesses each of what follows its tokens; sequences without a guess are left out."""

    def note(self, sequence: Sequence, proposed: int, kept: int) -> None:
        """How many of a sequence's guesses were right."""

    def forget(self, sequence: int) -> None:
        """The sequence has ended."""


class PromptLookup:
    """Guesses that text goes on as it did the last time that the latest tokens were there, in the prompt or in the answer."""

    def __init__(self) -> None:
        self._indices: dict[int, _NgramIndex] = {}

    def propose(self, sequences: Series[Sequence], most: Series[int]) -> dict[int, tuple[int, ...]]:
        found = {}
        for sequence, limit in zip(sequences, most, strict=True):
            index = self._indices.setdefault(sequence.id, _NgramIndex())
            guess = index.propose(sequence.tokens, min(limit, index.pace.allowance(limit)))
            if guess:
                found[sequence.id] = guess
        return found

    def note(self, sequence: Sequence, proposed: int, kept: int) -> None:
        self._indices[sequence.id].pace.note(proposed, kept)

    def forget(self, sequence: int) -> None:
        self._indices.pop(sequence, None)


class GuessPace:
    """How many guesses are worth their cost for one sequence: fewer, and less often, where they are mostly wrong."""

    def __init__(self) -> None:
        self._rate, self._pause = _GOOD_RATE, 0

    def allowance(self, most: int) -> int:
        if self._pause:
            self._pause -= 1
            return 0
        return most if self._rate >= _GOOD_RATE else max(int(most * self._rate / _GOOD_RATE), 1)

    def note(self, proposed: int, kept: int) -> None:
        for place in range(min(kept + 1, proposed)):  # what follows the first wrong guess says nothing
            self._rate += _SMOOTHING * ((place < kept) - self._rate)
        if self._rate < _POOR_RATE:
            self._pause = _PAUSE_STEPS


class _NgramIndex:
    """Where each run of a few tokens was last followed by another."""

    def __init__(self) -> None:
        self.pace = GuessPace()
        self._ends: dict[tuple[int, ...], int] = {}
        self._known = 0  # tokens whose followers are in the index

    def propose(self, tokens: Series[int], most: int) -> tuple[int, ...]:
        for end in range(max(self._known, 1), len(tokens)):
            for size in _NGRAMS:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = end
        self._known = max(len(tokens), 1)
        if most < 1:
            return ()
        for size in _NGRAMS:
            place = self._ends.get(tuple(tokens[-size:]))
            if place is not None:
                return tuple(tokens[place : place + most])
        return ()
