"""The cases, in the order in which they are measured: those with a target first.

A target is a fraction of the copy rate of the same run on a tensor of the input's size. Cases without a target are measured
and shown.

Records of other projects are those that checkpoints and configurations of ao_lab mean, with a case for each: those of each
class of configuration that torchao has as well, with its default parameters, for weights and inputs; and every record of the
projects whose checkpoints are read (compressed-tensors, Transformer Engine).

Cases of 2:4 are masks, compressed storage and back, codes, and both orientations; each row or tile is compared by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

import ao_lab
import reference
from ao_lab.config.recipe import integer_scheme
from ao_lab.config.torchao import RECORDS_OF, as_torchao
from experiments.kernels import operations
from experiments.kernels.linear_cases import linear, linear_of_codes, linear_pair
from experiments.kernels.operations import (
    EPS,
    HUGE,
    LARGE,
    Case,
    Compared,
    Inputs,
    Sample,
    Shape,
    both,
    compare_quantized,
    fake_quantize,
    normal,
    quantize,
    quantized_piece,
    saturation_mask,
    small,
    stochastic,
    storage,
    whole,
)
from reference import SCHEMES, Compressed, Scheme
from reference.arrays.namespace import and_nearest
from reference.schemes.conventions import conventions, torchao_conventions
from reference.schemes.schemes import scheme_of

#: Bytes of metadata of an element: two bits for each of two in four.
METADATA = 0.125
Compare = Callable[[Any, Inputs, Any, Sample], list[Compared]]


def stored(element_bytes: float) -> float:
    """Bytes of an element of a compressed tensor, counted over the dense one."""
    return element_bytes / 2 + METADATA


def sparse_case(
    operation: str, element: str, read: float, written: float, *, call: Any, compare: Compare,
    variant: str = "", make: Any = None, of_row: float = 0,
) -> Case:  # fmt: skip
    """A sparse_case by the bytes of an element that it reads and writes, and of what it reads for each row."""
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
    return sparse_case(
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

    return sparse_case(
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

    return sparse_case(
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

    return sparse_case(
        "quantize_compressed", name, operations.WIDE, stored(operations.code_bytes(SCHEMES[name], packed=False)),
        of_row=4, make=make, compare=compare,
        call=lambda fast, inputs: fast.quantize_compressed(inputs["x"], name, inputs["scale"]),
    )  # fmt: skip


def prune_transposable() -> Case:
    """`fast.prune_transposable` of a bfloat16 matrix."""

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        return [("mask", sample.rows(got), reference.prune_transposable(sample.rows(inputs["x"])))]

    return sparse_case(
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

    return sparse_case(
        "compress_transposable", "bfloat16", operations.WIDE, 2 * stored(operations.WIDE), compare=compare,
        call=lambda fast, inputs: fast.compress_transposable(inputs["x"]),
    )  # fmt: skip


def compare_stored(got: Compressed, expected: Compressed, sample: Sample) -> list[Compared]:
    """Values and metadata of a result's rows."""
    return [
        ("values", sample.rows(got.values), expected.values),
        ("metadata", sample.rows(got.metadata), expected.metadata),
    ]


# Builders of cases around a quantizer: dequantization, and activations fused with quantization.
def dequantize(name: str, *, packed: bool = False, huge: bool = False) -> Case:
    """Stored tensor to bfloat16. It is quantized by `fast`, and whatever it holds is dequantized by the reference as well."""

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        options = {"packed": True} if packed else {}
        return {"q": fast.quantize(normal(shape, device, seed), name, **options)}

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        if isinstance(SCHEMES[name].scale.block, str):
            # Blocks of the flattened tensor: rows are no tensors of their own, so a small tensor is compared as a whole.
            part = fast.quantize(normal((32, got.shape[1]), str(got.device), 1), name)
            got, sample = fast.dequantize(part, "bfloat16"), Sample(0, 32)
        else:
            part = inputs["q"]
        expected = reference.dequantize(quantized_piece(part, sample), "bfloat16")
        return [("values", sample.rows(got), expected)]

    return Case(
        name=".".join(["dequantize", name] + ["packed"] * packed),
        operation="dequantize",
        scheme=name,
        needs=("dequantize", "quantize:packed" if packed else "quantize"),
        read=lambda shape: operations.stored_bytes(name, shape, packed=packed),
        moved=lambda shape: (
            operations.stored_bytes(name, shape, packed=packed) + operations.wide_bytes(shape)
        ),
        make=make,
        call=lambda fast, inputs: fast.dequantize(inputs["q"], "bfloat16"),
        compare=compare,
        shapes=(*LARGE, HUGE) if huge else LARGE,
        options={"packed": packed},
    )


