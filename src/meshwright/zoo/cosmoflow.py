"""CosmoFlow: a 3-D convolutional network that predicts four cosmological parameters from a volume of dark matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.zoo.keyed_random import KeyedDropout


@dataclass(frozen=True)
class CosmoFlowConfig:
    """Edge of the cubic volume, channels after each convolution, width of the two hidden dense layers."""

    edge: int
    filters: tuple[int, ...] = (32, 64, 128, 256, 512)
    dense: tuple[int, int] = (128, 64)
    redshifts: int = 4
    targets: int = 4
    dropout: float = 0.0  # published runs use 0.5

    @property
    def volume(self) -> tuple[int, int, int, int]:
        return (self.redshifts, self.edge, self.edge, self.edge)


COSMOFLOW_CONFIGS: dict[str, CosmoFlowConfig] = {
    "cosmoflow": CosmoFlowConfig(edge=128),
    "cosmoflow-tiny": CosmoFlowConfig(edge=16, filters=(4, 8, 8, 16, 16), dense=(32, 16)),
}


class ConvLayer(nn.Module):
    """3×3×3 convolution, leaky ReLU, and a pooling that halves the volume until one voxel is left."""

    def __init__(self, inputs: int, outputs: int, pool: bool) -> None:
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, 3, padding=1)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv(x), 0.3)
        return F.max_pool3d(x, 2) if self.pool else x


class CosmoFlow(nn.Module):
    """Volume (B, 4, edge, edge, edge) to targets in (−1.2, 1.2): they are scaled to [−1, 1], and tanh must not saturate there."""

    def __init__(self, config: CosmoFlowConfig) -> None:
        super().__init__()
        self.config = config
        edge, channels = config.edge, config.redshifts
        self.layers = nn.ModuleList()
        for filters in config.filters:
            self.layers.append(ConvLayer(channels, filters, pool=edge > 1))
            edge, channels = max(edge // 2, 1), filters
        self.dense1 = nn.Linear(channels * edge**3, config.dense[0])
        self.dropout1 = KeyedDropout(config.dropout, site=0)
        self.dense2 = nn.Linear(config.dense[0], config.dense[1])
        self.dropout2 = KeyedDropout(config.dropout, site=1)
        self.output = nn.Linear(config.dense[1], config.targets)

    def forward(self, volume: Tensor) -> Tensor:
        x = volume
        for layer in self.layers:
            x = layer(x)
        x = self.dropout1(F.leaky_relu(self.dense1(x.flatten(1)), 0.3))
        x = self.dropout2(F.leaky_relu(self.dense2(x), 0.3))
        return 1.2 * torch.tanh(self.output(x))
