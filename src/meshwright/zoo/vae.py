"""Variational autoencoders, multilayer and convolutional: images to (decoder logits, mean, log-variance)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.zoo.keyed_random import KeyedNormal


@dataclass(frozen=True)
class VAEConfig:
    """Image shape (channels, height, width), width of the hidden layers, and size of the latent code."""

    image: tuple[int, int, int]
    hidden: int
    latent: int
    convolutional: bool = False

    def __post_init__(self) -> None:
        if self.convolutional and (self.image[1] % 4 or self.image[2] % 4):
            raise ValueError(f"the height and width of image {self.image} must be multiples of 4")


VAE_CONFIGS: dict[str, VAEConfig] = {
    "vae": VAEConfig(image=(1, 8, 8), hidden=128, latent=16),
    "vae-conv": VAEConfig(image=(1, 28, 28), hidden=32, latent=16, convolutional=True),
}


def _dense_encoder_decoder(config: VAEConfig) -> tuple[nn.Sequential, nn.Sequential]:
    pixels = math.prod(config.image)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(pixels, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 2 * config.latent))
    decoder = nn.Sequential(nn.Linear(config.latent, config.hidden), nn.ReLU(), nn.Linear(config.hidden, pixels), nn.Unflatten(1, config.image))
    return encoder, decoder


def _conv_encoder_decoder(config: VAEConfig) -> tuple[nn.Sequential, nn.Sequential]:
    channels, height, width = config.image
    inner = (config.hidden, height // 4, width // 4)
    encoder = nn.Sequential(
        nn.Conv2d(channels, config.hidden // 2, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(config.hidden // 2, config.hidden, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(math.prod(inner), 2 * config.latent),
    )
    decoder = nn.Sequential(
        nn.Linear(config.latent, math.prod(inner)),
        nn.ReLU(),
        nn.Unflatten(1, inner),
        nn.ConvTranspose2d(config.hidden, config.hidden // 2, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(config.hidden // 2, channels, 4, stride=2, padding=1),
    )
    return encoder, decoder


class VAE(nn.Module):
    """Encoder, reparameterised sample, decoder. In training the sample is mean + σ·noise with keyed noise; in evaluation it is the mean."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = _conv_encoder_decoder(config) if config.convolutional else _dense_encoder_decoder(config)
        self.noise = KeyedNormal(site=0)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(image).chunk(2, dim=1)
        code = mean + torch.exp(0.5 * log_variance) * self.noise(mean) if self.training else mean
        return self.decoder(code), mean, log_variance

    def draw(self, count: int, seed: int) -> Tensor:
        """Images, as the probabilities of their pixels, of codes drawn from the prior N(0, 1)."""
        like = next(self.parameters())
        codes = torch.randn((count, self.config.latent), generator=torch.Generator().manual_seed(seed))
        return torch.sigmoid(self.decoder(codes.to(like.device, like.dtype)).float())
