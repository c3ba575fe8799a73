"""Scales under a second scale for each group (NVFP4): both levels multiplied, as scales in float32 of the same blocks.

Codes and values of `reference.quantize` depend on the product of both levels alone, in float32; a record without the second
level takes that product as a given scale, and gives the same codes and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fast.formats import decode, encode
from fast.ops import derived
from fast.quantize.quantize import choose_scales
from reference import Scheme
from reference.schemes.schemes import Scale, record_of


@derived
def without_outer(key: str) -> Scheme:
    """The record of a key with block scales in float32 that hold both levels."""
    scheme = record_of(key)
    outer = _outer_of(scheme)
    if outer.stored != "decode" or scheme.outer_order != "decode" or outer.statistic != "absmax_elements":
        raise ValueError(
            f"scheme {scheme.name}: experts take outer scales over elements that decode, as nvfp4 has; use nvfp4"
        )
    scale = replace(scheme.scale, storage="float32", floor=None)
    return replace(scheme, name=f"{scheme.name}_one_level", outer=None, scale=scale)


@derived
def of_outer(key: str) -> Scheme:
    """The record of a key that finds the outer scale of each block alone."""
    outer, plain = _outer_of(record_of(key)), without_outer(key)
    scale = replace(plain.scale, target=outer.target, floor=outer.floor)
    return replace(plain, name=f"{plain.name}_outer", scale=scale)


def scales_of_two_levels(
    x: torch.Tensor, scheme: Scheme, shared: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """float32 scales of x's blocks: block scale as stored times the outer one.

    shared: outer scales of single blocks to those of their groups, in the same shape.
    """
    plain, storage = without_outer(scheme.key), scheme.scale.storage
    finite = torch.where(x.isfinite(), x, x.new_zeros(()))
    outer = shared(choose_scales(finite, of_outer(scheme.key)).scale)
    exact = divided(choose_scales(x, plain).scale, outer)
    stored = decode(encode(exact, storage), storage)
    floor = scheme.scale.floor
    if floor is not None and floor[0] == "stored":
        stored = stored.clamp(min=float(floor[1]))  # NaN stays
    # A product of NaN has the sign and payload that the device gives it; scales have one NaN.
    result = stored * outer
    return torch.where(result.isnan(), torch.full((), torch.nan, device=result.device), result)


def _outer_of(scheme: Scheme) -> Scale:
    if scheme.outer is None:
        raise ValueError(f"scheme {scheme.name} has no outer scale")
    return scheme.outer


@torch.library.custom_op("ao_lab::divided", mutates_args=())
def _divided_op(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / b


@_divided_op.register_fake
def _divided_fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a)


def divided(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b, correctly rounded: compilers that write `/` as a product with a reciprocal do not see it."""
    result: torch.Tensor = _divided_op(a, b) if torch.compiler.is_compiling() else a / b
    return result


__all__ = ["divided", "scales_of_two_levels", "without_outer"]
