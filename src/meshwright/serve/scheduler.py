"""Decides what each step computes: continuous batching. Sequences join and leave between steps; nothing waits for the longest. No torch.

[Note: continuous batching]
Sequences that generate take one token each in every step. What is left of a step's tokens goes to prompts, in pieces, so that a long prompt does not
hold up those that generate. A sequence that needs a page when there is none makes the youngest one give its pages back; that one begins again later,
with what it has generated, most of which it finds in memory.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from types import MappingProxyType

from meshwright.core.errors import RequestError
from meshwright.serve.page_pool import PageList, PagePool
from meshwright.serve.requests import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from meshwright.serve.steps import Chunk, Step


@dataclass(eq=False)
class Sequence:
    """One request under way: its tokens, of which the first `num_prompt` were given and the first `computed` are in memory."""

    id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    arrived: float
    held: PageList = field(default_factory=PageList)
    computed: int = 0
    reused: int = 0  # of the prompt, by prefix reuse
    started: float = 0.0  # when its first step began
    first_token: float = 0.0  # when it came

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        return self.computed == len(self.tokens) - 1 and self.generated > 0


@dataclass(frozen=True)
class Limits:
    """What a step and a sequence may take. `prompt_tokens` are those of prompts in one step beside sequences that generate."""

    context: int  # tokens of a sequence, prompt and answer
    max_sequences: int = 64  # that have memory at once
    step_tokens: int = 2048
    prompt_tokens: int = 512
    max_waiting: int = 1_000_000


class Scheduler:
    """Sequences that wait and run. `splits_prompts`: a prompt may be computed in pieces, and a sequence may begin again."""

    def __init__(self, pool: PagePool, limits: Limits, end_tokens: Series[int], *, splits_prompts: bool = True) -> None:
        self.pool, self.limits, self._splits_prompts = pool, limits, splits_prompts
        self._end_tokens = frozenset(end_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # the oldest first
        self._ended: list[int] = []
        self._next_id = 0
        self.preemptions = 0

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence."""
        return min(self.limits.context, self.pool.count * self.pool.page_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, tokens: Series[int], params: SamplingParams, seed: int, num_prompt: int | None = None) -> Sequence:
        """Queue a request. RequestError if it can never run. Tokens after the first `num_prompt` are an answer that goes on."""
        if not tokens:
            raise RequestError("the prompt has no tokens: give it some text")
        if len(tokens) >= self.capacity:
            raise RequestError(f"the prompt has {len(tokens)} tokens, and prompt and answer together may have {self.capacity}: shorten it")
        self._next_id += 1
        sequence = Sequence(self._next_id, list(tokens), num_prompt or len(tokens), params, seed, time.monotonic())
        self.waiting.append(sequence)
        return sequence

    @property
    def is_full(self) -> bool:
        """Whether so many requests wait that a further one should come later."""
        return len(self.waiting) >= self.limits.max_waiting

    def cancel(self, sequence: Sequence) -> bool:
        """Forget a request; False if it has ended already."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._end(sequence)
        else:
            return False
        return True

    def most_guesses(self, sequence: Sequence, most: int) -> int:
        """How many guesses of what follows a sequence that generates can be checked at once."""
        if not self._splits_prompts:
            return 0
        left = min(sequence.params.max_tokens - sequence.generated, self.capacity - len(sequence.tokens)) - 1
        return max(min(most, left, self.limits.step_tokens // max(len(self.running), 1) - 1), 0)

    def most_repeats(self, most: int) -> int:
        """How often the next step can be repeated before anything but the next tokens of greedy answers has to be done."""
        if self.waiting or not all(s.is_decoding and s.params.is_plain_greedy for s in self.running):
            return 1
        left = [min(s.params.max_tokens - s.generated, self.capacity - len(s.tokens)) for s in self.running]
        return max(min(most, *left), 1) if left else 1

    def next_step(self, prompt_tokens: int | None = None, guesses: Mapping[int, tuple[int, ...]] = MappingProxyType({}), repeats: int = 1) -> Step:
        """What to compute next; a step without chunks if there is nothing. `prompt_tokens` limits those of prompts beside sequences that generate;
        `guesses` are of what follows sequences, by id; with `repeats` there is room for so many tokens of each sequence, or none is repeated."""
        budget, chunks = self.limits.step_tokens, list[Chunk]()
        if repeats > 1 and not all(self.pool.extend(s.held, len(s.tokens) + repeats - 1) for s in self.running):
            repeats = 1
        for sequence in [s for s in self.running if s.is_decoding]:
            if sequence not in self.running:
                continue
            guess = guesses.get(sequence.id, ())
            if guess and not self.pool.extend(sequence.held, len(sequence.tokens) + len(guess)):
                guess = ()
            if self._make_room(sequence, len(sequence.tokens) + len(guess)):
                chunks.append(self._chunk(sequence, 1, guess))
        running = {sequence.id for sequence in self.running}
        chunks = [chunk for chunk in chunks if chunk.sequence in running]  # some may have lost their pages to others
        budget -= sum(len(chunk.tokens) for chunk in chunks)
        if chunks:
            budget = min(budget, self.limits.prompt_tokens if prompt_tokens is None else prompt_tokens)
        for sequence in [s for s in self.running if not s.is_decoding]:
            budget = self._add_prompt(sequence, budget, chunks)
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_sequences and self._admit(budget):
            budget = self._add_prompt(self.running[-1], budget, chunks)
        ended, self._ended = tuple(self._ended), []
        return Step(tuple(chunks), ended, repeats)

    def finish_step(self, step: Step, sampled: Series[tuple[int, TokenLogprobs | None]]) -> list[TokenEvent]:
        """Note what a step has computed; `sampled` has a token for each row of logits, in order. Guesses are kept up to the first wrong one."""
        by_id = {sequence.id: sequence for sequence in self.running}
        events, tokens = list[TokenEvent](), iter(sampled)
        for chunk in step.chunks:
            chosen = list(itertools.islice(tokens, chunk.num_logits * step.repeats))
            sequence = by_id.get(chunk.sequence)
            if sequence is None:  # cancelled meanwhile
                continue
            guess = chunk.tokens[1:] if chunk.generates else ()
            sequence.computed = chunk.end - len(guess)
            if step.repeats > 1:  # what was chosen was computed next
                guess = tuple(token for token, _ in chosen[:-1])
            self.pool.register(sequence.held, sequence.tokens, sequence.computed)
            for place, new in enumerate(chosen):
                events.append(self._append(sequence, *new))
                if events[-1].finish is not None or place >= len(guess) or guess[place] != new[0]:
                    break
                sequence.computed += 1
        return events

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        sequence.first_token = sequence.first_token or time.monotonic()
        sequence.tokens.append(token)
        reason: FinishReason | None = None
        params = sequence.params
        if (token in self._end_tokens and not params.ignore_end) or token in params.stop_tokens:
            reason = "stop"
        elif sequence.generated >= params.max_tokens or len(sequence.tokens) >= self.capacity:
            reason = "length"
        if reason is not None:
            self._end(sequence)
        return TokenEvent(sequence.id, token, reason, logprobs, reused=sequence.reused)

    # -- memory --

    def _admit(self, budget: int) -> bool:
        """Give the first that waits memory for what it computes in this step, if there is enough for its whole prompt and one page more."""
        sequence = self.waiting[0]
        if not self._splits_prompts and len(sequence.tokens) > budget and self.running:
            return False
        room = min(sequence.num_prompt + sequence.params.max_tokens, self.limits.context)
        held, reused = self.pool.open(sequence.tokens, room)
        needed = self.pool.pages_for(len(sequence.tokens)) + bool(self.running)
        if needed - len(held.pages) > self.pool.available:
            self.pool.release(held)
            self.pool.reused_tokens -= reused
            return False
        self.waiting.popleft()
        sequence.held, sequence.computed = held, reused
        if not sequence.generated:
            sequence.reused = reused
        sequence.started = sequence.started or time.monotonic()
        self.running.append(sequence)
        return True

    def _add_prompt(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Add a chunk of a prompt; returns what is left of the budget."""
        left = len(sequence.tokens) - sequence.computed
        count = min(left, budget) if self._splits_prompts else left
        if count <= 0 or budget <= 0 or not self.pool.extend(sequence.held, sequence.computed + count):
            return budget
        chunks.append(self._chunk(sequence, count))
        return budget - count

    def _chunk(self, sequence: Sequence, count: int, guess: tuple[int, ...] = ()) -> Chunk:
        start, end = sequence.computed, sequence.computed + count
        num_logits = 1 + len(guess) if end == len(sequence.tokens) else 0
        return Chunk(sequence.id, start, (*sequence.tokens[start:end], *guess), tuple(sequence.held.pages), num_logits)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for a sequence that generates; the youngest other one gives its own back if need be. False if this is the youngest itself."""
        while not self.pool.extend(sequence.held, tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.held)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.held)
        self._ended.append(sequence.id)
