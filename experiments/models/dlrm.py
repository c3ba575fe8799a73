"""DLRMv2 with a deep cross network of low rank (DCNv2), in MLPerf's exact shapes and in small ones.

Naumov et al., arXiv 1906.00091 (DLRM); Wang et al., arXiv 2008.13535, equation 3 (low rank). Shapes, tables and bags of DLRMV2
are those of MLPerf's training benchmark. Modules are nn.Linear and one nn.EmbeddingBag, so that whatever quantizes those
quantizes the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.data.impressions import Impressions
from experiments.models.click_models import Tables, feed_forward, multiply_adds

HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
SIZES = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4,
    976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DLRMConfig:
    """Shapes of a DLRM. width: of embeddings and of the bottom network's output. cross: layers of the cross network, each
    through `rank` columns. top: widths of the top network before its one output. norm: whether LayerNorm stands before the
    activations, which are ReLU without it and SiLU with it."""

    name: str
    dense: int
    sizes: tuple[int, ...]
    hots: tuple[int, ...]
    width: int
    bottom: tuple[int, ...]
    cross: int
    rank: int
    top: tuple[int, ...]
    norm: bool = False

    @property
    def crossed(self) -> int:
        """Width of the cross network: dense features and tables side by side."""
        return (len(self.sizes) + 1) * self.width

    @property
    def multiply_adds(self) -> int:
        """Of the linear layers, a sample, forward."""
        dense = multiply_adds((self.dense, *self.bottom, self.width))
        top = multiply_adds((self.crossed, *self.top, 1))
        return dense + 2 * self.cross * self.rank * self.crossed + top


DLRMV2 = DLRMConfig(
    name="DLRMv2-DCN",
    dense=13,
    sizes=SIZES,
    hots=HOTS,
    width=128,
    bottom=(512, 256),
    cross=3,
    rank=512,
    top=(1024, 1024, 512, 256),
)


def small(data: Impressions, width: int = 32, norm: bool = True) -> DLRMConfig:
    """A network for data of a package: three cross layers of rank 128, a top of 512, 512 and 256, norms before SiLU."""
    return DLRMConfig(
        name="DCN, small",
        dense=data.dense.shape[1],
        sizes=data.sizes,
        hots=data.hots,
        width=width,
        bottom=(64,),
        cross=3,
        rank=128,
        top=(512, 512, 256),
        norm=norm,
    )


class LowRankCross(nn.Module):
    """x + x0 * (W (V x) + b): one layer of a cross network, W and V of low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        """(B, width) of the network's input and of the layer's."""
        return torch.addcmul(x, first, self.up(self.down(x)))


class DLRM(nn.Module):
    """Logits (B,) of dense features (B, dense) and ids (B, sum of hots)."""

    def __init__(
        self, config: DLRMConfig, *, tables: nn.Module | None = None, device: str | None = None
    ) -> None:
        super().__init__()
        self.config = config
        norm: Callable[[int], nn.Module] | None = nn.LayerNorm if config.norm else None
        activation = nn.SiLU if config.norm else nn.ReLU
        with torch.device(device or "cpu"):
            self.tables = tables or Tables(config.sizes, config.hots, config.width, device)
            self.bottom = feed_forward(
                (config.dense, *config.bottom, config.width), norm=norm, activation=activation
            )
            self.cross = nn.ModuleList(LowRankCross(config.crossed, config.rank) for _ in range(config.cross))
            self.top = feed_forward(
                (config.crossed, *config.top, 1), norm=norm, activation=activation, last=True
            )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """One logit a sample."""
        return self.interact(self.bottom(dense), self.tables(ids))

    def interact(self, dense: Tensor, sums: Tensor) -> Tensor:
        """From the dense network's output (B, width) and sums (B, tables, width) on: what is timed without tables."""
        first = torch.cat([dense[:, None], sums.to(dense.dtype)], 1).reshape(len(dense), -1)
        x = first
        for layer in self.cross:
            x = layer(first, x)
        logits: Tensor = self.top(x)[:, 0]
        return logits


__all__ = ["DLRM", "DLRMV2", "DLRMConfig", "LowRankCross", "small"]
