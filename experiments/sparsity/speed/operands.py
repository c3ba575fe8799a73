"""Operands of a product: random normal, the weight pruned to 2:4 by magnitude or whole, in bfloat16 or scaled float8.

Several sets, which together exceed the L2 cache: their products are timed in rotation. Those of the last table are kept, so
that its methods multiply the same ones. Dense products take whole weights, as a dense layer has: zeros among them need less
power, and a GPU near its limit multiplies them faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

import fast
from experiments.harness.outcome import Wrong
from experiments.harness.timing import cache_bytes, input_sets

#: Rows, inputs, outputs.
Shape = tuple[int, int, int]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LARGEST = 448.0
#: Largest difference of a product to that in float32, relative to its norm: one or two roundings to bfloat16 (0.17% each), and
#: sums of float8 that a tensor core cuts.
LIMIT = 1e-2
#: Rows of a product that are compared.
COMPARED = 256


@dataclass(frozen=True)
class Operands:
    """x (M, K) and the weight (N, K) with its zeros, of one element; float32 scales (M, 1) and (N, 1), None for bfloat16."""

    x: Tensor
    weight: Tensor
    x_scale: Tensor | None = None
    scale: Tensor | None = None

    @cached_property
    def compressed(self) -> tuple[Tensor, Tensor]:
        """Kept values and metadata."""
        found = fast.compress(self.weight)
        return found[0], found[1]

    @cached_property
    def arranged(self) -> Tensor:
        """Metadata in the order of our kernel."""
        return fast.arrange_sparse_metadata(self.compressed[1], self.weight.dtype)

    @cached_property
    def exact(self) -> Tensor:
        """The first rows of the product in float32."""
        y = self.x[:COMPARED].float() @ self.weight.float().t()
        return (
            y if self.x_scale is None or self.scale is None else y * self.x_scale[:COMPARED] * self.scale.t()
        )

    def check(self, y: Tensor) -> None:
        """`Wrong` where a product differs by more than `LIMIT`, or does not have its shape or dtype."""
        if y.dtype != BF16 or y.shape != (self.x.shape[0], self.weight.shape[0]):
            raise Wrong(f"a product of shape {tuple(y.shape)} in {y.dtype}")
        error = float((y[:COMPARED].float() - self.exact).norm() / self.exact.norm())
        if not error <= LIMIT:
            raise Wrong(f"the product differs by {error:.1e} of its size")


@lru_cache(maxsize=3)
def operands(
    shape: Shape, element: torch.dtype, device: str, seed: int, *, sparse: bool
) -> tuple[Operands, ...]:
    """Sets of a shape, the same for the same seed."""
    m, k, n = shape
    least = element.itemsize * (m * k + n * k // (2 if sparse else 1)) + 2 * m * n
    generator = torch.Generator(device).manual_seed(seed)
    count = input_sets(least, cache_bytes()) if device == "cuda" else 1
    return tuple(drawn(shape, element, generator, sparse=sparse) for _ in range(count))


def drawn(shape: Shape, element: torch.dtype, generator: torch.Generator, *, sparse: bool) -> Operands:
    """One set."""
    m, k, n = shape
    draw: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": BF16}
    x, weight = torch.randn(m, k, **draw), torch.randn(n, k, **draw) * k**-0.5
    if sparse:
        weight = weight.masked_fill(~fast.prune(weight), 0)
    if element == BF16:
        return Operands(x, weight)
    (x, x_scale), (weight, scale) = quantized(x), quantized(weight)
    return Operands(x, weight, x_scale, scale)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn with a float32 scale for each row; zeros stay zeros."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


__all__ = ["BF16", "FP8", "Operands", "Shape", "operands"]
