"""Errors as answers: their status, their body in the shape of OpenAI's API, and nothing of the server's inside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from meshwright.core.errors import MeshwrightError, RequestError
from meshwright.serve.openai_schema import error_body
from meshwright.serve.replica_set import BusyError, DeadlineError, NotReadyError, OverloadedError

_NOT_READY_RETRY_S = 1
_SHOULD = "input should be "
_TYPE = re.compile(r"str|int|float|bool|list\[.*\]|dict\[.*\]")


class UnknownModelError(RequestError):
    """A request for a model that this server does not have."""


def handle_errors(app: FastAPI) -> None:
    """Answer every error of a route."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return explained(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        known = {404: "there is no such path: see /docs", 405: "this path takes another method: see /docs"}
        return JSONResponse(error_body(known.get(error.status_code, str(error.detail))), error.status_code, headers=error.headers)

    @app.exception_handler(MeshwrightError)
    async def own_error(request: Request, error: MeshwrightError) -> JSONResponse:
        note_error(request.state.facts, error)
        return explained(error)

    @app.exception_handler(Exception)
    async def other_error(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, RecursionError):
            note_error(request.state.facts, error)
        return explained(error)


def note_error(facts: dict[str, Any], error: Exception) -> None:
    """Put an error into the request's line of the log."""
    facts["error"] = f"{type(error).__name__}: {error}"[:500]


# By class: the status, and the error's type and code in OpenAI's terms. The first that fits counts.
_KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (OverloadedError, 429, "rate_limit_error", "overloaded"),
    (NotReadyError, 503, "server_error", "not_ready"),
    (DeadlineError, 504, "server_error", "timeout"),
    (BusyError, 409, "invalid_request_error", None),
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (RequestError, 400, "invalid_request_error", None),
)


def explain_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and body for an error."""
    if isinstance(error, RequestValidationError):
        return 400, error_body(*_first_problem(error))
    if isinstance(error, RecursionError):
        return 400, error_body("the JSON is nested too deeply")
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            return status, error_body(str(error), name, "model" if kind is UnknownModelError else None, code)
    return 500, error_body("the server failed; its log has the cause under this request's id", "server_error")


def explained(error: Exception) -> JSONResponse:
    status, body = explain_error(error)
    wait_s = error.retry_after_s if isinstance(error, OverloadedError) else _NOT_READY_RETRY_S if isinstance(error, NotReadyError) else None
    return JSONResponse(body, status, headers=None if wait_s is None else {"retry-after": str(wait_s)})


def _first_problem(error: RequestValidationError) -> tuple[str, str, str | None]:
    """What is wrong with the first wrong field, the error's type, and the field's name."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}", "invalid_request_error", None
    place = _place(first)
    reasons = dict.fromkeys(_reason(other) for other in error.errors() if _place(other) == place)  # of each type that the field may have
    name, reason = ".".join(place), " or ".join(reasons).replace(f" or {_SHOULD}", " or ")
    return f"{name}: {reason}" if name else reason, "invalid_request_error", place[0] if place else None


def _place(problem: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of fields that lead to a problem. Of a field that may have several types, pydantic puts the type after its name: that ends it."""
    parts = [str(part) for part in problem["loc"] if part != "body"]
    return tuple(takewhile(lambda part: not _TYPE.fullmatch(part), parts))


def _reason(problem: Mapping[str, Any]) -> str:
    known = {"extra_forbidden": "it is not known: leave it out", "missing": "it is missing"}
    reason = known.get(problem["type"]) or str(problem["msg"]).removeprefix("Value error, ")
    return f"{reason[:1].lower()}{reason[1:]}"
