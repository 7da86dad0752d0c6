"""The lab's convolutional network for 3×32×32 images: 553,514 parameters, log-probabilities of ten classes."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class CNN(nn.Module):
    """Three convolutions that halve the image, then two dense layers."""

    image = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        self.dense1 = nn.Linear(64 * 4 * 4, 512)
        self.dense2 = nn.Linear(512, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = image
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.max_pool2d(F.relu(conv(x)), 2)
        x = F.relu(self.dense1(x.flatten(1)))
        return F.log_softmax(self.dense2(x), dim=1)
