"""The default learning rate and warm-up: by width and depth, said with their reason, and always the user's to give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import zoo
from meshwright.core.task import Task
from meshwright.orchestrate import RunConfig
from meshwright.orchestrate.lr_defaults import default_peak, fill_learning_rate, model_scale

GPT3_RATES = {768: 6e-4, 1024: 3e-4, 2048: 2e-4, 2560: 1.6e-4, 4096: 1.2e-4, 5120: 1e-4, 12288: 6e-5}


def shapes_of(task: Task) -> list[tuple[int, ...]]:
    with torch.device("meta"):
        return [tuple(p.shape) for p in task.build().parameters()]


def filled(task: Task, **settings: Any) -> tuple[float, int, str]:
    config, reason = fill_learning_rate(RunConfig(**settings), task, shapes_of(task))
    assert config.learning_rate is not None
    assert config.warmup_steps is not None
    return config.learning_rate, config.warmup_steps, reason


@pytest.mark.parametrize(
    ("name", "width", "layers"),
    [("gpt2-124m", 768, 12), ("gpt-1.3b", 2048, 24), ("llama3-8b", 4096, 32), ("hf:TinyLlama-1.1B", 2048, 22), ("hf:phi-1_5", 2048, 24)],
)  # fmt: skip
def test_width_and_depth_are_found_in_the_shapes(name: str, width: int, layers: int) -> None:
    scale = model_scale(shapes_of(zoo.load(name)))
    assert scale is not None
    assert scale.width == width
    assert scale.depth == pytest.approx(layers, rel=0.2)


def test_kernels_experts_and_vectors_are_no_width() -> None:
    convolution = model_scale([(64, 32, 3, 3), (128, 64, 3, 3), (128,)])
    experts = model_scale([(8, 512, 1024), (8, 1024, 512), (512, 512), (8, 512)])
    assert convolution is not None
    assert experts is not None
    assert (convolution.width, experts.width) == (64, 512)
    assert model_scale([(128,), ()]) is None


def test_the_rate_follows_the_published_table() -> None:
    for width, published in GPT3_RATES.items():
        peak, _ = default_peak(model_scale([(width, width)]), "adamw", pretrained=False)
        assert 0.6 < peak / published < 1.6


@pytest.mark.parametrize("name", ["gpt-mini", "gpt2-124m", "gpt-1.3b", "smollm2", "llama3-3b", "llama3-8b", "hf:Llama-2-7b"])
def test_the_first_step_is_small_enough_for_width_and_depth(name: str) -> None:
    """A first step far above 2 / (depth·width^1.5) moves the residual stream by many times itself; a short run begins with up to 14 times that."""
    task = zoo.load(name)
    scale = model_scale(shapes_of(task))
    assert scale is not None
    for steps, largest in ((20, 14), (100_000, 3)):
        peak, warmup, _ = filled(task, steps=steps)
        assert warmup <= 2000 and peak / (warmup + 1) * scale.depth * scale.width**1.5 < largest


def test_every_default_is_said_with_its_reason() -> None:
    task = zoo.load("llama3-8b")
    peak, warmup, reason = filled(task, steps=20)
    scaled = "Learning rate 0.00011: 0.0006 at width 768, scaled to width 4096."
    assert reason == f"{scaled} Warm-up of {warmup} steps: for width 4096 and depth 35; this run of 20 steps ends within it."
    assert peak == 1.1e-4
    assert filled(zoo.load("vae"))[2] == "Learning rate 0.001: the default of vae. Warm-up of 10 steps: the least by default."
    assert filled(zoo.load("vae"), steps=5000)[1:] == (50, "Learning rate 0.001: the default of vae. Warm-up of 50 steps: 1% of the run.")


def test_what_is_given_is_kept() -> None:
    task = zoo.load("gpt-1.3b")
    assert filled(task, learning_rate=3e-4, warmup_steps=7) == (3e-4, 7, "Learning rate 0.0003: given. Warm-up of 7 steps: given.")
    assert filled(task, learning_rate=1e-6)[:2] == (1e-6, 10)
    assert filled(replace(task, learning_rate=5e-5))[0] == 5e-5
    assert filled(task, optimizer="momentum")[:2] == (1e-2, 10)


def test_trained_weights_get_a_smaller_rate(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    fresh = zoo.load(f"hf:{tmp_path}", seq=16)
    (tmp_path / "model.safetensors").touch()
    trained = zoo.load(f"hf:{tmp_path}", seq=16)
    assert filled(fresh)[0] == 1e-3
    assert filled(trained) == (
        2e-5,
        10,
        "Learning rate 2e-05: the largest by default, for trained weights. Warm-up of 10 steps: the least by default.",
    )
    assert filled(zoo.load(f"hf:{tmp_path}", seq=16, random_init=True))[0] == 1e-3
    wide, reason = default_peak(model_scale([(8192, 8192)]), "adamw", pretrained=True)
    assert (wide, reason) == (1e-5, "2e-05 at width 4096, scaled to width 8192, for trained weights")
