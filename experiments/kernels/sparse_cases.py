"""Cases of 2:4: masks, compressed storage and back, codes, and both orientations; each row or tile is compared by itself."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

import reference
from experiments.kernels import operations
from experiments.kernels.operations import (
    Case,
    Compared,
    Inputs,
    Sample,
    Shape,
    normal,
)
from reference import SCHEMES, Compressed

#: Bytes of metadata of an element: two bits for each of two in four.
METADATA = 0.125
Compare = Callable[[Any, Inputs, Any, Sample], list[Compared]]


def stored(element_bytes: float) -> float:
    """Bytes of an element of a compressed tensor, counted over the dense one."""
    return element_bytes / 2 + METADATA


def case(
    operation: str, element: str, read: float, written: float, *, call: Any, compare: Compare,
    variant: str = "", make: Any = None, of_row: float = 0,
) -> Case:  # fmt: skip
    """A case by the bytes of an element that it reads and writes, and of what it reads for each row."""
    return Case(
        name=".".join([operation, element] + [variant] * bool(variant)),
        operation=operation,
        scheme=element,
        needs=(operation,),
        read=lambda shape: read * prod(shape),
        moved=lambda shape: (read + written) * prod(shape) + of_row * shape[0],
        make=make or (lambda fast, shape, device, seed: {"x": normal(shape, device, seed)}),
        call=call,
        compare=compare,
    )


def prune(pattern: str = "2:4") -> Case:
    """`fast.prune` of a bfloat16 matrix."""

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        return [("mask", sample.rows(got), reference.prune(sample.rows(inputs["x"]), pattern=pattern))]

    variant = "" if pattern == "2:4" else pattern.replace(":", "of")
    return case(
        "prune", "bfloat16", operations.WIDE, 1, variant=variant, compare=compare,
        call=lambda fast, inputs: fast.prune(inputs["x"], pattern=pattern),
    )  # fmt: skip


def compress(element: str) -> Case:
    """`fast.compress`: of bfloat16 by magnitude, of 8-bit floats, which are not ranked, what is 2:4 already."""
    dtype = getattr(torch, element)
    pattern = "2:4" if dtype == torch.bfloat16 else None

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        x = normal(shape, device, seed)
        return {"x": x if pattern else (x * fast.prune(x)).to(dtype)}

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        return compare_stored(got, reference.compress(sample.rows(inputs["x"]), pattern), sample)

    return case(
        "compress", element, dtype.itemsize, stored(dtype.itemsize), make=make, compare=compare,
        call=lambda fast, inputs: fast.compress(inputs["x"], pattern),
    )  # fmt: skip


def decompress(element: str) -> Case:
    """`fast.decompress` of what `compress` makes."""
    dtype = getattr(torch, element)

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        x = normal(shape, device, seed)
        return {"x": fast.compress((x * fast.prune(x)).to(dtype))}

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        values, metadata = (sample.rows(part) for part in inputs["x"])
        return [("values", sample.rows(got), reference.decompress(values, metadata))]

    return case(
        "decompress", element, stored(dtype.itemsize), dtype.itemsize, make=make, compare=compare,
        call=lambda fast, inputs: fast.decompress(*inputs["x"]),
    )  # fmt: skip


def quantize_compressed(name: str) -> Case:
    """`fast.quantize_compressed` of a bfloat16 matrix with a scale for each row at hand."""

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        x = normal(shape, device, seed)
        return {"x": x, "scale": fast.choose_scales(x, name).scale}

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        x, scale = sample.rows(inputs["x"]), sample.rows(inputs["scale"])
        return compare_stored(got, reference.quantize_compressed(x, name, scale), sample)

    return case(
        "quantize_compressed", name, operations.WIDE, stored(operations.code_bytes(SCHEMES[name], packed=False)),
        of_row=4, make=make, compare=compare,
        call=lambda fast, inputs: fast.quantize_compressed(inputs["x"], name, inputs["scale"]),
    )  # fmt: skip


def prune_transposable() -> Case:
    """`fast.prune_transposable` of a bfloat16 matrix."""

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        return [("mask", sample.rows(got), reference.prune_transposable(sample.rows(inputs["x"])))]

    return case(
        "prune_transposable", "bfloat16", operations.WIDE, 1, compare=compare,
        call=lambda fast, inputs: fast.prune_transposable(inputs["x"]),
    )  # fmt: skip


def compress_transposable() -> Case:
    """`fast.compress_transposable` of a bfloat16 matrix: masks, and both orientations, from one reading."""

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        rows, columns = reference.compress_transposable(sample.rows(inputs["x"]))
        # Of the transpose these are columns: two values of four rows, a byte of eight.
        values, metadata = (
            Sample(sample.start // step, sample.stop // step).columns(part)
            for part, step in zip(got[1], (2, 8), strict=True)
        )
        return [
            *compare_stored(got[0], rows, sample),
            ("transposed values", values, columns.values),
            ("transposed metadata", metadata, columns.metadata),
        ]

    return case(
        "compress_transposable", "bfloat16", operations.WIDE, 2 * stored(operations.WIDE), compare=compare,
        call=lambda fast, inputs: fast.compress_transposable(inputs["x"]),
    )  # fmt: skip


def compare_stored(got: Compressed, expected: Compressed, sample: Sample) -> list[Compared]:
    """Values and metadata of a result's rows."""
    return [
        ("values", sample.rows(got.values), expected.values),
        ("metadata", sample.rows(got.metadata), expected.metadata),
    ]
