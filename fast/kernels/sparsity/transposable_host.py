"""The host side of transposable masks: which tensors the kernel takes, and the calls. Others get None, and the reference."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.sparsity.host import mask_call
from fast.kernels.sparsity.transposable import ACROSS, DOWN, TILE, transposable_kernel
from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch
from reference import Compressed

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Rows and columns of a block of the kernel.
BLOCK = 8
#: Elements / 8 that are too many: below, seven rows of octets are numbered in 32 bits.
MOST = 2**31
#: Registers of a thread: without a limit the compiler takes so many that eight warps fill a multiprocessor, with it there are
#: twelve.
REGISTERS = 168
#: The same of programs with edges, which need a few more.
UNLIMITED = 255
POINTERS = ("mask", "values", "metadata", "values_t", "metadata_t")


def prune_transposable(
    w: torch.Tensor,
    scores: torch.Tensor | None,
    method: str,
    key: Any = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The mask, by default a new one; None where the kernel does not serve. What is wrong with scores and methods the reference
    says. out: contiguous, without scores."""
    ranked = w if scores is None else scores
    if method != "exact" or not _in_blocks(ranked) or ranked.shape != w.shape or ranked.device != w.device:
        return None
    # Of w only the shape is read where there are scores.
    call = mask_call(w, scores, out)
    call.launch(_launch(ranked), ("w" if scores is None else "scores", *POINTERS))
    made: torch.Tensor = call.result("mask", key)
    return made


def compress_transposable(w: torch.Tensor, key: Any = None) -> tuple[Compressed, Compressed] | None:
    """Both orientations of a matrix; None where the kernel does not serve."""
    if w.dim() != 2 or not _in_blocks(w):
        return None
    call = Call({"w": w}, words=("w",))
    rows, columns = w.shape
    for suffix, (height, width) in (("", (rows, columns)), ("_t", (columns, rows))):
        call.allocate(f"values{suffix}", (height, width // 2), w.dtype)
        call.allocate(f"metadata{suffix}", (height, width // BLOCK), torch.uint8)
    call.launch(_launch(w), ("w", *POINTERS))
    made: tuple[Compressed, Compressed] = call.result(POINTERS[1:], key, None, _pairs)
    return made


def _pairs(made: tuple[torch.Tensor, ...]) -> tuple[Compressed, Compressed]:
    return Compressed(*made[:2]), Compressed(*made[2:])


def _in_blocks(x: torch.Tensor) -> bool:
    """Whether a tensor is floats in whole blocks."""
    if x.dtype not in FLOATS or x.dim() < 2 or not 0 < x.numel() < MOST * BLOCK:
        return False
    return x.shape[-2] % BLOCK == 0 and x.shape[-1] % BLOCK == 0


def _launch(x: torch.Tensor) -> CompiledLaunch:
    """The kernel; matrices of a batch stand below each other."""
    width = x.shape[-1] // BLOCK
    height = x.numel() // x.shape[-1] // BLOCK
    masked = height % DOWN != 0 or width % ACROSS != 0
    tail = (height, width, x.dtype.itemsize, x.dtype == torch.bfloat16, masked, DOWN, ACROSS, TILE)
    programs = -(-height // DOWN) * -(-width // ACROSS)
    return CompiledLaunch(transposable_kernel, programs, tail, 1, maxnreg=UNLIMITED if masked else REGISTERS)


__all__ = ["compress_transposable", "prune_transposable"]
