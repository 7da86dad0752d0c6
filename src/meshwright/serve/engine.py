"""The engine: takes requests as tokens, runs steps of the model, and gives tokens back. One engine is one replica; its first rank decides."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshwright.serve.requests import SamplingParams, TokenEvent, TokenLogprobs
from meshwright.serve.sampler import SampleRow, sample
from meshwright.serve.scheduler import Scheduler
from meshwright.serve.scheduler import Sequence as Running
from meshwright.serve.speculation import Proposer
from meshwright.serve.steps import Chunk, Step

_SLOWDOWN = 2.0  # how many times as long as without prompts a step may take beside sequences that generate
_MIN_PROMPT_TOKENS = 16
_MOST_LATE_S = 0.02  # how late repeated steps may let a token be, and a new request begin


class StepRunner(Protocol):
    """Runs a step on all ranks. `most_repeats`: how often it can repeat one by itself."""

    @property
    def most_repeats(self) -> int: ...

    def run(self, step: Step) -> Tensor:
        """The logits of the chunks that want them (rows, vocabulary), or the tokens (rows, repeats) of a step that is repeated."""


@dataclass
class EngineStats:
    """Counters since the start, for metrics and reports."""

    steps: int = 0
    prompt_tokens: int = 0  # computed, without those reused
    generated_tokens: int = 0
    decoded_tokens: int = 0  # of them, in steps after a sequence's first token
    prompt_s: float = 0.0  # of steps without generation
    decode_s: float = 0.0  # of steps with it
    mixed_prompt_tokens: int = 0  # computed beside generation
    guessed_tokens: int = 0  # that were checked
    kept_guesses: int = 0  # that were right


class Engine:
    """Requests come in by `submit` at any time between steps; `step` runs one and returns what it gave."""

    def __init__(
        self, runner: StepRunner, scheduler: Scheduler, proposer: Proposer | None = None, guesses: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`proposer` makes at most `guesses` guesses of what follows a sequence."""
        self.scheduler, self.stats, self.runner = scheduler, EngineStats(), runner
        self._proposer, self._most_guesses, self._clock = proposer, guesses, clock
        self._most_prompt_tokens = scheduler.limits.prompt_tokens
        self._pace = PromptPace(self._most_prompt_tokens)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, tokens: Sequence[int], params: SamplingParams, num_prompt: int | None = None) -> Running:
        """Queue a request; RequestError if it can never run. With `num_prompt`, the tokens after so many are the answer so far, which goes on as it
        would have, if the request has a seed."""
        seed = params.seed if params.seed is not None else random.getrandbits(63)
        return self.scheduler.add(tokens, params, seed, num_prompt)

    def cancel(self, sequence: Running) -> bool:
        return self.scheduler.cancel(sequence)

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """Run one step, if there is anything to do."""
        guesses = self._propose()
        repeats = 1 if guesses else self.scheduler.most_repeats(min(self.runner.most_repeats, self._pace.steps_in(_MOST_LATE_S)))
        step = self.scheduler.next_step(self._pace.prompt_tokens, guesses, repeats)
        if not step.chunks and not step.ended:
            return []
        sequences = {sequence.id: sequence for sequence in self.scheduler.running}
        before = self._clock()
        found = self.runner.run(step)
        chosen = [(token, None) for token in found.flatten().tolist()] if step.repeats > 1 else self._sample(step, sequences, found)
        seconds = self._clock() - before
        events = self.scheduler.finish_step(step, chosen)
        self._count(step, events, sequences, seconds)
        return events

    def _sample(self, step: Step, sequences: dict[int, Running], logits: Tensor) -> list[tuple[int, TokenLogprobs | None]]:
        rows = [row for chunk in step.chunks for row in self._rows(sequences[chunk.sequence], chunk)]
        return [(found.token, found.logprobs) for found in sample(logits, rows)] if rows else []

    def _propose(self) -> dict[int, tuple[int, ...]]:
        generating = [s for s in self.scheduler.running if s.is_decoding] if self._proposer is not None else []
        if self._proposer is None or not generating:
            return {}
        return self._proposer.propose(generating, [self.scheduler.most_guesses(s, self._most_guesses) for s in generating])

    def facts(self) -> dict[str, float]:
        """Counters and gauges, for metrics."""
        pool, scheduler = self.scheduler.pool, self.scheduler
        return {
            **vars(self.stats), "running": len(scheduler.running), "waiting": len(scheduler.waiting), "preemptions": scheduler.preemptions,
            "reused_tokens": pool.reused_tokens, "kv_used": pool.used / max(pool.count, 1), "step_prompt_tokens": self._pace.prompt_tokens,
        }  # fmt: skip

    def drain(self) -> Iterator[TokenEvent]:
        """Run until nothing is left."""
        while self.has_work:
            yield from self.step()

    def _rows(self, sequence: Running, chunk: Chunk) -> Iterator[SampleRow]:
        """What each row of the chunk's logits is sampled by: as if the guesses before it were right."""
        for place in range(chunk.num_logits):
            tokens = [*sequence.tokens, *chunk.tokens[1 : 1 + place]] if place else sequence.tokens
            yield SampleRow(sequence.params, sequence.seed, len(tokens), tokens, sequence.num_prompt)

    def _count(self, step: Step, events: Sequence[TokenEvent], sequences: dict[int, Running], seconds: float) -> None:
        stats, generating = self.stats, {chunk.sequence: len(chunk.tokens) for chunk in step.chunks if chunk.generates}
        prompt_tokens = step.num_tokens - sum(generating.values())
        decoded = Counter(event.request for event in events if event.request in generating)
        stats.steps += 1
        stats.prompt_tokens += prompt_tokens
        stats.generated_tokens += len(events)
        if generating:
            stats.decode_s += seconds
            stats.decoded_tokens += decoded.total()
            stats.mixed_prompt_tokens += prompt_tokens
            self._pace.note(prompt_tokens, seconds / step.repeats)
        elif step.chunks:
            stats.prompt_s += seconds
        if self._proposer is None:
            return
        for sequence, tokens in generating.items():
            if tokens > 1 and decoded[sequence]:
                stats.guessed_tokens += tokens - 1
                stats.kept_guesses += decoded[sequence] - 1
                self._proposer.note(sequences[sequence], tokens - 1, decoded[sequence] - 1)
        for sequence in step.ended:
            self._proposer.forget(sequence)


