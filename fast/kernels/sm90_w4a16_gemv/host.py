"""The host side of `sm90_w4a16_gemv`: what it takes, and its launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch

from fast.kernels.sm90_w4a16_gemv.launch import POINTERS, SkinnyLaunch, is_loadable
from fast.kernels.sm90_w4a16_gemv.select import MOST_ROWS, choose, gains
from fast.kernels.sm90_w4a16_gemv.variants import ELEMENTS, FACTORED, STEP, Direct, Form, Variant
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import interpreted
from fast.launch.nvrtc import library

INPUTS = (torch.bfloat16, torch.float16)
#: Compute capability that the kernel is compiled for.
HOPPER = (9, 0)


class Weight(Protocol):
    """What the kernel looks at of a `linear_small.layout.ArrangedWeight`, whose package builds on this one."""

    words: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    shape: tuple[int, int]
    element: str
    group: int

    @property
    def rows(self) -> int:
        """N, filled."""

    @property
    def columns(self) -> int:
        """K, filled."""


def launch_for(
    w: Weight, count: int, inputs: torch.dtype, dtype: torch.dtype, variant: Variant | Direct | None = None
) -> SkinnyLaunch | None:
    """What multiplies `count` rows of inputs by a weight into `dtype`; its pointers are POINTERS.

    None where another kernel has to: devices that are not Hopper's, weights whose rows or columns are filled, other dtypes and
    elements, float16 where scales are factors, more than MOST_ROWS rows. variant: by default that of `choose`.
    """
    if not is_taken(w, count, inputs, dtype):
        return None
    form = form_of(w, inputs, dtype)
    given = variant or choose(form, count, *w.shape)
    if given is None or not is_loadable(given, form, w.words.get_device()):
        return None
    return launch_of(given, form, count, w.shape)


def sm90_w4a16_gemv(
    x: torch.Tensor,
    w: Weight,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    variant: Variant | Direct | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """`linear_small` by this kernel, of operands that it would have checked; None as `launch_for`.

    key, record: see `launch.cache`, of a call without x_scale.
    """
    dtype = x.dtype if dtype is None else dtype
    launch = launch_for(w, x.numel() // w.shape[1], x.dtype, dtype, variant)
    if launch is None:
        return None
    scales = {} if x_scale is None else {"x_scale": x_scale}
    call = Call({"x": x, "codes": w.words, "scale": w.scale, "zero": w.zero, **scales, "bias": bias})
    call.allocate("y", (*x.shape[:-1], w.shape[0]), dtype)
    call.launch(launch, POINTERS)  # type: ignore[arg-type]
    y: torch.Tensor = call.result("y", key, record)
    return y


def is_faster(w: Weight, count: int, inputs: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the kernel takes so many rows and was measured to be faster than `linear_small`."""
    if not is_taken(w, count, inputs, dtype):
        return False
    return gains(form_of(w, inputs, dtype), count, *w.shape)


def form_of(w: Weight, inputs: torch.dtype, dtype: torch.dtype) -> Form:
    """What is multiplied."""
    return Form(w.element, w.group, w.zero is not None, inputs == torch.float16, FLOAT_NAMES[dtype])


def is_taken(w: Weight, count: int, inputs: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether sizes, dtypes and the device are those of the kernel."""
    if inputs not in INPUTS or dtype not in FLOAT_NAMES or not 0 < count <= MOST_ROWS:
        return False
    if w.element in FACTORED and inputs != torch.bfloat16:
        return False
    if w.element not in ELEMENTS or w.shape != (w.rows, w.columns) or w.shape[1] % STEP:
        return False
    return (
        w.words.is_cuda
        and not interpreted()
        and capability(w.words.get_device()) == HOPPER
        and has_compiler()
    )


@lru_cache(maxsize=1)
def has_compiler() -> bool:
    """Whether NVRTC is here, which comes with torch's wheels for CUDA; without it `linear_small` multiplies."""
    try:
        return bool(library())
    except RuntimeError:
        return False


@lru_cache(maxsize=64)
def capability(index: int) -> tuple[int, int]:
    """Of a CUDA device."""
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=4096)
def launch_of(variant: Variant | Direct, form: Form, count: int, shape: tuple[int, int]) -> SkinnyLaunch:
    """One launch, compiled once."""
    return SkinnyLaunch(variant, form, count, shape)


__all__ = ["MOST_ROWS", "is_faster", "launch_for", "sm90_w4a16_gemv"]
