"""Small language models of transformers, with random weights, for tests of inference: a configuration for each family."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 97
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_OF_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": None}
_PLAIN = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": None}

# name → (model class, configuration class, its arguments)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _OF_GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _COMMON),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_COMMON, "sliding_window": 6}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_COMMON, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_COMMON, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_COMMON, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_COMMON, "head_dim": 8, "sliding_window": 6}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_COMMON, "head_dim": 8, "sliding_window": 6}),
    "phi": ("PhiForCausalLM", "PhiConfig", {**_COMMON, "num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _COMMON),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_PLAIN, "ffn_dim": 64, "max_position_embeddings": 128, "word_embed_proj_dim": 32, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_PLAIN, "intermediate_size": 64}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_COMMON, "num_local_experts": 4}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4, "eos_token_id": None}),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
         "eos_token_id": None},
    ),
}  # fmt: skip
PACKED = tuple(name for name in FAMILIES if name not in ("bloom", "t5"))


def build(name: str, **changes: Any) -> Any:
    """The model with random weights that are large enough for its answers to differ by prompt and position."""
    model_class, config_class, arguments = FAMILIES[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**arguments, **changes})).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08, generator=generator)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return model


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers generates."""
    tokens = torch.tensor([prompt])
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    with torch.inference_mode():
        found = model.generate(tokens, **options)[0].tolist()
    return found[-count:]  # type: ignore[no-any-return]


def prompts(count: int, seed: int = 0, longest: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
