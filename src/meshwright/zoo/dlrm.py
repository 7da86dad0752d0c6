"""DLRM: a recommendation model whose embedding tables outweigh its two small multilayer perceptrons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class DLRMConfig:
    """Tables (with one index per sample each), the vector width they share with the bottom MLP's output, and the MLPs' hidden widths."""

    tables: int
    rows: int
    width: int
    dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @property
    def top_widths(self) -> tuple[int, ...]:
        pairs = (self.tables + 1) * self.tables // 2  # of the tables' vectors and the bottom MLP's
        return (self.width + pairs, *self.top, 1)


DLRM_CONFIGS: dict[str, DLRMConfig] = {
    "dlrm": DLRMConfig(tables=4, rows=80000, width=128, dense=128, bottom=(128, 128), top=(512, 512, 512, 256)),
    "dlrm-tiny": DLRMConfig(tables=4, rows=200, width=16, dense=16, bottom=(16,), top=(32, 16)),
}


def _mlp(widths: tuple[int, ...], last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class DLRM(nn.Module):
    """Dense features (B, dense) and one index for each table (B, tables) to the logit of a click (B,)."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = nn.ModuleList(nn.Embedding(config.rows, config.width) for _ in range(config.tables))
        self.bottom = _mlp((config.dense, *config.bottom, config.width), last_relu=True)
        self.top = _mlp(config.top_widths, last_relu=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in the published model: table rows uniform in ±1/√rows, dense weights normal with variance 2 / (inputs + outputs)."""
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                bound = 1.0 / math.sqrt(module.num_embeddings)
                nn.init.uniform_(module.weight, -bound, bound)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=math.sqrt(2.0 / (module.in_features + module.out_features)))
                nn.init.normal_(module.bias, std=math.sqrt(1.0 / module.out_features))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        return self.top(torch.cat((bottom, self._pairwise_interaction(vectors)), dim=1)).squeeze(1)

    def _pairwise_interaction(self, vectors: Tensor) -> Tensor:
        """The dot product of each pair of vectors, once."""
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        count = self.config.tables + 1
        row, column = torch.tril_indices(count, count, offset=-1, device=vectors.device)
        return products[:, row, column]
