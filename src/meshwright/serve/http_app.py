"""The server's HTTP interface: OpenAI's routes for text, `/predict` for other models, health, metrics and a page to try it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel

from meshwright.core.errors import RequestError
from meshwright.serve.http_errors import UnknownModelError, handle_errors
from meshwright.serve.openai_schema import EmbeddingRequest
from meshwright.serve.predict_routes import PredictService, embedding_body, predict_schema
from meshwright.serve.service_metrics import ServiceMetrics
from meshwright.serve.text_routes import add_text_routes, until_disconnected
from meshwright.serve.text_service import TextService

_PAGE = Path(__file__).parent / "page.html"


@dataclass
class Services:
    """What the server offers: text, or predictions, of one model under one name."""

    name: str
    created: int
    metrics: ServiceMetrics
    text: TextService | None = None
    predict: PredictService | None = None
    reload: Callable[[], Awaitable[str]] | None = None
    facts: Callable[[], dict[str, Any]] = dict
    is_ready: Callable[[], bool] = lambda: True
    open: Callable[[], Awaitable[None]] | None = None
    close: Callable[[], Awaitable[None]] | None = None

    @property
    def kind(self) -> str:
        return "text" if self.text is not None else "predict"

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name, "default"):
            raise UnknownModelError(f"there is no model '{name[:80]}' here: use '{self.name}'")  # type: ignore[index]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error, in the shape of OpenAI's API."""

    error: ErrorDetail


_REFUSALS = {400: "The request is wrong: the message says what to change.", 401: "The API key is missing or wrong.", 404: "There is no such model.",
             408: "The body did not arrive in time.", 413: "The body is too large.", 415: "The body is compressed.",
             429: "Too many requests wait: come again after Retry-After seconds.", 500: "The server failed; its log has the cause.",
             503: "The model is being loaded, or the server is shutting down.", 504: "The answer took too long."}  # fmt: skip


def make_app(services: Services) -> FastAPI:
    """The FastAPI application, without what `access.Access` puts around it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        if services.open is not None:
            await services.open()
        yield
        if services.close is not None:
            await services.close()

    responses: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody, "description": text} for status, text in _REFUSALS.items()}
    app = FastAPI(
        title="Meshwright", description=f"{services.name}, served by Meshwright", lifespan=lifespan, redoc_url=None, responses=responses
    )  # fmt: skip
    handle_errors(app)
    _add_status_routes(app, services)
    if services.reload is not None:
        _add_reload_route(app, services.reload)
    if services.text is not None:
        add_text_routes(app, services.text, services.name, services.check_model)
    if services.predict is not None:
        _add_predict_route(app, services.predict)
    _add_embedding_route(app, services)
    app.openapi = lambda: _openapi(app, services)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI, services: Services) -> dict[str, Any]:
    """The document, with what the model takes as soon as that is known. Wrong bodies are 400 here, not 422."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    if services.predict is not None and services.predict.specs:
        content = {"application/json": {"schema": predict_schema(services.predict.specs)}}
        document["paths"]["/predict"]["post"]["requestBody"] = {"required": True, "content": content}
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


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
        services.check_model(name)
        return {"id": services.name, "object": "model", "created": services.created, "owned_by": "meshwright"}

    @app.get("/v1/plan")
    async def plan() -> dict[str, Any]:
        """What is served, under which plan, and how it goes."""
        return {"model": services.name, "kind": services.kind, **services.facts()}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"))


def _add_reload_route(app: FastAPI, reload: Callable[[], Awaitable[str]]) -> None:
    @app.post("/v1/reload")
    async def reload_model() -> dict[str, str]:
        """Put the newest weights of the served run or folder in place, if they are newer and healthy."""
        return {"model": await reload()}


def _add_predict_route(app: FastAPI, service: PredictService) -> None:
    @app.post("/predict", response_class=Response)
    async def predict(request: Request) -> Response:
        """The model's outputs for some samples. Numbers that are not finite are null."""
        raw = await request.body()
        answer = await until_disconnected(request, service.predict(raw, request.state.facts))
        return answer if isinstance(answer, Response) else Response(answer, media_type="application/json")


def _add_embedding_route(app: FastAPI, services: Services) -> None:
    @app.post("/v1/embeddings", response_class=Response, include_in_schema=services.predict is not None)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Vectors of texts, as in OpenAI's API."""
        services.check_model(body.model)
        if services.predict is None:
            raise RequestError("this model generates text; embeddings are for encoders: serve one, such as a folder of BERT")
        answer = await until_disconnected(request, services.predict.embed(body, request.state.facts))
        if isinstance(answer, Response):
            return answer
        vectors, tokens = answer
        return Response(embedding_body(vectors, tokens, body, services.name), media_type="application/json")
