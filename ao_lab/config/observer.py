"""What a configuration may ask for before a weight is quantized: something that observes the inputs of its layers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from ao_lab.config.recipe import Recipe


class Observer(Protocol):
    """Observes the inputs of one weight's layers, then quantizes the weight."""

    def observe(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Take in the input of a layer, as its product sees it; `name` is the weight's full name."""

    def unsupported_reason(self) -> str | None:
        """Why no weight can be quantized yet; None where one can."""

    def weight(self, dense: torch.Tensor, recipe: Recipe, axis: int) -> torch.Tensor:
        """The quantized weight (a `QuantizedTensor`) of a dense one (out, in)."""


__all__ = ["Observer"]
