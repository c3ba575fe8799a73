"""`linear_pair` for CUDA tensors: two products of one row in one launch, by the kernels of `linear`.

A launch loses 2 to 3 us at its beginning and end, where few bytes are under way. Two weights of a layer that multiply the same
inputs, a gate and what it gates, lose that once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fast.kernels.byte_product import byte_pair_kernel
from fast.kernels.launch import Fixed, together
from fast.kernels.linear import (
    FLOATS,
    Weight,
    byte_launch,
    is_of_bytes,
    is_of_nibbles,
    nibble_launch,
    weight_of,
)
from fast.kernels.nibble_product import nibble_pair_kernel
from fast.kernels.quantizer import in_words
from fast.kernels.replay import NAMES, Recording, several
from reference import Quantized, Scheme

PARTS = ("codes", "scale", "outer", "zero")


def linear_pair(
    x: torch.Tensor, first: Quantized, second: Quantized, key: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """x (..., K), one row, times the transposes of two weights, or None where no kernel takes them. key: see `ready`."""
    launch = launch_for(first.scheme, tuple(first.shape), first.axis, first.packed, x.dtype)
    given = {name + end: getattr(w, name) for w, end in ((first, ""), (second, "2")) for name in PARTS}
    if launch is None or not together(x, *given.values()):
        return None
    words = {name: in_words(given[name]) for name in ("codes", "codes2")}
    call = Recording({"x": in_words(x), **given, **words})
    for name in ("y", "y2"):
        call.empty(name, (*x.shape[:-1], first.shape[0]), x.dtype)
    call.launch(launch, [name for name in launch.kernel.arg_names if name in (*call.inputs, "y", "y2")])
    call.remember(key, first.scheme, several("y", "y2"))
    return call.tensors["y"], call.tensors["y2"]


def launch_for(
    scheme: Scheme, shape: tuple[int, ...], axis: int, packed: bool, dtype: torch.dtype
) -> Fixed | None:
    """The launch for one row of a dtype and two weights that are both stored so; None where there is none."""
    weight = weight_of(scheme, shape, axis, packed)
    if weight is None or dtype not in FLOATS or not weight.rows:
        return None
    return _launch(weight, NAMES[dtype])


@lru_cache(maxsize=4096)
def _launch(weight: Weight, dtype: str) -> Fixed | None:
    """Programs of the first weight, then those of the second."""
    if is_of_nibbles(weight) and dtype != "float32":
        one, kernel = nibble_launch(weight, dtype, 2), nibble_pair_kernel
    elif is_of_bytes(weight):
        one, kernel = byte_launch(weight, dtype, 2), byte_pair_kernel
    else:
        return None
    return Fixed(kernel, 2 * one.grid[0], one.tail, one.warps, **one.options)


__all__ = ["launch_for", "linear_pair"]
