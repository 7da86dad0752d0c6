"""The models of `diffusers`: U-Nets, transformers, control nets and autoencoders for images, video and sound.

The arguments of a class are its defaults, shrunken by their names as those of `transformers` are; a case holds the arguments that must agree, the
shapes of the inputs, and inputs that all samples share.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from family import BATCH, SEQ, WIDTH, Built, Family, Loss, distance_from_wave, first_tensor
from family_shrink import small_value

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One model: its class, arguments and inputs. `shared` inputs have no dim of samples, so the loss adds them to each batch. A `packed` model wants
    the frames of all samples in one dim; the loss lays them end to end, so that a batch can be split by samples."""

    kind: str
    arguments: Mapping[str, Any]
    inputs: Mapping[str, Shape]
    shared: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False


def diffusers_families() -> list[Family]:
    cases = {**_unets(), **_image_transformers(), **_video_transformers(), **_autoencoders()}
    return [Family("diffusers", name, lambda case=case: _build(case)) for name, case in cases.items()]  # type: ignore[misc]


def _build(case: Case) -> Built:
    import diffusers

    kind = getattr(diffusers, case.kind)
    accepted = inspect.signature(kind.__init__).parameters.values()
    defaults = {p.name: p.default for p in accepted if p.name != "self" and p.default is not p.empty}
    arguments = {name: small_value(name, default) for name, default in defaults.items()} | dict(case.arguments)
    generator = torch.Generator().manual_seed(1)
    batch = {name: _input(name, shape, generator) for name, shape in case.inputs.items()}
    return kind(**arguments), batch, _loss_with(case.shared, case.packed)


# Inputs that are whole numbers, and masks.
_NUMBERS = {"timestep", "class_labels", "input_ids", "fps"}


def _input(name: str, shape: Shape, generator: torch.Generator) -> Tensor:
    if "mask" in name:
        return torch.ones(shape, dtype=torch.long)
    if name in _NUMBERS:
        numbers = torch.randint(0, 9, shape, generator=generator)
        return numbers.float() if name == "timestep" else numbers
    return torch.randn(shape, generator=generator)


def _loss_with(shared: Mapping[str, Any], packed: bool) -> Loss:
    def output_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: value.flatten(0, 1) for name, value in batch.items()} if packed else batch
        return distance_from_wave(first_tensor(model(**inputs, **shared)))

    return output_loss


_TEXT = (BATCH, SEQ, WIDTH)
_LATENT = (BATCH, 4, 8, 8)
_WIDE_LATENT = (BATCH, 16, 8, 8)
_VIDEO = (BATCH, 4, 2, 8, 8)
_WIDE_VIDEO = (BATCH, 16, 2, 8, 8)
_TIME = {"timestep": (BATCH,)}
_CONDITION = {**_TIME, "encoder_hidden_states": _TEXT}
_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}


def _both_ways(down: str, attention_down: str, attention_up: str, up: str) -> dict[str, Any]:
    return {"down_block_types": (down, attention_down), "up_block_types": (attention_up, up)}


