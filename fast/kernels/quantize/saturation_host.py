"""Host side of `fast.quantize.saturation`: a mask of the blocks that saturate, and gradients masked by it."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.block_launch import run_plan
from fast.kernels.quantize.host import problem_of
from fast.launch.call import Call
from reference import Scheme
from reference.schemes.schemes import scheme_of


def noted(
    x: torch.Tensor, record: str | Scheme, axis: int, key: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values and the mask, or None where the kernel makes no mask. key: of the call, see `launch.cache`."""
    of = problem_of(x, scheme_of(record), axis)
    if of is None or not plans.makes_saturation_mask(of):
        return None
    call = Call({"x": x})
    run_plan(call, plans.fake_quantizing_with_mask(of))
    made: tuple[torch.Tensor, torch.Tensor] = call.result(("y", "codes"), key, record)
    return made


def clip(
    g: torch.Tensor, x: torch.Tensor, mask: torch.Tensor, record: str | Scheme, axis: int, key: Any = None
) -> torch.Tensor:
    """g, contiguous, zeroed in place where x saturates in a block of the mask."""
    of = problem_of(x, scheme_of(record), axis)
    if of is None or not plans.makes_saturation_mask(of):
        raise ValueError(
            f"clip: no kernel makes a saturation mask of {tuple(x.shape)} {x.dtype} for {record}"
        )
    if g.shape != x.shape or g.dtype != x.dtype or not g.is_contiguous() or g.is_neg():
        raise ValueError(
            f"clip: g is contiguous and like x, whose mask `noted` made; got {tuple(g.shape)} {g.dtype} for "
            f"{tuple(x.shape)} {x.dtype}"
        )
    if mask.dtype != torch.uint8 or mask.numel() != of.place.blocks:
        raise ValueError(
            f"clip: the saturation mask has one uint8 for each of {of.place.blocks} blocks, got {tuple(mask.shape)} "
            f"{mask.dtype}"
        )
    if not x.device == g.device == mask.device:
        raise ValueError(
            f"clip: g, x and mask lie on one device, got {g.device}, {x.device} and {mask.device}"
        )
    call = Call({"g": g, "x": x, "codes": mask})
    run_plan(call, plans.masking_in_place(of))
    made: torch.Tensor = call.result("g", key, record)
    return made


__all__ = ["clip", "noted"]
