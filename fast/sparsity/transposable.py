"""`prune_transposable` and `compress_transposable` for torch tensors; see those of `reference` for ties and NaN."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, run
from fast.ops import register
from reference import Compressed


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
    made: tuple[Compressed, Compressed] = run(COMPRESS_TRANSPOSABLE, None, (), (w,))
    return made


def _prune_kernel(record: Any, values: Any, operands: Any, key: Any) -> Any:
    from fast.kernels.sparsity import transposable

    return transposable.prune_transposable(*operands, *values, key)


def prune_transposable_op(w: torch.Tensor, scores: torch.Tensor | None, method: str) -> torch.Tensor:
    """Bool mask of the weights to keep."""
    made: torch.Tensor = execute(PRUNE_TRANSPOSABLE, None, (method,), (w, scores))
    return made


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
    made = []
    for shape in (w.shape, w.mT.shape):
        *rest, length = shape
        made.append(w.new_empty((*rest, length // 2)))
        made.append(w.new_empty((*rest, (length + 7) // 8), dtype=torch.uint8))
    return made


def _compress_operator(record: Any, values: Any, operands: Any) -> tuple[Compressed, Compressed]:
    made = torch.ops.ao_lab.compress_transposable(*operands)
    return Compressed(*made[:2]), Compressed(*made[2:])


COMPRESS_TRANSPOSABLE = Function(
    "compress_transposable", ("w",), lambda r, v, o: reference.compress_transposable(*o), _compress_operator,
    _compress_kernel,
)  # fmt: skip
register("compress_transposable", compress_transposable_op, _compress_fake)


__all__ = ["compress_transposable", "prune_transposable"]
