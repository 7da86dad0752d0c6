"""Finds the quickest way to run a model that gives what its plain forward pass gives: on made-up tokens, before any request.

Two sequences go through the decoder as requests do: in chunks, one beside the other, the second beginning while the first is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.core.errors import RequestError, RunError
from meshwright.execute.apply import AppliedPlan
from meshwright.serve.decoders import CachedDecoder, Decoder, PackedDecoder, RecomputeDecoder, decoder_start, is_encoder_decoder, make_plain_forward
from meshwright.serve.steps import Chunk, Step

_LENGTHS = (13, 9)
# Which tokens of the first and of the second sequence a step has. `_WHOLE_PROMPTS` is for decoders that do not split them.
_Span = tuple[int, int]
_CHUNKED: tuple[tuple[_Span | None, _Span | None], ...] = (((0, 5), None), ((5, 8), (0, 4)), ((8, 9), (4, 5)), ((9, 10), (5, 8)), ((10, 13), (8, 9)))
_WHOLE_PROMPTS: tuple[tuple[_Span | None, _Span | None], ...] = (
    ((0, 8), None),
    ((8, 9), (0, 5)),
    ((9, 10), (5, 6)),
    (None, (6, 7)),
    ((10, 11), (7, 8)),
)
# Relative to the norm of the logits. A pass that adds in another order is off by some units of rounding.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True)
class ChosenDecoder:
    """A decoder, how it differs from the plain forward pass, and why quicker ones cannot be used."""

    decoder: Decoder
    difference: float
    reasons: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        if isinstance(self.decoder, PackedDecoder):
            return "packed"
        return "one sequence at a time" if isinstance(self.decoder, CachedDecoder) else "without a cache"


def choose_decoder(applied: AppliedPlan, vocabulary: int, page_tokens: int, device: torch.device) -> ChosenDecoder:
    """The first kind of decoder that agrees with the model, which is in evaluation mode, under `inference_mode`. Collective."""
    model = applied.model
    tokens = [torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in _LENGTHS]
    has_encoder = is_encoder_decoder(model)
    if has_encoder:
        if applied.pipeline is not None:
            raise RequestError(f"{type(model).__name__} is an encoder–decoder, which inference does not split into stages: use tp")
        expected = _expected_answers(model, tokens, device)
    else:
        plain = make_plain_forward(applied)
        expected = [plain(torch.tensor([t], device=device)) for t in tokens]
    kinds: list[Callable[[], Decoder]] = [] if has_encoder else [lambda: PackedDecoder(applied, page_tokens, device)]
    if applied.pipeline is None:
        kinds.append(lambda: CachedDecoder(model, device))
        kinds += [] if has_encoder else [lambda: RecomputeDecoder(model, device)]
    reasons: list[str] = []
    for make in kinds:
        decoder: Decoder | None = None
        try:
            decoder = make()
            difference = _difference_of_answers(decoder, tokens, expected) if has_encoder else _difference(decoder, tokens, expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model's code meets arguments that it was not written for
            reasons.append(" ".join(str(error).split())[:200] or type(error).__name__)
        else:
            if difference <= _TOLERANCE.get(expected[0].dtype, 0.1):
                return ChosenDecoder(decoder, difference, tuple(reasons))
            reasons.append(f"{type(decoder).__name__} differs from the plain forward pass by {difference:.1e}")
        if decoder is not None:
            decoder.close()
    raise RunError(f"{type(model).__name__} cannot generate: {'; '.join(reasons)}")


def _difference(decoder: Decoder, sequences: Sequence[list[int]], expected: Sequence[Tensor]) -> float:
    pages = _scattered_pages(decoder, sequences)
    worst = 0.0
    for spans in _CHUNKED if decoder.splits_prompts else _WHOLE_PROMPTS:
        chunks = [Chunk(i, s[0], tuple(sequences[i][s[0] : s[1]]), pages[i]) for i, s in enumerate(spans) if s is not None]
        for row, chunk in zip(decoder.forward(Step(tuple(chunks))), chunks, strict=True):
            worst = max(worst, _relative(row, expected[chunk.sequence][chunk.end - 1]))
    _clear(decoder)
    return worst


def _scattered_pages(decoder: Decoder, sequences: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """Pages for both sequences, if the decoder has any. Those of the first do not follow one another."""
    if decoder.memory is None:
        return [()] * len(sequences)
    decoder.forward(Step((Chunk(0, 0, tuple(sequences[0])),)))  # records the shapes of keys and values
    first, second = (-(-len(tokens) // decoder.memory.page_tokens) for tokens in sequences)
    decoder.memory.allocate(2 * first + second)
    return [tuple(range(0, 2 * first, 2)), tuple(range(2 * first, 2 * first + second))]


def _clear(decoder: Decoder) -> None:
    if decoder.memory is None:
        decoder.forward(Step(ended=(0, 1)))
    else:
        decoder.memory.free()


def _expected_answers(model: nn.Module, sequences: Sequence[list[int]], device: torch.device) -> list[Tensor]:
    """Logits of an encoder–decoder that reads one sequence and continues the other."""
    found = []
    for i, tokens in enumerate(sequences):
        answer = torch.tensor([[decoder_start(model), *sequences[1 - i][:-1]]], device=device)
        found.append(model(input_ids=torch.tensor([tokens], device=device), decoder_input_ids=answer, use_cache=False).logits[0])
    return found


def _difference_of_answers(decoder: Decoder, sequences: Sequence[list[int]], expected: Sequence[Tensor]) -> float:
    worst = 0.0
    for step in range(min(map(len, sequences))):
        next_chunk = lambda i, step=step: Chunk(i, len(sequences[i]) + step - 1, (sequences[1 - i][step - 1],))  # noqa: E731
        chunks = [next_chunk(i) if step else Chunk(i, 0, tuple(sequences[i])) for i in range(2)]
        logits = decoder.forward(Step(tuple(chunks)))
        worst = max(worst, *(_relative(row, expected[i][step]) for i, row in enumerate(logits)))
    _clear(decoder)
    return worst


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    return difference if difference == difference else float("inf")
