"""Embeddings of texts from an encoder of transformers: how the vectors of a text's tokens become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.core.errors import RequestError
from meshwright.core.serialization import read_json

Method = Literal["mean", "pooler", "cls", "max"]
METHODS: dict[Method, str] = {
    "mean": "the mean of the last hidden states of the text's own tokens", "pooler": "the model's own pooler",
    "cls": "the last hidden state of the first token", "max": "the largest of the last hidden states of the text's own tokens, number by number",
}  # fmt: skip
_OF_SENTENCE_TRANSFORMERS: dict[str, Method] = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max"
}  # fmt: skip


@dataclass(frozen=True)
class Pooling:
    """How one vector is made, and where that comes from. `normalized` vectors have length 1."""

    method: Method = "mean"
    normalized: bool = False
    source: str = ""

    def __str__(self) -> str:
        return METHODS[self.method] + (", normalized to length 1" if self.normalized else "") + (f" (as {self.source} says)" if self.source else "")


def find_pooling(folder: Path | None, method: str) -> Pooling:
    """The method that was asked for; "auto": what the folder says in the files of sentence-transformers, or else the mean."""
    if method != "auto":
        return Pooling(method)  # type: ignore[arg-type]
    if folder is None or not (folder / "modules.json").is_file():
        return Pooling()
    modules = read_json(folder / "modules.json")
    entries = (
        [(str(m.get("type", "")).rpartition(".")[2], str(m.get("path", ""))) for m in modules if isinstance(m, dict)]
        if isinstance(modules, list)
        else []
    )
    found = Pooling(source="modules.json")
    for kind, path in entries:
        if kind == "Pooling":
            found = Pooling(_method_in(folder / path / "config.json"), source=f"{path}/config.json")
        elif kind == "Normalize":
            found = Pooling(found.method, True, found.source)
        elif kind != "Transformer":
            raise RequestError(f"{folder}: its embeddings go through a {kind} layer ({path}), which is not supported: choose with --set pooling=mean")
    return found


def _method_in(file: Path) -> Method:
    data = read_json(file)
    modes = [key for key, value in data.items() if key.startswith("pooling_mode_") and value is True] if isinstance(data, dict) else []
    if len(modes) != 1 or modes[0] not in _OF_SENTENCE_TRANSFORMERS:
        raise RequestError(f"{file}: its way of pooling ({', '.join(modes) or 'none'}) is not supported: choose with --set pooling=mean")
    return _OF_SENTENCE_TRANSFORMERS[modes[0]]


def make_pooled(model: nn.Module, pooling: Pooling) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """A function from tokens (N, S) and their mask to vectors (N, width) in float32."""
    encoder: Any = getattr(model, "base_model", model)

    def embed(inputs: Mapping[str, Tensor]) -> Tensor:
        out = encoder(**inputs, return_dict=True)
        if pooling.method == "pooler":
            vectors = getattr(out, "pooler_output", None)
            if vectors is None:
                raise RequestError(f"{type(encoder).__name__} has no pooler: use --set pooling=mean")
        else:
            vectors = _pool(out.last_hidden_state, inputs.get("attention_mask"), pooling.method)
        vectors = vectors.float()
        return torch.nn.functional.normalize(vectors, dim=-1) if pooling.normalized else vectors

    return embed


def _pool(hidden: Tensor, mask: Tensor | None, method: Method) -> Tensor:
    if method == "cls":
        return hidden[:, 0]
    own = torch.ones(hidden.shape[:2], device=hidden.device, dtype=torch.bool) if mask is None else mask.bool()
    if method == "max":
        return hidden.masked_fill(~own[..., None], float("-inf")).amax(1)
    weights = own.to(hidden.dtype)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1)