def rms_norm(name: str, *, residual: bool = False) -> Case:
    """RMS norm and quantization in one kernel; with a residual, which is added first and written back."""

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        inputs = {"x": normal(shape, device, seed), "weight": normal((shape[1],), device, seed + 1)}
        return {**inputs, "residual": normal(shape, device, seed + 2) if residual else None}

    def rest(inputs: Inputs) -> Mapping[str, Any]:
        return {"eps": EPS, **({"residual": inputs["residual"]} if residual else {})}

    def call(fast: Any, inputs: Inputs) -> Any:
        return fast.rms_norm_quantize(inputs["x"], inputs["weight"], name, **rest(inputs))

    def unfused(fast: Any, inputs: Inputs) -> Any:
        normed, sums = fast.rms_norm(inputs["x"], inputs["weight"], **rest(inputs))
        return fast.quantize(normed, name), sums

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        options = {"residual": sample.rows(inputs["residual"])} if residual else {}
        expected, sums = reference.rms_norm_quantize(
            sample.rows(inputs["x"]), inputs["weight"].cpu(), name, eps=EPS, **options
        )
        pairs = compare_quantized(got[0], expected, sample)
        return [*pairs, ("new residual", sample.rows(got[1]), sums)] if residual else pairs

    def moved(shape: Shape) -> float:
        wide = operations.wide_bytes(shape)
        return wide * (3 if residual else 1) + 2.0 * shape[1] + operations.stored_bytes(name, shape)

    return Case(
        name=".".join(["rms_norm", name] + ["residual"] * residual),
        operation="rms_norm",
        scheme=name,
        needs=("rms_norm_quantize", "rms_norm", "quantize"),
        read=lambda shape: operations.wide_bytes(shape) * (2 if residual else 1),
        moved=moved,
        make=make,
        call=call,
        compare=compare,
        beside={"unfused": unfused},
        options={"residual": residual},
    )


def swiglu(name: str) -> Case:
    """silu(gate) * up and quantization in one kernel."""

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        return {"gate": normal(shape, device, seed), "up": normal(shape, device, seed + 1)}

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        parts = [sample.rows(inputs[key]) for key in ("gate", "up")]
        return compare_quantized(got, reference.swiglu_quantize(*parts, name), sample)

    def unfused(fast: Any, inputs: Inputs) -> Any:
        return fast.quantize(fast.swiglu(inputs["gate"], inputs["up"]), name)

    return Case(
        name=f"swiglu.{name}",
        operation="swiglu",
        scheme=name,
        needs=("swiglu_quantize", "swiglu", "quantize"),
        read=lambda shape: 2 * operations.wide_bytes(shape),
        moved=lambda shape: 2 * operations.wide_bytes(shape) + operations.stored_bytes(SCHEMES[name], shape),
        make=make,
        call=lambda fast, inputs: fast.swiglu_quantize(inputs["gate"], inputs["up"], name),
        compare=compare,
        beside={"unfused": unfused},
    )


def of_configurations() -> Iterator[Scheme]:
    """The records of weights and inputs of each configuration's defaults in torchao's bits."""
    for name in RECORDS_OF:
        config = as_torchao(getattr(ao_lab, name)())
        for record in (config.scheme, config.activation_scheme):
            if record is not None:
                yield scheme_of(record)


def of_checkpoints() -> Iterator[Scheme]:
    """The records of other projects than torchao."""
    torchao = {scheme.name for scheme in torchao_conventions()}
    for scheme in conventions():
        if scheme.name not in torchao:
            yield scheme


def convention_records() -> list[Scheme]:
    """Each record once, in order of name."""
    found = {scheme.name: scheme for scheme in (*of_configurations(), *of_checkpoints())}
    return [found[name] for name in sorted(found)]


def convention_cases() -> list[Case]:
    """A case for each record; small floats packed, as checkpoints store them."""
    return [convention_case(scheme) for scheme in convention_records()]


def convention_case(scheme: Scheme) -> Case:
    """The case of a record. Where scales are quantized themselves, codes are compared on a tensor of its own."""
    if scheme.outer is not None and scheme.outer.statistic != "absmax_elements":
        return whole(scheme.name)
    packed = scheme.format.kind == "float" and scheme.format.bits < 8
    return quantize(scheme, packed=packed)


WITH_HUGE = (*LARGE, HUGE)


def with_target() -> list[Case]:
    """Cases with a target."""
    return [
        quantize("fp8_rowwise", shapes=WITH_HUGE),
        quantize("fp8_1x128"),
        quantize("mxfp8_e4m3", shapes=WITH_HUGE),
        quantize("mxfp8_e4m3_rceil"),
        quantize("int8_rowwise"),
        quantize("int4_g32"),
        quantize("int4_g128"),
        fake_quantize("int4_g32"),
        quantize("mxfp6_e2m3", packed=True),
        quantize("mxfp6_e3m2", packed=True),
        quantize("mxfp4", packed=True, shapes=WITH_HUGE),
        quantize("nvfp4", packed=True, given=True),
        dequantize("fp8_rowwise", huge=True),
        dequantize("mxfp8_e4m3"),
        dequantize("mxfp4", packed=True),
        dequantize("nvfp4", packed=True),
        dequantize("int4_g128"),
        dequantize("int8_rowwise"),
        both("fp8_tensorwise", given=True),
        both("mxfp8_e4m3"),
        quantize("fp8_tensorwise"),
        quantize("nvfp4", packed=True),
        rms_norm("fp8_rowwise"),
        rms_norm("mxfp8_e4m3"),
        swiglu("fp8_rowwise"),
        swiglu("mxfp8_e4m3"),
        small("fp8_rowwise"),
        *of_sparsity(),
        *convention_cases(),
    ]


