"""Wrong inputs: the same class and the same words from `fast` as from `reference`.

Every public function in the unusual situations of `tests.support.situations`, on the GPU: its one stated answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from reference import SCHEMES, Scales, quantize
from tests.gpu.harness.inputs import normals
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings
from tests.support.situations import EXAMPLES, SITUATIONS, walk

Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]
#: What `fast` takes as first argument is a tensor, and nothing else.
FOREIGN = (np.ones((64, 64), np.float32), [1.0, 2.0], 3.0, None, "x")
TAKES = {
    "quantize": ("mxfp4",),
    "choose_scales": ("mxfp4",),
    "fake_quantize": ("mxfp4",),
    "encode": ("float8_e4m3fn",),
    "decode": ("float8_e4m3fn",),
    "pack": ("int4",),
    "unpack": ("int4", (64, 64)),
    "quantize_both": ("mxfp4",),
}


def jobs(settings: Settings) -> list[Job]:
    """All families of this module."""
    return [*error_jobs(settings), *situation_jobs(settings)]


def error_jobs(settings: Settings) -> list[Job]:
    """Family "errors"."""
    return [
        Job("errors", "", "quantize", error_case),
        Job("errors", "foreign arrays", "quantize", foreign_case),
    ]


def error_case(run: Run) -> None:
    """Each call fails on both sides alike; a call that succeeds on either side is a difference."""
    for function, label, args, keywords in (*quantizer_calls(), *code_calls(), *fused_calls()):
        if not hasattr(run.fast, function):
            continue
        expected = run.expect(function, *args, **keywords)
        if not isinstance(expected, Failure):
            run.record(function, label, 1, 1, [f"{label}: the reference accepts this; the test is wrong"])
            continue
        run.same(function, label, *args, expected=expected, **keywords)


def foreign_case(run: Run) -> None:
    """TypeError that names the way out."""
    for function, rest in TAKES.items():
        if not hasattr(run.fast, function):
            continue
        for value in FOREIGN:
            run.calls += 1
            got = run.guarded(lambda f=function, v=value, r=rest: getattr(run.fast, f)(v, *r))
            text = got.text if isinstance(got, Failure) else ""
            good = isinstance(got, Failure) and got.kind == "TypeError" and "takes torch tensors, got" in text
            detail = [] if good else [f"{type(value).__name__} to {function}: got {str(got)[:300]}"]
            run.record(function, f"given a {type(value).__name__}", 1, int(not good), detail)


def quantizer_calls() -> Iterator[Call]:
    """Functions that take a tensor and a scheme."""
    x = normals((64, 96))
    for function in ("quantize", "choose_scales", "fake_quantize"):
        for dtype in ("int32", "int8", "uint8", "bool", "complex64", "int64"):
            yield function, f"{dtype} input", (np.ones((64, 96), dtype), "mxfp4"), {}
        for scheme in ("mxfp5", "", "MXFP4", 7, None):
            yield function, f"scheme {scheme!r}", (x, scheme), {}
        for axis in (2, -3, 1.0, True, "0", None):
            yield function, f"axis {axis!r}", (x, "mxfp4"), {"axis": axis}
        for shape, scheme in (((64, 33), "mxfp4"), ((7,), "nvfp4"), ((32,), "fp8_128x128"), ((), "mxfp4"),
                              ((3, 32), "torchao.nf4"), ((64, 72), "te.nvfp4_16x16"), ((4, 100), "int4_g32")):  # fmt: skip
            yield function, f"{scheme} of {shape}", (np.ones(shape, np.float32), scheme), {}
    yield from scale_calls(x)
    for scheme, shape, axis in (
        ("fp8_rowwise", (64, 96), -1),
        ("mxfp4", (64, 96), 0),
        ("mxfp4", (2, 64, 96), -1),
    ):
        yield "quantize", f"{scheme} {shape} tiled", (normals(shape), scheme), {"tiled": True, "axis": axis}
    stochastic = replace(SCHEMES["mxfp4"], name="s", rounding="stochastic")
    yield "quantize", "stochastic without words", (x, stochastic), {}
    yield "fake_quantize", "stochastic", (x, stochastic), {}
    yield "fake_quantize_vjp", "stochastic", (x, x, stochastic), {}
    yield "quantize", "words not needed", (x, "mxfp4"), {"random_bits": np.zeros((64, 96), np.uint32)}
    yield "quantize", "words of another dtype", (x, stochastic), {"random_bits": np.zeros((64, 96), np.int32)}
    yield "fake_quantize_vjp", "g of another shape", (x[:2], x, "mxfp4"), {}
    yield "fake_quantize_vjp", "g of another dtype", (x.astype(np.float16), x, "mxfp4"), {}


def scale_calls(x: Any) -> Iterator[Call]:
    """Scales that do not fit their record."""
    byte, single = np.zeros((64, 3), np.uint8), np.ones((64, 6), np.float32)
    wrong: tuple[tuple[str, str, Any], ...] = (
        ("mxfp4", "float scale", np.ones((64, 3), np.float32)),
        ("mxfp4", "shape", np.zeros((64, 4), np.uint8)),
        ("mxfp4", "outer", Scales(byte, np.array(1, np.float32))),
        ("mxfp4", "zero", Scales(byte, None, byte)),
        ("mxfp4", "a list", [1.0]),
        ("mxfp4", "a string", "scales"),
        ("nvfp4", "no outer", np.zeros((64, 6), np.uint8)),
        ("nvfp4", "float scale", Scales(single, np.array(1, np.float32))),
        ("nvfp4", "outer of shape (1,)", Scales(outer=np.ones(1, np.float32))),
        ("nvfp4", "empty", Scales()),
        ("int4_g32_asymmetric", "no zero", np.ones((64, 3), np.float32)),
        ("int4_g32_asymmetric", "uint8 zero", Scales(np.ones((64, 3), np.float32), None, byte)),
        ("nf4", "only scale", Scales(np.zeros(96, np.int8))),
        ("fp8_tensorwise", "shape (1,)", np.ones(1, np.float32)),
        ("fp8_rowwise", "half", np.ones((64, 1), np.float16)),
    )
    for scheme, label, scales in wrong:
        for function in ("quantize", "fake_quantize"):
            yield function, f"{scheme} scales: {label}", (x, scheme), {"scales": scales}


def code_calls() -> Iterator[Call]:
    """Functions of codes and formats."""
    x, codes = normals((4, 32)), np.zeros((4, 32), np.uint8)
    yield "encode", "int input", (np.ones(3, np.int32), "float8_e4m3fn"), {}
    yield "encode", "unknown format", (x, "float7"), {}
    yield "encode", "rounding", (x, "float8_e4m3fn"), {"rounding": "nearest"}
    yield "encode", "overflow", (x, "float8_e4m3fn"), {"overflow": "wrap"}
    yield "encode", "overflow of a format", (x, "float8_e4m3fn"), {"overflow": "inf"}
    yield "encode", "overflow of integers", (x, "int4"), {"overflow": "nonfinite"}
    yield "encode", "stochastic without words", (x, "float8_e5m2"), {"rounding": "stochastic"}
    yield "encode", "codebook toward zero", (x, "nf4"), {"rounding": "toward_zero"}
    for function in ("decode", "pack"):
        yield function, "float codes", (x, "int4"), {}
        yield function, "int32 codes", (codes.astype(np.int32), "int4"), {}
        yield function, "unknown format", (codes, "int44"), {}
    yield "pack", "0-d", (np.array(1, np.uint8), "int4"), {}
    yield "unpack", "shape", (codes, "int4", (4, 65)), {}
    yield "unpack", "rank", (codes, "int4", (4, 2, 64)), {}
    q = quantize(x, "mxfp8_e4m3")
    yield "dequantize", "dtype", (q, "float8_e4m3fn"), {}
    yield "dequantize", "dtype unknown", (q, "float33"), {}
    yield "dequantize", "codes of another shape", (replace(q, codes=codes[:2]),), {}
    yield "dequantize", "scale of another shape", (replace(q, shape=(4, 33)),), {}


def fused_calls() -> Iterator[Call]:
    """Functions that do more than one thing."""
    x, weight = normals((64, 96)), np.ones(96, np.float32)
    half, up = x.astype(np.float16), x.astype(np.float16)[:32]
    yield "quantize_both", "tiled", (normals((64, 64)), "fp8_tensorwise"), {"tiled": True}
    yield "quantize_both", "3-D", (normals((2, 32, 32)), "mxfp4"), {}
    yield "quantize_both", "indivisible", (normals((33, 64)), "mxfp4"), {}
    yield "quantize_both", "int", (np.ones((32, 32), np.int32), "mxfp4"), {}
    yield "quantize_both", "scales no pair", (x, "mxfp4"), {"scales": np.ones(3, np.float32)}
    yield "rms_norm_quantize", "weight shape", (x, weight[:95], "mxfp4"), {}
    yield "rms_norm_quantize", "weight dtype", (x, weight.astype(np.float16), "mxfp4"), {}
    yield "rms_norm_quantize", "residual shape", (x, weight, "mxfp4"), {"residual": x[:2]}
    yield "rms_norm_quantize", "eps", (x, weight, "mxfp4"), {"eps": -1.0}
    yield "rms_norm_quantize", "eps NaN", (x, weight, "mxfp4"), {"eps": float("nan")}
    yield "rms_norm_quantize", "float64", (x.astype(np.float64), weight, "mxfp4"), {}
    yield "rms_norm_quantize", "0-d", (np.float32(1), weight, "mxfp4"), {}
    yield "swiglu_quantize", "float32", (x, x, "mxfp4"), {}
    yield "swiglu_quantize", "up shape", (half, up, "mxfp4"), {}
    yield "swiglu_quantize", "up dtype", (half, x, "mxfp4"), {}
    yield "swiglu_quantize", "scheme", (half, half, "mxfp44"), {}


def situation_jobs(settings: Settings) -> list[Job]:
    """Family "situations"."""
    return [
        Job("situations", example, example.partition(",")[0], situations_case, (example,), 5.0)
        for example in list(EXAMPLES)[:: 1 if settings.fraction > 0.2 else 4]
    ]


def situations_case(run: Run, example: str) -> None:
    """One check for each situation; twice, so that remembered calls are asked too."""
    for situation in SITUATIONS:
        for turn in ("first", "again"):
            wrong = list(walk(example, situation, run.device.type, run.fast))
            run.record(example.partition(",")[0], f"{situation} {turn}", 1, len(wrong), wrong)
