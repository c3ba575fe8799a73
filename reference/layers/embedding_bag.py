"""Sums of rows of a stored table, bag by bag: what recommendation models look up.

A row is what `dequantize` gives in float32. A bag begins with +0 and adds its rows in the order of its ids, each multiplied by
its weight where there are weights; products and sums are rounded to float32 one by one, and the last sum to the output's dtype.
"mean" divides it by the number of ids first, correctly rounded. A bag without ids is +0. So the order of every addition is part
of the rule: a kernel gives the same bits.

Non-finite values go the way of IEEE arithmetic; overflow of a sum or of a product with a weight is infinity.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from reference.arrays.bridges import bridged, holds_jax
from reference.arrays.namespace import (
    Array,
    DTypeLike,
    Namespace,
    check_plain,
    choice,
    dtype_name,
    namespace_of,
)
from reference.arrays.softfloat import add, divide, float32_bits, multiply
from reference.formats.encode import to_dtype_bits
from reference.quantize.quantize import check_quantized, dequantize, with_plain_scales
from reference.quantize.stored import Quantized

MODES = ("sum", "mean")
DTYPES = ("float32", "bfloat16", "float16")
_dequantize = inspect.unwrap(dequantize)


def embedding_bag(
    table: Quantized,
    ids: Any,
    offsets: Any,
    weights: Any = None,
    *,
    mode: str = "sum",
    padding: int | None = None,
    dtype: DTypeLike = "float32",
) -> Array:
    """Sums (or means) of rows of a table: (bags, width) of the dtype.

    table: a `Quantized` of shape (rows, width), of any scheme. ids: (n,) integers. offsets: (bags,) integers, where each bag's
    ids begin: 0 first, never falling, at most n; the last bag ends with the ids. weights: (n,) float32, bfloat16 or float16, of
    the same library, factors of rows; for "sum" alone. padding: an id whose rows are left out, and do not count in a mean.

    Raises TypeError for ids and offsets that are no integers and for a table that is no `Quantized`, ValueError for other
    shapes, ids outside of the table and weights of a mean. ids and offsets are read on the host: they cannot be traced by JAX.
    """
    table = checked_table(table)
    choice(mode, MODES, "mode")
    name = dtype_name(dtype, DTYPES, "dtype")
    index, starts = host_integers(ids, "ids"), host_integers(offsets, "offsets")
    check_bags(index, starts, table.shape[0], weights, mode)
    if padding is not None and (kept := index != padding).sum() < len(index):
        starts = np.concatenate([[0], np.cumsum(kept)])[starts]
        weights = None if weights is None else weights[as_index(weights, np.flatnonzero(kept))]
        index = index[kept]
    # Which ids there are is no part of a program: those of JAX are of one step.
    add_up = _bags_by_steps if holds_jax(table.codes) else _bags
    y: Array = add_up(table, index, starts, weights, mode, name)
    return y


@bridged
def _bags(table: Quantized, index: Any, starts: Any, weights: Any, mode: str, name: str) -> Array:
    """`embedding_bag` of what was checked."""
    ns = namespace_of(table.codes)
    total = _sums(ns, table, index, starts, weights)
    return _finished(ns, total, starts, len(index), mode, name)


def _finished(ns: Namespace, total: Array, starts: Any, count: int, mode: str, name: str) -> Array:
    """Sums as the mode and the dtype have them."""
    if mode == "mean":
        counts = np.maximum(np.diff(np.append(starts, count)), 1).astype(np.float32)
        total = divide(ns, total, ns.constant(counts.view(np.int32)[:, None], total))
    return to_dtype_bits(ns, total, name)


def checked_table(table: object) -> Quantized:
    """A matrix, its scales not tiled; TypeError or ValueError for anything else."""
    if not isinstance(table, Quantized):
        raise TypeError(
            f"embedding_bag takes a table as a Quantized, got {type(table).__name__}; quantize(table, scheme) makes one"
        )
    if len(table.shape) != 2:
        raise ValueError(f"embedding_bag takes a table of shape (rows, width), got {table.shape}")
    check_quantized(table)
    return with_plain_scales(table)


def as_index(like: Array, places: Any) -> Array:
    """Places as an index of an array's library, on its device."""
    return namespace_of(like).constant(places, like)


