"""A small configuration of any model type of `transformers`.

The constructor of the configuration gets small values for the fields that have a default, by what their names say; fields without one stay open,
so the configuration computes them from the small ones. `OVERRIDES` (family_overrides.py) holds what a rule cannot know.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from family import HEADS, IMAGE, SEQ, VOCAB, WIDTH

TOKENS = 32  # special tokens have smaller ids, text has larger ones
HEAD_DIM = WIDTH // HEADS
ROTARY_DIM = 4  # of heads of which only a part has rotary positions
_MAX_LAYER_KINDS = 4


def shrink(config: Any, overrides: dict[str, Any]) -> Any:
    """The configuration made anew with small sizes; parts of a configuration likewise. `overrides` names fields, `part.field` within parts."""
    kind, values = type(config), vars(config)
    default, layers = _default(kind), _sample_layers(values)
    factor = min((_factor(value) for name, value in values.items() if _is_widths(name, value)), default=1)
    arguments: dict[str, Any] = {}
    for name, is_open in _arguments(kind, values, default).items():
        value = values[name]
        if is_config(value):
            arguments[name] = shrink(value, {n.partition(".")[2]: v for n, v in overrides.items() if n.startswith(f"{name}.")})
        elif value is None and name in _FILLED:
            arguments[name] = _FILLED[name]
        elif layers is not None and name == layers.field:
            arguments[name] = len(layers.indices)
        elif layers is not None and isinstance(value, (list, tuple)) and len(value) == layers.count:
            picked = range(len(layers.indices)) if _counts_layers(value) else [value[i] for i in layers.indices]
            arguments[name] = [small_value(name, v) for v in picked]
        elif not is_open or value != default.get(name):
            arguments[name] = _narrow(value, factor) if _is_widths(name, value) else small_value(name, value)
    if values.get("num_key_value_heads") == values.get("num_attention_heads") and "num_key_value_heads" in arguments:
        arguments["num_key_value_heads"] = arguments.get("num_attention_heads", HEADS)
    if values.get("qk_rope_head_dim") and "head_dim" in arguments:
        arguments["head_dim"] = ROTARY_DIM
    arguments |= _outputs(values, default, arguments)
    if "mrope_section" in (getattr(kind, "ignore_keys_at_rope_validation", None) or ()):
        arguments["rope_parameters"] = _small_mrope(values.get("rope_parameters") or {}, values, arguments)
    return kind(**(arguments | {name: value for name, value in overrides.items() if "." not in name}))


# Fields that some configurations leave empty although their models need them.
_FILLED = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "prediction_length": 8,
    "pad_token_id": 0,
}


def is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _default(kind: type) -> dict[str, Any]:
    try:
        return vars(kind())
    except Exception:  # a part that only exists inside another configuration
        return {}


def _arguments(kind: Any, values: dict[str, Any], default: dict[str, Any]) -> dict[str, bool]:
    """Each argument of the constructor, and whether the configuration computes it where it is not given."""
    names = {field.name: field.default is None for field in dataclasses.fields(kind) if field.init}
    names |= {name: False for name in values if name not in names and name not in default}  # given beside the declared ones
    return {name: is_open for name, is_open in names.items() if name in values and not name.startswith("_") and name not in _NOT_SIZES}


def _outputs(values: dict[str, Any], default: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The stages whose outputs a backbone returns; a backbone whose stages are its layers has a layer for each."""
    names = values.get("_out_features")
    if not names or names == default.get("_out_features"):
        return {}
    if isinstance(arguments.get("num_hidden_layers"), int):
        return {"num_hidden_layers": max(len(names), 2), "out_features": [f"stage{i + 1}" for i in range(len(names))]}
    return {"out_features": names}


_NOT_SIZES = {"id2label", "label2id", "num_labels", "dtype", "architectures", "transformers_version", "output_hidden_states", "return_dict"}


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The layers that a small model keeps, and the field that counts them."""

    field: str
    count: int
    indices: list[int]


def _sample_layers(values: dict[str, Any]) -> _Layers | None:
    """One layer of each kind, at least two, where a configuration lists what each layer is."""
    for field in ("num_hidden_layers", "n_layer", "num_layers"):
        count = values.get(field)
        if not isinstance(count, int) or count <= _MAX_LAYER_KINDS:
            continue
        lists = [v for v in values.values() if isinstance(v, (list, tuple)) and len(v) == count and not _counts_layers(v)]
        if not lists:
            return None
        kinds: dict[str, int] = {}
        for index in range(count):
            kinds.setdefault(str([v[index] for v in lists]), index)
        indices = list(kinds.values())[:_MAX_LAYER_KINDS]
        indices += [i for i in range(count) if i not in indices][: max(2 - len(indices), 0)]
        return _Layers(field, count, sorted(indices))
    return None


def _counts_layers(value: Any) -> bool:
    """Whether a list names each layer by its number."""
    return list(value) == list(range(len(value)))


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
        (r"index_topk", _most(SEQ)),
        (r"num_experts_per_tok|top_k$|topk$|moe_k|num_selected", _most(2)),
        (r"num_experts|n_routed_experts|num_local_experts|n_experts|^num_expert", _most(4)),
        (r"lora_rank|_rank$", _most(16)),
        (r"^(n_groups|mamba_n_groups|n_group|topk_group)$", _most(1)),
        (r"^window_size$", lambda value: min(value, 2) if value <= 64 else 32),  # in patches, or in pixels
        (r"num_queries$", _most(8)),
        (r"context_size$|n_window", _most(32)),
        (r"tokens_per_image$", _most(4)),
        (r"num_pos_feats", _most(WIDTH // 2)),
        (r"groups$", _most(HEADS)),
        (r"^(mamba_d_head|mamba_head_dim|mamba_headdim)$", _most(16)),
        (r"^(qk_rope_head_dim|rotary_dim|index_head_dim)$", _most(ROTARY_DIM)),
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
    return _narrow(value, _factor(value)) if _is_widths(name, value) else value


def _is_widths(name: str, value: Any) -> bool:
    """Whether this is a list of widths, of one for each stage."""
    numbers = isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value)
    return bool(numbers and re.search(r"hidden_size|embed_dim|width|dim|channels", name) and max(value) > 64)


def _factor(widths: Any) -> int:
    """How much narrower a list becomes; all lists of a configuration by the same, so that those that agree still do."""
    return max(min(v for v in widths if v) // WIDTH, 1)


def _narrow(widths: Any, factor: int) -> Any:
    return type(widths)(max(v // factor, 1) for v in widths)


def _small_mrope(rope: dict[str, Any], values: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions in three sections, which fill half of a head; for each kind of layer where kinds differ."""
    if rope and all(isinstance(value, dict) for value in rope.values()):
        return {kind: _small_mrope(value, values, arguments) for kind, value in rope.items()}
    part = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    half = int((arguments.get("head_dim") or HEAD_DIM) * part) // 2
    return {**rope, "mrope_section": [half // 3, half // 3, half - 2 * (half // 3)]}
