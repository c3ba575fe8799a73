"""`encode` and `decode` for torch tensors; see `reference.encode` for the rules."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.device import has_kernels
from fast.kernels.launch import cache as ready
from fast.tensors import require_tensor
from reference import Format


def encode(
    x: torch.Tensor,
    fmt: str | Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    random_bits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes of x: uint8 (uint16 for 16-bit formats) of x's shape, on its device.

    Arguments, edges and errors as in `reference.encode`.
    """
    x = require_tensor(x, "encode")
    key, known = ready.call("encode", fmt, (rounding, overflow), x, random_bits)
    if known is not None:
        return known  # type: ignore[no-any-return]
    x = x.detach()
    if has_kernels(x):
        from fast.kernels.encode import pointwise

        fast = pointwise.encode(x, fmt, rounding, overflow, random_bits, key)
        if fast is not None:
            return fast
    made: Any = reference.encode(x, fmt, rounding=rounding, overflow=overflow, random_bits=random_bits)
    return require_tensor(made, "encode")


def decode(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """float32 values of codes, exact, as in `reference.decode`."""
    key, known = ready.call("decode", fmt, (), require_tensor(codes, "decode"))
    if known is not None:
        return known  # type: ignore[no-any-return]
    if has_kernels(codes):
        from fast.kernels.encode import pointwise

        fast = pointwise.decode(codes, fmt, key)
        if fast is not None:
            return fast
    made: Any = reference.decode(codes, fmt)
    return require_tensor(made, "decode")
