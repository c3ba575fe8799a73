"""The cases, in the order in which they are measured: those with a target first.

A target is a fraction of the copy rate of the same run on a tensor of the input's size. Cases without a target are measured
and shown.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ao_lab.config.recipe import integer_scheme
from experiments.kernels.cases import sparsity
from experiments.kernels.cases.case import HUGE, LARGE, Case, at_least, at_most
from experiments.kernels.cases.conventions import convention_cases
from experiments.kernels.cases.fused import FUSED_SPEEDUP, dequantize, rms_norm, swiglu
from experiments.kernels.cases.linear import linear, linear_of_codes, linear_pair
from experiments.kernels.cases.operations import (
    both,
    fake_quantize,
    quantize,
    saturation_mask,
    small,
    stochastic,
    storage,
    whole,
)
from reference import SCHEMES

WITH_HUGE = (*LARGE, HUGE)
FUSED = (at_least("fraction", 0.85), FUSED_SPEEDUP)
#: A small tensor takes little more than any kernel does, and the host launches it quickly.
SMALL = (at_most("time over elementwise", 1.2), at_most("host time", 15.0))


def with_target() -> list[Case]:
    """Cases with a target."""
    return [
        quantize("fp8_rowwise", target=0.95, shapes=WITH_HUGE),
        quantize("fp8_1x128", target=0.95),
        quantize("mxfp8_e4m3", target=0.95, shapes=WITH_HUGE),
        quantize("mxfp8_e4m3_rceil", target=0.95),
        quantize("int8_rowwise", target=0.95),
        quantize("int4_g32", target=0.95),
        quantize("int4_g128", target=0.95),
        fake_quantize("int4_g32", target=0.95),
        quantize("mxfp6_e2m3", packed=True, target=0.90),
        quantize("mxfp6_e3m2", packed=True, target=0.90),
        quantize("mxfp4", packed=True, target=0.90, shapes=WITH_HUGE),
        quantize("nvfp4", packed=True, given=True, target=0.85),
        dequantize("fp8_rowwise", target=0.92, huge=True),
        dequantize("mxfp8_e4m3", target=0.92),
        dequantize("mxfp4", packed=True, target=0.92),
        dequantize("nvfp4", packed=True, target=0.92),
        dequantize("int4_g128", target=0.92),
        dequantize("int8_rowwise", target=0.92),
        both("fp8_tensorwise", given=True, target=0.90),
        both("mxfp8_e4m3", target=0.85),
        quantize("fp8_tensorwise", target=0.92),
        quantize("nvfp4", packed=True, target=0.85),
        rms_norm("fp8_rowwise", targets=FUSED),
        rms_norm("mxfp8_e4m3", targets=FUSED),
        swiglu("fp8_rowwise", targets=FUSED),
        swiglu("mxfp8_e4m3", targets=FUSED),
        small("fp8_rowwise", SMALL),
        *of_sparsity(),
        *convention_cases(),
    ]


def of_sparsity() -> list[Case]:
    """Cases of 2:4, all with one target."""
    return [
        sparsity.prune(target=0.90),
        sparsity.prune("4:8", target=0.90),
        sparsity.compress("bfloat16", target=0.90),
        sparsity.compress("float8_e4m3fn", target=0.90),
        sparsity.decompress("bfloat16", target=0.90),
        sparsity.quantize_compressed("fp8_rowwise", target=0.90),
        sparsity.compress_transposable(target=0.90),
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
        sparsity.prune("1:4"),
        sparsity.prune_transposable(),
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
