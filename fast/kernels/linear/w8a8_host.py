"""`linear_of_codes` for CUDA tensors: which weights the kernel takes, and how many of their rows a program."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fast.kernels.launch.launcher import Fixed, interpreted, together
from fast.kernels.launch.replay import NAMES, Recording, picked
from fast.kernels.linear.gemv_w8a8 import code_kernel
from fast.kernels.linear.select import BYTES, FLOATS, byte_rows, kind_of, warps_along
from fast.kernels.quantize.geometry import INT32, ceil_div
from fast.kernels.quantize.host import in_words
from reference import Quantized, Scheme

#: What the kernel calls the elements.
KINDS = {"int8": "int", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
#: Codes that a lane takes at once: rows begin at multiples of these.
LANE = 16


def linear_of_codes(
    x: Quantized, w: Quantized, bias: torch.Tensor | None, dtype: torch.dtype, key: Any
) -> torch.Tensor | None:
    """The product of one row of codes, or None where the kernel does not take them. key: of the call; see `ready`."""
    launch = launch_for(x.scheme, w.scheme, tuple(w.shape), dtype, bias)
    given = {
        "x": x.codes,
        "x_scale": x.scale,
        "x_zero": x.zero,
        "codes": w.codes,
        "scale": w.scale,
        "bias": bias,
    }
    if launch is None or not together(*given.values()):
        return None
    # The kernel reads words: a view at another address is copied.
    words = {name: in_words(given[name].contiguous()) for name in ("x", "codes")}
    call = Recording({**given, **words})
    call.empty("y", (1, w.shape[0]), dtype)
    call.launch(launch, list(launch.kernel.arg_names[: len(given) + 1]))
    call.remember(key, x.scheme, picked("y"))
    return call.tensors["y"]


def launch_for(
    x: Scheme, w: Scheme, shape: tuple[int, ...], dtype: torch.dtype, bias: torch.Tensor | None = None
) -> Fixed | None:
    """The launch that multiplies one row of codes by a weight of some shape, both as `check_codes` allows, and adds such a
    bias; None where there is none: rows whose length is no multiple of 16, no rows, other dtypes."""
    rows, length = shape
    if dtype not in FLOATS or not rows or not length or length % LANE or interpreted():
        return None
    kinds = KINDS[x.element], KINDS[w.element]
    given = (x.zero is not None, kind_of(bias))
    return _launch(*kinds, w.scale.block == -1, rows, length, NAMES[dtype], given)


@lru_cache(maxsize=4096)
def _launch(
    inputs: str,
    kind: str,
    each: bool,
    rows: int,
    length: int,
    dtype: str,
    given: tuple[bool, torch.dtype | None],
) -> Fixed:
    """Four rows of the weight a program where there are many, else two, and warps along K until there are enough in all.

    given: whether inputs have a zero point, and the kind of the bias, for a launch of its own.
    """
    taken = byte_rows(rows)
    along = warps_along(ceil_div(rows, taken), ceil_div(length, BYTES))
    wide = rows * length > INT32 - length
    tail = (rows, length, each, inputs, kind, taken, along, wide, dtype, True)
    return Fixed(code_kernel, ceil_div(rows, taken), tail, along, launch_pdl=True)
