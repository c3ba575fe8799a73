"""Products of tokens and a 2:4 weight on a GPU: what is launched for a call, and calls like one before it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from fast.kernels.launch.direct import current_device, current_stream
from fast.kernels.sparse_mm.driver import STEP, function_of, launcher, tensor_map
from fast.kernels.sparse_mm.nvrtc import cached_cubin
from fast.kernels.sparse_mm.variants import ELEMENTS, KINDS, PANEL, Variant, sources
from functools import lru_cache

#: Tiles of tokens that share their features' values in the L2 cache.
GROUP = 8


class Problem(ctypes.Structure):
    """The kernel's second argument; the first are the tensor maps of values and x."""

    _fields_ = (
        ("metadata", ctypes.c_void_p), ("x_scale", ctypes.c_void_p), ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p), ("y", ctypes.c_void_p),
        ("tokens", ctypes.c_int), ("features", ctypes.c_int), ("steps", ctypes.c_int),
        ("panels", ctypes.c_int), ("blocks", ctypes.c_int),
        ("x_scale_step", ctypes.c_int), ("scale_step", ctypes.c_int), ("bias_kind", ctypes.c_int), ("group", ctypes.c_int),
    )  # fmt: skip


def boxes(variant: Variant) -> tuple[tuple[int, int], tuple[int, int]]:
    """Boxes (rows, bytes) of values and of x that a copy of the kernel takes."""
    return (variant.features, PANEL // 2 * variant.panels), (variant.tokens // variant.pair, PANEL)


def steps_of(variant: Variant, length: int) -> int:
    """Stages along K, for rows of x of `length` bytes."""
    return -(-length // (PANEL * variant.panels))


def tiles_of(variant: Variant, tokens: int, features: int) -> int:
    """Clusters' tiles: with splits as many clusters as this, else at most."""
    return -(-tokens // variant.tokens) * -(-features // (variant.features * variant.pair))