def _unets() -> dict[str, Case]:
    cross = _both_ways("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    cross_3d = _both_ways("DownBlock3D", "CrossAttnDownBlock3D", "CrossAttnUpBlock3D", "UpBlock3D")
    conditioned = {**_BLOCKS, "cross_attention_dim": WIDTH}
    image = {"sample": _LATENT, **_CONDITION}
    control = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "conditioning_embedding_out_channels": (8, 16)}
    temporal = {"block_out_channels": (32, 64), "layers_per_block": 1, "num_attention_heads": (2, 4), "addition_time_embed_dim": 8}
    svd = "SpatioTemporal"
    temporal |= _both_ways(f"DownBlock{svd}", f"CrossAttnDownBlock{svd}", f"CrossAttnUpBlock{svd}", f"UpBlock{svd}")
    cascade = {"block_out_channels": (32, 32), "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1)}
    cascade |= {"clip_text_pooled_in_channels": WIDTH, "clip_text_in_channels": WIDTH, "clip_image_in_channels": WIDTH, "dropout": (0.0, 0.0)}
    unet_1d = {"sample_size": 64, "block_out_channels": (32, 64), "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D")}
    unet_1d |= {"up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"), "extra_in_channels": 64}
    return {
        "unet1d": Case("UNet1DModel", unet_1d, {"sample": (BATCH, 2, 64), **_TIME}),
        "unet2d": Case(
            "UNet2DModel",
            {**_BLOCKS, **_both_ways("DownBlock2D", "AttnDownBlock2D", "AttnUpBlock2D", "UpBlock2D"), "in_channels": 4, "out_channels": 4,
             "sample_size": 8, "attention_head_dim": 4},
            {"sample": _LATENT, **_TIME},
        ),
        "unet2d_condition": Case("UNet2DConditionModel", {**conditioned, **cross, "attention_head_dim": 4, "sample_size": 8}, image),
        "unet3d": Case("UNet3DConditionModel", {**conditioned, **cross_3d, "attention_head_dim": 4, "sample_size": 8}, {**image, "sample": _VIDEO}),
        "unet_spatio_temporal": Case(
            "UNetSpatioTemporalConditionModel",
            {**temporal, "cross_attention_dim": WIDTH, "projection_class_embeddings_input_dim": 24, "sample_size": 8, "num_frames": 2},
            {"sample": (BATCH, 2, 8, 8, 8), **_TIME, "encoder_hidden_states": (BATCH, 1, WIDTH), "added_time_ids": (BATCH, 3)},
        ),
        "control_net": Case("ControlNetModel", {**conditioned, **control, "attention_head_dim": 4}, {**image, "controlnet_cond": (BATCH, 3, 16, 16)}),
        "i2vgen_xl": Case(
            "I2VGenXLUNet",
            {**conditioned, **cross_3d, "attention_head_dim": 4, "num_attention_heads": 2, "sample_size": 8},
            {**image, "sample": _VIDEO, "fps": (BATCH,), "image_latents": _VIDEO, "image_embeddings": (BATCH, WIDTH)},
        ),
        "audioldm2": Case("AudioLDM2UNet2DConditionModel", {**conditioned, **cross, "attention_head_dim": 4, "sample_size": 8}, image),
        "stable_cascade": Case(
            "StableCascadeUNet",
            {**cascade, "conditioning_dim": WIDTH},
            {"sample": _WIDE_LATENT, "timestep_ratio": (BATCH,), "clip_text_pooled": (BATCH, 1, WIDTH), "clip_text": _TEXT,
             "clip_img": (BATCH, 1, WIDTH)},
        ),
        "uvit2d": Case(
            "UVit2DModel",
            {"vocab_size": 40, "codebook_size": 32, "block_out_channels": 32, "in_channels": 32, "micro_cond_encode_dim": 8,
             "micro_cond_embed_dim": 40, "num_res_blocks": 1, "sample_size": 8, "block_num_heads": 2},
            {"input_ids": (BATCH, 8, 8), "encoder_hidden_states": _TEXT, "pooled_text_emb": (BATCH, WIDTH), "micro_conds": (BATCH, 5)},
        ),
    }  # fmt: skip


