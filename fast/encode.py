"""`encode` and `decode` for torch tensors; see `reference.encode` for the rules."""

from __future__ import annotations

from typing import Any

import torch

import reference
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
    x = require_tensor(x, "encode").detach()
    made: Any = reference.encode(x, fmt, rounding=rounding, overflow=overflow, random_bits=random_bits)
    return require_tensor(made, "encode")


def decode(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """float32 values of codes, exact, as in `reference.decode`."""
    made: Any = reference.decode(require_tensor(codes, "decode"), fmt)
    return require_tensor(made, "decode")
