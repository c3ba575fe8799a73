"""`prune`, `prune_transposable` and `compress_transposable` for torch tensors; see those of `reference` for ties and NaN.

`prune_into` writes such a mask into one that is there: what training renews in each step, where others have its address.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, run
from fast.kernels.sm90_sparse24_gemm.arrange import OCTET, pack_bits, packed_shape
from fast.ops import register
from fast.sparsity.compress import PRUNE
from reference import Compressed

# `prune` for torch tensors; see `reference.prune` for ties and NaN.


def prune(w: torch.Tensor, *, pattern: str = "2:4", scores: torch.Tensor | None = None) -> torch.Tensor:
    """Bool mask of the weights to keep on w's device, as in `reference.prune`."""
    mask: torch.Tensor = run(PRUNE, None, (pattern,), (w, scores))
    return mask


def prune_transposable(
    w: torch.Tensor, *, scores: torch.Tensor | None = None, method: str = "exact"
) -> torch.Tensor:
    """Bool mask of the weights to keep on w's device, as in `reference.prune_transposable`.

    On a GPU one kernel finds "exact" masks of float32, bfloat16 and float16 in rows and columns of multiples of 8; other calls
    run as torch operations, which take 90 times the memory of the scores.
    """
    mask: torch.Tensor = run(PRUNE_TRANSPOSABLE, None, (method,), (w, scores))
    return mask


def compress_transposable(w: torch.Tensor) -> tuple[Compressed, Compressed]:
    """w and its transpose in 2:4 storage by one mask, as in `reference.compress_transposable`. No gradient flows through.

    On a GPU one kernel reads a matrix once, with rows and columns in multiples of 8, and writes both.
    """
    result: tuple[Compressed, Compressed] = run(COMPRESS_TRANSPOSABLE, None, (), (w,))
    return result


def _prune_kernel(record: Any, values: Any, operands: Any, key: Any) -> Any:
    from fast.kernels.sparsity import transposable

    return transposable.prune_transposable(*operands, *values, key)


def prune_transposable_op(w: torch.Tensor, scores: torch.Tensor | None, method: str) -> torch.Tensor:
    """Bool mask of the weights to keep."""
    result: torch.Tensor = execute(PRUNE_TRANSPOSABLE, None, (method,), (w, scores))
    return result


PRUNE_TRANSPOSABLE = Function(
    "prune_transposable", ("w", "scores"),
    lambda r, v, o: reference.prune_transposable(o[0], scores=o[1], method=v[0]),
    lambda r, v, o: torch.ops.ao_lab.prune_transposable(*o, *v), _prune_kernel,
)  # fmt: skip
register(
    "prune_transposable", prune_transposable_op,
    lambda w, scores, method: w.new_empty(w.shape, dtype=torch.bool),
)  # fmt: skip


def _compress_kernel(record: Any, values: Any, operands: Any, key: Any) -> Any:
    from fast.kernels.sparsity import transposable

    return transposable.compress_transposable(*operands, key)


def compress_transposable_op(w: torch.Tensor) -> list[torch.Tensor]:
    """Values and metadata of w, and of its transpose."""
    one, other = execute(COMPRESS_TRANSPOSABLE, None, (), (w,))
    return [*one, *other]


def _compress_fake(w: torch.Tensor) -> list[torch.Tensor]:
    result = []
    for shape in (w.shape, w.mT.shape):
        *rest, length = shape
        result.append(w.new_empty((*rest, length // 2)))
        result.append(w.new_empty((*rest, (length + 7) // 8), dtype=torch.uint8))
    return result


def _compress_operator(record: Any, values: Any, operands: Any) -> tuple[Compressed, Compressed]:
    result = torch.ops.ao_lab.compress_transposable(*operands)
    return Compressed(*result[:2]), Compressed(*result[2:])


COMPRESS_TRANSPOSABLE = Function(
    "compress_transposable", ("w",), lambda r, v, o: reference.compress_transposable(*o), _compress_operator,
    _compress_kernel,
)  # fmt: skip
register("compress_transposable", compress_transposable_op, _compress_fake)


# A mask by magnitude, written into one that is there: what training renews in each step, where others have its address.


def prune_into(
    w: torch.Tensor, out: torch.Tensor, *, pattern: str = "2:4", transposable: bool = False
) -> torch.Tensor:
    """out, a bool tensor of w's shape, or uint8 of its bits: `prune(w, pattern=pattern)`, or `prune_transposable(w)`, is
    written to it; bits as `fast.kernels.sm90_sparse24_gemm.arrange` packs them.

    On a GPU by their kernels without a copy where `out` is contiguous (bits: of 2:4 and floats, in rows of whole octets).
    Errors are theirs. Autograd sees the write.
    """
    if not _in_place(w, out, pattern):
        return _copied(None, (pattern, transposable), (w, out))
    result: torch.Tensor = execute(PRUNE_INTO, None, (pattern, transposable), (w, out))
    if out.is_cuda:  # written by its address, of which torch knows nothing
        torch.autograd.graph.increment_version(out)
    return result


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
    mask = prune_transposable(w) if transposable else prune(w, pattern=pattern)
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


__all__ = ["compress_transposable", "prune_into", "prune_transposable"]
