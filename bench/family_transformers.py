"""Every model type of `transformers`, built from a small configuration, with a batch that it runs."""

from __future__ import annotations

from typing import Any

import torch

from family import MAX_PARAMETERS, Built, Family, one_line
from family_inputs import IMAGE_TOKENS, batch_with_images, runnable_batch
from family_overrides import FIELDS, INPUTS
from family_shrink import shrink

# Tried in this order; the first class that a model type has and that runs counts.
_HEADS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION",
    "IMAGE_TEXT_TO_TEXT", "SEQUENCE_CLASSIFICATION", "", "MULTIMODAL_LM", "BACKBONE", "PRETRAINING", "DEPTH_ESTIMATION", "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION", "CTC", "RNNT", "RETRIEVAL", "IMAGE_MATTING", "POSE_ESTIMATION", "KEYPOINT_MATCHING",
    "KEYPOINT_DETECTION", "TABLE_RECOGNITION", "TIME_SERIES_PREDICTION",
)  # fmt: skip


def transformers_families() -> list[Family]:
    """Every model type; those of images and text once with text alone and once with both."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    classes = _classes()
    found = [Family("transformers", t, lambda t=t: _build(t, classes[t])) for t in sorted(classes)]  # type: ignore[misc]
    for model_type, names in sorted(classes.items()):
        both = [(head, name) for head, name in names if head == "IMAGE_TEXT_TO_TEXT"]
        if both and any(hasattr(CONFIG_MAPPING[model_type], token) for token in IMAGE_TOKENS):
            found.append(Family("transformers", f"{model_type}+images", lambda t=model_type, both=both: _build(t, both, images=True)))  # type: ignore[misc]
    return found


def _classes() -> dict[str, list[tuple[str, str]]]:
    """For each model type: heads and the names of the classes with them."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found: dict[str, list[tuple[str, str]]] = {}
    for head in _HEADS:
        names = getattr(modeling_auto, f"MODEL{'_FOR_' if head else ''}{head}_MAPPING_NAMES")
        for model_type in CONFIG_MAPPING_NAMES:
            if model_type in names:
                name = names[model_type]
                found.setdefault(model_type, []).append((head, name if isinstance(name, str) else name[0]))
    return found


def _build(model_type: str, classes: list[tuple[str, str]], images: bool = False) -> Built:
    errors: dict[str, str] = {}
    for head, name in classes:
        if name in errors:
            continue
        try:
            return build_class(model_type, head, name, images)
        except Exception as error:
            errors[name] = one_line(error)
    raise ValueError("; ".join(f"{name}: {error}" for name, error in errors.items()))


def build_class(model_type: str, head: str, name: str, images: bool) -> Built:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrink(CONFIG_MAPPING[model_type](), FIELDS.get(model_type, {}))
    kind = getattr(transformers, name)
    config = config if isinstance(config, kind.config_class) else _part_for(kind, config)
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"too large after shrinking: {count:,} parameters")
    torch.manual_seed(0)
    model = kind(config).float().train()
    extra = INPUTS.get(model_type, {})
    batch, loss = batch_with_images(model, config, extra) if images else runnable_batch(model, config, head, extra)
    return model, batch, loss


def _part_for(kind: Any, config: Any) -> Any:
    """The part of a configuration that a class wants: a text model inside a model of images and text."""
    return next((value for value in vars(config).values() if isinstance(value, kind.config_class)), config)
