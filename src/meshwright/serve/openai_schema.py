"""Requests in the shape of OpenAI's API, checked strictly: an unknown field or a wrong type is an error that says what to change."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, field_validator

from meshwright.core.errors import RequestError
from meshwright.serve.requests import MAX_TOP_LOGPROBS, SamplingParams

_MAX_ANSWERS, _MAX_PROMPTS, _MAX_STOPS = 32, 256, 16
TokenIds = list[Annotated[StrictInt, Field(ge=0)]]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(_Strict):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None  # OpenAI's padding of chunks; there is none here


class _Generation(_Strict):
    """What chats and completions have in common. `top_k`, `min_p`, `repetition_penalty` and `ignore_end` are not OpenAI's."""

    model: str | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=0, le=1_000_000_000)] = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=_MAX_ANSWERS)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1, le=10_000_000)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=_MAX_STOPS)] | None = None
    ignore_end: StrictBool = False
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: StrictBool | None = None

    @field_validator("store")
    @classmethod
    def _keeps_nothing(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("nothing is stored here: leave it out")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens, temperature=1.0 if self.temperature is None else self.temperature, top_p=self.top_p or 1.0, top_k=self.top_k,
            min_p=self.min_p, repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0, seed=None if self.seed is None else self.seed % 2**63, ignore_end=self.ignore_end,
            logprobs=logprobs,
        )  # fmt: skip


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message; what belongs to tools is refused with a line of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, str]:
        if self.role in ("tool", "function") or self.tool_calls:
            raise RequestError("tools are not supported: leave out messages of tools")
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ResponseFormat(_Strict):
    type: str
    json_schema: Any = None


class ChatRequest(_Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=100_000)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=10_000_000)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    parallel_tool_calls: StrictBool | None = None
    logit_bias: dict[str, Number] | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None

    @field_validator("tools", "functions")
    @classmethod
    def _refuse_tools(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("tools are not supported: leave them out")
        return value

    @field_validator("tool_choice", "function_call")
    @classmethod
    def _no_tool(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError("tools are not supported: leave it out")
        return value

    @field_validator("reasoning_effort")
    @classmethod
    def _no_effort(cls, value: str | None) -> str | None:
        if value not in (None, "none"):
            raise ValueError("it is not supported: leave it out")
        return value

    @field_validator("response_format")
    @classmethod
    def _only_text(cls, value: ResponseFormat | None) -> ResponseFormat | None:
        if value is not None and value.type != "text":
            raise ValueError('only {"type": "text"} is supported: leave it out')
        return value

    @field_validator("logit_bias")
    @classmethod
    def _no_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value:
            raise ValueError("it is not supported: leave it out")
        return value

    def params(self, room: int) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true")
        return self._params(self.max_completion_tokens or self.max_tokens or room, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(_Generation):
    prompt: str | TokenIds | Annotated[list[str], Field(max_length=_MAX_PROMPTS)] | Annotated[list[TokenIds], Field(max_length=_MAX_PROMPTS)]
    logprobs: Annotated[StrictInt, Field(ge=0, le=5)] | None = None
    echo: StrictBool = False
    best_of: StrictInt | None = None
    suffix: str | None = None
    logit_bias: dict[str, Number] | None = None

    @field_validator("best_of")
    @classmethod
    def _one_of_one(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError("only 1 is supported: leave it out")
        return value

    @field_validator("suffix", "logit_bias")
    @classmethod
    def _unsupported(cls, value: Any) -> Any:
        if value:
            raise ValueError("it is not supported: leave it out")
        return value

    def params(self, room: int) -> SamplingParams:
        return self._params(self.max_tokens or min(room, 16), self.logprobs)


class EmbeddingRequest(_Strict):
    model: str | None = None
    input: str | TokenIds | Annotated[list[str], Field(max_length=2048)] | Annotated[list[TokenIds], Field(max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None = None
    user: str | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """The texts, or their tokens, one by one."""
        if isinstance(self.input, str):
            return [self.input]
        return [list(self.input)] if self.input and isinstance(self.input[0], int) else list(self.input)  # type: ignore[arg-type]

    @field_validator("input")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not value:
            raise ValueError("it is empty: give some text")
        return value


def error_body(message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
