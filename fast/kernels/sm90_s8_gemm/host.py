"""Products of many rows of int8 codes on a GPU: what is taken, and what is launched."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.sm90_s8_gemm.select import choose, programs_of
from fast.kernels.sm90_s8_gemm.variants import FEATURES, INTEGER, KERNEL, ROW, Problem, Variant
from fast.launch import cuda
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.cuda import BIAS, CudaLaunch, Maps
from fast.launch.driver import STEP, tensor_map
from fast.launch.hopper import GROUP, MOST_ROWS, index_of, processors_of, refused_device
from reference import Quantized

#: Pointers of a launch, of which the first two are read through their tensor maps alone.
POINTERS = ("codes", "x", "x_scale", "scale", "bias", "y")
#: Numbers of the source's `Problem`: tokens, features, steps, x_scale_step, scale_step, bias_kind, group; filled up to 8 bytes.
NUMBERS = "7i4x"
#: What rows of y, in elements, are multiples of.
FEATURES_STEP = 8


def linear_of_codes(
    x: Quantized, w: Quantized, bias: torch.Tensor | None, dtype: torch.dtype, key: Any
) -> torch.Tensor | None:
    """Rows of int8 codes (M, K) times the transpose of a weight of int8 codes (N, K): the sum, exact in int32, as float32,
    times x's scale, times the weight's, plus the bias, each rounded to float32; then one rounding to `dtype`.

    None where another kernel has to take it, see `refused`, or is faster (`select`). key: of the call; see `launch.cache`.
    """
    if refused(x, w, dtype) is not None:
        return None
    variant = choose(x.shape[0], w.shape[0], is_stored(dtype), processors_of(x.codes.get_device()))
    call = None if variant is None else call_of(variant, problem_of(dtype), x, w, bias)
    if call is None:
        return None
    y: torch.Tensor = call.result("y", key, x.scheme)
    return y


def problem_of(dtype: torch.dtype) -> Problem:
    """Products of int8 codes into a dtype."""
    return Problem(INTEGER, FLOAT_NAMES[dtype])


def refused(x: Quantized, w: Quantized, dtype: torch.dtype) -> str | None:
    """Why the kernel does not take a product of checked codes; None where it does."""
    if (x.scheme.element, w.scheme.element) != (INTEGER, INTEGER):
        return f"elements are {INTEGER}, got {x.scheme.element} and {w.scheme.element}"
    if x.zero is not None:
        return "there are no zero points"
    return refused_sizes(x.shape[0], tuple(w.shape), dtype, device_of(x.codes))


def refused_sizes(rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str | None:
    """The same of so many rows and a weight (N, K) of codes that it takes, on a device."""
    features, length = shape
    if dtype not in FLOAT_NAMES:
        return f"results are {', '.join(FLOAT_NAMES.values())}, got {dtype}"
    if not rows or not features or not length or max(rows, features, length) > MOST_ROWS:
        return f"sizes are 1 to {MOST_ROWS}, got {(rows, features, length)}"
    if length % STEP or features % FEATURES_STEP:
        return f"K is a multiple of {STEP} and N of {FEATURES_STEP}, got {(rows, features, length)}"
    reason = refused_device(device)
    return KERNEL.failure(problem_of(dtype), index_of(device)) if reason is None else reason


def is_faster(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether so many rows by a weight (N, K) are taken, and faster than by Triton's kernel."""
    if refused_sizes(rows, shape, dtype, device) is not None:
        return False
    return choose(rows, shape[0], is_stored(dtype), processors_of(index_of(device))) is not None


def device_of(codes: torch.Tensor) -> torch.device:
    """Where it would run; a function of its own, so that tests can say another one."""
    return codes.device


def is_stored(dtype: torch.dtype) -> bool:
    """Whether the copy engine writes y."""
    return dtype.itemsize == 2


def call_of(
    variant: Variant, problem: Problem, x: Quantized, w: Quantized, bias: torch.Tensor | None
) -> Call | None:
    """The call whose launch made "y", of codes (M, K) and (N, K), and scales: one number or one for each row. None where the
    variant does not compile or load."""
    (tokens, length), features, device = x.codes.shape, w.codes.shape[0], x.codes.get_device()
    if not cuda.is_loadable(KERNEL, variant, problem, device):
        return None
    at_once = cuda.clusters_at_once(KERNEL, variant, problem, variant.shared, device)
    clusters = programs_of(variant.tokens, tokens, features, variant.pair) // variant.pair
    numbers = (
        tokens, features, -(-length // ROW), int(x.scale.numel() > 1), int(w.scale.numel() > 1), BIAS, GROUP,
    )  # fmt: skip

    def describe(weight: int, x: int, y: int = 0) -> bytes:
        made = tensor_map(weight, features, length, (FEATURES, ROW))
        made += tensor_map(x, tokens, length, (variant.tokens // variant.pair, ROW))
        return made + tensor_map(y, tokens, 2 * features, (variant.chunk, ROW)) if variant.stored else made

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


__all__ = ["POINTERS", "call_of", "is_faster", "is_stored", "linear_of_codes", "problem_of", "refused"]
