"""OpenAI's routes for text: chats and completions, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from meshwright.core.errors import RequestError
from meshwright.serve.http_errors import explain_error, note_error
from meshwright.serve.openai_answers import AnswerShape, event_stream
from meshwright.serve.openai_schema import ChatRequest, CompletionRequest
from meshwright.serve.text_service import GenerationJob, TextService, whole_answers

CheckModel = Callable[[str | None], None]
_GONE = 499  # the client went away before there was an answer; only the log sees it


def add_text_routes(app: FastAPI, service: TextService, name: str, check_model: CheckModel) -> None:
    @app.post("/v1/chat/completions", response_class=Response)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """The next message of a conversation, as in OpenAI's API."""
        check_model(body.model)
        service.check_ready()
        tokens = await service.encode_chat([message.plain() for message in body.messages])
        job = GenerationJob([tokens], body.params(max(service.capacity - len(tokens), 1)), body.stops, body.n or 1)
        return await _respond(service, job, request, _shape(name, is_chat=True), body.stream, body.stream_options)

    @app.post("/v1/completions", response_class=Response)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Texts that go on, as in OpenAI's API."""
        check_model(body.model)
        service.check_ready()
        prompts = await _prompts(body.prompt, service)
        count = body.n or 1
        job = GenerationJob(prompts, body.params(max(service.capacity - max(map(len, prompts)), 1)), body.stops, count)
        echo = tuple(service.codec.decode(tokens) for tokens in prompts for _ in range(count)) if body.echo else ()
        return await _respond(service, job, request, _shape(name, is_chat=False, echo=echo), body.stream, body.stream_options)


async def _prompts(prompt: Any, service: TextService) -> list[list[int]]:
    if isinstance(prompt, str):
        return [await service.encode(prompt)]
    if prompt and isinstance(prompt[0], int):
        return [list(prompt)]
    if not prompt:
        raise RequestError("prompt: it is empty: give a text")
    return [await service.encode(entry) if isinstance(entry, str) else list(entry) for entry in prompt]


def _shape(name: str, *, is_chat: bool, echo: Sequence[str] = ()) -> AnswerShape:
    now = time.time_ns()
    return AnswerShape(f"{'chatcmpl' if is_chat else 'cmpl'}-{now:x}", now // 10**9, name, is_chat, tuple(echo))


async def _respond(service: TextService, job: GenerationJob, request: Request, shape: AnswerShape, stream: bool | None, options: Any) -> Response:
    service.check(job)  # before a stream has begun with status 200
    facts = request.state.facts
    facts["prompt_tokens"] = sum(map(len, job.prompts))
    if stream:
        include_usage = options is not None and options.include_usage
        events = event_stream(service, job, shape, include_usage, lambda error: _noted_explanation(facts, error))
        return StreamingResponse(_noted(events, job, facts, service), media_type="text/event-stream", headers={"cache-control": "no-cache"})
    answers = await until_disconnected(request, whole_answers(service, job))
    _note_usage(job, facts, service)
    if isinstance(answers, Response):
        return answers
    facts["finish"] = [answer.finish for answer in answers]
    return Response(json.dumps(shape.whole(answers, job.usage), ensure_ascii=False), media_type="application/json")


async def _noted(events: AsyncGenerator[bytes, None], job: GenerationJob, facts: dict[str, Any], service: TextService) -> AsyncGenerator[bytes, None]:
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()
        _note_usage(job, facts, service)


def _noted_explanation(facts: dict[str, Any], error: Exception) -> dict[str, Any]:
    note_error(facts, error)
    return explain_error(error)[1]


def _note_usage(job: GenerationJob, facts: dict[str, Any], service: TextService) -> None:
    usage, metrics = job.usage, service.metrics
    facts.update(answer_tokens=usage.answer_tokens, cached_tokens=usage.cached_tokens)
    if usage.first_token_s is not None:
        facts["first_token_s"] = round(usage.first_token_s, 4)
    metrics.prompt_tokens += usage.prompt_tokens
    metrics.cached_tokens += usage.cached_tokens


async def until_disconnected(request: Request, work: Any) -> Any:
    """The result of some work, for a request whose body has been read; an empty response, and the work is given up, if the client goes away first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and gone.result()["type"] == "http.disconnect":
            return Response(status_code=_GONE)
        return await task
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
