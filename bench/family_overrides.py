"""What no rule can know about a model type of `transformers`: fields that must agree, and inputs with shapes of their own."""

from __future__ import annotations

from typing import Any

import torch

from family import BATCH, SEQ, VOCAB
from family_shrink import TOKENS

_SWIN = {"image_size": 64, "window_size": 2}
_HIERA = {
    "embed_dim_per_stage": [32, 64, 128, 256], "blocks_per_stage": [1, 1, 1, 1], "num_attention_heads_per_stage": [1, 2, 2, 2],
    "image_size": [64, 64],
}  # fmt: skip
_TIMM_VIT = {"architecture": "vit_pe_core_tiny_patch16_384", "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": (32, 32)}}
_TIMM_CNN = {"architecture": "test_efficientnet"}
_STILL = {"pos_embed_rescale": None, "pos_embed_shift": None, "pos_embed_jitter": None}  # positions are moved at random in training
_SERIES_FIELDS = {"input_size": 1, "num_time_features": 1, "context_length": 8}
_SIZES = {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_LAYER_ROPE = {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _MROPE["rope_parameters"])}
_FEW_FILTERS = {"num_filters": 2}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4}


def _inside(part: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {f"{part}.{name}": value for name, value in fields.items()}


# Fields of the configuration; `part.field` within a part.
FIELDS: dict[str, dict[str, Any]] = {
    "align": {"vision_config.width_coefficient": 0.25, "vision_config.depth_coefficient": 0.2, "projection_dim": 80},
    "blip-2": {"image_token_index": 7, "num_query_tokens": 4},
    "bridgetower": {"hidden_size": 64, "text_config.hidden_size": 64, "vision_config.hidden_size": 64},
    "bros": {"hidden_size": 128},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGAAZ": 6}},
    "clap": {"audio_config.hidden_size": 256},
    "clvp": {"text_config.num_attention_heads": 1, "speech_config.num_attention_heads": 1},
    "cohere_compass": _inside("text_config", _LAYER_ROPE),
    "cohere_compass_text": _LAYER_ROPE,
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "depth_pro": {"patch_size": 32, "intermediate_hook_ids": (1, 0)},
    "deepseek_v4": {"head_dim": 8},
    "diffusion_gemma": {"text_config.num_experts": 4, "text_config.top_k_experts": 2, "text_config.moe_intermediate_size": 64},
    "dinov3_vit": _STILL,
    "donut-swin": _SWIN,
    "dots1": {"n_shared_experts": 1},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "eomt_dinov3": _STILL,
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "fast_vlm": {"vision_config.architecture": "fastvit_t8"},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "gemma3n": _inside("vision_config", _TIMM_CNN),
    "gemma3n_vision": _TIMM_CNN,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "vision_config.hidden_size": 64, "downsample_rate": "1/2"},
    "informer": _SERIES_FIELDS,
    "instructblip": {"image_token_index": 7, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 7, "num_query_tokens": 4},
    "kosmos-2": {"latent_query_num": 4},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "levit": {"patch_size": 16, "image_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "lw_detr": {"backbone_config.image_size": 64, "projector_scale_factors": [1.0]},
    "lw_detr_vit": {"image_size": 64},
    "mamba2": {"num_heads": 8},
    "mask2former": _inside("backbone_config", _SWIN),
    "mobilevitv2": {"image_size": 64},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark": {"audio_config.num_hidden_layers": 4},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "neomme": {"head_dim": 16},
    "paddleocr_vl": _inside("text_config", _MROPE),
    "pe_audio_video": _inside("audio_video_config.video_config.vision_config", _TIMM_VIT),
    "pe_audio_video_encoder": _inside("video_config.vision_config", _TIMM_VIT),
    "pe_video": _inside("video_config.vision_config", _TIMM_VIT),
    "pe_video_encoder": _inside("vision_config", _TIMM_VIT),
    "perceiver": {"d_latents": 32, "num_latents": 8},
    "perception_lm": _inside("vision_config", _TIMM_VIT),
    "qwen4_exp": _inside("text_config", _INDEXER),
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4)},
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": _inside("backbone_config", _HIERA) | {"backbone_channel_list": [256, 128, 64, 32], **_SIZES},
    "sam3_tracker": _inside("vision_config", _SIZES),
    "sapiens2": _STILL,
    "seggpt": {"image_size": [64, 32]},
    "step3p7": {"text_config.sliding_window": 8},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "time_series_transformer": _SERIES_FIELDS,
    "timm_backbone": {"backbone": "test_resnet"},
    "vibevoice": _inside("audio_config", _FEW_FILTERS) | _inside("semantic_model_config", _FEW_FILTERS),
    "vibevoice_acoustic_tokenizer": _FEW_FILTERS,
    "vibevoice_acoustic_tokenizer_decoder": _FEW_FILTERS,
    "vibevoice_acoustic_tokenizer_encoder": _FEW_FILTERS,
    "vibevoice_asr": _inside("acoustic_tokenizer_encoder_config", _FEW_FILTERS) | _inside("semantic_tokenizer_encoder_config", _FEW_FILTERS),
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zoedepth": {"bottleneck_features": 32, "fusion_hidden_size": 32},
}


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(TOKENS, VOCAB, shape, generator=torch.Generator().manual_seed(3))


