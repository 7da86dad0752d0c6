"""Chooses the next token of each sequence from the model's logits.

[Note: random numbers of a request]
A token is drawn by adding Gumbel noise to the logits and taking the largest. The noise is a hash of the request's seed, the position and the token,
so that it is the same on every device, in any batch and under any plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.core.keyed_hash import GOLDEN_GAMMA, logical_shift_right, splitmix64, to_int64
from meshwright.serve.requests import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class SampleRow:
    """One row of logits: the parameters, seed and position of its sequence, and where its answer begins in `tokens`."""

    params: SamplingParams
    seed: int
    position: int
    tokens: Sequence[int]
    num_prompt: int


@dataclass(frozen=True)
class Sampled:
    token: int
    logprobs: TokenLogprobs | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """One token for each row of `logits` (rows, vocabulary), which is changed where penalties ask for it."""
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    raw = logits[wanted].float().log_softmax(-1) if wanted else None
    for i, row in enumerate(rows):
        if row.params.has_penalties:
            apply_penalties(logits[i], row)
    tokens = logits.argmax(-1) if all(row.params.is_greedy for row in rows) else _draw(logits.float(), rows)
    found = tokens.tolist()
    logprobs: dict[int, TokenLogprobs] = {}
    if raw is not None:
        for place, i in enumerate(wanted):
            logprobs[i] = _token_logprobs(raw[place], found[i], rows[i].params.logprobs or 0)
    return [Sampled(token, logprobs.get(i)) for i, token in enumerate(found)]


def apply_penalties(logits: Tensor, row: SampleRow) -> None:
    """Change one row of logits by what its sequence has already."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)), device=logits.device)
        found = logits[seen]
        logits[seen] = torch.where(found < 0, found * params.repetition_penalty, found / params.repetition_penalty)
    answer = row.tokens[row.num_prompt :]
    if answer and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.tensor(answer, device=logits.device).unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    device = logits.device
    column = lambda values: torch.tensor(values, device=device).unsqueeze(1)  # noqa: E731
    greedy = column([row.params.is_greedy for row in rows])
    logits = logits / column([row.params.temperature or 1.0 for row in rows])
    if any(row.params.has_filters for row in rows):
        top_k = column([row.params.top_k or logits.shape[1] for row in rows])
        logits = filter_logits(logits, top_k, column([row.params.top_p for row in rows]), column([row.params.min_p for row in rows]))
    noise = gumbel_noise(column([to_int64(row.seed) for row in rows]), column([row.position for row in rows]), logits.shape[1])
    return torch.where(greedy, logits, logits + noise).argmax(-1)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set logits outside the k most likely, outside the smallest set with probability `top_p`, and below `min_p` of the most likely, to -inf. Each
    filter sees the probabilities that the one before has left, as in transformers. The most likely token always stays."""
    ordered, order = logits.sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
    threshold = ordered.gather(1, (top_k.clamp(max=logits.shape[1]) - 1).long())
    ordered = ordered.masked_fill(ordered < threshold, -torch.inf)  # those as likely as the k-th stay too
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ordered = ordered.masked_fill((before >= top_p) & (ranks > 0), -torch.inf)
    probabilities = ordered.softmax(-1)
    ordered = ordered.masked_fill(probabilities < min_p * probabilities[:, :1], -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise (rows, vocabulary) from seeds and positions (rows, 1)."""
    state = splitmix64(splitmix64(seeds) + positions * GOLDEN_GAMMA)
    bits = splitmix64(state + torch.arange(vocabulary, device=seeds.device) * GOLDEN_GAMMA)
    uniform = (logical_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return (-torch.log(-torch.log(uniform))).float()


def _token_logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    values, tokens = row.topk(min(count, row.shape[0]))
    return TokenLogprobs(float(row[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
