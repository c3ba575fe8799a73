"""The cases, in the order in which they are measured: those with a target first.

A target is a fraction of the copy rate of the same run on a tensor of the input's size. Cases without a target are measured
and shown.

Records of other projects that checkpoints and configurations of ao_lab mean, and a case for each.

The records come from ao_lab: those of each class of configuration that torchao has as well, with its default parameters, for
weights and inputs; and every record of the projects whose checkpoints are read (compressed-tensors, Transformer Engine).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.nn import functional

import ao_lab
import reference
from ao_lab.config.recipe import Recipe, integer_scheme
from ao_lab.config.torchao import RECORDS_OF, as_torchao
from ao_lab.tensor.quantized_tensor import from_quantized
from experiments.kernels import operations
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
from reference import SCHEMES, Compressed, Quantized, Scheme
from reference.matmul.linear import transposed
from reference.schemes.conventions import conventions, torchao_conventions
from reference.schemes.schemes import scheme_of

# Cases of `fast.linear`: a few rows of inputs times a stored weight, beside the dense product and dequantizing first.

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


# Cases of 2:4: masks, compressed storage and back, codes, and both orientations; each row or tile is compared by itself.

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
            near = difflib.get_close_matches(name, words, n=3, cutoff=0.4)
            hint = f"the nearest are {', '.join(near)}" if near else "none is near"
            raise ValueError(f"no kernel is called {name!r}; {hint}; --list shows all")
    return [case for case in CASES.values() if not names or any(matches(case, name) for name in names)]


def matches(case: Case, name: str) -> bool:
    """Whether a user's word means this case: its name, or whole parts of it in order."""
    return f".{name}." in f".{case.name}."
