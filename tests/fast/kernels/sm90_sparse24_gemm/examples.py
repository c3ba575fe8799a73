"""Weights and inputs of integers, so that sums are exact in any order, for tests of the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import reference
from fast.launch import nvrtc


def require_nvrtc() -> None:
    """Skip where NVRTC is not installed."""
    try:
        nvrtc.library()
    except RuntimeError as error:
        pytest.skip(str(error))


def operands(
    m: int,
    n: int,
    k: int,
    kinds: tuple[str, str],
    *,
    seed: int = 0,
    scaled: bool = True,
    bias: str | None = "float32",
) -> list[Any]:
    """x, values, metadata, bias, x_scale, scale; kinds: of values and x."""
    g = torch.Generator().manual_seed(seed)
    kept = reference.prune(torch.rand(n, k, generator=g))
    # Kept zeros too: their indices must do no harm.
    w = torch.where(kept, torch.randint(-4, 5, (n, k), generator=g).float(), 0.0).to(getattr(torch, kinds[0]))
    x = torch.randint(-4, 5, (m, k), generator=g).to(getattr(torch, kinds[1]))
    values, metadata = reference.compress(w, kept)
    rest = torch.rand(n, generator=g).to(getattr(torch, bias)) if bias else None
    scales = (torch.rand(m, 1, generator=g), torch.rand(n, 1, generator=g) - 0.5) if scaled else (None, None)
    return [x, values, metadata, rest, *scales]


def expected(given: list[Any], name: str) -> torch.Tensor:
    """By the reference."""
    x, values, metadata, bias, x_scale, scale = given
    made: torch.Tensor = reference.linear_sparse(
        x, values, metadata, bias, x_scale=x_scale, scale=scale, out_dtype=name
    )
    return made


__all__ = ["expected", "operands", "require_nvrtc"]
