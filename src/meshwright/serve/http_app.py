"""The server's HTTP interface: OpenAI's routes for text, `/predict` for other models, health, metrics and a page to try it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from meshwright.core.errors import MeshwrightError, RequestError
from meshwright.serve.openai_answers import AnswerShape, event_stream
from meshwright.serve.openai_schema import ChatRequest, CompletionRequest, EmbeddingRequest, error_body
from meshwright.serve.replica_set import NotReadyError, OverloadedError
from meshwright.serve.service_metrics import ServiceMetrics
from meshwright.serve.text_service import GenerationJob, TextService, whole_answers

_PAGE = Path(__file__).parent / "page.html"
_POLL_S = 0.25


@dataclass
class Services:
    """What the server offers: text, or predictions, of one model under one name."""

    name: str
    created: int
    metrics: ServiceMetrics
    text: TextService | None = None
    predict: Any = None  # a PredictService
    reload: Callable[[], Awaitable[str]] | None = None
    facts: Callable[[], dict[str, Any]] = dict
    is_ready: Callable[[], bool] = lambda: True
    close: Callable[[], Awaitable[None]] | None = None


class UnknownModelError(RequestError):
    """A request for a model that this server does not have."""


def make_app(services: Services) -> FastAPI:
    """The FastAPI application, without what `access.Access` puts around it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        if services.close is not None:
            await services.close()

    app = FastAPI(title="Meshwright", description=f"{services.name}, served by Meshwright", lifespan=lifespan, redoc_url=None)
    _handle_errors(app)
    _add_status_routes(app, services)
    if services.text is not None:
        _add_text_routes(app, services, services.text)
    if services.predict is not None:
        services.predict.add_routes(app)
    return app


# -- errors --


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _explained(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        known = {404: "there is no such path: see /docs", 405: "this path takes another method: see /docs"}
        return JSONResponse(error_body(known.get(error.status_code, str(error.detail))), error.status_code, headers=error.headers)

    @app.exception_handler(MeshwrightError)
    async def own_error(request: Request, error: MeshwrightError) -> JSONResponse:
        return _explained(error)

    @app.exception_handler(Exception)
    async def other_error(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, RecursionError):
            request.state.facts["error"] = f"{type(error).__name__}: {error}"[:500]
        return _explained(error)


def explain_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and body for an error. Nothing of the server's inside is told."""
    if isinstance(error, RequestValidationError):
        return 400, error_body(*_first_problem(error))
    if isinstance(error, RecursionError):
        return 400, error_body("the JSON is nested too deeply")
    if isinstance(error, OverloadedError):
        return 429, error_body(str(error), "rate_limit_error", code="overloaded")
    if isinstance(error, NotReadyError):
        return 503, error_body(str(error), "server_error", code="not_ready")
    if isinstance(error, UnknownModelError):
        return 404, error_body(str(error), param="model", code="model_not_found")
    if isinstance(error, RequestError):
        return 400, error_body(str(error))
    return 500, error_body("the server failed; its log has the cause under this request's id", "server_error")


def _first_problem(error: RequestValidationError) -> tuple[str, str, str | None]:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}", "invalid_request_error", None
    name = ".".join(place)
    reason = {"extra_forbidden": "it is not known: leave it out", "missing": "it is missing"}.get(first["type"], "")
    reason = reason or str(first["msg"]).removeprefix("Value error, ")
    return f"{name}: {reason[0].lower()}{reason[1:]}" if name else reason, "invalid_request_error", place[0] if place else None


def _explained(error: Exception) -> JSONResponse:
    status, body = explain_error(error)
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, OverloadedError) else None
    return JSONResponse(body, status, headers=headers)


# -- status --


