"""Lookups in a `QuantizedTensor`: rows as they are stored are read, decoded and added, and no others.

`embedding_bag` is what nn.EmbeddingBag computes, by `fast.embedding_bag`; nn.EmbeddingBag itself comes here as well, with modes
"sum" and "mean", weights and a padding index. Tables whose rows share scales, and mode "max", are looked up first and then left
to torch.
"""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.tensor import slicing
from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor

aten = torch.ops.aten
#: Modes of torch's operators, by their number.
MODES = ("sum", "mean", "max")
#: Dtypes of a table that its sums have too.
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def embedding_bag(
    table: QuantizedTensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    mode: str = "sum",
    padding: int | None = None,
    features: int = 1,
) -> torch.Tensor:
    """Sums (or means) of rows of a quantized embedding table, (bags, width) in the table's dtype; see
    `reference.embedding_bag`.

    ids: (n,) integers; offsets: (bags,) integers, the starts of bags; weights: (n,), factors of rows. features: number of kinds
    of bags that alternate, as the tables of a model do (sample after sample): on a GPU bags of one kind share a program.

    TypeError for a table that is not a `QuantizedTensor`. ValueError as in `reference.embedding_bag`; on a GPU ids outside of
    the table are a device-side assertion, as for torch's own lookups.
    """
    if not isinstance(table, QuantizedTensor):
        raise TypeError(
            f"embedding_bag takes a QuantizedTensor, got {type(table).__name__}; quantize_ makes tables so, and "
            f"torch.nn.functional.embedding_bag is for dense ones"
        )
    if table.dtype not in DTYPES:
        raise TypeError(
            f"embedding_bag gives sums in the table's dtype, which is one of {', '.join(DTYPES.values())}, not {table.dtype}"
        )
    if weights is not None and weights.requires_grad and torch.is_grad_enabled():
        raise ValueError("embedding_bag of a quantized table has no gradient; give weights.detach()")
    y: torch.Tensor = _stored_bags()(
        _rows_apart(table), ids, offsets, weights,
        mode=mode, padding=padding, dtype=DTYPES[table.dtype], features=features,
    )  # fmt: skip
    return y


def _stored_bags() -> Any:
    """`fast.embedding_bag`, imported when the first table is looked up in."""
    from fast.layers.embedding_bag import embedding_bag as function

    return function


def _rows_apart(table: QuantizedTensor) -> Any:
    """A table as `fast` knows it, its rows along its first axis."""
    if len(table.shape) != 2 or table.meta.flat is not None or table.meta.transposed:
        raise ValueError(
            f"embedding_bag takes a table of shape (rows, width) as quantized, got a view of shape {tuple(table.shape)}"
        )
    return table.plain.stored


@operation(aten.embedding.default)
def _embedding(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Only the rows that are asked for are dequantized, where a row can be."""
    weight, index = args[0], args[1]
    rows = slicing.select_rows(weight, index, counted=True)
    if rows is None:
        return func(weight.dequantize(), *args[1:], **kwargs)  # type: ignore[no-any-return]
    return rows.dequantize().reshape((*index.shape, weight.shape[1]))


@operation(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(
    func: Any,
    args: Any,
    kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    """What torch's operators return: the sums, and three tensors that only a dense table's gradient reads."""
    call = Bags(*args, **kwargs)
    table = call.weight
    whole = isinstance(table, QuantizedTensor) and table.meta.flat is None and not table.meta.transposed
    if not whole or call.mode > 1 or table.dtype not in DTYPES:
        return call.of_rows(func)
    # Of offsets that say where the last bag ends, what follows is a bag of its own.
    y: torch.Tensor = _stored_bags()(
        table.plain.stored, call.indices, call.offsets, call.per_sample_weights,
        mode=MODES[call.mode], padding=None if call.padding_idx < 0 else call.padding_idx, dtype=DTYPES[table.dtype],
    )  # fmt: skip
    y = y[:-1] if call.include_last_offset else y
    none = call.indices.new_empty(0)
    return y, none, none.new_empty(0), none.new_empty(0)


class Bags:
    """The arguments of torch's operators."""

    def __init__(
        self, weight: Any, indices: torch.Tensor, offsets: torch.Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
        sparse: bool = False, per_sample_weights: torch.Tensor | None = None, include_last_offset: bool = False,
        padding_idx: int = -1,
    ) -> None:  # fmt: skip
        self.weight, self.indices, self.offsets, self.mode = weight, indices, offsets, mode
        self.per_sample_weights, self.include_last_offset = per_sample_weights, include_last_offset
        self.padding_idx = padding_idx

    def of_rows(self, func: Any) -> tuple[torch.Tensor, ...]:
        """By torch, of the rows that are asked for, or of the dense table."""
        rows = slicing.select_rows(self.weight, self.indices, counted=True)
        dense, places = (self.weight if rows is None else rows).dequantize(), self.indices
        padding = self.padding_idx
        if rows is not None:
            if padding >= 0:
                raise ValueError(
                    "embedding_bag with mode='max' and a padding index: dequantize() the table first"
                )
            places = torch.arange(len(self.indices), device=self.indices.device, dtype=self.indices.dtype)
        result: tuple[torch.Tensor, ...] = func(
            dense, places, self.offsets, False, self.mode, False, self.per_sample_weights,
            self.include_last_offset, padding,
        )  # fmt: skip
        return result


__all__ = ["embedding_bag"]
