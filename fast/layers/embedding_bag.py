"""`embedding_bag` for torch tensors; see `reference.embedding_bag` for the rule.

On a GPU ids are not checked before the launch, which would wait for them: the kernel reads no row outside of the table and ends
with a device-side assertion, as torch's own lookups do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, require_tensor, run, settings
from fast.ops import record_name, register
from fast.quantize.quantize import stored
from reference import Quantized
from reference.arrays.namespace import DTypeLike, choice, dtype_name
from reference.layers.embedding_bag import DTYPES, MODES
from reference.quantize.quantize import with_plain_scales
from reference.schemes.schemes import record_of

Values = tuple[Any, ...]
Operands = Sequence[Any]
NONE = -1


def embedding_bag(
    table: Quantized,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    mode: str = "sum",
    padding: int | None = None,
    dtype: DTypeLike = "float32",
    features: int = 1,
) -> torch.Tensor:
    """Sums of rows (bags, width) on the table's device, without gradient. Arguments and errors as in `reference.embedding_bag`.

    features: bags of different lengths come in turn, so many of them (the tables of a model): bags of one kind then share a
    program of the kernel. No bit depends on it.
    """
    choice(mode, MODES, "mode")
    name = dtype_name(dtype, DTYPES, "dtype")
    if not isinstance(table, Quantized):
        # The reference says what is wrong.
        return require_tensor(reference.embedding_bag(table, ids, offsets), "embedding_bag")
    q = with_plain_scales(table)
    values = (mode, NONE if padding is None else int(padding), name, int(features), *settings(q))
    y: torch.Tensor = run(
        EMBEDDING_BAG, q.scheme, values, (q.codes, q.scale, q.outer, q.zero, ids, offsets, weights)
    )
    return y


def embedding_bag_op(
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    mode: str,
    padding: int,
    dtype: str,
    features: int,
    shape: list[int],
    axis: int,
    scheme: str,
    packed: bool,
) -> torch.Tensor:
    """Sums of rows, bag by bag."""
    values = (mode, padding, dtype, features, tuple(shape), axis, packed, False)
    operands = (codes, scale, outer, zero, ids, offsets, weights)
    result: torch.Tensor = execute(EMBEDDING_BAG, record_of(scheme), values, operands)
    return result


def _fake(
    codes: torch.Tensor, scale: Any, outer: Any, zero: Any, ids: Any, offsets: torch.Tensor, weights: Any, mode: str,
    padding: int, dtype: str, features: int, shape: list[int], axis: int, scheme: str, packed: bool,
) -> torch.Tensor:  # fmt: skip
    return codes.new_empty((offsets.shape[0], shape[1]), dtype=getattr(torch, dtype))


def _operate(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    *options, shape, axis, packed, _ = values
    result: torch.Tensor = torch.ops.ao_lab.embedding_bag(
        *operands, *options, list(shape), axis, record_name(record), packed
    )
    return result


def _reference(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    mode, padding, dtype, _, *rest = values
    q = stored(record, rest, operands[:4])
    result: torch.Tensor = reference.embedding_bag(
        q, *operands[4:], mode=mode, padding=None if padding == NONE else padding, dtype=dtype
    )
    return result


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.layers import embedding_bag as host

    *options, shape, axis, packed, tiled = values
    return host.embedding_bag(
        stored(record, (shape, axis, packed, tiled), operands[:4]), *operands[4:], *options
    )


OPERANDS = ("codes", "scale", "outer scale", "zero point", "ids", "offsets", "weights")
EMBEDDING_BAG = Function("embedding_bag", OPERANDS, _reference, _operate, _kernel)
register("embedding_bag", embedding_bag_op, _fake)

__all__ = ["embedding_bag"]
