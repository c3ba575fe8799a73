"""Experts of a mixture: rows of inputs sorted by expert times the weights (experts, outputs, inputs) of all, as
`torch._grouped_mm` multiplies them.

Of each token two experts are drawn at random, so rows are two a token, and how many an expert has is the same in every method.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from experiments.linear.layers import Layers
from experiments.linear.methods import Method

#: Experts, and those of a token.
EXPERTS, EACH = 8, 2


class Experts(nn.Module):
    """One projection of each expert. Rows are sorted by expert; how many each has their number says."""

    #: Weights are (experts, outputs, inputs): what `quantize_` asks.
    is_transposed = False

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, inputs) to (rows, outputs)."""
        ends = ends_of(len(x), len(self.weight), x.device)
        y: Tensor = torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)
        return y

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Rows of x times a dense weight (experts, outputs, inputs), in float32."""
        ends = [0, *ends_of(len(x), len(weight), x.device).tolist()]
        parts = [x[a:b].float() @ one.float().t() for a, b, one in zip(ends, ends[1:], weight, strict=False)]
        return torch.cat(parts)


@lru_cache(maxsize=64)
def ends_of(rows: int, experts: int, device: torch.device) -> Tensor:
    """Where the rows of each expert end: int32 (experts)."""
    tokens = -(-rows // EACH)
    draw = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    chosen = draw.topk(EACH, 1).indices.flatten()[:rows]
    return torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32).to(device)


@dataclass
class ExpertLayers(Layers):
    """As many `Experts` of each method; `shape` is that of one expert."""

    experts: int = EXPERTS

    @property
    def data(self) -> str:
        """How rows call it: experts x outputs x inputs."""
        return f"{self.experts}x{super().data}"

    def share_read(self, rows: int) -> float:
        """The part of the weights that these rows need."""
        counts = ends_of(rows, self.experts, torch.device("cpu")).diff(
            prepend=torch.zeros(1, dtype=torch.int32)
        )
        return int((counts > 0).sum()) / self.experts

    def _layer(self, method: Method, number: int) -> Any:
        n, k = self.shape
        weight = torch.empty(self.experts, n, k, device=self.device, dtype=torch.bfloat16)
        weight.normal_(std=k**-0.5, generator=self._generator(number))
        return method.quantize(Experts(weight))


__all__ = ["EACH", "EXPERTS", "ExpertLayers", "Experts", "ends_of"]
