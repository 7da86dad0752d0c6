"""Convolutional networks as users write them: strides, dilations, overlapping poolings, residual blocks, skips, norms of several kinds."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A block of torchvision's ResNets: one ReLU for both, in place, and a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def resnet() -> nn.Module:
    stem = [nn.Conv2d(2, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, Residual(4, 4, 1), Residual(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def windows() -> nn.Module:
    """Windows of every kind; sizes that do not divide: 21 → 11 → 11 → 6 → 4 → 4."""
    first = [nn.Conv2d(2, 4, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(4, 6, 3, dilation=2, padding="same"), nn.GELU()]
    then = [nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.Conv2d(6, 6, 3, groups=2), nn.AvgPool2d(3, 1, 1), nn.Conv2d(6, 2, (1, 3), padding=(0, 1))]
    return nn.Sequential(*first, *then, nn.Flatten(), nn.Linear(32, 3))


class Hourglass(nn.Module):
    """Down and up again with a skip, in functions; GroupNorm, and a LayerNorm over channels; a value for each position comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 4), nn.LayerNorm(8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.join = nn.Parameter(torch.randn(4, 8, 3, 3) * 0.1)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.norm1(self.down1(x)))
        low = self.down2(F.max_pool2d(skip, kernel_size=3, stride=2, padding=1))
        low = self.norm2(low.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        low = F.interpolate(F.avg_pool2d(low, 2), scale_factor=2, mode="nearest")
        both = torch.cat([skip, self.up(low)], dim=1)
        return self.head(F.conv2d(both, self.join, padding=1).relu_())


_MADE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "resnet": (resnet, (2, 32, 32), (3,)),
    "windows": (windows, (2, 21, 21), (3,)),
    "hourglass": (Hourglass, (2, 16, 16), (2, 16, 16)),
}
NAMES = tuple(_MADE)


def _stack(layers: list[list[int | str]]) -> nn.Module:
    """Any windows one after the other: (kind, kernel, stride, padding, dilation) each."""
    kinds: dict[int | str, Callable[..., nn.Module]] = {
        "conv": lambda k, s, p, d: nn.Conv2d(2, 2, k, s, p, d),
        "max": lambda k, s, p, d: nn.MaxPool2d(k, s, min(p, k // 2), d),
        "mean": lambda k, s, p, _: nn.AvgPool2d(k, s, min(p, k // 2)),
        "norm": lambda *_: nn.BatchNorm2d(2),
    }
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.Tanh(), *(kinds[kind](*numbers) for kind, *numbers in layers))


def _described(name: str) -> tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]:
    """A network by name, or by its layers and the size of its images, in JSON."""
    if name in _MADE:
        return _MADE[name]
    told = json.loads(name)
    with torch.random.fork_rng():
        wanted = _stack(told["layers"]).double()(torch.zeros(2, 2, *told["size"], dtype=torch.float64)).shape[1:]
    return lambda: _stack(told["layers"]), (2, *told["size"]), tuple(wanted)


def build(name: str) -> nn.Module:
    return _described(name)[0]()


def batch(name: str, size: int, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 + step)
    _, given, wanted = _described(name)
    x, y = (torch.randn(size, *shape, generator=draw, dtype=torch.float64) for shape in (given, wanted))
    y.view(size, -1)[:, 0].abs_()  # something counts, whatever is drawn
    return {"x": x, "y": y}


def loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(given["x"]), given["y"])


def counted_loss(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum, count) over the targets that are positive."""
    keep = given["y"] > 0
    return ((model(given["x"]) - given["y"]).square() * keep).sum(), keep.sum()
