"""What a client asks for and what it gets back, as frozen data: sampling parameters, a request, and the events of its generation. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.core.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The defaults are greedy. Filters apply in the order of transformers: penalties, temperature, top_k, top_p, min_p.

    A seed makes a request's random numbers depend on it and the position alone: not on other requests, the batch or the plan.
    """

    max_tokens: int = 256
    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens in prompt and answer, as in transformers
    presence_penalty: float = 0.0  # of tokens in the answer, as in OpenAI's API
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()  # beside the model's end of text
    ignore_end: bool = False  # generate max_tokens whatever comes
    logprobs: int | None = None  # how many of the most likely tokens come with each token's own log-probability

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_tokens", 1, 10_000_000), ("temperature", 0.0, 100.0), ("top_k", 0, 1_000_000_000), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise RequestError(f"{name} is {value:g}, and must be from {low:g} to {high:g}")
        if self.top_p == 0.0:
            raise RequestError("top_p is 0, and must be above it: temperature=0 takes the most likely token")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise RequestError(f"repetition_penalty is {self.repetition_penalty:g}, and must be above 0 and at most 100")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"logprobs is {self.logprobs}, and must be from 0 to {MAX_TOP_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the one with the largest logit, and nothing else is asked for."""
        return self.is_greedy and not self.has_penalties and self.logprobs is None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability that the model gave to a token, and the most likely tokens with theirs."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(NamedTuple):
    """One generated token of a request, or its end (`token` is then -1 if no token came with it). `reused` tokens of the prompt were in memory
    already."""

    request: int
    token: int
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    error: str = ""
    reused: int = 0