def _image_transformers() -> dict[str, Case]:
    heads = {"num_attention_heads": 2, "attention_head_dim": 16}
    rope = {"axes_dims_rope": (4, 6, 6), "in_channels": 16, **heads}
    tokens = {"hidden_states": (BATCH, SEQ, 16), **_CONDITION}
    positions = {"img_ids": torch.arange(3.0 * SEQ).view(SEQ, 3), "txt_ids": torch.zeros(SEQ, 3)}
    dit = {**heads, "patch_size": 2, "norm_num_groups": 4, "num_embeds_ada_norm": 10, "in_channels": 4, "sample_size": 8}
    pixart = {**dit, "cross_attention_dim": WIDTH, "caption_channels": WIDTH}
    sd3 = {**heads, "in_channels": 4, "out_channels": 4, "sample_size": 8, "joint_attention_dim": WIDTH, "caption_projection_dim": WIDTH}
    latent = {"hidden_states": _LATENT, **_CONDITION}
    pooled = {"pooled_projections": (BATCH, WIDTH)}
    sizes = dict.fromkeys(("original_size", "target_size", "crop_coords"), (BATCH, 2))
    cog = {**heads, "in_channels": 4, "out_channels": 4, "sample_size": 8, "pos_embed_max_size": 8, "condition_dim": 8}
    return {
        "transformer2d": Case("Transformer2DModel", {**heads, "in_channels": 4, "norm_num_groups": 2, "num_layers": 2, "cross_attention_dim": WIDTH},
                              {"hidden_states": _LATENT, "encoder_hidden_states": _TEXT}),
        "dit": Case("DiTTransformer2DModel", dit, {"hidden_states": _LATENT, **_TIME, "class_labels": (BATCH,)}),
        "pixart": Case("PixArtTransformer2DModel", pixart, latent),
        "sd3": Case("SD3Transformer2DModel", {**sd3, "pooled_projection_dim": WIDTH}, latent | pooled),
        "sd3_control_net": Case("SD3ControlNetModel", {**sd3, "pooled_projection_dim": WIDTH}, latent | pooled | {"controlnet_cond": _LATENT}),
        "flux": Case("FluxTransformer2DModel", {**rope, "pooled_projection_dim": WIDTH}, tokens | pooled, positions),
        "flux_control_net": Case("FluxControlNetModel", {**rope, "pooled_projection_dim": WIDTH},
                                 tokens | pooled | {"controlnet_cond": (BATCH, SEQ, 16)}, positions),
        "flux2": Case("Flux2Transformer2DModel", {**rope, "axes_dims_rope": (4, 4, 4, 4), "guidance_embeds": False}, tokens,
                      {name: torch.zeros(SEQ, 4) for name in positions}),
        "chroma": Case("ChromaTransformer2DModel", {**rope, "approximator_num_channels": 64}, tokens, positions),
        "bria": Case("BriaTransformer2DModel", rope, tokens, positions),
        "ovis_image": Case("OvisImageTransformer2DModel", {**rope, "out_channels": 16}, tokens, positions),
        "longcat_image": Case("LongCatImageTransformer2DModel", rope, tokens, positions),
        "qwen_image": Case("QwenImageTransformer2DModel", {**rope, "out_channels": 4}, tokens | {"encoder_hidden_states_mask": (BATCH, SEQ)},
                           {"img_shapes": [(1, 4, 4)]}),
        "aura_flow": Case("AuraFlowTransformer2DModel", {**sd3, "pos_embed_max_size": 16}, latent),
        "sana": Case("SanaTransformer2DModel",
                     {**heads, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
                      "sample_size": 8}, latent),
        "lumina2": Case("Lumina2Transformer2DModel",
                        {"in_channels": 4, "axes_dim_rope": (4, 2, 2), "axes_lens": (32, 16, 16), "sample_size": 8, "multiple_of": 16},
                        latent | {"encoder_attention_mask": (BATCH, SEQ)}),
        "cogview3": Case("CogView3PlusTransformer2DModel", cog, latent | sizes),
        "cogview4": Case("CogView4Transformer2DModel", {**cog, "rope_axes_dim": (8, 8)}, latent | sizes),
        "hunyuan_dit": Case("HunyuanDiT2DModel",
                            {**heads, "in_channels": 4, "patch_size": 2, "sample_size": 8, "text_len": SEQ, "text_len_t5": SEQ,
                             "cross_attention_dim_t5": 2048, "use_style_cond_and_image_meta_size": False},
                            latent | {"text_embedding_mask": (BATCH, SEQ),
                                      "encoder_hidden_states_t5": (BATCH, SEQ, 2048), "text_embedding_mask_t5": (BATCH, SEQ)},
                            {"image_rotary_emb": (torch.ones(16, 16), torch.zeros(16, 16))}),
        "prx": Case("PRXTransformer2DModel", {"in_channels": 4, "hidden_size": WIDTH, "num_heads": 2, "axes_dim": (8, 8)}, latent),
        "hunyuan_image": Case("HunyuanImageTransformer2DModel", {**heads, "in_channels": 4, "out_channels": 4, "rope_axes_dim": (8, 8)},
                              latent | {"encoder_attention_mask": (BATCH, SEQ)}),
        "prior": Case("PriorTransformer", {"num_embeddings": SEQ, **heads},
                      {"hidden_states": (BATCH, WIDTH), **_CONDITION, "proj_embedding": (BATCH, WIDTH)}),
        "stable_audio": Case("StableAudioDiTModel",
                             {**heads, "in_channels": 4, "out_channels": 4, "num_key_value_attention_heads": 1, "time_proj_dim": 8,
                              "sample_size": SEQ},
                             {"hidden_states": (BATCH, 4, SEQ), **_CONDITION, "global_hidden_states": (BATCH, 1, WIDTH)},
                             {"rotary_embedding": (torch.ones(SEQ + 1, 8), torch.zeros(SEQ + 1, 8))}),
    }  # fmt: skip


