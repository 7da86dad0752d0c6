"""Weights in 8 bits: close to what they were, for any number of rows, and never in place of code of a layer's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import serve_models
from torch import nn

from meshwright.execute.quantized_weights import prepare_layers, quantize, quantize_layers, quantized_linear


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 70) | st.just(64), outputs=st.integers(1, 50), seed=st.integers(0, 99))
def test_rows_are_off_by_no_more_than_their_scale(rows: int, width: int, outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, width, generator=generator) * torch.rand(outputs, 1, generator=generator) * 10
    quantized, scale = quantize(weight, torch.int8)
    assert quantized.dtype == torch.int8 and ((quantized.float() * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()
    x = torch.randn(rows, width, generator=generator)
    found, exact = quantized_linear(x, quantized, scale), x @ (quantized.float() * scale[:, None]).T
    size = x.abs() @ (quantized.float() * scale[:, None]).abs().T
    assert ((found - exact).abs() <= 2**-7 * size).all(), "activations of a few rows are in bfloat16"


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "opt"])
def test_models_keep_their_answers_about(name: str) -> None:
    model = serve_models.build(name)
    own = copy.deepcopy(model)
    layers = prepare_layers(own)
    inputs: dict[str, Any] = {"input_ids": torch.tensor(serve_models.prompts(1, longest=12))}
    if name == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.inference_mode():
        expected = model(**inputs).logits
        assert torch.equal(own(**inputs).logits, expected), "as long as weights are what they were"
        before = sum(layer.weight.nbytes for layer in layers)
        assert quantize_layers(layers, "int8") < before / 3
        found = own(**inputs).logits
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
    assert own.get_input_embeddings().weight.dtype == torch.float32, "rows are looked up in what they were"


def test_layers_with_code_of_their_own_are_left_alone() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * x)

    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    plain = nn.Linear(4, 4)
    assert prepare_layers(nn.Sequential(Doubling(4, 4), patched, plain, nn.Conv1d(4, 4, 1))) == (plain,)
