"""The part of a plan that is for inference: how many sequences a replica has at once, and how their keys and values are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import RequestError

PAGE_TOKENS = 16
Quantization = Literal["none", "int8", "fp8"]
Speculation = Literal["none", "prompt", "model"]
MAX_SEQUENCES, _MAX_CONTEXT = 65536, 100_000_000


@dataclass(frozen=True)
class ServePolicy:
    """`context`: the most tokens of a sequence, prompt and answer together; 0 in plans for training. `sequences`: how many a replica generates at
    once."""

    context: int = 0
    sequences: int = 0
    page_tokens: int = PAGE_TOKENS  # of one page of key-value memory
    kv_pages: int = 0  # of one rank; 0: as many as fit when the model is loaded
    quantize: Quantization = "none"  # of the weights of linear layers
    speculate: Speculation = "none"  # guesses of the next tokens, from the text itself or by a smaller model
    guesses: int = 4  # at once
    replicas: int = 1  # copies of the model, each on ranks of its own: the plan's mesh is that of one

    def __bool__(self) -> bool:
        return self.context > 0


def check_serve(policy: ServePolicy) -> None:
    if not policy:
        return
    for name, value, most in (("context", policy.context, _MAX_CONTEXT), ("sequences", policy.sequences, MAX_SEQUENCES)):
        if not 1 <= value <= most:
            raise RequestError(f"plan: serve.{name}={value} must be from 1 to {most:,}")
    if policy.guesses < 1:
        raise RequestError(f"plan: serve.guesses={policy.guesses} must be at least 1")
    if policy.replicas < 1:
        raise RequestError(f"plan: serve.replicas={policy.replicas} must be at least 1")
    if not 1 <= policy.page_tokens <= _MAX_CONTEXT or policy.kv_pages < 0:
        raise RequestError(f"plan: serve.page_tokens={policy.page_tokens} must be at least 1, and kv_pages={policy.kv_pages} not negative")
