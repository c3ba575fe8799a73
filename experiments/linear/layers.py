"""Layers of one shape, as many of each method as it takes that none is found in the L2 cache, and the check before they are
timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import ao_lab
from ao_lab.gemm.fused import groups_reason, most_fused_rows
from ao_lab.gemm.select import select_kernel
from experiments.harness.outcome import Wrong
from experiments.harness.timing import cache_bytes, input_sets
from experiments.linear.methods import BASE, OURS, TORCHAO, Method
from fast.matmul.preshuffled.grouped import average_rows_as_stored

#: Outputs, inputs.
Shape = tuple[int, int]
#: Largest difference of outputs to the product in float32 of what is stored, relative to its norm: weights, inputs and outputs
#: that are rounded to bfloat16 (0.17% each), and sums of float8 that a tensor core cuts. Of torchao's to the dense layer, whose
#: rounding to 4 bits is in it (12%).
LIMIT, FOREIGN_LIMIT = 1e-2, 0.25
#: Rows of outputs that are compared, and the most layers of a method.
COMPARED, MOST = 64, 64
#: Bytes of an element of bfloat16.
WIDE = 2


@dataclass
class Layers:
    """Layers of a shape by method, made when they are first asked for; those of a number have the same random weights in every
    method."""

    shape: Shape
    device: str
    seed: int
    made: dict[str, list[nn.Linear]] = field(default_factory=dict)

    @property
    def data(self) -> str:
        """How rows call the shape: outputs x inputs."""
        return "x".join(map(str, self.shape))

    def share_read(self, rows: int) -> float:
        """The part of a weight that these rows need: all of it."""
        return 1.0

    @torch.no_grad()
    def of(self, method: Method, rows: int) -> list[nn.Linear]:
        """As many as exceed three times the cache, together with inputs and outputs; one on a CPU."""
        found = self.made.setdefault(method.name, [])
        if not found:
            found.append(self._layer(method, 0))
        moved = stored_bytes(found[0]) + WIDE * rows * sum(self.shape)
        count = input_sets(moved, cache_bytes(), MOST) if self.device == "cuda" else 1
        found += [self._layer(method, number) for number in range(len(found), count)]
        return found[:count]

    def inputs(self, rows: int, count: int) -> list[Tensor]:
        """As many inputs, random normal."""
        generator = self._generator(-1 - rows)
        k = self.shape[1]
        return [
            torch.randn(rows, k, generator=generator, device=self.device, dtype=torch.bfloat16)
            for _ in range(count)
        ]

    def _layer(self, method: Method, number: int) -> nn.Linear:
        n, k = self.shape
        layer = nn.Linear(k, n, bias=False, device=self.device, dtype=torch.bfloat16).requires_grad_(False)
        layer.weight.normal_(std=k**-0.5, generator=self._generator(number))
        return method.quantize(layer)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1_000_003 * (self.seed + 1) + number)


def stored_bytes(layer: nn.Linear) -> float:
    """Bytes of a layer's weight as it is stored; of another library's tensor those of 4 bits an element, the fewest."""
    weight = layer.weight
    if isinstance(weight, ao_lab.QuantizedTensor):
        return float(sum(part.nbytes for part in weight.parts.values() if part is not None))
    return weight.numel() / 2 if type(weight.data) is not Tensor else float(weight.nbytes)


@torch.no_grad()
def checked(method: Method, layer: nn.Linear, y: Tensor, x: Tensor, dense: Tensor) -> float:
    """The relative error of outputs; `Wrong` for one that is too large, or for outputs that are not finite."""
    if not bool(torch.isfinite(y).all()):
        raise Wrong("outputs are not finite")
    picked = torch.cat([torch.arange(len(x))[:COMPARED], torch.arange(len(x))[COMPARED:][-COMPARED:]])
    exact = expected(method, layer, x, dense, picked)
    error = float((y[picked].float() - exact).norm() / exact.norm())
    limit = FOREIGN_LIMIT if method.library == TORCHAO else LIMIT
    if not error <= limit:
        raise Wrong(f"outputs differ by {error:.1e} of their size, more than {limit}")
    return error


def expected(method: Method, layer: nn.Linear, x: Tensor, dense: Tensor, picked: Tensor) -> Tensor:
    """The product in float32 of the values of inputs and weight as they are stored, of some rows; of torchao's, and of the
    dense layer, the dense weight's."""
    weight: Any = layer.weight
    if method.library == OURS:
        dense, scheme = weight.dequantize(torch.float32), weight.recipe.activation
        if scheme is not None:
            # Scales may be of all rows.
            x = ao_lab.dequantize(ao_lab.quantize(x, scheme), "float32")
    if not isinstance(layer, nn.Linear):
        return layer.product(x, dense)[picked]
    return x[picked].float() @ dense.float().t()


def kernel_of(method: Method, layer: nn.Linear, rows: int) -> str:
    """What computes a layer of ours for so many rows, as `ao_lab.explain` has it; the library's name for others."""
    if method.library != OURS or method == BASE:
        return method.library
    weight: Any = layer.weight.transposed()
    if not isinstance(layer, nn.Linear):
        if groups_reason(weight, torch.bfloat16) is not None:
            return "dequantize"
        average = rows / len(layer.weight)
        return "fused" if average <= average_rows_as_stored(weight.stored, torch.bfloat16) else "dequantize"
    name = select_kernel(weight, torch.bfloat16, rows)
    return "dequantize" if name == "fused" and rows > most_fused_rows(weight, torch.bfloat16) else name


__all__ = ["LIMIT", "Layers", "Shape", "checked", "kernel_of", "stored_bytes"]