def _video_transformers() -> dict[str, Case]:
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4}
    video, mask = {"hidden_states": _VIDEO, **_CONDITION}, {"encoder_attention_mask": (BATCH, SEQ)}
    by_frames = {"hidden_states": (BATCH, 2, 4, 8, 8), **_CONDITION}
    pooled = {"pooled_projections": (BATCH, WIDTH)}
    wan = {**heads, "rope_max_seq_len": 32, "freq_dim": 16}
    sample = {"sample_width": 8, "sample_height": 8, "sample_frames": 5}
    return {
        "cogvideox": Case("CogVideoXTransformer3DModel", {**heads, **sample, "max_text_seq_length": SEQ}, by_frames),
        "allegro": Case("AllegroTransformer3DModel", {**heads, **sample, "cross_attention_dim": WIDTH},
                        video | {"attention_mask": (BATCH, 2, 8, 8)} | mask),
        "ltx": Case("LTXVideoTransformer3DModel", heads | {"cross_attention_dim": WIDTH},
                    {"hidden_states": (BATCH, SEQ, 4), **_CONDITION, **mask}, {"num_frames": 1, "height": 4, "width": 4}),
        "latte": Case("LatteTransformer3DModel",
                      {**heads, "num_layers": 2, "sample_size": 8, "patch_size": 2, "video_length": 2, "cross_attention_dim": WIDTH,
                       "caption_channels": WIDTH, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 10}, video),
        "mochi": Case("MochiTransformer3DModel", {**heads, "max_sequence_length": SEQ}, video | mask),
        "wan": Case("WanTransformer3DModel", wan, video),
        "skyreels2": Case("SkyReelsV2Transformer3DModel", wan, video),
        "wan_vace": Case("WanVACETransformer3DModel", {**wan, "vace_layers": [0], "vace_in_channels": 4}, video | {"control_hidden_states": _VIDEO}),
        "sana_video": Case("SanaVideoTransformer3DModel",
                           {**heads, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "sample_size": 8,
                            "rope_max_seq_len": 32}, video),
        "hunyuan_video": Case("HunyuanVideoTransformer3DModel", {**heads, "rope_axes_dim": (4, 6, 6), "guidance_embeds": False},
                              video | mask | pooled),
        "cosmos": Case("CosmosTransformer3DModel", {**heads, "max_size": (4, 8, 8), "concat_padding_mask": False}, video),
        "easy_animate": Case("EasyAnimateTransformer3DModel", {**heads, "patch_size": 2, "sample_width": 8, "sample_height": 8,
                                                                       "mmdit_layers": 2}, video),
        "transformer_temporal": Case("TransformerTemporalModel", {**heads, "norm_num_groups": 2, "num_layers": 2},
                                     {"hidden_states": (BATCH, 2, 4, 8, 8)}, {"num_frames": 2}, packed=True),
    }  # fmt: skip


def _autoencoders() -> dict[str, Case]:
    coder = {**_BLOCKS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4}
    image, video = {"sample": (BATCH, 3, 16, 16)}, {"sample": (BATCH, 3, 5, 16, 16)}
    two = (16, 32)
    wan = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True], "latents_mean": [0.0] * 4}

    def blocks(prefix: str) -> dict[str, Any]:
        names = {"down_block_types": (f"{prefix}DownBlock3D",) * 2, "up_block_types": (f"{prefix}UpBlock3D",) * 2}
        return {**_BLOCKS, **names, "latent_channels": 4}

    asymmetric = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "down_block_out_channels": two}
    return {
        "autoencoder_kl": Case("AutoencoderKL", coder, image),
        "vq_model": Case("VQModel", {**coder, "num_vq_embeddings": 32}, image),
        "asymmetric": Case("AsymmetricAutoencoderKL", {**asymmetric, "up_block_out_channels": two, "norm_num_groups": 4}, image),
        "autoencoder_tiny": Case("AutoencoderTiny",
                                 {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16), "num_encoder_blocks": (1, 1),
                                  "num_decoder_blocks": (1, 1)}, image),
        "autoencoder_dc": Case("AutoencoderDC",
                               {"encoder_block_out_channels": two, "decoder_block_out_channels": two, "encoder_layers_per_block": (1, 1),
                                "decoder_layers_per_block": (1, 1), "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)),
                                "encoder_block_types": ("ResBlock", "EfficientViTBlock"), "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
                                "latent_channels": 4, "attention_head_dim": 8}, image),
        "temporal_decoder": Case("AutoencoderKLTemporalDecoder",
                                 {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (32, 64), "latent_channels": 4},
                                 {"sample": (BATCH, 2, 3, 16, 16)}, {"num_frames": 2}, packed=True),
        "autoencoder_cogvideox": Case("AutoencoderKLCogVideoX", blocks("CogVideoX"), video),
        "autoencoder_hunyuan_video": Case("AutoencoderKLHunyuanVideo", {**blocks("HunyuanVideo"), "spatial_compression_ratio": 2}, video),
        "autoencoder_wan": Case("AutoencoderKLWan", {**wan, "latents_std": [1.0] * 4}, video),
        "autoencoder_qwen_image": Case("AutoencoderKLQwenImage", {**wan, "latents_std": [1.0] * 4}, video),
        "oobleck": Case("AutoencoderOobleck", {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2],
                                               "decoder_channels": 8, "decoder_input_channels": 4}, {"sample": (BATCH, 2, 64)}),
    }  # fmt: skip
