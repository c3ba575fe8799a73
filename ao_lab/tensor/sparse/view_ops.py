"""Operations that cut a `SparseQuantizedTensor` and show it otherwise. Views share the parts."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch

from ao_lab.tensor.sparse import slicing
from ao_lab.tensor.sparse.registry import sparse_operation, sparse_view
from ao_lab.tensor.sparse.sparse_tensor import SparseQuantizedTensor

aten = torch.ops.aten


@sparse_view(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(t: SparseQuantizedTensor, shape: Any) -> SparseQuantizedTensor:
    return slicing.view(t, shape)


@sparse_view(aten.expand.default)
def _expand(t: SparseQuantizedTensor, shape: Any, implicit: bool = False) -> SparseQuantizedTensor:
    """To its own shape, or to a batch of itself."""
    t.check_shaped()
    rank = len(t.shape)
    wanted = tuple(n if want == -1 else want for n, want in zip(t.shape, shape[-rank:], strict=False))
    if wanted != tuple(t.shape):
        raise ValueError(f"expand of {t!r} to {tuple(shape)}: only to its own shape; dequantize() first")
    lead = tuple(shape[:-rank])
    return slicing.with_parts(t, lambda part: part.expand(*lead, *part.shape), (*lead, *t.shape))


@sparse_view(aten.slice.Tensor)
def _slice(
    t: SparseQuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> SparseQuantizedTensor:
    if step != 1:
        raise ValueError(f"slice of {t!r} with step {step}: only step 1; dequantize() first")
    return slicing.slice_axis(t, dim, 0 if start is None else start, t.shape[dim] if end is None else end)


@sparse_view(aten.split.Tensor)
def _split(t: SparseQuantizedTensor, size: int, dim: int = 0) -> list[SparseQuantizedTensor]:
    length = t.shape[dim]
    return [
        slicing.slice_axis(t, dim, first, last) for first, last in pairwise([*range(0, length, size), length])
    ]


@sparse_view(aten.split_with_sizes.default)
def _split_sizes(t: SparseQuantizedTensor, sizes: Any, dim: int = 0) -> list[SparseQuantizedTensor]:
    cuts = [0, *accumulate(sizes)]
    if cuts[-1] != t.shape[dim]:
        raise ValueError(f"split of axis {dim} of {t!r} into {list(sizes)}: these must sum to {t.shape[dim]}")
    return [slicing.slice_axis(t, dim, first, last) for first, last in pairwise(cuts)]


@sparse_view(aten.select.int)
def _select(t: SparseQuantizedTensor, dim: int, index: int) -> SparseQuantizedTensor:
    return slicing.select(t, dim % len(t.shape), index)


@sparse_view(aten.unbind.int)
def _unbind(t: SparseQuantizedTensor, dim: int = 0) -> list[SparseQuantizedTensor]:
    return [slicing.select(t, dim % len(t.shape), index) for index in range(t.shape[dim])]


@sparse_operation(aten.index_select.default)
def _index_select(func: Any, args: Any, kwargs: Any) -> SparseQuantizedTensor:
    t, dim, index = args
    found = slicing.select_rows(t, index) if dim % len(t.shape) == 0 else None
    if found is None:
        raise ValueError(
            f"index_select along axis {dim} of {t!r}: groups or blocks span it; dequantize() first"
        )
    return found


@sparse_operation(aten.index.Tensor)
def _index(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Experts, or rows, by number: t[numbers]. Of a matrix other places, and rows that blocks span, are dense numbers."""
    t, places = args
    single = len(places) == 1 and places[0].dim() == 1 and places[0].dtype != torch.bool
    found = slicing.select_rows(t, places[0]) if single else None
    if found is None and t.dim() == 2:
        return func(t.dequantize(), places)  # type: ignore[no-any-return]
    if found is None:
        raise ValueError(
            f"indexing of {t!r}: a vector of numbers along axis 0, where no block spans it; dequantize() first"
        )
    return found


@sparse_operation(aten.embedding.default)
def _embedding(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Only the rows that are asked for are decompressed, where a row can be."""
    weight, index = args[0], args[1]
    found = slicing.select_rows(weight, index)
    if found is None:
        return func(weight.dequantize(), *args[1:], **kwargs)  # type: ignore[no-any-return]
    return found.dequantize().reshape((*index.shape, weight.shape[1]))
