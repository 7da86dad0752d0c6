"""Batches for a model of `transformers`: tensors by the names of its forward, tried in turn until one runs."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from family import BATCH, IMAGE, SEQ, VOCAB, Loss, distance_from_wave, first_tensor, output_loss, own_loss
from family_shrink import TOKENS, is_config


@dataclass(frozen=True)
class Attempt:
    """One way to call a model; `layout` says how sound and images are laid out where a name does not say it."""

    labels: bool
    everything: bool
    layout: int


def runnable_batch(model: nn.Module, config: Any, head: str, extra: dict[str, tuple[int, ...] | Tensor]) -> tuple[dict[str, Tensor], Loss]:
    """The first batch whose loss is finite; raises what the first one raised."""
    first: Exception | None = None
    trial = copy.deepcopy(model)  # a model may keep what it computes
    for attempt in _attempts(model):
        try:
            batch, loss = make_batch(model, config, head, attempt, extra)
            _check(trial, batch, loss)
            return batch, loss
        except Exception as error:
            first = first or error
    assert first is not None
    try:  # a model that runs with images only
        return batch_with_images(model, config, extra)
    except Exception:
        raise first from None


def _check(model: nn.Module, batch: dict[str, Tensor], loss: Loss) -> None:
    """The loss is finite, depends on a parameter, and can be computed of some of the samples alone."""
    value = loss(model, batch)
    if not torch.isfinite(value):
        raise ValueError("the loss is not finite")
    if not value.requires_grad:
        raise ValueError("the loss does not depend on a parameter")
    loss(model, {name: tensor[: BATCH // 2] for name, tensor in batch.items()})


def batch_with_images(model: nn.Module, config: Any, extra: dict[str, Any]) -> tuple[dict[str, Tensor], Loss]:
    """Text after the tokens of an image, as many as the model wants: it says that numbers do not match until they do."""
    first: Exception | None = None
    trial = copy.deepcopy(model)
    for layout, sizes in itertools.product(range(3), (False, True)):
        for count in range(1, _MOST_IMAGE_TOKENS + 1):
            try:
                batch = _images_in_text(model, config, layout, sizes, count) | {
                    name: _tensor(value) for name, value in extra.items() if name != "input_ids"
                }
                _check(trial, batch, text_and_images_loss)
                return batch, text_and_images_loss
            except Exception as error:
                first = first or error
                if "do not match" not in str(error):
                    break
    assert first is not None
    raise first


_MOST_IMAGE_TOKENS = 36
IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_index", "media_placeholder_token_id")


def _images_in_text(model: nn.Module, config: Any, layout: int, sizes: bool, count: int) -> dict[str, Tensor]:
    accepted = inspect.signature(model.forward).parameters
    makers = _makers(config, layout)
    token = next((getattr(config, name) for name in IMAGE_TOKENS if isinstance(getattr(config, name, None), int)), None)
    if token is None or "pixel_values" not in accepted:
        raise ValueError("no token stands for an image")
    ids = torch.cat([torch.full((BATCH, count), token), makers["input_ids"]()], 1)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if "image_grid_thw" in accepted:
        packed = _packed(config, {"pixel_values"}, layout)
        batch |= {"pixel_values": packed["pixel_values"], "image_grid_thw": packed["grid_thw"]}
    else:
        batch["pixel_values"] = makers["pixel_values"]()
    if sizes and "image_sizes" in accepted:
        batch["image_sizes"] = torch.full((BATCH, 2), batch["pixel_values"].shape[-1])
    if "mm_token_type_ids" in accepted:
        batch["mm_token_type_ids"] = (ids == token).long()
    return batch


def text_and_images_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss; patches are laid end to end where it wants those of all images in one dim."""
    packed = {name: batch[name].flatten(0, 1) for name in ("pixel_values", "image_grid_thw") if "image_grid_thw" in batch}
    return own_loss(model, {**batch, **packed})


def _attempts(model: nn.Module) -> Iterator[Attempt]:
    for labels in (True, False) if "labels" in inspect.signature(model.forward).parameters else (False,):
        for everything in (False, True):
            for layout in range(3):
                yield Attempt(labels, everything, layout)


def packed_loss(model: nn.Module, batch: Any) -> Tensor:
    """For models that want the patches of all images in one dim: samples are laid end to end here, so a batch can be split by samples."""
    output = first_tensor(model(**{name: value.flatten(0, 1) for name, value in batch.items()}))
    output = output[0] if output.shape[0] == 1 else output
    return distance_from_wave(output.unflatten(0, (len(next(iter(batch.values()))), -1)))


