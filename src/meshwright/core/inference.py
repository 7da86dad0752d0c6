"""What the planner knows of a model that is to be served, what is asked of it, and what a plan for that is expected to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from meshwright.core.dataflow import Dataflow
from meshwright.core.errors import RequestError
from meshwright.core.model import ModelProfile

InferenceObjective = Literal["latency", "throughput", "batch"]


@dataclass(frozen=True)
class KVLayer:
    """Keys and values that one attention layer keeps of each token."""

    heads: int
    key_width: int
    value_width: int

    def elements(self, tp: int = 1) -> int:
        """Of one token on the tensor-parallel rank that has the most heads."""
        return -(-self.heads // tp) * (self.key_width + self.value_width)


@dataclass(frozen=True)
class InferenceModel:
    """A model, traced with one prompt and with one token. Profiles count bytes in the precision of serving."""

    name: str
    prompt: ModelProfile  # a prompt of `prompt_tokens` tokens
    token: ModelProfile  # the next token of one sequence; `at_batch` gives that of several
    prompt_tokens: int
    kv_layers: tuple[KVLayer, ...]  # empty: nothing is kept, and all tokens are computed again for each next one
    flow: Dataflow | None = None  # None: the model is not split


@dataclass(frozen=True)
class InferenceLoad:
    """What is asked: `batch` answers at once in all, sequences of up to `context` tokens, of which the prompt has `prompt_tokens`."""

    batch: int
    context: int
    prompt_tokens: int
    objective: InferenceObjective = "latency"

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_tokens < self.context:
            raise RequestError(
                f"prompt={self.prompt_tokens} and context={self.context}: prompt and answer together have at most `context` tokens, so the prompt "
                f"has 1 to {self.context - 1}"
            )

    @property
    def answer_tokens(self) -> int:
        return self.context - self.prompt_tokens

    @property
    def mean_context(self) -> int:
        """Tokens that a sequence has, on average over its answer."""
        return self.prompt_tokens + self.answer_tokens // 2

    def with_batch(self, batch: int) -> InferenceLoad:
        return replace(self, batch=batch)


@dataclass(frozen=True)
class InferenceEstimate:
    """Times, rate and memory of one plan for inference. Times are those of one replica."""

    prefill_s: float  # of one prompt
    decode_s: float  # between two tokens, with all answers under way
    tokens_per_s: float  # of answers, over all replicas, prompts included in the time
    breakdown: Mapping[str, float]  # seconds of a decode step: weights, cache, compute, communication
    memory_bytes: tuple[int, ...]  # by rank of a replica
    memory_kinds: Mapping[str, int]  # the largest rank's, by kind
    max_batch: int  # answers at once that fit, over all replicas
    fits: bool
    reason: str
    error: float  # relative, one sigma
    kv_token_bytes: int = 0  # of one token, on the rank that holds most
    notes: tuple[str, ...] = field(default=())

    def answer_seconds(self, load: InferenceLoad) -> float:
        """From a request to the end of its answer."""
        return self.prefill_s + load.answer_tokens * self.decode_s
