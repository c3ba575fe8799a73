"""Cases of `fast.linear`: a few rows of inputs times a stored weight, beside the dense product and dequantizing first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

import reference
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.quantized_tensor import from_quantized
from experiments.kernels import operations
from experiments.kernels.operations import (
    Case,
    Compared,
    Inputs,
    Sample,
    Shape,
    normal,
    quantized_piece,
)
from reference import SCHEMES, Quantized, Scheme
from reference.matmul.linear import transposed

#: Weights (N, K) of Llama-3.1-8B: up and down.
WEIGHTS = ("14336x4096", "4096x14336")
#: Rows of inputs whose results are compared.
COMPARED = 4
#: The fewest rows that `torch._int_mm` takes on a GPU.
FEWEST_ROWS = 17
#: How tensor cores add 8-bit floats.
TENSOR_CORE = {"accumulation": "hopper_fp8", "promote": 128}


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
        return within(inputs["x"], inputs["w"], got, sample)

    return Case(
        name=f"linear.{scheme.name}" + ("" if rows == 1 else f".rows{rows}") + ".wrapped" * wrapped,
        operation="linear",
        scheme=scheme.name,
        needs=("linear",),
        read=lambda shape: operations.stored_bytes(scheme, shape, packed=packed),
        moved=lambda shape: (
            operations.stored_bytes(scheme, shape, packed=packed) + operations.wide_bytes((rows, sum(shape)))
        ),
        make=make,
        call=call,
        compare=compare,
        shapes=WEIGHTS,
        beside={"dense": dense, "unfused": unfused},
        host=rows == 1,
        wraps=unwrapped if wrapped else None,
        options={"packed": packed},
    )


def linear_of_codes(name: str, rows: int = 1) -> Case:
    """`fast.linear_of_codes`: rows of inputs that are codes themselves, as dynamic activations make them."""
    scheme = SCHEMES[name]

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        x = normal((rows + 1, shape[1]), device, seed + 1)[1:]
        return {"x": fast.quantize(x, scheme), "w": fast.quantize(normal(shape, device, seed), scheme)}

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        w, x = quantized_piece(inputs["w"], sample), on_host(inputs["x"])
        result = got[:COMPARED, sample.start : sample.stop].cpu()
        if scheme.element == "int8":
            options: dict[str, Any] = {
                "accumulation": "blocked",
                "block": w.shape[1],
                "out_dtype": "bfloat16",
            }
            return [("values", result, reference.linear(first_rows(x, len(result)), w, **options))]
        x = first_rows(x, len(result))
        options = {"accumulation": "blocked", "block": w.shape[1]} if rows == 1 else TENSOR_CORE
        bound = reference.matmul_error_bound(x, transposed(w), out_dtype="bfloat16", **options)
        error = (result.double() - exact(torch.as_tensor(reference.dequantize(x)), w)).abs()
        inside = error <= torch.as_tensor(bound)
        return [("within the bound", inside, torch.ones_like(inside))]

    def int_mm(fast: Any, inputs: Inputs) -> Any:
        x, w = inputs["x"], inputs["w"]
        codes = [q.codes.view(torch.int8) for q in (x, w)]
        # cuBLAS takes 17 rows at least.
        if rows < FEWEST_ROWS:
            codes[0] = functional.pad(codes[0], (0, 0, 0, FEWEST_ROWS - rows))
        return (torch._int_mm(codes[0], codes[1].t())[:rows] * x.scale * w.scale.t()).to(torch.bfloat16)

    def scaled_mm(fast: Any, inputs: Inputs) -> Any:
        x, w = inputs["x"], inputs["w"]
        codes = [q.codes.view(torch.float8_e4m3fn) for q in (x, w)]
        return torch._scaled_mm(
            codes[0], codes[1].t(), scale_a=x.scale, scale_b=w.scale.t(), out_dtype=torch.bfloat16
        )

    return Case(
        name=f"linear_of_codes.{name}" + f".rows{rows}" * (rows > 1),
        operation="linear_of_codes",
        scheme=name,
        needs=("linear_of_codes",),
        read=lambda shape: operations.stored_bytes(scheme, shape),
        moved=lambda shape: (
            operations.stored_bytes(scheme, shape) + rows * shape[1] + operations.wide_bytes((rows, shape[0]))
        ),
        make=make,
        call=lambda fast, inputs: fast.linear_of_codes(inputs["x"], inputs["w"], dtype=torch.bfloat16),
        compare=compare,
        shapes=WEIGHTS,
        beside={}
        if rows == 1
        else {"int_mm, eager": int_mm}
        if scheme.element == "int8"
        else {"scaled_mm": scaled_mm},
        host=True,
    )


def first_rows(x: Quantized, count: int) -> Quantized:
    """The first rows of inputs, each with a scale."""
    return replace(x, codes=x.codes[:count], scale=x.scale[:count], shape=(count, x.shape[1]))


def linear_pair(scheme: Scheme, *, gated: bool = False) -> Case:
    """`fast.linear_pair` of one row and two weights that are stored alike; gated: `fast.linear_swiglu`."""
    packed, name = scheme.format.bits < 8, "linear_swiglu" if gated else "linear_pair"

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        both = [fast.quantize(normal(shape, device, seed + i), scheme, packed=packed) for i in (0, 1)]
        # Gates of about one, where silu is neither zero nor its argument.
        return {"x": normal((2, shape[1]), device, seed + 2)[1:] / shape[1] ** 0.5, "w": both}

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        x, both = inputs["x"], inputs["w"]
        # silu of a product adds in the order of a pair: its bits follow from those products, which are compared themselves.
        products = fast.linear_pair(x, *both) if gated else got
        compared = [one for y, w in zip(products, both, strict=True) for one in within(x, w, y, sample)]
        if not gated:
            return compared
        parts = [y[:, sample.start : sample.stop].cpu() for y in products]
        return [*compared, ("values", got[:, sample.start : sample.stop].cpu(), reference.swiglu(*parts))]

    def apart(fast: Any, inputs: Inputs) -> Any:
        products = [fast.linear(inputs["x"], w) for w in inputs["w"]]
        return fast.swiglu(*products) if gated else products

    return Case(
        name=f"{name}.{scheme.name}",
        operation=name,
        scheme=scheme.name,
        needs=(name, "linear_pair", "swiglu") if gated else (name,),
        read=lambda shape: 2 * operations.stored_bytes(scheme, shape, packed=packed),
        moved=lambda shape: (
            2 * operations.stored_bytes(scheme, shape, packed=packed)
            + operations.wide_bytes((1, (1 if gated else 2) * shape[0] + shape[1]))
        ),
        make=make,
        call=lambda fast, inputs: getattr(fast, name)(inputs["x"], *inputs["w"]),
        compare=compare,
        shapes=WEIGHTS[:1],
        beside={"unfused": apart},
        host=True,
        options={"packed": packed},
    )


def within(x: torch.Tensor, weight: Quantized, got: torch.Tensor, sample: Sample) -> list[Compared]:
    """Whether a product lies within the bound of `linear`."""
    x, w = x[:COMPARED].cpu(), quantized_piece(weight, sample)
    error = (got[:COMPARED, sample.start : sample.stop].cpu().double() - exact(x, w)).abs()
    inside = error <= torch.as_tensor(reference.linear_error_bound(x, w))
    return [("within the bound", inside, torch.ones_like(inside))]


def on_host(q: Quantized) -> Quantized:
    """The same codes and scales on the host."""
    parts = {part: getattr(q, part) for part in ("codes", "scale", "outer", "zero")}
    return replace(q, **{part: None if tensor is None else tensor.cpu() for part, tensor in parts.items()})


def exact(x: torch.Tensor, w: Quantized) -> torch.Tensor:
    """The product in float64, whose own rounding is nothing beside the bound."""
    dense: Any = reference.dequantize(w)
    return x.double() @ dense.double().T
