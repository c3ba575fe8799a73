"""Cases of `fast.linear`: a few rows of inputs times a stored weight, beside the dense product and dequantizing first."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import reference
from ao_lab.recipes import Recipe
from ao_lab.tensor import from_quantized
from experiments.kernels import floors
from experiments.kernels.case import Bar, Case, Compared, Inputs, Sample
from experiments.kernels.floors import Shape
from experiments.kernels.inputs import normal, quantized_piece
from reference import Quantized, Scheme

#: Weights (N, K) of Llama-3.1-8B: up and down.
WEIGHTS = ("14336x4096", "4096x14336")
#: Rows of inputs whose results are compared.
COMPARED = 4


def linear(scheme: Scheme, rows: int = 1, *, wrapped: bool = False) -> Case:
    """`fast.linear` of `rows` bfloat16 inputs and a stored weight; results lie within a bound, not on the reference's bits.

    wrapped: the same by F.linear of a `QuantizedTensor`, whose time on the host is what users pay.
    """
    packed = scheme.format.bits < 8

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        dense = normal(shape, device, seed)
        w = fast.quantize(dense, scheme, packed=packed)
        recipe = Recipe(weight=scheme, kernel="reference" if device == "cpu" else "fused")
        layer = from_quantized(w, recipe, torch.bfloat16) if wrapped else None
        x = normal((rows + 1, shape[1]), device, seed + 1)[1:]
        return {"x": x, "w": w, "dense": dense, "layer": layer}

    def call(fast: Any, inputs: Inputs) -> Any:
        if wrapped:
            return functional.linear(inputs["x"], inputs["layer"])
        return fast.linear(inputs["x"], inputs["w"])

    def unwrapped(fast: Any, inputs: Inputs) -> Any:
        return fast.linear(inputs["x"], inputs["w"])

    def dense(fast: Any, inputs: Inputs) -> Any:
        return functional.linear(inputs["x"], inputs["dense"])

    def unfused(fast: Any, inputs: Inputs) -> Any:
        return functional.linear(inputs["x"], fast.dequantize(inputs["w"], "bfloat16"))

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        w, x = quantized_piece(inputs["w"], sample), inputs["x"][:COMPARED].cpu()
        error = (got[:COMPARED, sample.start : sample.stop].cpu().double() - exact(x, w)).abs()
        inside = error <= bound(x, w)
        return [("within the bound", inside, torch.ones_like(inside))]

    return Case(
        name=f"linear.{scheme.name}" + ("" if rows == 1 else f".rows{rows}") + ".wrapped" * wrapped,
        operation="linear",
        scheme=scheme.name,
        needs=("linear",),
        read=lambda shape: floors.stored_bytes(scheme, shape, packed=packed),
        moved=lambda shape: (
            floors.stored_bytes(scheme, shape, packed=packed) + floors.wide_bytes((rows, sum(shape)))
        ),
        make=make,
        call=call,
        compare=compare,
        shapes=WEIGHTS,
        beside={"dense": dense, "unfused": unfused},
        host=rows == 1,
        wraps=unwrapped if wrapped else None,
        bars=(Bar("host time, added", 10.0, at_least=False),) if wrapped else (),
        options={"packed": packed},
    )


def exact(x: torch.Tensor, w: Quantized) -> torch.Tensor:
    """The product in float64, whose own rounding is nothing beside the bound."""
    dense: Any = reference.dequantize(w)
    return x.double() @ dense.double().T


def bound(x: torch.Tensor, w: Quantized) -> torch.Tensor:
    """The largest error of float32 sums in any order, and of rounding to bfloat16.

    `reference.matmul_error_bound` (blocked, any order) with one change: kernels subtract z times the sum of the inputs, so
    that |c - z| counts as |c| + |z|, at most |c - z| + 2 |z|, and a zero point of b bits is at most 2**(b - 1). A term passes
    at most K + 4 roundings (its product, the sums, z's product, the difference, the scale's product), and two for each of
    three factors of a scale.
    """
    dense: Any = reference.dequantize(w)
    size = dense.abs().double()
    if w.zero is not None:
        size = size + 2.0**w.scheme.format.bits * spread(w.scale, w).double()
    terms = x.shape[1] + 4 + 6
    gamma = terms * 2.0**-24 / (1 - terms * 2.0**-24)
    largest = x.abs().double() @ size.T
    return gamma * largest + (largest * gamma + exact(x, w).abs()) * 2.0**-8


def spread(scale: torch.Tensor, w: Quantized) -> torch.Tensor:
    """Scales of blocks along K for every element."""
    values: Any = reference.decode(scale, w.scheme.scale.storage) if scale.dtype == torch.uint16 else scale
    return values.float().repeat_interleave(w.shape[1] // values.shape[1], 1)
