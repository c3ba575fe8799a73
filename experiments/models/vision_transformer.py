"""A vision transformer: square images in patches, blocks with pre-normalization, means over tokens, a linear layer.

Plain PyTorch: every matrix is an `nn.Linear`, so that whatever prunes or quantizes linear layers does so with this model.
Blocks follow Dosovitskiy et al. 2021 (arXiv 2010.11929, equations 1 to 4), with means over tokens in place of a class token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes of a vision transformer.

    image, patch: sides in pixels. grid: an image has grid x grid predictions of `classes` classes, each of its own square.
    ValueError where patches do not divide the image or a square, or heads the width.
    """

    name: str
    image: int
    patch: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    classes: int
    grid: int = 1
    channels: int = 1

    def __post_init__(self) -> None:
        if self.image % (self.patch * self.grid) or self.width % self.heads:
            raise ValueError(
                f"patches of {self.patch} pixels must divide a {self.grid}th of an image's {self.image}, and {self.heads} "
                f"heads a width of {self.width}"
            )

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return (self.image // self.patch) ** 2


class VisionAttention(nn.Module):
    """Self-attention between all tokens of an image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class VisionBlock(nn.Module):
    """Attention and feed-forward layers, each behind a norm and added to the residual stream."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = VisionAttention(config)
        self.fc1 = nn.Linear(config.width, config.feed_forward)
        self.fc2 = nn.Linear(config.feed_forward, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Logits of every square of an image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.channels * config.patch**2, config.width)
        self.positions = nn.Parameter(torch.zeros(config.tokens, config.width))
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)
        self.apply(initialize)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, image, image) to (batch, grid^2, classes), rows first."""
        x = self.embed(patches(images, self.config.patch)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.means(self.norm(x)))

    def means(self, x: Tensor) -> Tensor:
        """Means over the tokens of every square: (batch, tokens, width) to (batch, grid^2, width)."""
        grid = self.config.grid
        inside = self.config.image // self.config.patch // grid
        return x.unflatten(1, (grid, inside, grid, inside)).mean((2, 4)).flatten(1, 2)


def patches(images: Tensor, side: int) -> Tensor:
    """(batch, channels, height, width) to (batch, tokens, channels * side^2), patches row by row."""
    found = images.unfold(2, side, side).unfold(3, side, side)
    return found.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def initialize(module: nn.Module) -> None:
    """Weights normal with the deviation that keeps an input's, biases 0."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.zeros_(module.bias)


__all__ = ["VisionConfig", "VisionTransformer", "patches"]