def make_batch(model: nn.Module, config: Any, head: str, attempt: Attempt, extra: dict[str, Any]) -> tuple[dict[str, Tensor], Loss]:
    accepted = inspect.signature(model.forward).parameters
    makers = _makers(config, attempt.layout)
    if "grid_thw" in accepted:
        return _packed(config, accepted, attempt.layout), packed_loss
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) and main in accepted else next((name for name in accepted if name in makers), main)
    wanted = [main] + [n for n, p in accepted.items() if n != main and (p.default is inspect.Parameter.empty or (attempt.everything and n in _USUAL))]
    names = [n for n in wanted if accepted.get(n) is None or accepted[n].kind is not inspect.Parameter.VAR_KEYWORD]
    batch = {n: makers[n]() for n in names if n in makers and n not in extra}
    for name, value in extra.items():
        batch[name] = _tensor(value)
    if not batch:
        raise ValueError(f"nobody knows what {main} is")
    if not attempt.labels or "labels" in batch:
        if "decoder_input_ids" in accepted:
            batch.setdefault("decoder_input_ids", makers["decoder_input_ids"]())
        return batch, own_loss if "labels" in batch else output_loss
    if "CLASSIFICATION" in head:
        return {**batch, "labels": torch.arange(BATCH) % 2}, own_loss
    return {**batch, "labels": batch["input_ids"].clone() if "input_ids" in batch else makers["labels"]()}, own_loss


def _tensor(value: Tensor | tuple[int, ...]) -> Tensor:
    return value if isinstance(value, Tensor) else torch.randn(value, generator=torch.Generator().manual_seed(2))


# Optional inputs that are given where the main input alone does not run.
_USUAL = {
    "input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids", "bbox", "attention_mask", "past_values", "token_type_ids",
    "input_features_mask",
}  # fmt: skip


def _makers(config: Any, layout: int) -> dict[str, Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(1)
    text = getattr(config, "text_config", None) or getattr(config, "decoder", None) or config
    parts = (getattr(config, name, None) for name in ("vision_config", "encoder", "backbone_config"))
    vision = next((part for part in parts if is_config(part)), config)
    audio = getattr(config, "audio_config", None) or getattr(config, "speech_config", None) or getattr(config, "encoder_config", None) or config

    def ids() -> Tensor:
        vocabulary = min(getattr(text, "vocab_size", None) or VOCAB, VOCAB)
        return torch.randint(min(TOKENS, vocabulary // 2), vocabulary, (BATCH, SEQ), generator=generator)

    def image() -> Tensor:
        size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or IMAGE
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        images = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None) or 2
        video = "video" in type(config).__name__.lower() or hasattr(vision, "num_frames") or hasattr(vision, "frames_per_clip")
        outer = ((images,), (), (1,)) if video else ((), (2,), (1,))
        return torch.randn(BATCH, *outer[layout], channels, height, width, generator=generator)

    def frames() -> int:
        return 2 * (getattr(audio, "max_source_positions", None) or 32)

    def features() -> Tensor:
        names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim", "feature_projection_input_dim", "input_feat_size")
        bins = next((v for v in (getattr(audio, n, None) for n in names) if isinstance(v, int)), 80)
        shapes = ((bins, frames()), (frames(), bins), (1, frames(), bins))
        return torch.randn(BATCH, *shapes[layout], generator=generator)

    def sound() -> Tensor:
        bins = getattr(audio, "num_mel_bins", None) or 80
        return torch.randn(BATCH, *((3840,), (1, 3840), (getattr(audio, "max_length", None) or 64, bins))[layout], generator=generator)

    def series() -> Tensor:
        length = getattr(config, "context_length", None) or 32
        channels = getattr(config, "num_input_channels", 1)
        return torch.randn(BATCH, *((length, channels), (length,), (length,))[layout], generator=generator)

    return {
        **dict.fromkeys(("input_ids", "decoder_input_ids", "labels", "qformer_input_ids"), ids),
        **dict.fromkeys(("pixel_values", "pixel_values_videos", "images"), image),
        **dict.fromkeys(("input_features", "audio_mel"), features),
        **dict.fromkeys(("input_values", "audio_values"), sound),
        **dict.fromkeys(("attention_mask",), lambda: torch.ones(BATCH, SEQ, dtype=torch.long)),
        "input_features_mask": lambda: torch.ones(BATCH, frames(), dtype=torch.long),
        "audio_mel_mask": lambda: torch.zeros(BATCH, frames(), dtype=torch.bool),
        "spatial_shapes": lambda: torch.full((BATCH, 2), 4),
        "pixel_attention_mask": lambda: torch.ones(BATCH, 16, dtype=torch.long),
        "token_type_ids": lambda: torch.zeros(BATCH, SEQ, dtype=torch.long),
        "bbox": lambda: torch.zeros(BATCH, SEQ, 4, dtype=torch.long),
        "past_values": series,
        "inputs_embeds": lambda: torch.randn(BATCH, SEQ, getattr(text, "hidden_size", 32), generator=generator),
    }


def _packed(config: Any, accepted: Any, layout: int) -> dict[str, Tensor]:
    """One image of 4 × 4 patches for each sample; `packed_loss` lays them end to end."""
    vision = getattr(config, "vision_config", None) or config
    patch = getattr(vision, "patch_size", None) or 14
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or getattr(vision, "in_chans", None) or 3
    length = channels * patch**2 * (getattr(vision, "temporal_patch_size", None) or 1)
    shape = ((length,), (2 * length,), (channels, patch, patch))[layout]
    name = next(n for n in ("hidden_states", "pixel_values") if n in accepted)
    batch = {name: torch.randn(BATCH, 16, *shape, generator=torch.Generator().manual_seed(1)), "grid_thw": torch.tensor([[[1, 4, 4]]] * BATCH)}
    if "merge_sizes" in accepted:
        batch["merge_sizes"] = torch.ones(BATCH, 1, dtype=torch.long)
    return batch
