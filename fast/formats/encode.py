"""`encode` and `decode` for torch tensors; see `reference.encode` for the rules."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.formats.ops import DECODE, ENCODE
from reference import Format


def encode(
    x: torch.Tensor,
    fmt: str | Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    random_bits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes of x: uint8 (uint16 for 16-bit formats) of x's shape, on its device. No gradient flows through them.

    Arguments, edges and errors as in `reference.encode`.
    """
    codes: torch.Tensor = run(ENCODE, fmt, (rounding, overflow), (x, random_bits))
    return codes


def decode(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """float32 values of codes, exact, as in `reference.decode`."""
    values: torch.Tensor = run(DECODE, fmt, (), (codes,))
    return values
