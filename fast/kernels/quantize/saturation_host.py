"""Host side of `clipped`: `fast.quantize.saturation` by kernels."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.launch import plan as passes
from fast.kernels.launch.replay import picked, several
from fast.kernels.quantize.host import asked_of, prepared
from reference import Scheme
from reference.schemes.schemes import scheme_of


def noted(
    x: torch.Tensor, asked_scheme: str | Scheme, axis: int, key: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values and notes, or None where the kernel makes no notes. key: of the call, see `ready`."""
    scheme = scheme_of(asked_scheme)
    of = asked_of(x, scheme, axis)
    if of is None or not passes.notes(of):
        return None
    plan = prepared(("noting", of.dtype, scheme, of.blocks), lambda: passes.noting(of))
    made = plan({"x": x.contiguous()}, x.device)
    plan.remember(key, asked_scheme, {"x": x}, several("y", "codes"))
    return made["y"], made["codes"]


def clip(
    g: torch.Tensor,
    x: torch.Tensor,
    notes: torch.Tensor,
    asked_scheme: str | Scheme,
    axis: int,
    key: Any = None,
) -> torch.Tensor:
    """g, contiguous, masked in place where notes say so."""
    scheme = scheme_of(asked_scheme)
    of = asked_of(x, scheme, axis)
    if (
        of is None
        or not passes.notes(of)
        or g.shape != x.shape
        or g.dtype != x.dtype
        or not g.is_contiguous()
    ):
        raise ValueError(
            f"clip: g is contiguous and like x, whose notes `noted` made; got {tuple(g.shape)} {g.dtype} for "
            f"{tuple(x.shape)} {x.dtype}"
        )
    plan = prepared(("clipping", of.dtype, scheme, of.blocks), lambda: passes.clipping(of))
    plan({"g": g, "x": x.contiguous(), "codes": notes}, x.device)
    plan.remember(key, asked_scheme, {"g": g, "x": x, "codes": notes}, picked("g"))
    return g


__all__ = ["clip", "noted"]