def of_sparsity() -> list[Case]:
    """Cases of 2:4 with a target."""
    return [
        prune(),
        prune("4:8"),
        compress("bfloat16"),
        compress("float8_e4m3fn"),
        decompress("bfloat16"),
        quantize_compressed("fp8_rowwise"),
        compress_transposable(),
    ]


def without_target() -> list[Case]:
    """Cases without a target."""
    plain = ("fp8_128x128", "fp8_rowwise_e5m2", "mxfp8_e5m2", "mxint8", "int8_tensorwise")
    integers = ("int8_rowwise_asymmetric", "int4_g128_asymmetric", "int8_g32")
    return [
        *(quantize(name) for name in (*plain, *integers)),
        *(quantize(f"int{bits}_g128", packed=True) for bits in (2, 3, 4, 5, 6)),
        quantize("int4_g128_asymmetric", packed=True),
        quantize("mxfp6_e2m3"),
        quantize("mxfp4"),
        quantize("mxfp4_rceil", packed=True),
        whole("nf4"),
        *(quantize(name, axis=0) for name in ("fp8_rowwise", "mxfp8_e4m3", "int8_rowwise", "int4_g32")),
        *(stochastic(name) for name in ("mxfp8_e4m3", "mxfp4")),
        dequantize("mxfp6_e2m3", packed=True),
        dequantize("int3_g128", packed=True),
        dequantize("int4_g128_asymmetric", packed=True),
        dequantize("nf4"),
        fake_quantize("mxfp4"),
        *(fake_quantize(name) for name in ("fp8_rowwise", "int8_rowwise_asymmetric", "int4_g128_asymmetric")),
        *(saturation_mask(name) for name in ("int8_rowwise_asymmetric", "int4_g128_asymmetric")),
        *(
            fake_quantize(f"{element}_{block}")
            for element in ("ternary", "stretched2")
            for block in ("rowwise", "g32")
        ),
        fake_quantize("int4_g32", gradient=True),
        rms_norm("fp8_rowwise", residual=True),
        rms_norm("mxfp8_e4m3", residual=True),
        storage("encode", "float8_e4m3fn"),
        storage("encode", "float4_e2m1fn"),
        storage("decode", "float8_e4m3fn"),
        storage("pack", "float4_e2m1fn"),
        storage("pack", "float6_e2m3fn"),
        storage("unpack", "float4_e2m1fn"),
        storage("unpack", "float6_e2m3fn"),
        prune("1:4"),
        prune_transposable(),
        small("mxfp8_e4m3"),
        small("int4_g32"),
        *(
            linear(SCHEMES[name])
            for name in ("int8_rowwise", "fp8_rowwise", "mxfp8_e4m3", "int4_g128", "mxfp4", "nvfp4")
        ),
        linear(SCHEMES["int8_rowwise"], wrapped=True),
        *(linear_of_codes(name) for name in ("int8_rowwise", "fp8_rowwise")),
        *(linear_of_codes(name, rows) for name in ("fp8_rowwise", "int8_rowwise") for rows in (16, 64)),
        linear_of_codes("int8_rowwise", 1024),
        *(
            linear_pair(SCHEMES[name], gated=gated)
            for gated in (False, True)
            for name in ("int8_rowwise", "fp8_rowwise", "int4_g128")
        ),
        linear(integer_scheme(4, 64, asymmetric=True, storage="bfloat16")),
        *(linear(SCHEMES[name], rows) for name in ("int8_rowwise", "int4_g128") for rows in (16, 64)),
    ]


CASES: dict[str, Case] = {case.name: case for case in (*with_target(), *without_target())}


def chosen(names: Sequence[str] | None) -> list[Case]:
    """Cases whose name is, begins with or contains as a part one of the names; all without names.

    ``mxfp4`` chooses everything about that scheme, ``dequantize`` every dequantizer. ValueError with the nearest names where
    a name chooses nothing.
    """
    for name in names or ():
        if not any(matches(case, name) for case in CASES.values()):
            words = sorted({part for case in CASES for part in case.split(".")} | set(CASES))
            near = and_nearest(name, words, 3, 0.4) or "; none is near"
            raise ValueError(f"no kernel is called {name!r}{near}; --list shows all")
    return [case for case in CASES.values() if not names or any(matches(case, name) for name in names)]


def matches(case: Case, name: str) -> bool:
    """Whether a user's word means this case: its name, or whole parts of it in order."""
    return f".{name}." in f".{case.name}."
