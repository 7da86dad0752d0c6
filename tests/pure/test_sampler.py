"""Choosing tokens: greedy, filters as in transformers, penalties, and random numbers that depend on the request alone."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from meshwright.core.errors import RequestError
from meshwright.serve.requests import SamplingParams
from meshwright.serve.sampler import SampleRow, apply_penalties, filter_logits, gumbel_noise, sample


def row(position: int = 3, seed: int = 0, tokens: tuple[int, ...] = (1, 2, 3), num_prompt: int = 3, **params: object) -> SampleRow:
    return SampleRow(SamplingParams(**params), seed, position, tokens, num_prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (20, 0.9, 0.05), (1, 0.3, 0.5), (0, 0.01, 0.0)])
def test_filters_leave_what_those_of_transformers_leave(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1.0 else logits
    for warper in (
        ([TopKLogitsWarper(top_k)] if top_k else []) + ([TopPLogitsWarper(top_p)] if top_p < 1 else []) + ([MinPLogitsWarper(min_p)] if min_p else [])
    ):
        expected = warper(None, expected)
    column = lambda value: torch.full((8, 1), value)  # noqa: E731
    found = filter_logits(logits / temperature, column(top_k or 50), column(top_p), column(min_p))
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found[~found.isinf()], expected[~expected.isinf()])


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(2))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[4, 7, 7, 2]]), logits.clone())
    apply_penalties(logits[0], row(tokens=(4, 7, 7, 2), num_prompt=2, repetition_penalty=1.3))
    assert torch.allclose(logits, expected)


def test_penalties_of_the_api_count_the_answer_alone() -> None:
    logits = torch.zeros(10)
    apply_penalties(logits, row(tokens=(1, 1, 4, 4, 5), num_prompt=2, presence_penalty=0.5, frequency_penalty=0.25))
    assert logits.tolist() == [0, 0, 0, 0, -1.0, -0.75, 0, 0, 0, 0]


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(3))
    rows = [
        row(seed=5, temperature=1.0),
        row(temperature=0.0),
        row(seed=6, temperature=0.8, top_p=0.9),
        row(seed=5, temperature=1.0, repetition_penalty=1.2),
    ]
    together = [s.token for s in sample(logits.clone(), rows)]
    alone = [sample(logits[i : i + 1].clone(), [r])[0].token for i, r in enumerate(rows)]
    assert together == alone and together[1] == int(logits[1].argmax())


def test_noise_is_gumbel_and_differs_by_seed_and_position() -> None:
    noise = gumbel_noise(torch.tensor([[1], [1], [2]]), torch.tensor([[0], [1], [0]]), 20000)
    assert noise.isfinite().all() and (noise.mean(1) - 0.5772).abs().max() < 0.03 and (noise.var(1) - 1.6449).abs().max() < 0.08
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.03


def test_samples_have_the_models_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = torch.zeros(4)
    logits = probabilities.log().repeat(4000, 1)
    for s in sample(logits, [row(position=i, seed=7, temperature=1.0) for i in range(4000)]):
        counts[s.token] += 1
    assert (counts / 4000 - probabilities).abs().max() < 0.03


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(4))
    expected = logits.log_softmax(-1)
    found = sample(logits.clone(), [row(temperature=0.3, seed=1, logprobs=3), row()])
    assert found[1].logprobs is None and found[0].logprobs is not None
    assert found[0].logprobs.logprob == pytest.approx(float(expected[0, found[0].token]))
    assert [t for t, _ in found[0].logprobs.top] == expected[0].topk(3).indices.tolist()


@pytest.mark.parametrize(
    "given", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"max_tokens": 0}, {"repetition_penalty": 0.0}, {"logprobs": 99}, {"min_p": 2.0}]
)
def test_parameters_out_of_range_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(given))):
        SamplingParams(**given)  # type: ignore[arg-type]
