"""The calls of the kernels that mask a weight: compressed for products with it, and as it is by a mask of bits."""

from __future__ import annotations

from typing import Any, cast

import torch

from fast.kernels.sm90_sparse24_gemm.arrange import shape_of
from fast.kernels.sm90_sparse24_gemm.bits import OCTET
from fast.kernels.sm90_sparse24_gemm.masked import ACROSS, DOWN, KEPT_TILE, TILE, keep_kernel, masked_kernel
from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch
from reference import Compressed

#: Length of a block of the kernel, and blocks that 64 rows, and two panels of 64 columns, of the result have.
BLOCK, ROWS, COLUMNS = 8, 8, 16
#: Of a program of `keep_kernel`.
WARPS = 4


def compress_masked(w: torch.Tensor, mask: torch.Tensor, turned: bool, key: Any = None) -> Compressed:
    """Values and arranged metadata of a matrix of 16-bit elements, lengths in multiples of 8, or of its transpose."""
    call = Call({"w": w, "mask": mask}, words=("w",) if mask.dtype == torch.uint8 else ("w", "mask"))
    rows, columns = reversed(w.shape) if turned else w.shape
    call.allocate("values", (rows, columns // 2), w.dtype)
    call.allocate("metadata", shape_of(rows, columns // BLOCK, 16), torch.uint8)
    call.launch(_launch(w, turned), ("w", "mask", "values", "metadata"))
    return cast("Compressed", call.result(("values", "metadata"), key, None, _pair))


def _pair(made: tuple[torch.Tensor, torch.Tensor]) -> Compressed:
    return Compressed(*made)


def _launch(w: torch.Tensor, turned: bool) -> CompiledLaunch:
    """The kernel over whole blocks of 64 rows and pairs of panels of the result."""
    height, width = w.shape[0] // BLOCK, w.shape[1] // BLOCK
    down, across = (COLUMNS, ROWS) if turned else (ROWS, COLUMNS)
    down, across = -(-height // down) * down, -(-width // across) * across
    tail = (height, width, across, turned, (down, across) != (height, width), DOWN, ACROSS, TILE)
    return CompiledLaunch(masked_kernel, down // DOWN * (across // ACROSS), tail, 1)


def keep(w: torch.Tensor, bits: torch.Tensor, out: torch.Tensor | None, key: Any = None) -> torch.Tensor:
    """w, rows of whole octets, where bits are set, +0 elsewhere. out: contiguous, perhaps w; by default a new tensor."""
    call = Call({"w": w, "bits": bits, "out": out})
    if out is None:
        call.allocate("out", w.shape, w.dtype)
    octets, size = w.numel() // OCTET, w.dtype.itemsize
    tail = (octets, size, w.numel() % KEPT_TILE != 0, KEPT_TILE)
    call.launch(CompiledLaunch(keep_kernel, -(-w.numel() // KEPT_TILE), tail, WARPS), ("w", "bits", "out"))
    made: torch.Tensor = call.result("out", key)
    return made


__all__ = ["compress_masked", "keep"]
