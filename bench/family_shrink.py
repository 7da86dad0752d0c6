"""A small configuration of any model type of `transformers`.

The constructor of the configuration gets small values for the fields that have a default, by what their names say; fields without one stay open,
so the configuration computes them from the small ones. `OVERRIDES` (family_overrides.py) holds what a rule cannot know.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from family import HEADS, IMAGE, VOCAB, WIDTH

TOKENS = 32  # special tokens have smaller ids, text has larger ones
HEAD_DIM = WIDTH // HEADS
_MAX_LAYER_KINDS = 4


def shrink(config: Any, overrides: dict[str, Any]) -> Any:
    """The configuration made anew with small sizes; parts of a configuration likewise. `overrides` names fields, `part.field` within parts."""
    kind = type(config)
    given = {name: value for name, value in overrides.items() if "." not in name}
    default = _default(kind)
    layers = _sample_layers(config)
    arguments: dict[str, Any] = {}
    for name, is_open in _fields(kind).items():
        value = getattr(config, name, None)
        if is_config(value):
            inner = {n.partition(".")[2]: v for n, v in overrides.items() if n.startswith(f"{name}.")}
            arguments[name] = given[name] if name in given else shrink(value, inner)
        elif layers is not None and isinstance(value, (list, tuple)) and len(value) == getattr(config, layers.field):
            picked = [value[i] for i in layers.indices]
            arguments[name] = [small_value(name, v) for v in picked]
        elif layers is not None and name == layers.field:
            arguments[name] = len(layers.indices)
        elif not is_open or value != getattr(default, name, None):
            arguments[name] = small_value(name, value)
    if "mrope_section" in (getattr(kind, "ignore_keys_at_rope_validation", None) or ()):
        arguments["rope_parameters"] = _small_mrope(config, arguments)
    return kind(**(arguments | given))


def is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _default(kind: type) -> Any:
    try:
        return kind()
    except Exception:
        return None


def _fields(kind: type) -> dict[str, bool]:
    """Each argument of the constructor, and whether the configuration computes it where it is not given."""
    fields = {f.name: f.default is None for f in dataclasses.fields(kind) if f.init}
    return {name: is_open for name, is_open in fields.items() if not name.startswith("_") and name not in _NOT_SIZES}


_NOT_SIZES = {"id2label", "label2id", "num_labels", "dtype", "architectures", "transformers_version", "output_hidden_states", "return_dict"}


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The layers that a small model keeps, and the field that counts them."""

    field: str
    indices: list[int]


def _sample_layers(config: Any) -> _Layers | None:
    """One layer of each kind, at least two, where a configuration lists what each layer is."""
    for field in ("num_hidden_layers", "n_layer", "num_layers"):
        count = getattr(config, field, None)
        if not isinstance(count, int) or count <= _MAX_LAYER_KINDS:
            continue
        lists = [v for v in vars(config).values() if isinstance(v, (list, tuple)) and len(v) == count]
        if not lists:
            return None
        kinds: dict[str, int] = {}
        for index in range(count):
            kinds.setdefault(str([v[index] for v in lists]), index)
        indices = list(kinds.values())[:_MAX_LAYER_KINDS]
        indices += [i for i in range(count) if i not in indices][: max(2 - len(indices), 0)]
        return _Layers(field, sorted(indices))
    return None


def small_value(name: str, value: Any) -> Any:
    """A small value for a field or argument of this name."""
    if isinstance(value, bool):
        return False if name in _OFF else value
    if isinstance(value, float):
        return 0.0 if re.search(r"drop|mask_(time|feature)_prob|jitter|layer_?drop", name) else value
    if isinstance(value, (list, tuple)):
        return _small_list(name, value)
    if isinstance(value, int) and re.search(r"(token_id|token_index|_token|token_ids)$", name):
        return 3 + sum(name.encode()) % (TOKENS - 3) if value >= TOKENS else value
    if isinstance(value, int):
        return next((make(value) for pattern, make in _RULES if pattern.search(name)), value)
    return value


# Caches, kernels that need a GPU, and what draws random numbers.
_OFF = {"use_cache", "use_mamba_kernels", "use_timm_backbone", "apply_spec_augment", "use_pretrained_backbone"}


def _most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def _over(limit: int, small: int) -> Callable[[int], int]:
    return lambda value: small if value > limit else value


# The first pattern that a field's name matches says how small its number is.
_RULES: list[tuple[re.Pattern[str], Callable[[int], int]]] = [
    (re.compile(pattern), make)
    for pattern, make in (
        (r"vocab", _most(VOCAB)),
        (r"max_position|n_positions|max_seq|seq_length|max_source|max_target|n_ctx|max_len|block_size", _most(64)),
        (r"drop", lambda value: 0),
        (r"key_value_heads|num_kv_heads?$|n_head_kv|kv_heads", lambda value: value if value <= 2 else 2),
        (r"num_attention_heads|n_heads?$|num_heads|_attention_heads$|n_head|_num_heads", _most(HEADS)),
        (r"num_experts_per_tok|top_k$|topk$|moe_k|num_selected", _most(2)),
        (r"num_experts|n_routed_experts|num_local_experts|n_experts|^num_expert", _most(4)),
        (r"lora_rank|_rank$", _most(16)),
        (r"^(n_groups|mamba_n_groups|n_group|topk_group)$", _most(1)),
        (r"^window_size$", _most(4)),
        (r"^(mamba_d_head|mamba_head_dim|mamba_headdim)$", _most(16)),
        (r"^(qk_rope_head_dim|rotary_dim|index_head_dim)$", _most(4)),
        (r"^qk_head_dim$", _most(HEAD_DIM + 4)),
        (r"(head_dim|head_size|d_head|^d_kv|kv_channels|key_dim)$", _most(HEAD_DIM)),
        (r"intermediate|inner|ffn|mlp|feed_forward|feedforward|d_ff|fc_dim", _over(64, 2 * WIDTH)),
        (r"(^|_)layers?_(start|idx|index)|interval|first_k|start_layer", lambda value: value),
        (r"num_hidden_layers|n_layers?$|num_layers|_layers$|depth$|num_blocks", _most(2)),
        (r"^(image_size|input_size|img_size)$", lambda value: IMAGE),
        (r"^(patch_size|tubelet_size)$", _over(4, 8)),
        (r"hidden_size|d_model|n_embd|^dim$|embed_dim|embedding_size|hidden_dim|emb_dim|embed_proj_dim|projection_dim|embedding_dim|proj_size|"
         r"model_dim|bottleneck_size|output_dim|^channels$|_dim$|_channels$|_width$|^width$", _over(WIDTH, WIDTH)),
    )
]  # fmt: skip


def _small_list(name: str, value: Any) -> Any:
    if not value or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
        return value
    make = type(value)
    if name.endswith("token_id"):
        return make(v % TOKENS for v in value)
    if re.search(r"depths?$|num_blocks|^layers$|num_layers|layer_depths", name):
        return make(min(v, 2) for v in value)
    if re.search(r"image_size|input_size|img_size", name):
        return make(IMAGE for _ in value)
    if re.search(r"num_(attention_)?heads|n_heads", name):
        return make(min(v, 2) for v in value)
    if re.search(r"hidden_size|embed_dim|width|dim|channels", name) and max(value) > 64:
        factor = max(min(v for v in value if v) // 32, 1)
        return make(max(v // factor, 1) for v in value)
    return value


def _small_mrope(config: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions in three sections, which fill half of a head."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    half = int((arguments.get("head_dim") or HEAD_DIM) * part) // 2
    return {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
