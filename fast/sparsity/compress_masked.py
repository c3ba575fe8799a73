"""A masked weight, or its transpose, compressed for the kernel of `linear_sparse`: what products of training multiply by.

`reference.compress` of the weight and its mask, whose metadata `fast.kernels.sm90_sparse24_gemm.arrange` puts in order; on a
GPU in one kernel. Masks are bool, or bits (`fast.kernels.sm90_sparse24_gemm.bits`); `masked` gives the masked weight as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.device import is_traced, is_transformed
from fast.dispatch import Function, execute
from fast.kernels.sm90_sparse24_gemm.arrange import arrange
from fast.kernels.sm90_sparse24_gemm.bits import OCTET, packed_shape, unpack_bits
from reference import Compressed

#: What the kernel of 16-bit elements takes.
DTYPES = (torch.float16, torch.bfloat16)


def compress_masked(w: torch.Tensor, mask: torch.Tensor, turned: bool = False) -> Compressed:
    """Values (N, K/2) and arranged metadata of w (N, K) where mask is True; turned: of the transposes, values (K, N/2).

    w: float16 or bfloat16, lengths in multiples of 8. mask: bool of its shape or uint8 (N, K/8), the bits of one, with at most
    two of every four True along the axis that is compressed. That is not checked on a GPU, where the host waits for nothing: of
    more the first two stay. The CPU raises ValueError as `reference.compress` does. TypeError for other dtypes, ValueError for
    other shapes.
    """
    made: Compressed = execute(COMPRESS_MASKED, None, (turned,), (w, mask))
    return made


def masked(w: torch.Tensor, mask: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """w (..., K) where mask is True, the same bits, +0 elsewhere, also where w is NaN. out: w itself or memory like it.

    For calls in which no gradient is recorded. mask: bool of its shape, or uint8 (..., ceil(K/8)), the bits of one: on a GPU by
    one kernel where 8 divides K; where a mode or a compiler listens by torch's operators. ValueError for other shapes.
    """
    if mask.dtype == torch.bool:
        return _written(w, mask, out)
    if mask.dtype != torch.uint8 or mask.shape != packed_shape(w.shape):
        raise ValueError(
            f"masked takes a bool mask of the weight's shape {tuple(w.shape)}, or uint8 of {packed_shape(tuple(w.shape))}, got "
            f"{mask.dtype} of {tuple(mask.shape)}; `pack_bits` makes such"
        )
    plain = not (is_traced(w) or is_transformed())
    if not (plain and w.is_cuda and _served(w, out)):
        return _written(w, unpack_bits(mask, w.shape[-1]), out)
    made: torch.Tensor = execute(MASKED, None, (), (w, mask, out))
    if out is None:
        return made
    torch.autograd.graph.increment_version(out)  # written by its address, of which torch knows nothing
    return out


def _served(w: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Asked in every call: one that is remembered reads its tensors as contiguous copies, and would write to one."""
    if out is not None and (
        (out.dtype, out.shape) != (w.dtype, w.shape) or not out.is_contiguous() or out.is_neg()
    ):
        return False
    return w.dtype.itemsize in (2, 4) and w.shape[-1] % OCTET == 0 and w.numel() > 0


def _written(w: torch.Tensor, mask: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """By torch."""
    if out is not None and out is w:
        return out.masked_fill_(~mask, 0)
    made = torch.where(mask, w, 0)
    return made if out is None else out.copy_(made)


def _check(w: torch.Tensor, mask: torch.Tensor) -> None:
    """The errors that both ways have."""
    if w.dtype not in DTYPES or mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(
            f"compress_masked takes float16 or bfloat16 and a bool mask, or uint8 of its bits, got {w.dtype} and {mask.dtype}; "
            f"cast them first"
        )
    shape = tuple(w.shape) if mask.dtype == torch.bool else packed_shape(tuple(w.shape))
    if w.dim() != 2 or mask.shape != shape or w.shape[0] % 8 or w.shape[1] % 8 or not w.numel():
        raise ValueError(
            f"compress_masked takes a matrix and a mask of its shape, or its bits, lengths in multiples of 8, got "
            f"{tuple(w.shape)} and {mask.dtype} of {tuple(mask.shape)}; pad them with zeros"
        )


def _reference(record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> Compressed:
    w, mask = operands
    _check(w, mask)
    mask = mask if mask.dtype == torch.bool else unpack_bits(mask, w.shape[1])
    sides = [side.t().contiguous() for side in (w, mask)] if values[0] else [w, mask]
    kept, metadata = reference.compress(*sides)
    return Compressed(kept, arrange(metadata, 16, defined=True))


def _kernel(record: Any, values: tuple[Any, ...], operands: Sequence[Any], key: Any) -> Compressed:
    from fast.kernels.sm90_sparse24_gemm.masked_host import compress_masked

    _check(*operands)
    return compress_masked(*operands, *values, key)


def _unpacked(record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> torch.Tensor:
    w, bits, out = operands
    return _written(w, unpack_bits(bits, w.shape[-1]), out)


def _keep(record: Any, values: tuple[Any, ...], operands: Sequence[Any], key: Any) -> torch.Tensor:
    from fast.kernels.sm90_sparse24_gemm.masked_host import keep

    return keep(*operands, key)


# No operators: they are parts of what operators are implemented by.
COMPRESS_MASKED = Function("compress_masked", ("w", "mask"), _reference, _reference, _kernel)
MASKED = Function("masked", ("w", "bits", "out"), _unpacked, _unpacked, _keep)

__all__ = ["COMPRESS_MASKED", "MASKED", "compress_masked", "masked"]
