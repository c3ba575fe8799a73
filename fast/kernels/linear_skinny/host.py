"""The host side of `linear_skinny`: what it takes, and its launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fast.kernels.launch.call import FLOAT_NAMES, Call
from fast.kernels.launch.launcher import ALIGNMENT, interpreted
from fast.kernels.linear_skinny.launch import POINTERS, SkinnyLaunch
from fast.kernels.linear_skinny.select import MOST_ROWS, choose
from fast.kernels.linear_skinny.variants import ELEMENTS, STEP, Form, Variant
from fast.kernels.linear_small.layout import ArrangedWeight

INPUTS = (torch.bfloat16, torch.float16)
#: Compute capability that the kernel is compiled for.
HOPPER = (9, 0)


def linear_skinny(
    x: torch.Tensor,
    w: ArrangedWeight,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    variant: Variant | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """`linear_small` of at most MOST_ROWS rows, whose operands it has checked; None where it does not take them: devices that
    are not Hopper's, weights whose rows or columns are filled, addresses that are no multiples of 16, other dtypes.

    variant: another than `choose`'s.
    """
    dtype = x.dtype if dtype is None else dtype
    count = x.numel() // w.shape[1]
    if not is_taken(x, w, dtype, count) or any(one is not None and is_odd(one) for one in (x, bias, x_scale)):
        return None
    if bias is not None and bias.dtype not in FLOAT_NAMES:
        return None
    form = Form(w.element, w.group, w.zero is not None, x.dtype == torch.float16, FLOAT_NAMES[dtype])
    given = variant or choose(form, count, *w.shape)
    if given is None:
        return None
    call = Call(
        {"x": x, "words": w.words, "scale": w.scale, "zero": w.zero, "x_scale": x_scale, "bias": bias}
    )
    call.allocate("y", (*x.shape[:-1], w.shape[0]), dtype)
    call.launch(launch_of(given, form, count, w.shape), POINTERS)  # type: ignore[arg-type]
    y: torch.Tensor = call.result("y", key, record)
    return y


def is_taken(x: torch.Tensor, w: ArrangedWeight, dtype: torch.dtype, count: int) -> bool:
    """Whether shapes, dtypes and the device are those of the kernel."""
    if x.dtype not in INPUTS or dtype not in FLOAT_NAMES or not 0 < count <= MOST_ROWS:
        return False
    if w.element not in ELEMENTS or w.shape != (w.rows, w.columns) or w.shape[1] % STEP:
        return False
    return x.is_cuda and not interpreted() and capability(x.get_device()) == HOPPER


@lru_cache(maxsize=64)
def capability(index: int) -> tuple[int, int]:
    """Of a CUDA device."""
    return torch.cuda.get_device_capability(index)


def is_odd(tensor: torch.Tensor) -> bool:
    """Whether bulk copies cannot begin at a tensor."""
    return tensor.data_ptr() % ALIGNMENT != 0


@lru_cache(maxsize=4096)
def launch_of(variant: Variant, form: Form, count: int, shape: tuple[int, int]) -> SkinnyLaunch:
    """One launch, compiled once."""
    return SkinnyLaunch(variant, form, count, shape)


__all__ = ["MOST_ROWS", "linear_skinny"]
