"""What a product asks of a quantized weight, and what a product is (`Kernel`).

`ao_lab.tensor.QuantizedTensor` is a weight; so is whatever has these attributes. `kept`: what a product derives of a weight's
codes, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

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


Product = Callable[[torch.Tensor, QuantizedWeight, torch.Tensor | None], torch.Tensor]


UnsupportedReason = Callable[[QuantizedWeight, torch.dtype], str | None]


@dataclass(frozen=True)
class Kernel:
    """A way to compute x @ w + bias, and why it does not take a weight (None: it does) beside inputs of a dtype."""

    run: Product
    unsupported_reason: UnsupportedReason


#: The attribute of codes that holds what was derived from them, by the names of products.
ARRANGED = "_arranged"


def kept(
    codes: torch.Tensor, metadata: torch.Tensor, name: str, make: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """What `make` made for product `name` of these parts; made anew where one of them has changed.

    ValueError where it has to be made while a CUDA graph is captured: memory of the graph would be kept, and its host waits.
    """
    all_of_them: dict[str, tuple[Any, torch.Tensor]] = codes.__dict__.setdefault(ARRANGED, {})
    state = (_version(codes), _version(metadata), codes.data_ptr(), metadata.data_ptr())
    results = all_of_them.get(name)
    if results is not None and results[0] == state:
        return results[1]
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"a 2:4 weight is arranged for {name} once, outside of CUDA graphs; run the layer before capture"
        )
    result = make()
    all_of_them[name] = (state, result)
    return result


def forget_arranged(codes: torch.Tensor) -> None:
    """All that was derived from codes that have changed; tensors do not count changes that an operation of a subclass makes in
    them."""
    codes.__dict__.pop(ARRANGED, None)


def _version(part: torch.Tensor) -> int:
    """Changes so far; tensors of inference mode count none."""
    return -1 if part.is_inference() else part._version


__all__ = ["ARRANGED", "Kernel", "Product", "QuantizedWeight", "Storage", "forget_arranged", "kept"]
