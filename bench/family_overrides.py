"""What no rule can know about a model type of `transformers`: fields that must agree, and inputs with shapes of their own."""

from __future__ import annotations

from typing import Any

import torch

from family import BATCH, SEQ

_SWIN = {"image_size": 64, "window_size": 2}
_HIERA = {
    "embed_dim_per_stage": [32, 64, 128, 256],
    "blocks_per_stage": [1, 1, 1, 1],
    "num_attention_heads_per_stage": [1, 2, 2, 2],
    "image_size": [64, 64],
}
_TIMM_VIT = {"architecture": "vit_pe_core_tiny_patch16_384", "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": (32, 32)}}
_SMALL_TIMM = {"vision_config.architecture": "test_efficientnet"}


def _inside(part: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {f"{part}.{name}": value for name, value in fields.items()}


# Fields of the configuration; `part.field` within a part.
FIELDS: dict[str, dict[str, Any]] = {
    "align": {"vision_config.width_coefficient": 0.25, "vision_config.depth_coefficient": 0.2, "vision_config.hidden_dim": 320},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGAAZ": 6}},
    "donut-swin": _SWIN,
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "gemma3n": _SMALL_TIMM,
    "gemma3n_vision": {"architecture": "test_efficientnet"},
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]]},
    "mamba2": {"num_heads": 8},
    "mask2former": _inside("backbone_config", _SWIN),
    "mobilevitv2": {"image_size": 64},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    "perceiver": {"d_latents": 32, "num_latents": 8},
    "perception_lm": _inside("vision_config", _TIMM_VIT),
    "pp_ocrv5_mobile_rec": {"image_size": 64},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4)},
    "sam2": _inside("vision_config.backbone_config", _HIERA) | {"vision_config.backbone_channel_list": [256, 128, 64, 32]},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": _inside("backbone_config", _HIERA) | {"backbone_channel_list": [256, 128, 64, 32]},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
}

_SERIES = {
    "past_values": (BATCH, 15), "past_time_features": (BATCH, 15, 1), "past_observed_mask": torch.ones(BATCH, 15), "future_values": (BATCH, 8),
    "future_time_features": (BATCH, 8, 1),
}  # fmt: skip
_PATCHES = {
    "pixel_values": (BATCH, 16, 192), "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long), "spatial_shapes": torch.full((BATCH, 2), 4),
}  # fmt: skip

# Further inputs: a tensor, or the shape of a random one.
INPUTS: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES,
    "blip_2_qformer": {"query_embeds": (BATCH, SEQ, 32)},
    "decision_transformer": {
        "states": (BATCH, 8, 17), "actions": (BATCH, 8, 4), "rewards": (BATCH, 8, 1), "returns_to_go": (BATCH, 8, 1),
        "timesteps": torch.arange(8).expand(BATCH, 8).clone(), "attention_mask": torch.ones(BATCH, 8, dtype=torch.long),
    },
    "informer": _SERIES,
    "lxmert": {"visual_feats": (BATCH, 8, 2048), "visual_pos": (BATCH, 8, 4)},
    "pix2struct": {"flattened_patches": (BATCH, 16, 770)},
    "seggpt": {"pixel_values": (BATCH, 3, 32, 32), "prompt_pixel_values": (BATCH, 3, 32, 32), "prompt_masks": (BATCH, 3, 32, 32)},
    "siglip2": _PATCHES,
    "siglip2_vision_model": _PATCHES,
    "time_series_transformer": _SERIES,
}  # fmt: skip
