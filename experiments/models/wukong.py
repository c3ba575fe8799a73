"""Wukong: stacked factorization machines over embeddings, in the shapes of its paper's table 5 and in small ones.

Zhang et al., arXiv 2403.02545. A layer has n' embeddings of width d and gives n_F + n_L: n_F by a factorization machine block
(products of all pairs against k learned columns, then a feed-forward network), n_L by a linear compression; both are added to
what came in (through a linear compression where the number changes), and normalised.

    FM(X) = X (X^T Y), X (n', d), Y (n', k); block: reshape(MLP(LN(flatten FM))); compression: W X, W (n, n')

Products of samples (X^T Y and X times it) are batched and small: (d x n')(n' x k) and (n' x d)(d x k).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from experiments.data.impressions import Impressions
from experiments.models.click_models import Tables, feed_forward, multiply_adds


@dataclass(frozen=True, kw_only=True)
class WukongConfig:
    """Shapes. half: embeddings of each of a layer's two parts (n_F = n_L). pairs: k, learned columns of a factorization
    machine. hidden: widths of each layer's feed-forward network, and of the last one. published: training GFLOP a sample."""

    name: str
    layers: int
    half: int
    pairs: int
    hidden: tuple[int, ...]
    features: int = 720
    width: int = 160
    dense: int = 0
    sizes: tuple[int, ...] = ()
    hots: tuple[int, ...] = ()
    published: float = 0.0

    @property
    def counts(self) -> tuple[int, ...]:
        """Embeddings that come into each layer, and that leave the last."""
        return (self.features, *[2 * self.half] * self.layers)

    @property
    def multiply_adds(self) -> int:
        """Of linear layers and of batched products, a sample, forward."""
        total, last = 0, self.counts[-1]
        for count in self.counts[:-1]:
            total += 2 * count * self.width * self.pairs
            total += multiply_adds((count * self.pairs, *self.hidden, self.half * self.width))
            total += count * self.half * self.width
            total += count * last * self.width if count != last else 0
        return total + multiply_adds((last * self.width, *self.hidden, 1))

    @property
    def training_gflop(self) -> float:
        """GFLOP of a training step a sample: two a multiply-add, three passes."""
        return 6 * self.multiply_adds / 1e9


def _published(layers: int, half: int, pairs: int, hidden: int, gflop: float) -> WukongConfig:
    name = f"Wukong {gflop:g} GFLOP"
    return WukongConfig(
        name=name, layers=layers, half=half, pairs=pairs, hidden=(hidden,) * 3, published=gflop
    )


#: The four sizes that are measured, of the eight of table 5.
WUKONG = {
    one.name: one
    for one in (
        _published(2, 8, 24, 2048, 0.53),
        _published(4, 32, 24, 2048, 1.25),
        _published(8, 48, 48, 4096, 5.6),
        _published(8, 96, 96, 8192, 22.2),
    )
}


def small(data: Impressions, width: int = 32) -> WukongConfig:
    """A network for data of a package: two layers of eight embeddings each way."""
    return WukongConfig(
        name="Wukong, small",
        layers=2,
        half=8,
        pairs=8,
        hidden=(256,),
        features=len(data.sizes) + 1,
        width=width,
        dense=data.dense.shape[1],
        sizes=data.sizes,
        hots=data.hots,
    )


class FactorizationBlock(nn.Module):
    """X (B, n', d) to n_F embeddings (B, n_F, d)."""

    def __init__(self, config: WukongConfig, count: int) -> None:
        super().__init__()
        self.shape = (config.half, config.width)
        self.columns = nn.Linear(count, config.pairs, bias=False)
        self.norm = nn.LayerNorm(count * config.pairs)
        widths = (count * config.pairs, *config.hidden, config.half * config.width)
        self.network = feed_forward(widths, last=True)

    def forward(self, x: Tensor) -> Tensor:
        """Products of pairs against the learned columns, through the network."""
        products = x @ self.columns(x.transpose(1, 2))
        result: Tensor = self.network(self.norm(products.flatten(1)))
        return result.reshape(len(x), *self.shape)


class Compression(nn.Module):
    """W X: (B, n', d) to (B, n, d)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Each column of the embeddings by the same matrix."""
        result: Tensor = self.linear(x.transpose(1, 2)).transpose(1, 2)
        return result


class WukongLayer(nn.Module):
    """LN(concat(FM block, compression) + X)."""

    def __init__(self, config: WukongConfig, count: int) -> None:
        super().__init__()
        self.pairs = FactorizationBlock(config, count)
        self.compression = Compression(count, config.half)
        same = count == 2 * config.half
        self.residual: nn.Module = nn.Identity() if same else Compression(count, 2 * config.half)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, n', d) to (B, 2 half, d)."""
        result: Tensor = self.norm(torch.cat([self.pairs(x), self.compression(x)], 1) + self.residual(x))
        return result


class Top(nn.Sequential):
    """The last feed-forward network, with a forward of its own: torch compiles the modules of a plain nn.Sequential apart."""

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings (B, n, d) to logits (B,)."""
        logits: Tensor = super().forward(x.flatten(1))[:, 0]
        return logits


class Wukong(nn.Module):
    """Logits (B,) of dense features (B, dense) and ids (B, sum of hots); with no tables of embeddings (B, features, d)."""

    def __init__(self, config: WukongConfig, *, device: str | None = None) -> None:
        super().__init__()
        self.config = config
        with torch.device(device or "cpu"):
            self.tables = Tables(config.sizes, config.hots, config.width, device) if config.sizes else None
            self.bottom = (
                feed_forward((config.dense, config.width), activation=nn.SiLU) if config.dense else None
            )
            self.layers = nn.ModuleList(WukongLayer(config, count) for count in config.counts[:-1])
            last = config.counts[-1] * config.width
            self.top = Top(*feed_forward((last, *config.hidden, 1), last=True))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """One logit a sample; ValueError where the network was built without tables."""
        if self.tables is None or self.bottom is None:
            raise ValueError(f"{self.config.name} has no tables; call interact with embeddings")
        sums = self.tables(ids)
        return self.interact(torch.cat([self.bottom(dense)[:, None].to(sums.dtype), sums], 1))

    def interact(self, x: Tensor) -> Tensor:
        """From embeddings (B, features, d) on: what is timed without tables."""
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.top(x)
        return logits


def layers_of(config: WukongConfig, layers: int) -> WukongConfig:
    """The same with fewer layers, for machines on which all do not fit."""
    return replace(config, name=f"{config.name}, {layers} layers", layers=layers, published=0.0)


__all__ = ["WUKONG", "Compression", "Wukong", "WukongConfig", "WukongLayer", "layers_of", "small"]
