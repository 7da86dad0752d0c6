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
        "attention": lambda: _SelfAttention(nn.MultiheadAttention(width, HEADS, batch_first=True)),
        "attention_bias_kv": lambda: _SelfAttention(nn.MultiheadAttention(width, HEADS, add_bias_kv=True, batch_first=True)),
        "transformer": lambda: _WithMemory(nn.Transformer(width, HEADS, 2, 2, 64, 0.0, batch_first=True)),
        "rms_norm": lambda: nn.Sequential(nn.Linear(width, 64), nn.RMSNorm(64), nn.SiLU(), nn.Linear(64, width)),
        "layer_norm": lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.LayerNorm(64), nn.Hardtanh(), nn.Linear(64, width)),
        "local_response_norm": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 1), nn.LocalResponseNorm(3), nn.Conv1d(64, width, 1))),
        "channel_shuffle": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 1), nn.ChannelShuffle(4), nn.Conv1d(64, width, 1))),
        "max_pool": lambda: _Transposed(nn.Sequential(nn.Conv1d(width, 64, 3, padding=1), nn.MaxPool1d(3, 1, 1), nn.Conv1d(64, width, 1))),
        "conv2d": lambda: _AsImage(
            nn.Sequential(nn.Conv2d(width, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AvgPool2d(3, 1, 1), nn.Conv2d(64, width, 1)), (4, 4)
        ),
        "conv3d": lambda: _AsImage(nn.Sequential(nn.Conv3d(width, 64, 3, padding=1), nn.Softplus(), nn.Conv3d(64, width, 1)), (2, 2, 4)),
        "pixel_shuffle": lambda: _AsImage(nn.Sequential(nn.Conv2d(width, 128, 1), nn.PixelShuffle(2), nn.Conv2d(32, width, 2, 2)), (4, 4)),
        "unfold": lambda: _AsImage(_Unfolded(), (4, 4)),
        "upsample": lambda: _AsImage(nn.Sequential(nn.Conv2d(width, 64, 2, 2), nn.Upsample(scale_factor=2), nn.Conv2d(64, width, 1)), (4, 4)),
        "lstm_cell": lambda: _Unrolled(nn.LSTMCell(width, width)),
        "activations": lambda: nn.Sequential(
            nn.Linear(width, 64),
            nn.ELU(),
            nn.Linear(64, 64),
            nn.Mish(),
            nn.Linear(64, 64),
            nn.Softmax(-1),
            nn.Linear(64, 64),
            nn.LogSigmoid(),
            nn.Linear(64, width),
            nn.Tanhshrink(),
        ),
        "adaptive_pool": lambda: nn.Sequential(nn.Linear(width, 64), nn.AdaptiveAvgPool1d(width), nn.Linear(width, width)),
    }
    found = [Family("torch", name, lambda make=make: _build_torch(make)) for name, make in layers.items()]  # type: ignore[misc]
    return [*found, Family("torch", "embedding_bag", _build_embedding_bag), Family("torch", "adaptive_softmax", _build_adaptive_softmax)]


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


class _SelfAttention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class _AsImage(nn.Module):
    """The sequence as an image or a volume of this shape."""

    def __init__(self, inner: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2).unflatten(2, self.shape)).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class _Unfolded(nn.Module):
    """A convolution by hand: patches as columns, a linear layer, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.unfold, self.linear, self.fold = nn.Unfold(2, stride=2), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.Fold((4, 4), 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fold(self.linear(self.unfold(x).transpose(1, 2)).transpose(1, 2))  # type: ignore[no-any-return]


class _Unrolled(nn.Module):
    """A recurrent cell, called once for each position."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for position in x.unbind(1):
            state = self.cell(position, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1)


class _Table(nn.Module):
    """Bags of ids, as in a recommendation model."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.mlp = nn.EmbeddingBag(VOCAB, WIDTH), nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, VOCAB))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.mlp(self.bag(input_ids))  # type: ignore[no-any-return]


class _AdaptiveSoftmax(nn.Module):
    """A language model whose head has clusters of rare words; it computes the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(VOCAB, WIDTH), nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.head = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, [32, 64])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return -self.head(self.mlp(self.words(input_ids)).flatten(0, 1), labels.flatten()).output.mean()  # type: ignore[no-any-return]


def _build_embedding_bag() -> Built:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"][:, 0])

    return _Table(), _tokens(), loss


def _build_adaptive_softmax() -> Built:
    return _AdaptiveSoftmax(), _tokens(), lambda model, batch: model(**batch)


def _tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator) for name in ("input_ids", "labels")}


def _token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, -2), batch["labels"].flatten())


def _build_torch(make: Callable[[], nn.Module]) -> Built:
    model, batch = _Surrounded(make()), _tokens()
    with torch.no_grad():
        model(batch["input_ids"])  # gives the head its width
    return model, batch, _token_loss
