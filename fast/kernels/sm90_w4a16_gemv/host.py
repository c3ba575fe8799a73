"""The host side of `sm90_w4a16_gemv`: what it takes, and its launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fast.kernels.sm90_w4a16_gemv.variants import KERNEL, MOST_ROWS, STEP, Direct, Form, Variant, choose
from fast.kernels.triton_small_m.layout import ArrangedWeight
from fast.launch import cuda
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.cuda import BIAS, CudaLaunch

#: Pointers of a launch in the order of the source's `Problem`; then count, n, k and the bias's dtype.
POINTERS = ("x", "codes", "scale", "zero", "x_scale", "bias", "y")


def launch_for(
    w: ArrangedWeight,
    count: int,
    inputs: torch.dtype,
    dtype: torch.dtype,
    variant: Variant | Direct | None = None,
) -> CudaLaunch | None:
    """What multiplies `count` rows of inputs by a weight into `dtype`, where the family takes them (`fast.gemm.families`); its
    pointers are POINTERS. None where no variant has room, compiles and loads. variant: by default that of `choose`.
    """
    form = form_of(w, inputs, dtype)
    given = variant or choose(form, count, *w.shape)
    if given is None or not cuda.is_loadable(KERNEL, given, form, w.words.get_device()):
        return None
    return launch_of(given, form, count, w.shape)


def sm90_w4a16_gemv(
    x: torch.Tensor,
    w: ArrangedWeight,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    variant: Variant | Direct | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """`linear_small` by this kernel, of operands that it would have checked; None as `launch_for`.

    key, record: see `dispatch`, of a call without x_scale.
    """
    dtype = x.dtype if dtype is None else dtype
    launch = launch_for(w, x.numel() // w.shape[1], x.dtype, dtype, variant)
    if launch is None:
        return None
    scales = {} if x_scale is None else {"x_scale": x_scale}
    call = Call({"x": x, "codes": w.words, "scale": w.scale, "zero": w.zero, **scales, "bias": bias})
    call.allocate("y", (*x.shape[:-1], w.shape[0]), dtype)
    call.launch(launch, POINTERS)
    y: torch.Tensor = call.result("y", key, record)
    return y


def form_of(w: ArrangedWeight, inputs: torch.dtype, dtype: torch.dtype) -> Form:
    """What is multiplied."""
    return Form(w.element, w.group, w.zero is not None, inputs == torch.float16, FLOAT_NAMES[dtype])


@lru_cache(maxsize=4096)
def launch_of(variant: Variant | Direct, form: Form, count: int, shape: tuple[int, int]) -> CudaLaunch:
    """One launch, compiled once."""
    n, k = shape
    shared = variant.shared(form, count, k // STEP)
    return CudaLaunch(
        KERNEL, variant, form, POINTERS, variant.programs(n), shared, ("4i", (count, n, k, BIAS))
    )


__all__ = ["MOST_ROWS", "POINTERS", "form_of", "launch_for", "launch_of", "sm90_w4a16_gemv"]
