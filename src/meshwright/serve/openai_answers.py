"""Answers in the shape of OpenAI's API, whole or in chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from meshwright.serve.text_service import Delta, GenerationJob, TextService, TokenText, Usage


@dataclass(frozen=True)
class AnswerShape:
    """The fields that all chunks of one answer share. `is_chat` tells chats from completions."""

    id: str
    created: int
    model: str
    is_chat: bool
    echo: tuple[str, ...] = ()  # what each choice of a completion begins with

    def whole(self, answers: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = [self._whole_choice(answer) for answer in answers]
        return {**self._head(chunk=False), "choices": choices, "usage": usage_body(usage)}

    def chunk(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        """A part of a stream. The finish reason comes with the last text."""
        finish = _finish(delta)
        if not self.is_chat:
            text = (self.echo[delta.index] if self.echo and is_first else "") + delta.text
            choice = {"index": delta.index, "text": text, "finish_reason": finish, "logprobs": _completion_logprobs(delta.tokens)}
        else:
            content = {"role": "assistant", "content": delta.text} if is_first else {"content": delta.text}
            choice = {"index": delta.index, "delta": content, "finish_reason": finish, "logprobs": _chat_logprobs(delta.tokens)}
        return {**self._head(chunk=True), "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head(chunk=True), "choices": [], "usage": usage_body(usage)}

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _whole_choice(self, answer: Delta) -> dict[str, Any]:
        finish = _finish(answer)
        if self.is_chat:
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            return {"index": answer.index, "message": message, "finish_reason": finish, "logprobs": _chat_logprobs(answer.tokens)}
        text = (self.echo[answer.index] if self.echo else "") + answer.text
        return {"index": answer.index, "text": text, "finish_reason": finish, "logprobs": _completion_logprobs(answer.tokens)}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.answer_tokens,
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


async def event_stream(
    service: TextService, job: GenerationJob, shape: AnswerShape, include_usage: bool, explain: Callable[[Exception], dict[str, Any]]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events: a chunk for each delta, then the usage if it is asked for, then the end. An error is an event too: the status is sent."""
    begun: set[int] = set()
    try:
        async with aclosing(service.run(job)) as deltas:
            async for delta in deltas:
                chunk = shape.chunk(delta, is_first=delta.index not in begun)
                begun.add(delta.index)
                yield _event(chunk if not include_usage else {**chunk, "usage": None})
        if include_usage:
            yield _event(shape.usage_chunk(job.usage))
    except Exception as error:
        yield _event(explain(error))
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _finish(delta: Delta) -> str | None:
    return delta.finish if delta.finish in (None, "stop", "length") else "stop"


def _chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any] | None:
    if not tokens:
        return None
    entry = lambda text, logprob: {"token": text, "logprob": logprob, "bytes": list(text.encode())}  # noqa: E731
    content = [
        {
            **entry(t.text, t.logprobs.logprob),
            "top_logprobs": [entry(text, logprob) for text, (_, logprob) in zip(t.top_texts, t.logprobs.top, strict=True)],
        }
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any] | None:
    if not tokens:
        return None
    offsets, total = [], 0
    for t in tokens:
        offsets.append(total)
        total += len(t.text)
    return {
        "tokens": [t.text for t in tokens],
        "token_logprobs": [t.logprobs.logprob for t in tokens],
        "top_logprobs": [dict(zip(t.top_texts, (p for _, p in t.logprobs.top), strict=True)) for t in tokens],
        "text_offset": offsets,
    }
