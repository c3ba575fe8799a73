"""Rows between processes as codes and scales: the all-to-all of embedding sums in low precision.

Models with tables on different ranks exchange rows (sums of bags) after the lookups and their gradients before the update. Here
a row is quantized by a scheme whose scales are of rows, its codes and scales travel as bytes in one collective, and the
receiver dequantizes: what arrives is `dequantize(quantize(row))`, whatever the ranks. Nothing is added on the way: a reduction
of codes would have to be dequantized at every step.

FP8 takes 132 bytes for 128 elements, bfloat16 256. How long that takes depends on the network and is not measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
import torch.distributed as dist

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
    q = quantize(torch.zeros(1, width), scheme_of(scheme), packed=True)
    if not by_rows(q) or q.outer is not None:
        raise ValueError(
            f"{q.scheme.name} has scales of more than a row; rows travel by a scheme such as fp8_rowwise, int8_rowwise or "
            f"mxfp8_e4m3"
        )
    return sum(part.nbytes for part in (getattr(q, name) for name in PARTS) if part is not None)


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
    rows, width = sum(receive), x.shape[1]
    if scheme is None:
        return _sent(x.contiguous(), send, receive, group)
    q = quantize(x.contiguous(), scheme_of(scheme), packed=True)
    parts = {name: part for name in PARTS if (part := getattr(q, name)) is not None}
    sent = torch.cat([_bytes(part) for part in parts.values()], 1)
    lengths = [_bytes(part).shape[1] for part in parts.values()]
    arrived = torch.split(_sent(sent, send, receive, group), lengths, 1)
    stored = {
        name: _from_bytes(some, part.dtype) for some, (name, part) in zip(arrived, parts.items(), strict=True)
    }
    codes = stored["codes"].reshape(
        packed_shape((rows, width), q.scheme.format) if q.packed else (rows, width)
    )
    back = Quantized(
        codes, stored["scale"], None, stored.get("zero"), (rows, width), q.axis, q.scheme, q.packed
    )
    return dequantize(back, x.dtype)


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
