"""What a product asks of a quantized weight. `ao_lab.tensor.QuantizedTensor` is one; so is whatever has these attributes."""

from __future__ import annotations

from typing import Protocol

import torch

from ao_lab.config.recipe import Recipe
from reference import Quantized, Scales, Scheme


class Storage(Protocol):
    """How the parts of a weight are stored."""

    @property
    def transposed(self) -> bool:
        """Whether the last two axes are read the other way round than they are stored."""

    @property
    def layout(self) -> str:
        """Of all parts: "plain", "tiled" (its scales) or "preshuffled"."""


class QuantizedWeight(Protocol):
    """A weight (K, N), or a batch (B, K, N), in a scheme."""

    @property
    def recipe(self) -> Recipe:
        """Schemes of the weight and the input, and the kernel."""

    @property
    def scheme(self) -> Scheme:
        """How the weight is stored."""

    @property
    def meta(self) -> Storage:
        """How its parts are stored."""

    @property
    def block_axis(self) -> int:
        """The (negative) axis along which blocks run."""

    @property
    def quantized(self) -> Quantized:
        """What is stored, in the stored orientation and the plain layout."""

    @property
    def stored(self) -> Quantized:
        """The parts as they are, in the layout in which they lie."""

    @property
    def input_scales(self) -> Scales | None:
        """Static scales of the layer's input; None where they are found for each input."""

    @property
    def without_rotation(self) -> QuantizedWeight:
        """What is stored, as the weight of inputs that are rotated already."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    @property
    def shape(self) -> torch.Size:
        """The logical shape."""

    @property
    def device(self) -> torch.device:
        """Where its parts are."""

    @property
    def is_cuda(self) -> bool:
        """Whether that is an Nvidia GPU."""

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense weight."""


__all__ = ["QuantizedWeight", "Storage"]
