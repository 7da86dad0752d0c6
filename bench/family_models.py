"""Models that nobody chose for Meshwright: every model type of `transformers`, one of each family of `timm` and `torchvision`, models of
`diffusers` and torch's own modules, each built small from its own configuration, with a batch and a loss.

A model type's configuration is its default one, shrunken by the names of its fields (`shrink`): widths, depths, vocabularies, images. Where the
class computes a loss from labels, that loss is used, else the distance of its first output from a wave. What cannot be built or run on one device
this way is reported as such and is not a model of the sweep.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, SEQ, IMAGE, VOCAB, WIDTH, HEADS = 4, 16, 32, 96, 32, 4
MAX_PARAMETERS = 40_000_000
Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Family:
    """One kind of model: `build` returns the model, and a global batch of `BATCH` samples."""

    library: str
    name: str
    build: Callable[[], tuple[nn.Module, Any, Loss]]

    @property
    def key(self) -> str:
        return f"{self.library}/{self.name}"


def all_families() -> list[Family]:
    if importlib.util.find_spec("torchvision") is not None:
        _define_missing_operators()
    found = [*torch_families(), *transformers_families()]
    for package, families in (("timm", timm_families), ("torchvision", torchvision_families), ("diffusers", diffusers_families)):
        if importlib.util.find_spec(package) is not None:
            found += families()
    return found


def build(family: Family) -> tuple[nn.Module, Any, Loss]:
    """The model in training mode without dropout, its batch and its loss; the same in every process."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch, loss = family.build()
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout", "attn_dropout_p", "dropout_p", "layerdrop", "attention_dropout"):
            if type(getattr(module, name, None)) is float:
                setattr(module, name, 0.0)
    with torch.no_grad():  # a bias of zero and a gain of one hide what a plan does with them
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count:,} parameters after shrinking")
    return model.train(), batch, loss


# -- losses --


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model of transformers computes from its labels."""
    return model(**batch).loss


def output_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean squared distance of a model's first floating-point output from a wave: from zero, a norm at the end would make it constant."""
    output = first_tensor(model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch))
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    wave = torch.arange(output[0].numel(), device=output.device).cos().view(output.shape[1:])
    return (output - wave).square().mean()


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(first_tensor(model(inputs)), labels)


