"""Level 1: reference models as ordinary modules, each with its loss and the shape of its samples."""

from meshwright.zoo.keyed import KeyedDropout, KeyedNormal
from meshwright.zoo.registry import load, names

__all__ = ["KeyedDropout", "KeyedNormal", "load", "names"]
