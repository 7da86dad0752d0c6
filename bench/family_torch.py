"""torch's own layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from family import BATCH, HEADS, SEQ, VOCAB, WIDTH, Built, Family


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


def _build_torch(make: Callable[[], nn.Module]) -> Built:
    model, generator = _Surrounded(make()), torch.Generator().manual_seed(1)
    batch = {name: torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator) for name in ("input_ids", "labels")}
    with torch.no_grad():
        model(batch["input_ids"])  # gives the head its width
    return model, batch, _token_loss
