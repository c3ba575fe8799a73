"""Gradients of what a layer in training computes (`ao_lab.qat.forward`), as functions of plain tensors.

Straight through: dx = g fq(W) where x did not saturate, dW = g' fq(x) where W did not, 0 elsewhere; learned scales get the
gradient of `fake_quantize_vjp`. Both roundings are made again, the same bits, the larger operand first: its rounded copy is
gone before the other and its product are there, so that backward holds one rounded operand beyond what plain training holds.

Where a kernel marks which blocks saturate while it rounds them again (`fast.quantize.saturation`), gradients are masked in
place, in those blocks alone.
"""

from __future__ import annotations

from typing import Any

import torch

import fast
from ao_lab.qat.forward import Given, Rule, cannot_saturate, own, rounded
from fast.device import has_kernels
from fast.quantize import saturation
from reference import Scales, Scheme


def gradients(
    g: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    given: Given,
    rule: Rule,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weight, bias, the weight's scale, its zero point and the input's scale, those that are wanted.

    g has the dtype of x, which may be left out where `needs_input` says so. All of them are new tensors.
    """
    recipe, g = rule.recipe, g.contiguous()
    dx = dw = dscale = dzero = dinput = x_mask = w_mask = None
    # Inputs that are not rounded have no copy.
    larger = recipe.activation is not None and x is not None and x.numel() > weight.numel()
    for side in ("x", "weight") if larger else ("weight", "x"):
        if side == "x" and x is not None and (wanted[1] or wanted[3] or wanted[4]):
            operand, x_mask = again(x, recipe.activation, -1, given.of_input, g.dtype, given.started)
            dw = torch.mm(g.t(), operand).to(weight.dtype)
            del operand
        if side == "weight" and (wanted[0] or wanted[5]):
            operand, w_mask = again(weight, recipe.weight, rule.axis, given.of_weight, g.dtype, given.started)
            dx = torch.mm(g, operand)
            del operand
    if dx is not None and x is not None and recipe.activation is not None:
        dx, dinput, _ = straight_through(dx, x, recipe.activation, -1, given.of_input, given.started, x_mask)
    if dw is not None:
        dw, dscale, dzero = straight_through(
            dw, weight, recipe.weight, rule.axis, given.of_weight, given.started, w_mask
        )
    db = g.sum(0) if wanted[2] else None
    result = (dx, dw, db, dscale, dzero, dinput)
    return tuple(part if want else None for part, want in zip(result, wanted, strict=True))


def again(
    x: torch.Tensor, scheme: Scheme | None, axis: int, scales: Scales | None, dtype: torch.dtype, started: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An operand as forward rounded it, and the mask of its blocks that saturate, where a kernel makes one."""
    if scheme is None:
        return x.detach(), None
    if not has_kernels(x) or scales is not None or x.dtype != dtype or cannot_saturate(scheme):
        return rounded(x, scheme, axis, scales, dtype, started), None
    result, mask = saturation.fake_quantize_with_mask(own(x), scheme, axis)
    if started is not None:
        result, mask = torch.where(started, result, x), None if mask is None else mask * started
    return result, mask


def straight_through(
    g: torch.Tensor,
    x: torch.Tensor,
    scheme: Scheme,
    axis: int,
    scales: Scales | None,
    started: Any,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`fake_quantize_vjp`, in g's memory where there is a mask; g itself, and nothing for scales, before the start."""
    if scales is None and cannot_saturate(scheme):
        return g, None, None
    if mask is not None:
        return saturation.mask_gradient(g, own(x), mask, scheme, axis), None, None
    dx, dscale, dzero = fast.fake_quantize_vjp(g, own(x), scheme, axis=axis, scales=scales)
    if started is None:
        return dx, dscale, dzero
    late = [None if part is None else torch.where(started, part, 0.0) for part in (dscale, dzero)]
    return torch.where(started, dx, g), late[0], late[1]


__all__ = ["again", "gradients", "straight_through"]
