"""The image encoder of Segment Anything (Kirillov et al. 2023, arXiv 2304.02643) with random weights, at its exact shapes.

A plain vision transformer (ViTDet, arXiv 2203.16527): blocks with attention inside windows, a few with attention over the
whole image, relative positions of rows and of columns added to the scores, and a neck of two convolutions. Its linear layers
are those that published tables make 2:4: `qkv` and `proj` of attention, `lin1` and `lin2` of each `mlp`.

A vision transformer: square images in patches, blocks with pre-normalization, means over tokens, a linear layer.

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


@dataclass(frozen=True, kw_only=True)
class SamConfig:
    """Sizes. `whole`: the blocks whose attention is over the whole image. ValueError where patches do not divide the image or
    heads the width."""

    name: str
    width: int
    layers: int
    heads: int
    whole: tuple[int, ...]
    image: int = 1024
    patch: int = 16
    window: int = 14
    outputs: int = 256

    def __post_init__(self) -> None:
        if self.image % self.patch or self.width % self.heads:
            raise ValueError(
                f"patches of {self.patch} pixels must divide images of {self.image}, and {self.heads} heads a width of "
                f"{self.width}"
            )

    @property
    def side(self) -> int:
        """Patches along a side of an image."""
        return self.image // self.patch


VIT_L = SamConfig(name="sam-vit-l-random", width=1024, layers=24, heads=16, whole=(5, 11, 17, 23))
VIT_H = SamConfig(name="sam-vit-h-random", width=1280, layers=32, heads=16, whole=(7, 15, 23, 31))
#: A stand-in that a CPU can run: windows do not divide its side, as in the real ones.
TINY = SamConfig(
    name="sam-tiny-random", width=64, layers=2, heads=2, whole=(1,), image=64, patch=8, window=3, outputs=32
)


class SamAttention(nn.Module):
    """Attention over squares of side x side tokens, with relative positions."""

    def __init__(self, config: SamConfig, side: int) -> None:
        super().__init__()
        self.heads, self.side = config.heads, side
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        size = 2 * side - 1, config.width // config.heads
        self.rows, self.columns = (nn.Parameter(0.02 * torch.randn(size)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, side, side, width) to the same shape."""
        q, k, v = self.qkv(x.flatten(1, 2)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.scores(q))
        return self.proj(y.transpose(1, 2).flatten(2)).view_as(x)

    def scores(self, q: Tensor) -> Tensor:
        """What relative positions add to the scores, (batch, heads, tokens, tokens): the query times a vector of the distance
        in rows, and times one of the distance in columns."""
        side = self.side
        steps = torch.arange(side, device=q.device)
        apart = steps[:, None] - steps[None, :] + side - 1
        square = q.unflatten(2, (side, side))
        down = torch.einsum("bnhwc,hkc->bnhwk", square, self.rows[apart])
        right = torch.einsum("bnhwc,wkc->bnhwk", square, self.columns[apart])
        return (down[..., :, None] + right[..., None, :]).flatten(4).flatten(2, 3)


class SamMlp(nn.Module):
    """Two layers with a GELU between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same shape."""
        return self.lin2(functional.gelu(self.lin1(x)))


class SamBlock(nn.Module):
    """Attention in windows or over the image, and an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: SamConfig, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm1, self.norm2 = (nn.LayerNorm(config.width, eps=1e-6) for _ in range(2))
        self.attn = SamAttention(config, window or config.side)
        self.mlp = SamMlp(config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, side, side, width) to the same shape."""
        y = self.norm1(x)
        if self.window:
            side = x.shape[1]
            y = whole_of(self.attn(windows_of(y, self.window)), self.window, side)
        else:
            y = self.attn(y)
        x = x + y
        return x + self.mlp(self.norm2(x))


def windows_of(x: Tensor, window: int) -> Tensor:
    """(batch, side, side, width) in windows, (batch * windows, window, window, width), with zeros where they reach over."""
    more = -x.shape[1] % window
    x = functional.pad(x, (0, 0, 0, more, 0, more))
    parts = x.unflatten(2, (-1, window)).unflatten(1, (-1, window)).transpose(2, 3)
    return parts.flatten(0, 2)


def whole_of(parts: Tensor, window: int, side: int) -> Tensor:
    """The inverse of `windows_of`."""
    count = -(-side // window)
    x = parts.unflatten(0, (-1, count, count)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return x[:, :side, :side]


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of (batch, channels, height, width)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """To the same shape."""
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class SamEncoder(nn.Module):
    """Images (batch, 3, image, image) to features (batch, outputs, side, side)."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.positions = nn.Parameter(0.02 * torch.randn(config.side, config.side, config.width))
        self.blocks = nn.ModuleList(
            SamBlock(config, 0 if number in config.whole else config.window)
            for number in range(config.layers)
        )
        self.neck = nn.Sequential(
            nn.Conv2d(config.width, config.outputs, 1, bias=False),
            ChannelNorm(config.outputs),
            nn.Conv2d(config.outputs, config.outputs, 3, padding=1, bias=False),
            ChannelNorm(config.outputs),
        )

    def forward(self, images: Tensor) -> Tensor:
        """The features."""
        x = self.embed(images).movedim(1, -1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.neck(x.movedim(-1, 1))


def random_encoder(config: SamConfig, device: str, dtype: torch.dtype, seed: int) -> SamEncoder:
    """An encoder with the random weights of a seed, made on its device."""
    torch.manual_seed(seed)
    with torch.device(device):
        return SamEncoder(config).to(dtype)


def is_mlp(module: nn.Module, name: str) -> bool:
    """The layers that "MLP 2:4" is of."""
    return isinstance(module, nn.Linear) and ".mlp." in name
