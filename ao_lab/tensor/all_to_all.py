"""Rows between processes as codes and scales: the all-to-all of embedding sums in low precision.

Models with tables on different ranks exchange rows (sums of bags) after the lookups and their gradients before the update. Here
a row is quantized by a scheme whose scales are of rows, its codes and scales travel as bytes in one collective, and the
receiver dequantizes: what arrives is `dequantize(quantize(row))`, whatever the ranks. On a GPU one launch makes the bytes of
rows of 8 bits with one scale, and one the values. Nothing is added on the way: a reduction of codes would have to be
dequantized at every step.

FP8 takes 132 bytes for 128 elements, bfloat16 256. How long that takes depends on the network (experiment `distributed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fast.dispatch import has_kernels, is_intercepted
from fast.ops import once_differentiable
from fast.quantize.quantize import dequantize, quantize
from reference import Quantized, Scheme
from reference.formats.storage import packed_shape
from reference.layers.embedding_bag import by_rows
from reference.schemes.schemes import scheme_of

#: Parts of a stored row.
PARTS = ("codes", "scale", "zero")


def all_to_all_rows(
    x: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    scheme: str | Scheme | None = "fp8_rowwise",
    *,
    gradient: str | Scheme | None = None,
    group: Any = None,
) -> torch.Tensor:
    """Send rows of x to the ranks of a group, quantized, and receive theirs: shape (sum(receive), width), in x's dtype.

    x: shape (sum(send), width), floating-point, the rows for rank 0 first. send, receive: numbers of rows for and from each
    rank. scheme: of the rows that are sent (None: unquantized), with scales per row. gradient: scheme of their gradients (None:
    unquantized).

    ValueError for splits that do not fit the group or x, for a scheme with scales over several rows, and without a process
    group; TypeError for x that is not a tensor and splits that are not integers. Nothing was sent then. Every rank must call it
    with the same schemes.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"all_to_all_rows takes a torch tensor, got {type(x).__name__}: {x!r:.60}")
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "all_to_all_rows sends between the ranks of a process group; init_process_group makes one"
        )
    ranks, send, receive = dist.get_world_size(group), list(map(index, send)), list(map(index, receive))
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"all_to_all_rows sends rows of a matrix of floats, got {x.dtype} of shape {tuple(x.shape)}"
        )
    if len(send) != ranks or len(receive) != ranks or sum(send) != len(x) or min(*send, *receive) < 0:
        raise ValueError(
            f"splits {send} and {receive} of {len(x)} rows among {ranks} ranks: one number a rank each, those of "
            f"send add up to the rows"
        )
    for one in (scheme, gradient):
        if one is not None:
            row_bytes(one, x.shape[1])
    result: torch.Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        x, send, receive, scheme, gradient, group
    )
    return result


def row_bytes(scheme: str | Scheme, width: int) -> int:
    """Bytes of a row of so many elements; ValueError where its scales are not of rows alone."""
    return sum(length for _, _, length in row_of(scheme_of(scheme), width, torch.float32).parts)


class Row(NamedTuple):
    """What is stored of a row: names, dtypes and bytes of its parts, the blocks' axis, whether codes are packed."""

    parts: tuple[tuple[str, torch.dtype, int], ...]
    axis: int
    packed: bool


#: Rows by the keys of schemes, widths and dtypes: what a small quantized row has said.
_rows: dict[tuple[str, int, torch.dtype], Row] = {}


def row_of(scheme: Scheme, width: int, dtype: torch.dtype) -> Row:
    """A stored row of so many elements; ValueError where its scales are not of rows alone."""
    known = _rows.get((scheme.key, width, dtype))
    if known is not None:
        return known
    q = quantize(torch.zeros(1, width, dtype=dtype), scheme, packed=True)
    if not by_rows(q) or q.outer is not None:
        raise ValueError(
            f"{q.scheme.name} has scales of more than a row; rows travel by a scheme such as fp8_rowwise, int8_rowwise or "
            f"mxfp8_e4m3"
        )
    parts = [(name, part) for name in PARTS if (part := getattr(q, name)) is not None]
    row = Row(tuple((name, part.dtype, part.nbytes) for name, part in parts), q.axis, q.packed)
    _rows[scheme.key, width, dtype] = row
    return row


class _AllToAll(torch.autograd.Function):
    """The exchange, and that of gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, send: list[int], receive: list[int], scheme: Any, gradient: Any, group: Any
    ) -> torch.Tensor:
        ctx.given = send, receive, gradient, group
        return exchanged(x, send, receive, scheme, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        send, receive, gradient, group = ctx.given
        return exchanged(g, receive, send, gradient, group), None, None, None, None, None


def exchanged(x: torch.Tensor, send: list[int], receive: list[int], scheme: Any, group: Any) -> torch.Tensor:
    """What arrives of the ranks' rows, in one collective."""
    x = x.contiguous()
    if scheme is None:
        return _sent(x, send, receive, group)
    scheme = scheme_of(scheme)
    return values_of(_sent(joined(x, scheme), send, receive, group), scheme, x.shape[1], x.dtype)


def joined(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Quantized rows of x as bytes (rows, `row_bytes`): codes, scales, zero points behind each other."""
    if is_launched(x):
        from fast.kernels.quantize.joined_rows import join_rows

        if (made := join_rows(x, scheme)) is not None:
            return made
    q = quantize(x, scheme, packed=True)
    return torch.cat([_bytes(part) for name in PARTS if (part := getattr(q, name)) is not None], 1)


def is_launched(x: torch.Tensor) -> bool:
    """Whether kernels may be launched past the dispatcher: tracers, modes and transforms have to see operators."""
    return not is_intercepted() and has_kernels(x)


def values_of(arrived: torch.Tensor, scheme: Scheme, width: int, dtype: torch.dtype) -> torch.Tensor:
    """What `joined` rows of so many elements stand for."""
    if is_launched(arrived):
        from fast.kernels.quantize.joined_rows import split_rows

        if (made := split_rows(arrived, scheme, dtype)) is not None:
            return made
    row, shape = row_of(scheme, width, dtype), (len(arrived), width)
    pieces = torch.split(arrived, [length for _, _, length in row.parts], 1)
    stored = {name: _from_bytes(some, kind) for some, (name, kind, _) in zip(pieces, row.parts, strict=True)}
    codes = stored["codes"].reshape(packed_shape(shape, scheme.format) if row.packed else shape)
    back = Quantized(codes, stored["scale"], None, stored.get("zero"), shape, row.axis, scheme, row.packed)
    return dequantize(back, dtype)


def _sent(x: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
    result = x.new_empty((sum(receive), x.shape[1]))
    dist.all_to_all_single(result, x, receive, send, group=group)
    return result


def _bytes(part: torch.Tensor) -> torch.Tensor:
    """A row's part as bytes; of no rows too, whose strides say nothing."""
    return part.reshape(-1).view(torch.uint8).reshape(len(part), part.shape[1] * part.itemsize)


def _from_bytes(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same back; a copy, also of one row or none, since other parts lie between rows and before them."""
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


__all__ = ["all_to_all_rows", "row_bytes"]
