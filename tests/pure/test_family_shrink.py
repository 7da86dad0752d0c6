"""Small configurations and batches for the sweep over other people's models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from family import BATCH, HEADS, VOCAB, WIDTH
from family_inputs import packed_loss
from family_shrink import HEAD_DIM, TOKENS, shrink

transformers = pytest.importorskip("transformers")


def test_sizes_are_small_and_what_is_computed_from_them_agrees() -> None:
    config = shrink(transformers.LlamaConfig(), {})
    assert (config.hidden_size, config.num_attention_heads, config.head_dim, config.vocab_size) == (WIDTH, HEADS, HEAD_DIM, VOCAB)
    assert config.num_hidden_layers == 2


def test_one_layer_of_each_kind_is_kept() -> None:
    config = shrink(transformers.Gemma3TextConfig(), {})
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert len(config.layer_types) == config.num_hidden_layers == 2


def test_keys_of_every_head_stay_so() -> None:
    grouped, latent = shrink(transformers.Qwen2VLConfig(), {}).text_config, shrink(transformers.DeepseekV3Config(), {})
    assert (grouped.num_attention_heads, grouped.num_key_value_heads) == (HEADS, 2)
    assert latent.num_attention_heads == latent.num_key_value_heads == HEADS


def test_sections_of_rotary_positions_fill_half_of_a_head() -> None:
    config = shrink(transformers.Qwen2VLConfig(), {}).text_config
    assert sum(config.rope_parameters["mrope_section"]) == HEAD_DIM // 2


def test_special_tokens_do_not_occur_in_text() -> None:
    config = shrink(transformers.Qwen2VLConfig(), {})
    assert config.image_token_id < TOKENS
    assert config.image_token_id != config.video_token_id


def test_overrides_reach_into_parts() -> None:
    config = shrink(transformers.Qwen2VLConfig(), {"text_config.intermediate_size": 48, "tie_word_embeddings": True})
    assert config.text_config.intermediate_size == 48
    assert config.tie_word_embeddings


class Patches(nn.Module):
    """Wants the patches of all samples in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Tensor:
        assert len(hidden_states) == int(grid_thw.prod(-1).sum())
        return self.linear(hidden_states)  # type: ignore[no-any-return]


def test_a_batch_of_packed_patches_can_be_split_by_samples() -> None:
    model = Patches()
    batch: dict[str, Any] = {"hidden_states": torch.randn(BATCH, 4, 3), "grid_thw": torch.tensor([[[1, 2, 2]]] * BATCH)}
    halves = [packed_loss(model, {name: value[part] for name, value in batch.items()}) for part in (slice(0, 2), slice(2, 4))]
    assert torch.allclose(packed_loss(model, batch), sum(halves) / 2)