def host_integers(values: Any, what: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One axis of integers as int64 on the host."""
    check_plain(values)
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what} are integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(
            f"{what} have one axis, got shape {array.shape}; ids (bags, n) are ids.reshape(-1) with offsets 0, n, 2 n, ..."
        )
    return array.astype(np.int64)


def check_bags(index: Any, starts: Any, rows: int, weights: Any, mode: str) -> None:
    """ValueError for offsets that are none, ids outside of the table, and weights of another shape or of a mean; TypeError for
    weights that are masked."""
    check_plain(weights)
    if len(starts) and (starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > len(index)):
        raise ValueError(
            f"offsets begin with 0, never fall and end at most at {len(index)}, the number of ids; got {starts[:8].tolist()}"
            f"{' ...' * (len(starts) > 8)}"
        )
    if not len(starts) and len(index):
        raise ValueError(f"{len(index)} ids belong to no bag: offsets are empty")
    if (outside := (index < 0) | (index >= rows)).any():
        at = int(np.flatnonzero(outside)[0])
        raise ValueError(
            f"id {index[at]} at place {at} is outside of a table of {rows} rows (0 to {rows - 1}); map unknown ids to a row of "
            f"their own"
        )
    if weights is not None and mode != "sum":
        raise ValueError("weights are factors of a sum; mode='mean' takes none")
    if weights is not None and tuple(weights.shape) != index.shape:
        raise ValueError(f"weights of shape {tuple(weights.shape)} for {len(index)} ids; each id has one")


def _sums(ns: Namespace, table: Quantized, index: Any, starts: Any, weights: Any) -> Array:
    """float32 bit patterns of the sums (bags, width): the j-th ids of all bags that have so many, for one j after the other."""
    lengths = np.diff(np.append(starts, len(index)))
    order = np.argsort(-lengths, kind="stable")
    like, width = table.codes, table.shape[1]
    total, finished = ns.full((len(starts), width), 0, "int32", like), []
    factors = None if weights is None else float32_bits(ns, weights, ns.dtype_name(weights))
    rows = _rows(ns, table)
    for step in range(int(lengths.max(initial=0))):
        going = int((lengths > step).sum())
        finished.append(total[going:])
        places = starts[order[:going]] + step
        value = rows(index[places])
        if factors is not None:
            value = multiply(ns, factors[ns.constant(places, like)][:, None], value)
        total = add(ns, total[:going], value)
    parts = [total, *reversed(finished)]
    back = np.argsort(order, kind="stable")
    return ns.concatenate(parts, 0)[ns.constant(back, like)]


def _rows(ns: Namespace, table: Quantized) -> Any:
    """A function from ids to float32 bit patterns of rows: stored rows where blocks lie in rows, else of the dense table."""
    if by_rows(table):

        def of_stored(index: Any) -> Array:
            picked = _picked(table, ns.constant(index, table.codes), len(index))
            return float32_bits(ns, _dequantize(picked, "float32"), "float32")

        return of_stored
    dense = float32_bits(ns, _dequantize(table, "float32"), "float32")
    return lambda index: dense[ns.constant(index, table.codes)]


def _bags_by_steps(table: Quantized, index: Any, starts: Any, weights: Any, mode: str, name: str) -> Array:
    """The same for JAX: programs of one shape, a step each, in which bags without a further id stay as they are."""
    ns = namespace_of(table.codes)
    lengths, width = np.diff(np.append(starts, len(index))), table.shape[1]
    total = ns.full((len(starts), width), 0, "float32", table.codes)
    whole = None if by_rows(table) else dequantize(table, "float32")
    for step in range(int(lengths.max(initial=0))):
        places = np.minimum(starts + step, len(index) - 1)
        at = ns.constant(index[places], table.codes)
        value = dequantize(_picked(table, at, len(places)), "float32") if whole is None else whole[at]
        factor = None if weights is None else weights[ns.constant(places, table.codes)][:, None]
        total = _step(total, value, factor, ns.constant((lengths > step)[:, None], table.codes))
    return _last_step(total, np.asarray(starts), len(index), mode, name)


@bridged
def _step(total: Any, value: Any, factor: Any, going: Any) -> Array:
    """One more row for bags that go on: float32 arrays, factors of a dtype of weights."""
    ns = namespace_of(total)
    bits, added = ns.bitcast(total, "int32"), float32_bits(ns, value, "float32")
    if factor is not None:
        added = multiply(ns, float32_bits(ns, factor, ns.dtype_name(factor)), added)
    return ns.bitcast(ns.where(going, add(ns, bits, added), bits), "float32")


def _last_step(total: Any, starts: Any, count: int, mode: str, name: str) -> Array:
    ns = namespace_of(total)
    return _finished(ns, ns.bitcast(total, "int32"), starts, count, mode, name)


def by_rows(table: Quantized) -> bool:
    """Whether each row has scales of its own, of the row alone, and codes that begin with a byte."""
    outer_shape = None if table.outer is None else tuple(table.outer.shape)
    along = isinstance(table.scheme.scale.block, int) and table.axis == 1
    return along and outer_shape in (None, ())


def _picked(table: Quantized, at: Array, count: int) -> Quantized:
    """Some rows as a table."""
    return replace(
        table, **{name: part[at] for name, part in _row_parts(table)}, shape=(count, table.shape[1])
    )


def _row_parts(table: Quantized) -> Iterator[tuple[str, Any]]:
    for name in ("codes", "scale", "zero"):
        part = getattr(table, name)
        if part is not None and len(part.shape) == 2:
            yield name, part


__all__ = ["embedding_bag"]
