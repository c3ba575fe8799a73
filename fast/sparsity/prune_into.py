"""A mask by magnitude, written into one that is there: what training renews in each step, where others have its address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import fast
from fast.dispatch import Function, execute
from fast.kernels.sm90_sparse24_gemm.bits import OCTET, pack_bits, packed_shape


def prune_into(
    w: torch.Tensor, out: torch.Tensor, *, pattern: str = "2:4", transposable: bool = False
) -> torch.Tensor:
    """out, a bool tensor of w's shape, or uint8 of its bits: `prune(w, pattern=pattern)`, or `prune_transposable(w)`, is
    written to it; bits as `fast.kernels.sm90_sparse24_gemm.bits` packs them.

    On a GPU by their kernels without a copy where `out` is contiguous (bits: of 2:4 and floats, in rows of whole octets).
    Errors are theirs. Autograd sees the write.
    """
    if not _in_place(w, out, pattern):
        return _copied(None, (pattern, transposable), (w, out))
    made: torch.Tensor = execute(PRUNE_INTO, None, (pattern, transposable), (w, out))
    if out.is_cuda:  # written by its address, of which torch knows nothing
        torch.autograd.graph.increment_version(out)
    return made


def _in_place(w: torch.Tensor, out: torch.Tensor, pattern: str) -> bool:
    """Asked in every call: one that is remembered reads its tensors as contiguous copies, and would write to one."""
    if out.device != w.device or not out.is_contiguous():
        return False
    if out.dtype == torch.bool:
        return out.shape == w.shape
    whole = w.dim() > 0 and w.shape[-1] % OCTET == 0 and pattern == "2:4" and w.is_floating_point()
    return out.dtype == torch.uint8 and whole and out.shape == packed_shape(w.shape)


def _copied(record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> torch.Tensor:
    w, out = operands
    pattern, transposable = values
    mask = fast.prune_transposable(w) if transposable else fast.prune(w, pattern=pattern)
    return out.copy_(pack_bits(mask) if out.dtype == torch.uint8 else mask)


def _kernel(record: Any, values: tuple[Any, ...], operands: Sequence[Any], key: Any) -> torch.Tensor | None:
    from fast.kernels.sparsity import host
    from fast.kernels.sparsity import transposable as transposable_host

    w, out = operands
    pattern, transposable = values
    if transposable:
        return transposable_host.prune_transposable(w, None, "exact", key, out)
    return host.prune(w, None, pattern, key, out)


PRUNE_INTO = Function("prune_into", ("w", "out"), _copied, _copied, _kernel)

__all__ = ["PRUNE_INTO", "prune_into"]
