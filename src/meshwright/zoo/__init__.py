"""Level 1: reference models as ordinary modules, each with its loss and the shape of its samples."""

from meshwright.zoo.huggingface import has_weights
from meshwright.zoo.inference_task import has_loss, kind_of, load_for_inference
from meshwright.zoo.instruction_tuning import instruction_task
from meshwright.zoo.keyed_random import KeyedDropout, KeyedNormal
from meshwright.zoo.model_registry import load, names
from meshwright.zoo.published_configs import published_config, published_names

__all__ = [
    "KeyedDropout", "KeyedNormal", "has_loss", "has_weights", "instruction_task", "kind_of", "load", "load_for_inference", "names",
    "published_config", "published_names",
]  # fmt: skip