def first_tensor(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else vars(output).values()
    for value in values:
        if isinstance(value, (Tensor, tuple, list)) or hasattr(value, "values"):
            found = first_tensor(value)
            if found.is_floating_point() and (found.requires_grad or not torch.is_grad_enabled()):
                return found
    raise ValueError("no floating-point output")


# -- transformers --

# Tried in this order; the first class that a model type has and that runs counts.
_HEADS = (
    "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_IMAGE_CLASSIFICATION", "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_AUDIO_CLASSIFICATION", "MODEL_FOR_VIDEO_CLASSIFICATION", "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_SEQUENCE_CLASSIFICATION", "MODEL",
)  # fmt: skip


def transformers_families() -> list[Family]:
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    heads = {head: getattr(modeling_auto, f"{head}_MAPPING_NAMES") for head in _HEADS}
    types = [t for t in CONFIG_MAPPING_NAMES if any(t in names for names in heads.values())]
    return [Family("transformers", t, lambda t=t: _build_transformer(t, heads)) for t in sorted(types)]  # type: ignore[misc]


def _build_transformer(model_type: str, heads: dict[str, Any]) -> tuple[nn.Module, Any, Loss]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    errors: list[str] = []
    for head, names in heads.items():
        if model_type not in names:
            continue
        class_names = names[model_type]
        for class_name in [class_names] if isinstance(class_names, str) else class_names[:1]:
            try:
                config = shrink(CONFIG_MAPPING[model_type]())
                torch.manual_seed(0)
                model = getattr(transformers, class_name)(config)
                if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
                    raise ValueError("too large after shrinking")
                model.train()
                batch, loss = _runnable_batch(model, config, head)
            except Exception as error:
                errors.append(f"{class_name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
                continue
            return model, batch, loss
    raise ValueError("; ".join(errors) or "no class")


_WIDTHS = re.compile(
    r"^(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|hidden_dim|emb_dim|encoder_hidden_size|decoder_hidden_size|word_embed_proj_dim|"
    r"projection_dim|encoder_embed_dim|decoder_embed_dim|embedding_dim|proj_size|model_dim|lm_hidden_size|out_hidden_size|projector_hidden_size|"
    r"cross_attention_hidden_size|text_embed_dim|vision_hidden_size|bottleneck_size|rnn_hidden_size|decoder_output_dim|channels|neck_hidden_sizes)$"
)
_INNER = re.compile(r"(intermediate|inner|ffn|mlp|feed_forward|feedforward|d_ff|fc_dim|hidden_mult)")
_LAYERS = re.compile(r"(num_hidden_layers|n_layers?$|num_layers|_layers$|depth$|num_blocks)")
_ATTENTION_HEADS = re.compile(r"(num_attention_heads|n_heads?$|num_heads|_attention_heads$|n_head|decoder_num_heads)")


def shrink(config: Any) -> Any:
    """The configuration with small sizes in every field whose name says what it is; parts of a configuration likewise."""
    for name, value in list(vars(config).items()):
        if name.startswith("_") or name in ("id2label", "label2id"):
            continue
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value)
            continue
        try:
            setattr(config, name, _small(name, value, config))
        except Exception:  # some fields are computed from others
            continue
    return config


def _small(name: str, value: Any, config: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return False if name in ("use_cache", "use_mamba_kernels", "use_timm_backbone") else value
    if isinstance(value, float):
        return 0.0 if "drop" in name else value
    if isinstance(value, dict):
        return _small_rope(name, value)
    if isinstance(value, (list, tuple)):
        return _small_list(name, value, config)
    return _small_int(name, value, config) if isinstance(value, int) else value


def _small_int(name: str, value: int, config: Any) -> int:
    if "vocab" in name and value > VOCAB:
        return VOCAB
    if name.endswith(("token_id", "token_index", "_token")) and value >= VOCAB:
        return 3 + sum(name.encode()) % 80
    if re.search(r"(max_position|n_positions|max_seq|seq_length|max_source|max_target|n_ctx|max_len|block_size)", name):
        return min(value, 64)
    if "drop" in name:
        return 0
    if _ATTENTION_HEADS.search(name) and "kv" not in name and "key_value" not in name:
        return min(value, HEADS)
    if "key_value_heads" in name or name in ("num_kv_heads", "n_head_kv", "num_kv_head"):
        heads = max(getattr(config, "num_attention_heads", value) or value, 1)
        return value if value <= 2 else HEADS if value >= heads else 2
    if re.search(r"(num_experts_per_tok|top_k$|topk$|moe_k|num_selected)", name):
        return min(value, 2)
    if re.search(r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts|^num_expert)", name):
        return min(value, 4)
    if "lora_rank" in name or name.endswith("_rank"):
        return min(value, 16)
    if name == "head_dim" and getattr(config, "qk_rope_head_dim", None):  # the part with rotary positions
        return min(value, 4)
    if name in ("mamba_d_head", "mamba_head_dim", "mamba_headdim"):
        return 16
    if name in ("window_size", "n_groups", "mamba_n_groups", "n_group", "topk_group"):
        return min(value, 4 if name == "window_size" else 1)
    if name in (
        "head_dim",
        "d_kv",
        "kv_channels",
        "attention_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "d_head",
        "head_size",
        "attention_key_dim",
    ):
        return min(value, WIDTH // HEADS)
    if name in ("qk_rope_head_dim", "rotary_dim", "qk_head_dim", "index_head_dim"):
        return min(value, 4 if name != "qk_head_dim" else WIDTH // HEADS + 4)
    if _INNER.search(name) and value > 64:
        return 2 * WIDTH
    if _WIDTHS.search(name) and value > WIDTH:
        return WIDTH
    if _LAYERS.search(name) and value > 2 and "start" not in name:
        return 2
    if name in ("image_size", "input_size", "img_size"):
        return IMAGE
    if name in ("patch_size", "temporal_patch_size", "tubelet_size") and value > 4:
        return 8
    return value


def _small_list(name: str, value: Any, config: Any) -> Any:
    numbers = [v for v in value if isinstance(v, int) and not isinstance(v, bool)]
    layers = getattr(config, "num_hidden_layers", None) or 2
    if name in ("layer_types", "layers_block_type", "mlp_layer_types", "hybrid_override_pattern") and isinstance(value, list):
        return value[-layers:]
    if len(numbers) != len(value) or not value:
        return value
    if name == "depths" or "num_blocks" in name or name in ("layers", "num_layers", "layer_depths"):
        return type(value)(min(v, 2) for v in value)
    if re.search(r"(hidden_sizes|embed_dims?|widths|dims|channels|hidden_dim)", name) and max(value) > 64:
        factor = max(min(value) // 32, 1)
        return type(value)(max(v // factor, 1) for v in value)
    if re.search(r"(image_size|input_size|img_size)", name):
        return type(value)(IMAGE for _ in value)
    if re.search(r"num_(attention_)?heads", name):
        return type(value)(min(v, 2) for v in value)
    return value


def _small_rope(name: str, value: dict[str, Any]) -> dict[str, Any]:
    if "mrope_section" in value:
        return {**value, "mrope_section": [1, 1, 2]}
    return value


def _runnable_batch(model: nn.Module, config: Any, head: str) -> tuple[dict[str, Tensor], Loss]:
    """The first that runs: the model's main input, or all inputs that are known."""
    first: Exception | None = None
    for everything in (False, True):
        try:
            batch, loss = _transformer_batch(model, config, head, everything)
            with torch.no_grad():
                if not torch.isfinite(loss(model, batch)):
                    raise ValueError("the loss is not finite")
            return batch, loss
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _transformer_batch(model: nn.Module, config: Any, head: str, everything: bool) -> tuple[dict[str, Tensor], Loss]:
    """Inputs by the names of the model's forward."""
    generator = torch.Generator().manual_seed(1)
    accepted = inspect.signature(model.forward).parameters
    text = getattr(config, "text_config", None) or getattr(config, "decoder", None) or config
    vision = getattr(config, "vision_config", None) or config
    audio = getattr(config, "audio_config", None) or getattr(config, "speech_config", None) or config

    def ids() -> Tensor:
        return torch.randint(10, min(getattr(text, "vocab_size", None) or VOCAB, VOCAB), (BATCH, SEQ), generator=generator)

    def image() -> Tensor:
        size = getattr(vision, "image_size", IMAGE) or IMAGE
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        frames = (getattr(vision, "num_frames", 2),) if "video" in type(config).__name__.lower() or hasattr(vision, "num_frames") else ()
        return torch.randn(BATCH, *frames, getattr(vision, "num_channels", 3) or 3, height, width, generator=generator)

    def features() -> Tensor:
        bins = getattr(audio, "num_mel_bins", None) or getattr(audio, "input_feat_per_channel", None) or getattr(audio, "feature_size", None) or 80
        frames = 2 * getattr(audio, "max_source_positions", 32)
        by_time = config.model_type in (
            "speech_to_text",
            "wav2vec2-bert",
            "seamless_m4t",
            "seamless_m4t_v2",
            "audio-spectrogram-transformer",
            "fastspeech2",
        )
        return torch.randn(BATCH, *((frames, bins) if by_time else (bins, frames)), generator=generator)

    makers: dict[str, Callable[[], Tensor]] = {
        "input_ids": ids,
        "pixel_values": image,
        "pixel_values_videos": image,
        "input_features": features,
        "input_values": lambda: torch.randn(BATCH, 800, generator=generator),
        "decoder_input_ids": ids,
        "bbox": lambda: torch.zeros(BATCH, SEQ, 4, dtype=torch.long),
        "past_values": lambda: torch.randn(
            BATCH, getattr(config, "context_length", 32), getattr(config, "num_input_channels", 1), generator=generator
        ),
    }
    main = getattr(model, "main_input_name", "input_ids")
    names = [main] + [n for n, p in accepted.items() if n != main and n in makers and (everything or p.default is inspect.Parameter.empty)]
    batch = {n: makers[n]() for n in names if n in makers}
    if not batch:
        raise ValueError(f"nobody knows what {main} is")
    with_labels = "labels" in accepted and head not in ("MODEL", "MODEL_FOR_IMAGE_TEXT_TO_TEXT")
    if "decoder_input_ids" in accepted and not with_labels:
        batch.setdefault("decoder_input_ids", ids())
    if with_labels:
        classes = "CLASSIFICATION" in head
        labels = torch.randint(0, 2, (BATCH,), generator=generator) if classes else batch["input_ids"].clone() if "input_ids" in batch else ids()
        return {**batch, "labels": labels}, own_loss
    return batch, output_loss


# -- timm, torchvision, diffusers --


def _define_missing_operators() -> None:
    """torchvision's wheel for CUDA does not load its operators beside a CPU build of torch; its models can be imported if their schemas exist."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            _LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
            _LIBRARIES[-1].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_LIBRARIES: list[Any] = []


def _image_batch(size: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, size, size, generator=generator), torch.randint(0, classes, (BATCH,), generator=generator)


def timm_families() -> list[Family]:
    """The smallest model of each module of timm."""
    _define_missing_operators()
    import timm

    found = []
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names:
            found.append(Family("timm", module, lambda names=names: _build_timm(names)))  # type: ignore[misc]
    return found


def _build_timm(names: list[str]) -> tuple[nn.Module, Any, Loss]:
    import timm

    def size_on_meta(name: str) -> int:
        try:
            with torch.device("meta"):
                return sum(p.numel() for p in timm.create_model(name, num_classes=10).parameters())
        except Exception:
            return 10**12

    hints = ("test_", "atto", "femto", "pico", "nano", "tiny", "_t_", "xxs", "_s", "small", "18", "050", "b0")
    candidates = sorted(names, key=lambda n: min((i for i, h in enumerate(hints) if h in n), default=99))[:6]
    name = min(candidates, key=size_on_meta)
    errors = []
    for options in ({"img_size": 64}, {}):
        try:
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=10, **options)
            size = 64 if options or not getattr(model, "default_cfg", {}).get("fixed_input_size") else model.default_cfg["input_size"][-1]
            batch = _image_batch(size)
            with torch.no_grad():
                class_loss(model.train(), batch)
            return model, batch, class_loss
        except Exception as error:
            errors.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    raise ValueError("; ".join(errors))


def torchvision_families() -> list[Family]:
    """The smallest classifier of each module of torchvision.models, and a segmentation model of each kind."""
    _define_missing_operators()
    import torchvision.models as models

    by_module: dict[str, list[str]] = {}
    for name in models.list_models(module=models):
        by_module.setdefault(models.get_model_builder(name).__module__.rpartition(".")[2], []).append(name)
    found = [Family("torchvision", module, lambda names=names: _build_torchvision(names)) for module, names in by_module.items()]  # type: ignore[misc]
    for name in models.list_models(module=models.segmentation):
        found.append(Family("torchvision", name, lambda name=name: _build_segmentation(name)))  # type: ignore[misc]
    return found


def _build_torchvision(names: list[str]) -> tuple[nn.Module, Any, Loss]:
    import torchvision.models as models

    sizes: dict[str, int] = {}
    for name in names:
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in models.get_model(name, num_classes=10).parameters())
    name = min(sizes, key=lambda n: sizes[n])
    options = {"image_size": 64} if name.startswith("vit") else {"input_size": (64, 64)} if name.startswith("maxvit") else {}
    options |= {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    batch = _image_batch(96 if "inception" in name else 64)
    return models.get_model(name, num_classes=10, **options), batch, class_loss


def _build_segmentation(name: str) -> tuple[nn.Module, Any, Loss]:
    import torchvision.models as models

    images, _ = _image_batch(64)
    return models.get_model(name, weights=None, weights_backbone=None, num_classes=5), images, output_loss


def diffusers_families() -> list[Family]:
    """The U-Nets, transformers and autoencoders that take an image, a time and a condition."""
    small = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    cross = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    coder = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4}
    transformer = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    dit = {**transformer, "patch_size": 2, "norm_num_groups": 4, "num_embeds_ada_norm": 10}
    sd3 = {**transformer, "patch_size": 2, "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 16}
    pixart = {**dit, "cross_attention_dim": 32, "caption_channels": 16}
    image = {"sample": (BATCH, 4, 8, 8), "timestep": (BATCH,)}
    text, caption = {"encoder_hidden_states": (BATCH, SEQ, 32)}, {"encoder_hidden_states": (BATCH, SEQ, 16)}
    cases: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
        "unet2d": ("UNet2DModel", {**small, **blocks, "in_channels": 4, "out_channels": 4, "sample_size": 8, "attention_head_dim": 4}, image),
        "unet2d_condition": (
            "UNet2DConditionModel",
            {**small, **cross, "cross_attention_dim": 32, "sample_size": 8, "attention_head_dim": 4},
            image | text,
        ),
        "autoencoder_kl": ("AutoencoderKL", {**small, **coder}, {"sample": (BATCH, 3, 16, 16)}),
        "vq_model": ("VQModel", {**small, **coder, "num_vq_embeddings": 32}, {"sample": (BATCH, 3, 16, 16)}),
        "dit": ("DiTTransformer2DModel", dit, {"hidden_states": (BATCH, 4, 8, 8), "timestep": (BATCH,), "class_labels": (BATCH,)}),
        "sd3": ("SD3Transformer2DModel", sd3, {"hidden_states": (BATCH, 4, 8, 8), "timestep": (BATCH,), "pooled_projections": (BATCH, 16)} | text),
        "pixart": ("PixArtTransformer2DModel", pixart, {"hidden_states": (BATCH, 4, 8, 8), "timestep": (BATCH,)} | caption),
    }
    return [Family("diffusers", name, lambda case=case: _build_diffusers(*case)) for name, case in cases.items()]  # type: ignore[misc]


def _build_diffusers(class_name: str, config: dict[str, Any], inputs: dict[str, tuple[int, ...]]) -> tuple[nn.Module, Any, Loss]:
    import diffusers

    generator = torch.Generator().manual_seed(1)
    numbers = ("timestep", "class_labels")
    batch = {
        name: torch.randint(0, 9, shape, generator=generator) if name in numbers else torch.randn(shape, generator=generator)
        for name, shape in inputs.items()
    }
    return getattr(diffusers, class_name)(**config), batch, output_loss


# -- torch's own modules --


def torch_families() -> list[Family]:
    """torch's own layers with sequences, images and tables, between two linear layers."""
    width = WIDTH
    layers: dict[str, Callable[[], nn.Module]] = {
        "transformer_encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(width, HEADS, 64, 0.0, batch_first=True), 2),
        "transformer_encoder_pre_norm": lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, HEADS, 64, 0.0, "gelu", batch_first=True, norm_first=True), 2
        ),
        "transformer_decoder": lambda: _WithMemory(nn.TransformerDecoder(nn.TransformerDecoderLayer(width, HEADS, 64, 0.0, batch_first=True), 2)),
        "lstm": lambda: nn.LSTM(width, width, 2, batch_first=True),
        "gru": lambda: nn.GRU(width, width, 2, batch_first=True, bidirectional=True),
        "rnn": lambda: nn.RNN(width, width, batch_first=True),
        "conv1d": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 3, padding=1), nn.GELU(), nn.Conv1d(64, width, 3, padding=1))),
        "depthwise": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 1), nn.Conv1d(64, 64, 3, padding=1, groups=64), nn.Conv1d(64, width, 1))),
        "grouped": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 1), nn.Conv1d(64, 64, 3, padding=1, groups=4), nn.Conv1d(64, width, 1))),
        "transposed_conv": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 2, 2), nn.ReLU(), nn.ConvTranspose1d(64, width, 2, 2))),
        "weight_norm": lambda: nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(*shape)) for shape in ((width, 64), (64, width)))),
        "spectral_norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(width, 64)), nn.ReLU(), nn.Linear(64, width)),
        "bilinear": lambda: _Squared(nn.Bilinear(width, width, width)),
        "prelu": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 1), nn.PReLU(64), nn.Conv1d(64, width, 1))),
        "group_norm": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 1), nn.GroupNorm(4, 64), nn.Conv1d(64, width, 1))),
        "batch_norm": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, width, 1))),
        "instance_norm": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 1), nn.InstanceNorm1d(64, affine=True), nn.Conv1d(64, width, 1))),
        "glu": lambda: nn.Sequential(nn.Linear(width, 128), nn.GLU(), nn.Linear(64, width)),
        "frozen": lambda: nn.Sequential(nn.Linear(width, 64).requires_grad_(False), nn.GELU(), nn.Linear(64, width)),
        "adaptive_pool": lambda: nn.Sequential(nn.Linear(width, 64), nn.AdaptiveAvgPool1d(width), nn.Linear(width, width)),
    }
    return [Family("torch", name, lambda make=make: _build_torch(make)) for name, make in layers.items()]  # type: ignore[misc]


class _Surrounded(nn.Module):
    """An embedding, a layer and a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(VOCAB, WIDTH), layer, nn.LazyLinear(VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        output = self.layer(self.words(input_ids))
        return self.head(output[0] if isinstance(output, tuple) else output)  # type: ignore[no-any-return]


class _Transposed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class _WithMemory(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.flip(1))  # type: ignore[no-any-return]


class _Squared(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)  # type: ignore[no-any-return]


def _token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, -2), batch["labels"].flatten())


def _build_torch(make: Callable[[], nn.Module]) -> tuple[nn.Module, Any, Loss]:
    model, generator = _Surrounded(make()), torch.Generator().manual_seed(1)
    batch = {name: torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator) for name in ("input_ids", "labels")}
    with torch.no_grad():
        model(batch["input_ids"])  # gives the head its width
    return model, batch, _token_loss