class PromptPace:
    """How many tokens of prompts a step takes beside sequences that generate, so that these do not wait much longer for their next token: found from
    how long steps take with and without.

    Prompts take a time of their own, whatever their length, and a time for each token: a line through what was seen lately. Where the first is the
    larger one, fewer tokens would only make more such steps, so a step takes as many tokens as double it."""

    def __init__(self, most: int) -> None:
        self.prompt_tokens, self._most = most, most
        self._decode_s = 0.0  # of a step without prompts, lately
        self._seen = [0.0] * 5  # weights, tokens, tokens², seconds, tokens × seconds of steps with prompts, older ones count less

    def steps_in(self, seconds: float) -> int:
        """How many steps without prompts fit into a time."""
        return max(int(seconds / self._decode_s), 1) if self._decode_s else 1

    def note(self, prompt_tokens: int, seconds: float) -> None:
        if not prompt_tokens:
            self._decode_s = seconds if not self._decode_s else 0.8 * self._decode_s + 0.2 * seconds
        elif self._decode_s:
            extra = max(seconds - self._decode_s, 1e-6)
            now = (1.0, prompt_tokens, prompt_tokens**2, extra, prompt_tokens * extra)
            self._seen = [0.8 * before + value for before, value in zip(self._seen, now, strict=True)]
            fixed, each = self._line()
            room = max((_SLOWDOWN - 1.0) * self._decode_s, 2.0 * fixed)
            fitting = int((room - fixed) / each)
            self.prompt_tokens = min(max(fitting, _MIN_PROMPT_TOKENS, self.prompt_tokens // 2), self._most, 2 * self.prompt_tokens)

    def _line(self) -> tuple[float, float]:
        """Seconds of any prompt, and of each of its tokens."""
        weight, tokens, squares, seconds, products = self._seen
        spread = weight * squares - tokens**2
        if spread <= 1e-3 * squares * weight:  # all of about one length
            return 0.0, seconds / tokens
        each = max((weight * products - tokens * seconds) / spread, 1e-3 * seconds / tokens)
        return max((seconds - each * tokens) / weight, 0.0), min(each, seconds / tokens)
