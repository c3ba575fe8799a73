"""A masked weight, or its transpose, compressed for the kernel of `linear_sparse`: what products of training multiply by.

`reference.compress` of the weight and its mask, whose metadata `fast.kernels.sparse_mm.arrange` puts in order; on a GPU in one
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute
from fast.kernels.sparse_mm.arrange import arrange
from reference import Compressed

#: What the kernel of 16-bit elements takes.
DTYPES = (torch.float16, torch.bfloat16)


def compress_masked(w: torch.Tensor, mask: torch.Tensor, turned: bool = False) -> Compressed:
    """Values (N, K/2) and arranged metadata of w (N, K) where mask is True; turned: of the transposes, values (K, N/2).

    w: float16 or bfloat16, lengths in multiples of 8. mask: bool of its shape with at most two of every four True along the
    axis that is compressed. That is not checked on a GPU, where the host waits for nothing: of more the first two stay. The
    CPU raises ValueError as `reference.compress` does. TypeError for other dtypes, ValueError for other shapes.
    """
    made: Compressed = execute(COMPRESS_MASKED, None, (turned,), (w, mask))
    return made


def _check(w: torch.Tensor, mask: torch.Tensor) -> None:
    """The errors that both ways have."""
    if w.dtype not in DTYPES or mask.dtype != torch.bool:
        raise TypeError(
            f"compress_masked takes float16 or bfloat16 and a bool mask, got {w.dtype} and {mask.dtype}; cast them first"
        )
    if w.dim() != 2 or mask.shape != w.shape or w.shape[0] % 8 or w.shape[1] % 8 or not w.numel():
        raise ValueError(
            f"compress_masked takes a matrix and a mask of its shape, lengths in multiples of 8, got {tuple(w.shape)} and "
            f"{tuple(mask.shape)}; pad them with zeros"
        )


def _reference(record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> Compressed:
    w, mask = operands
    _check(w, mask)
    sides = [side.t().contiguous() for side in (w, mask)] if values[0] else [w, mask]
    kept, metadata = reference.compress(*sides)
    return Compressed(kept, arrange(metadata, 16, defined=True))


def _kernel(record: Any, values: tuple[Any, ...], operands: Sequence[Any], key: Any) -> Compressed:
    from fast.kernels.sparse_mm.masked_host import compress_masked

    _check(*operands)
    return compress_masked(*operands, *values, key)


# No operator: it is a part of what operators are implemented by.
COMPRESS_MASKED = Function("compress_masked", ("w", "mask"), _reference, _reference, _kernel)

__all__ = ["COMPRESS_MASKED", "compress_masked"]