def _add_status_routes(app: FastAPI, services: Services) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The server runs."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """The model is loaded, and requests are taken."""
        return JSONResponse({"status": "ready"}) if services.is_ready() else JSONResponse({"status": "not ready"}, 503, headers={"retry-after": "1"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Counters for Prometheus."""
        facts = services.facts()
        text = services.metrics.render({r["name"]: (r["state"], r["stats"]) for r in facts.get("replicas", ())}, facts.get("restarts", 0))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": services.name, "object": "model", "created": services.created, "owned_by": "meshwright"}]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(services, name)
        return {"id": services.name, "object": "model", "created": services.created, "owned_by": "meshwright"}

    @app.get("/v1/plan")
    async def plan() -> dict[str, Any]:
        """What is served, under which plan, and how it goes."""
        return {"model": services.name, "kind": "text" if services.text is not None else "predict", **services.facts()}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"))

    if services.reload is not None:

        @app.post("/v1/reload")
        async def reload() -> dict[str, str]:
            """Put the newest checkpoint of the served run in place, if it is newer and healthy."""
            assert services.reload is not None
            return {"model": await services.reload()}


def _check_model(services: Services, name: str | None) -> None:
    if name not in (None, services.name, "default"):
        raise UnknownModelError(f"there is no model '{name[:80]}' here: use '{services.name}'")  # type: ignore[index]


# -- text --


def _add_text_routes(app: FastAPI, services: Services, service: TextService) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        _check_model(services, body.model)
        tokens = service.encode_chat([message.plain() for message in body.messages])
        job = GenerationJob([tokens], body.params(max(service.capacity - len(tokens), 1)), body.stops, body.n or 1)
        return await _respond(service, job, request, _shape(services, is_chat=True), body.stream, body.stream_options)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check_model(services, body.model)
        prompts = _prompts(body.prompt, service)
        count = body.n or 1
        job = GenerationJob(prompts, body.params(max(service.capacity - max(map(len, prompts)), 1)), body.stops, count)
        echo = tuple(service.codec.decode(tokens) for tokens in prompts for _ in range(count)) if body.echo else ()
        return await _respond(service, job, request, _shape(services, is_chat=False, echo=echo), body.stream, body.stream_options)

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Response:
        _check_model(services, body.model)
        raise RequestError("this model generates text; embeddings are for encoders: serve one, such as a folder of BERT")


def _prompts(prompt: Any, service: TextService) -> list[list[int]]:
    if isinstance(prompt, str):
        return [service.codec.encode(prompt)]
    if prompt and isinstance(prompt[0], int):
        return [list(prompt)]
    if not prompt:
        raise RequestError("prompt: it is empty: give a text")
    return [service.codec.encode(entry) if isinstance(entry, str) else list(entry) for entry in prompt]


def _shape(services: Services, *, is_chat: bool, echo: Sequence[str] = ()) -> AnswerShape:
    now = time.time()
    prefix = "chatcmpl" if is_chat else "cmpl"
    return AnswerShape(f"{prefix}-{time.time_ns():x}", int(now), services.name, is_chat, tuple(echo))


async def _respond(service: TextService, job: GenerationJob, request: Request, shape: AnswerShape, stream: bool | None, options: Any) -> Response:
    service.check(job)  # before a stream has begun with status 200
    facts = request.state.facts
    facts["prompt_tokens"] = sum(map(len, job.prompts))
    if stream:
        include_usage = options is not None and options.include_usage
        events = event_stream(service, job, shape, include_usage, lambda error: _noted_explanation(facts, error))
        return StreamingResponse(_noted(events, job, facts, service), media_type="text/event-stream", headers={"cache-control": "no-cache"})
    answers = await _until_disconnected(request, whole_answers(service, job))
    _note_usage(job, facts, service)
    if answers is None:
        return Response(status_code=499)
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
    facts["error"] = f"{type(error).__name__}: {error}"[:500]
    return explain_error(error)[1]


def _note_usage(job: GenerationJob, facts: dict[str, Any], service: TextService) -> None:
    usage, metrics = job.usage, service.metrics
    facts.update(answer_tokens=usage.answer_tokens, cached_tokens=usage.cached_tokens)
    if usage.first_token_s is not None:
        facts["first_token_s"] = round(usage.first_token_s, 4)
    metrics.prompt_tokens += usage.prompt_tokens
    metrics.cached_tokens += usage.cached_tokens


async def _until_disconnected(request: Request, work: Any) -> Any:
    """The result of some work; None, and the work is given up, if the client goes away first."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_POLL_S)
            if not task.done() and await request.is_disconnected():
                return None
        return task.result()
    finally:
        task.cancel()
