"""Guesses of a smaller model with the same tokens (see [Note: speculation]): it generates a few tokens of each sequence ahead of the large one."""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass, field

import torch

from meshwright.serve.decoders import Decoder
from meshwright.serve.page_pool import PageList, PagePool
from meshwright.serve.sampler import SampleRow, sample
from meshwright.serve.scheduler import Sequence
from meshwright.serve.speculation import GuessPace
from meshwright.serve.steps import Chunk, Step


@dataclass
class _DraftState:
    """What the draft model has of a sequence: `computed` tokens are in its memory, the last `guessed` of them guesses after `length` known ones."""

    held: PageList = field(default_factory=PageList)
    computed: int = 0
    length: int = 0
    guessed: tuple[int, ...] = ()
    pace: GuessPace = field(default_factory=GuessPace)

    def rewind(self, tokens: Series[int]) -> None:
        """Go back to what is right of the guesses, and leave at least one token to compute."""
        right = 0
        for guess, token in zip(self.guessed, tokens[self.length :], strict=False):
            if guess != token:
                break
            right += 1
        self.computed = min(self.computed, self.length + right, len(tokens) - 1)


class DraftModel:
    """`decoder` runs the draft model, with memory of its own, in steps of at most `step_tokens` tokens."""

    def __init__(self, decoder: Decoder, pool: PagePool, step_tokens: int) -> None:
        self._decoder, self._pool, self._step_tokens = decoder, pool, step_tokens
        self._states: dict[int, _DraftState] = {}

    @torch.inference_mode()
    def propose(self, sequences: Series[Sequence], most: Series[int]) -> dict[int, tuple[int, ...]]:
        wanted: dict[int, int] = {}
        active: list[Sequence] = []
        for sequence, limit in zip(sequences, most, strict=True):
            state = self._states.setdefault(sequence.id, _DraftState())
            count = state.pace.allowance(limit) if limit else 0
            if count and self._pool.extend(state.held, len(sequence.tokens) + count):
                state.rewind(sequence.tokens)
                wanted[sequence.id] = count
                active.append(sequence)
        self._catch_up(active)
        guesses: dict[int, tuple[int, ...]] = {sequence.id: () for sequence in active}
        for turn in range(max(wanted.values(), default=0)):
            active = [sequence for sequence in active if wanted[sequence.id] > turn]
            self._guess_next(active, guesses)
        for sequence in (s for s in sequences if s.id in guesses):
            state, guess = self._states[sequence.id], guesses[sequence.id]
            state.length, state.guessed = len(sequence.tokens), guess
            state.computed = len(sequence.tokens) + len(guess) - 1  # the last guess was not read
        return guesses

    def note(self, sequence: Sequence, proposed: int, kept: int) -> None:
        self._states[sequence.id].pace.note(proposed, kept)

    def forget(self, sequence: int) -> None:
        if (state := self._states.pop(sequence, None)) is not None:
            self._pool.release(state.held)

    def _catch_up(self, sequences: Series[Sequence]) -> None:
        """Read what the model has not seen, but for each sequence's last token."""
        for sequence in sequences:
            state, end = self._states[sequence.id], len(sequence.tokens) - 1
            while state.computed < end:
                count = min(end - state.computed, self._step_tokens)
                tokens = tuple(sequence.tokens[state.computed : state.computed + count])
                self._decoder.forward(Step((Chunk(sequence.id, state.computed, tokens, tuple(state.held.pages), 0),)))
                state.computed += count

    def _guess_next(self, sequences: Series[Sequence], guesses: dict[int, tuple[int, ...]]) -> None:
        """Add a guess for each, drawn with the random numbers that the large model's token will be drawn with."""
        chunks, rows = [], []
        for sequence in sequences:
            guess, pages = guesses[sequence.id], tuple(self._states[sequence.id].held.pages)
            tokens = (*sequence.tokens, *guess)
            chunks.append(Chunk(sequence.id, len(tokens) - 1, tokens[-1:], pages))
            rows.append(SampleRow(sequence.params, sequence.seed, len(tokens), tokens, sequence.num_prompt))
        logits = self._decoder.forward(Step(tuple(chunks)))
        for sequence, sampled in zip(sequences, sample(logits, rows), strict=True):
            guesses[sequence.id] = (*guesses[sequence.id], sampled.token)
