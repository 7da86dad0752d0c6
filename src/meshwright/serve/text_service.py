"""Text generation as a service: prompts or conversations in, text and counts out, over the replicas of one model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from meshwright.core.errors import RequestError
from meshwright.serve.replica_set import DeadlineError
from meshwright.serve.requests import FinishReason, SamplingParams, TokenLogprobs
from meshwright.serve.service_metrics import ServiceMetrics
from meshwright.serve.text import TextCodec, TextStream
from meshwright.serve.text_replica import TextReplicas

_LONG_TEXT = 2000  # characters


@dataclass(frozen=True)
class TokenText:
    """One token of an answer with its text alone, where log-probabilities are asked for."""

    text: str
    logprobs: TokenLogprobs
    top_texts: tuple[str, ...]


@dataclass(frozen=True)
class Delta:
    """What was added to one of a request's answers. The last one of an answer has `finish`."""

    index: int
    text: str
    finish: FinishReason | None = None
    tokens: tuple[TokenText, ...] = ()


@dataclass
class Usage:
    """Tokens that a request has cost."""

    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float | None = None


@dataclass
class GenerationJob:
    """A request for `count` answers to each of several prompts; `usage` fills while it runs. Answers are numbered prompt by prompt."""

    prompts: list[list[int]]
    params: SamplingParams
    stops: tuple[str, ...] = ()
    count: int = 1
    usage: Usage = field(default_factory=Usage)


class TextService:
    """One model's text. `capacity` is the most tokens of prompt and answer; no answer may take longer than `timeout_s`."""

    def __init__(self, replicas: TextReplicas, codec: TextCodec, metrics: ServiceMetrics, timeout_s: float = 600.0) -> None:
        self.replicas, self.codec, self.metrics, self._timeout_s = replicas, codec, metrics, timeout_s

    @property
    def capacity(self) -> int:
        facts = self.replicas.facts
        return min(int(facts.get("context", 0)), int(facts.get("kv_tokens", 0)))

    def check_ready(self) -> None:
        self.replicas.set.check_ready()

    async def encode(self, text: str) -> list[int]:
        """The text's tokens. A long one is given to a thread, not to hold up others."""
        return self.codec.encode(text) if len(text) < _LONG_TEXT else await asyncio.to_thread(self.codec.encode, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        is_short = sum(len(message["content"]) for message in messages) < _LONG_TEXT
        return self.codec.encode_chat(messages) if is_short else await asyncio.to_thread(self.codec.encode_chat, messages)

    def check(self, job: GenerationJob) -> None:
        """Refuse what can never run, or what should come later."""
        vocabulary = int(self.replicas.facts.get("vocabulary", 0))
        for tokens in job.prompts:
            if not tokens:
                raise RequestError("the prompt is empty: give it some text")
            if len(tokens) >= self.capacity:
                length = f"the prompt has {len(tokens)} tokens, and prompt and answer together may have {self.capacity}"
                raise RequestError(f"{length}: shorten the prompt")
            if vocabulary and max(tokens) >= vocabulary:
                raise RequestError(f"the prompt has the token {max(tokens)}, and tokens are numbered from 0 to {vocabulary - 1}")
        self.replicas.check_room(len(job.prompts) * job.count)

    async def run(self, job: GenerationJob) -> AsyncGenerator[Delta, None]:
        """Deltas of all answers as they come. Closing the iterator gives the replicas' memory back."""
        self.check(job)
        job.usage.prompt_tokens = sum(map(len, job.prompts))
        started = time.monotonic()
        queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        first = job.params.seed if job.params.seed is not None else random.getrandbits(62)
        tasks = [
            asyncio.create_task(self._answer(job, tokens, place * job.count + i, first + i, queue, started))
            for place, tokens in enumerate(job.prompts)
            for i in range(job.count)
        ]
        left = len(tasks)
        late = DeadlineError(f"the answer took longer than {self._timeout_s:g} s: ask for fewer tokens")
        deadline = asyncio.get_running_loop().call_later(self._timeout_s, queue.put_nowait, late)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item.finish is not None
                yield item
        finally:
            deadline.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(
        self, job: GenerationJob, tokens: list[int], index: int, seed: int, queue: asyncio.Queue[Delta | BaseException], started: float
    ) -> None:  # fmt: skip
        stream, held = TextStream(self.codec, job.stops), list[TokenText]()
        params = replace(job.params, seed=seed)
        last = started
        try:
            async with aclosing(self.replicas.generate(tokens, params)) as events:
                async for event in events:
                    now = time.monotonic()
                    self.metrics.token(now - last, is_first=last == started)
                    job.usage.first_token_s = job.usage.first_token_s if job.usage.first_token_s is not None else now - started
                    last = now
                    job.usage.cached_tokens += event.reused if not job.usage.answer_tokens else 0
                    job.usage.answer_tokens += 1
                    is_end = event.finish == "stop" and event.token in self.codec.end_tokens
                    text = "" if is_end else stream.add(event.token)
                    if event.logprobs is not None and not is_end:
                        held.append(self._token_text(event.token, event.logprobs))
                    finish: FinishReason | None = "stop" if stream.stopped else event.finish
                    if finish is not None:
                        text += stream.finish()
                    if text or finish is not None:
                        queue.put_nowait(Delta(index, text, finish, tuple(held)))
                        held.clear()
                    if finish is not None:
                        return
        except Exception as error:  # whoever reads the queue raises it
            queue.put_nowait(error)

    def _token_text(self, token: int, logprobs: TokenLogprobs) -> TokenText:
        return TokenText(self._name(token), logprobs, tuple(self._name(other) for other, _ in logprobs.top))

    def _name(self, token: int) -> str:
        """A token's text; its number where it is only a part of a character, and would look like others."""
        text = self.codec.decode([token])
        return text if "\ufffd" not in text else f"token:{token}"


async def whole_answers(service: TextService, job: GenerationJob) -> list[Delta]:
    """All answers, whole."""
    texts: dict[int, Delta] = {}
    async with aclosing(service.run(job)) as deltas:
        async for delta in deltas:
            so_far = texts.get(delta.index, Delta(delta.index, ""))
            texts[delta.index] = Delta(delta.index, so_far.text + delta.text, delta.finish, so_far.tokens + delta.tokens)
    return [texts[index] for index in sorted(texts)]
