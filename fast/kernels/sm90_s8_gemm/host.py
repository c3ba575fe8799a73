"""Products of many rows of int8 codes on a GPU: what is taken, and what is launched."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.sm90_s8_gemm.variants import (
    FEATURES,
    INTEGER,
    KERNEL,
    ROW,
    Problem,
    Variant,
    choose,
    programs_of,
)
from fast.launch import cuda
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.cuda import BIAS, GROUP, CudaLaunch, Maps, processors_of
from fast.launch.driver import tensor_map
from reference import Quantized

#: Pointers of a launch, of which the first two are read through their tensor maps alone.
POINTERS = ("codes", "x", "x_scale", "scale", "bias", "y")
#: Numbers of the source's `Problem`: tokens, features, steps, x_scale_step, scale_step, bias_kind, group; filled up to 8 bytes.
NUMBERS = "7i4x"


def linear_of_codes(
    x: Quantized, w: Quantized, bias: torch.Tensor | None, dtype: torch.dtype, key: Any
) -> torch.Tensor | None:
    """Rows of int8 codes (M, K) times the transpose of a weight of int8 codes (N, K): the sum, exact in int32, as float32,
    times x's scale, times the weight's, plus the bias, each rounded to float32; then one rounding to `dtype`.

    Operands are those that the family takes (`fast.gemm.families`). None where another kernel is faster (`select`), and where
    the variant does not compile or load. key: of the call; see `dispatch`.
    """
    variant = choose(x.shape[0], w.shape[0], is_stored(dtype), processors_of(x.codes.get_device()))
    call = None if variant is None else call_of(variant, problem_of(dtype), x, w, bias)
    if call is None:
        return None
    y: torch.Tensor = call.result("y", key, x.scheme)
    return y


def problem_of(dtype: torch.dtype) -> Problem:
    """Products of int8 codes into a dtype."""
    return Problem(INTEGER, FLOAT_NAMES[dtype])


def is_stored(dtype: torch.dtype) -> bool:
    """Whether the copy engine writes y."""
    return dtype.itemsize == 2


def call_of(
    variant: Variant, problem: Problem, x: Quantized, w: Quantized, bias: torch.Tensor | None
) -> Call | None:
    """The call whose launch made "y", of codes (M, K) and (N, K), and scales: one number or one for each row. None where the
    variant does not compile or load."""
    (tokens, length), features, device = x.codes.shape, w.codes.shape[0], x.codes.get_device()
    if not cuda.is_loadable(KERNEL, variant, problem, device, variant.shared):
        return None
    at_once = cuda.clusters_at_once(KERNEL, variant, problem, variant.shared, device)
    clusters = programs_of(variant.tokens, tokens, features, variant.pair) // variant.pair
    numbers = (
        tokens, features, -(-length // ROW), int(x.scale.numel() > 1), int(w.scale.numel() > 1), BIAS, GROUP,
    )  # fmt: skip

    def describe(weight: int, x: int, y: int = 0) -> bytes:
        result = tensor_map(weight, features, length, (FEATURES, ROW))
        result += tensor_map(x, tokens, length, (variant.tokens // variant.pair, ROW))
        return (
            result + tensor_map(y, tokens, 2 * features, (variant.chunk, ROW)) if variant.stored else result
        )

    launch = CudaLaunch(
        KERNEL, variant, problem, POINTERS, min(clusters, at_once) * variant.pair, variant.shared, (NUMBERS, numbers),
        maps=Maps(describe, 2, (0, 1, 5) if variant.stored else (0, 1)),
    )  # fmt: skip
    call = Call(
        {"x": x.codes, "x_scale": x.scale, "zero": x.zero, "codes": w.codes, "scale": w.scale, "bias": bias}
    )
    call.allocate("y", (tokens, features), getattr(torch, problem.out))
    call.launch(launch, POINTERS)
    return call


__all__ = ["POINTERS", "call_of", "is_stored", "linear_of_codes", "problem_of"]
