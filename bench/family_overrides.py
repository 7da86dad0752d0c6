"""What no rule can know about a model type of `transformers`: fields that must agree, and inputs with shapes of their own."""

from __future__ import annotations

from typing import Any

# Fields of the configuration; `part.field` within a part.
FIELDS: dict[str, dict[str, Any]] = {}

# Further inputs: a tensor, or the shape of a random one.
INPUTS: dict[str, dict[str, Any]] = {}
