"""The host side of `fp8_skinny`: what it takes, which variant, and its launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fast.kernels.fp8_skinny.launch import POINTERS, Fp8SkinnyLaunch, is_loadable
from fast.kernels.fp8_skinny.select import MOST_ROWS, choose, gains
from fast.kernels.fp8_skinny.variants import Variant
from fast.kernels.launch.call import FLOAT_NAMES, Call
from fast.kernels.launch.launcher import interpreted, same_device
from fast.kernels.linear_skinny.host import HOPPER, capability, has_compiler
from reference import Scheme
from reference.schemes.schemes import SCHEMES

#: The scheme of inputs and weight.
SCHEME = "fp8_rowwise"
#: Dtypes of x: codes, and what is quantized on the way.
INPUTS = (torch.uint8, torch.bfloat16)


def launch_for(
    x: torch.Tensor, n: int, device: int, variant: Variant | None = None
) -> Fp8SkinnyLaunch | None:
    """What multiplies rows x (count, K), codes or bfloat16, by a weight (n, K) on a device; its pointers are POINTERS. None
    where another kernel has to: `takes`, and what does not compile. variant: by default that of `choose`."""
    count, k = x.shape
    if x.dtype not in INPUTS or interpreted() or capability(device) != HOPPER or not has_compiler():
        return None
    chosen = choose(count, n, k, x.dtype == torch.bfloat16) if takes(count, (n, k), x.dtype) else None
    given = variant or chosen
    return None if given is None or not is_loadable(given, device) else launch_of(given, count, (n, k))


def takes(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether it multiplies so many rows of a dtype by a weight (N, K) on a Hopper GPU: codes or bfloat16, rows that gain, of a
    shape that `choose` has a variant for; and whether it can be compiled."""
    if dtype not in INPUTS or interpreted() or not 0 < count <= MOST_ROWS:
        return False
    if not gains(count, dtype == torch.bfloat16):
        return False
    return choose(count, *shape, dtype == torch.bfloat16) is not None and has_compiler()


@lru_cache(maxsize=1024)
def takes_schemes(x: str, w: str) -> bool:
    """Whether inputs and weight, by their `Scheme.key`, are quantized as it quantizes and multiplies."""
    return {x, w} == {SCHEMES[SCHEME].key}


def fp8_skinny(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    variant: Variant | None = None,
    key: Any = None,
    record: Scheme | None = None,
) -> torch.Tensor | None:
    """x (count, K) times the transpose of codes (N, K) with a scale of each row, plus bias (N), in bfloat16.

    x: codes with x_scale (count), or bfloat16, which is quantized. None as `launch_for`, and for a bias that is no float of 16
    or 32 bits. key, record: see `launch.cache`.
    """
    if not x.is_cuda or not same_device(x, x_scale, codes, scale, bias):
        return None
    if bias is not None and bias.dtype not in FLOAT_NAMES:
        return None
    launch = launch_for(x, codes.shape[0], x.get_device(), variant)
    if launch is None:
        return None
    # In the order of the operands of `linear_dynamic` and `linear_of_codes`, which repeat the call by it.
    rows = {"x": x} if x_scale is None else {"x": x, "x_scale": x_scale, "x_zero": None}
    call = Call({**rows, "codes": codes, "scale": scale, "bias": bias}, words=("x", "codes"))
    call.allocate("y", (x.shape[0], codes.shape[0]), torch.bfloat16)
    call.launch(launch, POINTERS)  # type: ignore[arg-type]
    y: torch.Tensor = call.result("y", key, record)
    return y


@lru_cache(maxsize=4096)
def launch_of(variant: Variant, count: int, shape: tuple[int, int]) -> Fp8SkinnyLaunch:
    """One launch, compiled once."""
    return Fp8SkinnyLaunch(variant, count, shape)


__all__ = ["MOST_ROWS", "fp8_skinny", "launch_for", "takes", "takes_schemes"]