_SERIES = {
    "past_values": (BATCH, 15), "past_time_features": (BATCH, 15, 1), "past_observed_mask": torch.ones(BATCH, 15), "future_values": (BATCH, 8),
    "future_time_features": (BATCH, 8, 1),
}  # fmt: skip
_PATCHES = {"pixel_values": (BATCH, 16, 192), "pixel_attention_mask": _ones(BATCH, 16), "spatial_shapes": torch.full((BATCH, 2), 4)}
_GRID = torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(BATCH, 1, 1)
_LINE = {"pixel_values": (BATCH, 3, 48, 64)}  # a line of text
_QUERIES = {"qformer_input_ids": _ids(BATCH, SEQ)}

# Further inputs: a tensor, or the shape of a random one.
INPUTS: dict[str, dict[str, Any]] = {
    "blip_2_qformer": {"query_embeds": (BATCH, SEQ, 32), "encoder_hidden_states": (BATCH, 8, 32)},
    "bros": {"bbox": (BATCH, SEQ, 8)},
    "decision_transformer": {
        "states": (BATCH, 8, 17), "actions": (BATCH, 8, 4), "rewards": (BATCH, 8, 1), "returns_to_go": (BATCH, 8, 1),
        "timesteps": torch.arange(8).expand(BATCH, 8).clone(), "attention_mask": _ones(BATCH, 8),
    },
    "depth_pro": {"pixel_values": (BATCH, 3, 128, 128)},
    "dia": {"decoder_input_ids": _ids(BATCH, SEQ, 9)},
    "gemma4_audio": {"input_features": (BATCH, 64, 128), "attention_mask": _ones(BATCH, 64).bool()},
    "gemma4_vision": {"pixel_values": (BATCH, 16, 192), "pixel_position_ids": _GRID},
    "granite_speech5_ctc": {"input_features": (BATCH, 64, 320)},
    "granite_speech5_encoder": {"input_features": (BATCH, 64, 320)},
    "idefics": {"pixel_values": (BATCH, 1, 3, 32, 32), "image_attention_mask": _ones(BATCH, SEQ, 1)},
    "informer": _SERIES,
    "instructblip": _QUERIES,
    "instructblipvideo": _QUERIES,
    "kosmos-2": {"image_embeds_position_mask": (torch.arange(SEQ) < 4).expand(BATCH, SEQ).clone(), "input_ids": _ids(BATCH, SEQ)},
    "lxmert": {"visual_feats": (BATCH, 8, 32), "visual_pos": (BATCH, 8, 4)},
    "mimi_decoder": {"latents": (BATCH, 32, 8)},
    "molmo2": {"mm_token_type_ids": torch.zeros(BATCH, SEQ, dtype=torch.long)},
    "muse_glimmer_assistant": {"noise_embeds": (BATCH, SEQ, 32), "context_hidden_states": (BATCH, SEQ, 128)},
    "musicgen": {"input_ids": _ids(BATCH, 4, SEQ)},
    "musicgen_melody": {"input_ids": _ids(BATCH, 4, SEQ)},
    "nemotron3_5_transcribe_audio": {"input_features": (BATCH, 64, 128), "input_features_mask": _ones(BATCH, 64)},
    "oneformer": {"task_inputs": (BATCH, 77)},
    "pe_audio_video_encoder": {"input_values": (BATCH, 1, 3840), "pixel_values_videos": (BATCH, 2, 3, 32, 32)},
    "pix2struct": {"flattened_patches": torch.rand(BATCH, 16, 34, generator=torch.Generator().manual_seed(2))},
    "pocket_tts_audio_tokenizer_decoder": {"latents": (BATCH, 32, 8)},
    "pp_ocrv5_mobile_rec": {"pixel_values": (BATCH, 3, 96, 64)},
    "pp_ocrv5_server_rec": _LINE,
    "pp_ocrv6_small_rec": _LINE,
    "pp_ocrv6_tiny_rec": _LINE,
    "seggpt": {"pixel_values": (BATCH, 3, 32, 32), "prompt_pixel_values": (BATCH, 3, 32, 32), "prompt_masks": (BATCH, 3, 32, 32)},
    "siglip2": _PATCHES,
    "siglip2_vision_model": _PATCHES,
    "speech-encoder-decoder": {"input_values": (BATCH, 3840)},
    "time_series_transformer": _SERIES,
    "vibevoice_acoustic_tokenizer_decoder": {"hidden_states": (BATCH, 32, 4)},
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states": (BATCH, 1, 3200)},
    "vit_mae": {"noise": (BATCH, 16)},
    "voxtral_realtime": {"input_features": (BATCH, 128, 128), "input_ids": _ids(BATCH, SEQ)},
}  # fmt: skip
