"""Level 1: reference models as ordinary modules, each with its loss and the shape of its samples."""

from meshwright.zoo.huggingface import has_weights
from meshwright.zoo.instruct import instructed
from meshwright.zoo.keyed import KeyedDropout, KeyedNormal
from meshwright.zoo.published import published_config, published_names
from meshwright.zoo.registry import load, names

__all__ = ["KeyedDropout", "KeyedNormal", "has_weights", "instructed", "load", "names", "published_config", "published_names"]
