"""The host side of blocks along rows and columns from one read: which matrices the kernel takes, and what it leaves."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fast.kernels.scheme.constants import constants_of
from fast.kernels.scheme.fast_path_rules import OCP, fast_path_of
from fast.kernels.values.kernel import COLUMNS, ROWS, WARPS, values_kernel
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import CompiledLaunch, interpreted
from reference import Quantized
from reference.schemes.schemes import Scheme, scheme_of

#: Elements of a block, which divide both sides of a matrix.
BLOCK = 32
HALVES = (torch.bfloat16, torch.float16)
#: Offsets inside a strip of rows are 32 bits.
LONGEST = 2**25
#: Rules by which the exponent field of a maximum decides.
RULES = ("floor", "ceil", "rceil", "even")
POINTERS = ("x", "rows", "columns", "codes", "scale")


def covers(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether the kernel serves: a contiguous matrix of 16-bit floats in whole blocks of 32 both ways, and MX floats."""
    if x.dtype not in HALVES or x.dim() != 2 or not x.is_contiguous() or not x.numel():
        return False
    whole = x.shape[0] % BLOCK == 0 and x.shape[1] % BLOCK == 0 and x.shape[1] <= LONGEST
    return whole and _serves(scheme)


@lru_cache(maxsize=256)
def _serves(scheme: Scheme) -> bool:
    """Whether elements are the OCP formats of default schemes, rounded to nearest, under e8m0 scales.

    From a target of 4 on no multiplier is subnormal.
    """
    scale, nearest = scheme.scale, scheme.rounding == "nearest_even" and scheme.overflow == "saturate"
    powers = scale.rule in RULES and scale.storage == "float8_e8m0fnu" and scale.block == BLOCK
    plain = scheme.dequantize == "float32" and scheme.outer is None and scheme.zero is None
    return powers and plain and scale.target >= 4 and fast_path_of(scheme, nearest) in OCP.values()


@lru_cache(maxsize=256)
def _saturates(scheme: Scheme) -> bool:
    """Whether scaled elements lie beyond the largest number: not under scales that are rounded up."""
    scale = scheme.scale
    return not (scale.rule in ("ceil", "rceil") and scale.target <= scheme.format.max)


def both_values(
    x: torch.Tensor, record: str | Scheme, key: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values of the blocks along rows, and of those along columns, in x's dtype and layout; None where the kernel does not
    serve. key: of the call, see `launch.cache`."""
    scheme = scheme_of(record)
    if not covers(x, scheme):
        return None
    call = _launched(x, scheme, codes=False)
    made: tuple[torch.Tensor, torch.Tensor] = call.result(("rows", "columns"), key, record)
    return made


def values_and_codes(
    x: torch.Tensor, record: str | Scheme, key: Any = None
) -> tuple[torch.Tensor, Quantized] | None:
    """Values of the blocks along rows, and codes of those along columns, as `quantize` has them for axis 0."""
    scheme = scheme_of(record)
    if not covers(x, scheme):
        return None
    call = _launched(x, scheme, codes=True)
    stored = Quantized("codes", "scale", None, None, tuple(x.shape), 0, scheme)  # type: ignore[arg-type]
    made: tuple[torch.Tensor, Quantized] = call.result(("rows", stored), key, record)
    return made


def _launched(x: torch.Tensor, scheme: Scheme, *, codes: bool) -> Call:
    """The call whose buffers are "rows", and "columns" or "codes" and "scale"."""
    call, (height, width) = Call({"x": x}, words=("x",)), x.shape
    call.allocate("rows", x.shape, x.dtype)
    if codes:
        call.allocate("codes", x.shape, torch.uint8)
        call.allocate("scale", (height // BLOCK, width), torch.uint8)
    else:
        call.allocate("columns", x.shape, x.dtype)
    rule = constants_of(scheme, FLOAT_NAMES[x.dtype], not interpreted())
    grid = height // ROWS * -(-width // COLUMNS)
    tail = (width, rule, codes, _saturates(scheme), width % COLUMNS != 0, ROWS, COLUMNS)
    call.launch(CompiledLaunch(values_kernel, grid, tail, WARPS), POINTERS)
    return call


__all__ = ["both_values", "covers", "values_and_codes"]
