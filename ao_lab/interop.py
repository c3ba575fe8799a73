"""Quantized tensors in torch's own dtypes: views of the same memory, for `torch._scaled_mm` and for other libraries.

`Quantized` stores codes as unsigned integers, in every library. torch has dtypes for some of them: the float8 formats, e8m0
scales, int8, and float4 in pairs (the even index in the low bits, as `pack` writes them). What it has none for stays bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from reference import FORMATS, Format, Quantized, Scheme
from reference.formats.formats import format_of
from reference.formats.storage import storage_dtype
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import scheme_of

#: torch's dtype of a format, where a code is a whole element.
DTYPES = {
    name: getattr(torch, name)
    for name in FORMATS
    if FORMATS[name].bits in (8, 16) and isinstance(getattr(torch, name, None), torch.dtype)
} | {"mxint8": torch.int8}
PAIRS = "float4_e2m1fn"
#: Bytes of an unsigned integer, by how many it has.
UNSIGNED = {1: torch.uint8, 2: torch.uint16}


class NativeParts(NamedTuple):
    """The arrays of a `Quantized`; None where it has none."""

    codes: torch.Tensor
    scale: torch.Tensor
    outer: torch.Tensor | None = None
    zero: torch.Tensor | None = None


def native_dtype(fmt: str | Format, packed: bool = False) -> torch.dtype | None:
    """torch's dtype for the quantized values of a format, or None. packed: of packed values (a pair per byte, for float4)."""
    name = fmt if fmt == "float32" else format_of(fmt).name
    if packed and name == PAIRS:
        return getattr(torch, f"{PAIRS}_x2", None)
    return DTYPES.get(name)


def to_native(q: Quantized) -> NativeParts:
    """The arrays of q as views in torch's dtypes, nothing copied.

    Raises as `dequantize` does where q does not fit together, TypeError where its arrays are no torch tensors.
    """
    if not isinstance(q, Quantized) or not isinstance(q.codes, torch.Tensor):
        got = type(q.codes if isinstance(q, Quantized) else q).__name__
        raise TypeError(
            f"to_native takes a Quantized of torch tensors, got {got}; ao_lab.jax.to_torch shares JAX's"
        )
    check_quantized(q)
    codes = native_dtype(q.scheme.format, q.packed and q.scheme.format.bits < 8)
    return NativeParts(
        _viewed(q.codes, codes), _viewed(q.scale, native_dtype(q.scheme.scale.storage)), q.outer, q.zero
    )


def from_native(
    parts: NativeParts | Sequence[torch.Tensor | None],
    scheme: str | Scheme,
    *,
    shape: Sequence[int] | None = None,
    axis: int = -1,
    packed: bool = False,
    tiled: bool = False,
) -> Quantized:
    """The `Quantized` over the memory of these arrays: the inverse of `to_native`, also for arrays that others made.

    shape: that of the tensor, which packed codes do not say; else the codes'. Raises ValueError or TypeError, as `dequantize`
    does, where the arrays are not what the scheme stores.
    """
    record = scheme_of(scheme)
    if not isinstance(parts, (list, tuple)) or not 2 <= len(parts) <= len(NativeParts._fields):
        raise TypeError(
            f"from_native takes the arrays of a NativeParts ({', '.join(NativeParts._fields)}), got {type(parts).__name__}"
        )
    given = NativeParts(*parts)
    if shape is None and packed:
        raise ValueError("from_native of packed values needs shape=, that of the tensor")
    size = tuple(given.codes.shape if shape is None else shape)
    codes = _plain(given.codes, UNSIGNED[1 if record.format.bits <= 8 else 2])
    stored = storage_dtype(record.scale.storage)
    scale = given.scale if given.scale is None else _plain(given.scale, getattr(torch, stored))
    result = Quantized(
        codes, scale, given.outer, given.zero, size, axis % max(len(size), 1), record, packed, tiled
    )
    check_quantized(result)
    return result


def _viewed(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or dtype == tensor.dtype else tensor.view(dtype)


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a tensor as they are stored; a tensor of another width stays, for the check to name it."""
    return tensor.view(dtype) if tensor.element_size() == dtype.itemsize else tensor


__all__ = ["NativeParts", "from_native", "native_dtype", "to_native"]
