"""The host side of `sm90_sparse24_w4a16_gemv`: what it takes, and its launch; two products of one x in one launch, and silu of
the first times the second.

At its beginning and end a launch has few bytes under way (times: reports/LOG.md). Weights of one x lose that once, and have the
variant of one weight with the rows of both: each product has the bits that this variant gives it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.sm90_sparse24_w4a16_gemv.variants import (
    GATED,
    KERNEL,
    MOST_ROWS,
    TWO,
    C,
    Form,
    Variant,
    choose,
    rows_of_tiles,
)
from fast.launch import cuda
from fast.launch.cuda import BIAS, CudaLaunch
from fast.launch.launcher import Call, same_device

INPUTS = (torch.bfloat16, torch.float16)
#: Pointers of a launch in the order of the source's `Problem`; then count, n, k and the bias's dtype.
POINTERS = ("x", "codes", "metadata", "scale", "bias", "y")
#: Of two products; the rows of the second and a gap at the end.
PAIR_POINTERS = (*POINTERS, "codes2", "metadata2", "scale2", "y2")
#: With zero points.
ZERO_POINTERS = (*POINTERS, "zero")
#: Codes, metadata and scales of a weight, as `linear_sparse_int4` takes them.
Weight = Sequence[torch.Tensor]


def launch_for(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    group: int,
    variant: Variant | None = None,
    zero: torch.Tensor | None = None,
) -> CudaLaunch | None:
    """What multiplies x by a weight in 2:4 storage; its pointers are its `names`.

    Operands are those of `check_operands`. None where another kernel has to: devices that are not Hopper's, no rows of x or
    more than 64, a K or groups that no variant divides. variant: by default that of `choose`.
    """
    n, k = codes.shape[0], 4 * codes.shape[1]
    count = x.numel() // k if k else 0
    if not n or not 0 < count <= C.most_chunked or not is_served(x):
        return None
    form = Form(group, scale.dtype != torch.float32, x.dtype == torch.float16, zeros=zero is not None)
    given = variant or choose(form, count, n, k)
    if given is None or not cuda.is_loadable(KERNEL, given, form, x.get_device()):
        return None
    return launch_of(given, form, count, (n, k))


def sm90_sparse24_w4a16_gemv(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
    variant: Variant | None = None,
    zero: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`linear_sparse_int4` by this kernel alone; None as `launch_for`."""
    launch = launch_for(x, codes, scale, group, variant, zero)
    if launch is None:
        return None
    given = {"x": x, "codes": codes, "metadata": metadata, "scale": scale, "bias": bias, "zero": zero}
    call = Call(given)
    add_product(call, launch)
    y: torch.Tensor = call.result("y")
    return y


def add_product(call: Call, launch: CudaLaunch) -> None:
    """Launch a product in a call that has its operands, and allocate its result "y"."""
    x, codes = call.tensors["x"], call.tensors["codes"]
    call.allocate("y", (*x.shape[:-1], codes.shape[0]), x.dtype)
    call.launch(launch, launch.names)


def pair_launch_for(
    x: torch.Tensor, first: Weight, second: Weight, group: int, products: int, variant: Variant | None = None
) -> CudaLaunch | None:
    """What multiplies x by two weights (N, K) and (M, K); products: TWO or GATED. Its pointers are PAIR_POINTERS.

    Operands are those of `check_operands` with one group. None where other kernels have to: as `launch_for`, weights on
    other devices or with scales of two dtypes, GATED of weights of two shapes. variant: by default that of `choose` for the
    rows of both.
    """
    n, m, k = first[0].shape[0], second[0].shape[0], 4 * first[0].shape[1]
    count = x.numel() // k if k else 0
    if not n or not m or not 0 < count <= MOST_ROWS or not is_served(x):
        return None
    alike = first[2].dtype == second[2].dtype and same_device(x, *first, *second)
    if not alike or (products == GATED and n != m):
        return None
    form = Form(group, first[2].dtype != torch.float32, x.dtype == torch.float16, products)
    given = variant or choose(form, count, rows_of_tiles(n, m), k)
    if given is None or not cuda.is_loadable(KERNEL, given, form, x.get_device()):
        return None
    return launch_of(given, form, count, (n, k), m)


def sm90_sparse24_w4a16_gemv_pair(
    x: torch.Tensor,
    first: Weight,
    second: Weight,
    group: int,
    variant: Variant | None = None,
    key: Any = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """x (..., K) times the transposes of two weights: (..., N) and (..., M) in x's dtype. None as `pair_launch_for`.

    key: see `dispatch`.
    """
    call = _recorded(x, first, second, pair_launch_for(x, first, second, group, TWO, variant))
    if call is None:
        return None
    result: tuple[torch.Tensor, torch.Tensor] = call.result(("y", "y2"), key)
    return result


def sm90_sparse24_w4a16_gemv_swiglu(
    x: torch.Tensor, gate: Weight, up: Weight, group: int, variant: Variant | None = None, key: Any = None
) -> torch.Tensor | None:
    """`reference.swiglu` of the two products of `sm90_sparse24_w4a16_gemv_pair` by this variant, the bits of that: (..., N) in
    x's dtype.

    None as `pair_launch_for`; key: see `dispatch`.
    """
    call = _recorded(x, gate, up, pair_launch_for(x, gate, up, group, GATED, variant))
    if call is None:
        return None
    result: torch.Tensor = call.result("y", key)
    return result


def _recorded(x: torch.Tensor, first: Weight, second: Weight, launch: CudaLaunch | None) -> Call | None:
    """The call whose launch made "y", and "y2" where there are two."""
    if launch is None:
        return None
    names = ("codes", "metadata", "scale")
    parts = dict(zip((*names, *(f"{name}2" for name in names)), (*first, *second), strict=True))
    call = Call({"x": x, **parts})
    call.allocate("y", (*x.shape[:-1], first[0].shape[0]), x.dtype)
    if launch.problem.products == TWO:
        call.allocate("y2", (*x.shape[:-1], second[0].shape[0]), x.dtype)
    call.launch(launch, PAIR_POINTERS)
    return call


def is_served(x: torch.Tensor) -> bool:
    """Whether dtype and device are those of the kernel."""
    return x.dtype in INPUTS and cuda.is_served(x)


@lru_cache(maxsize=4096)
def launch_of(
    variant: Variant, form: Form, count: int, shape: tuple[int, int], second: int = 0
) -> CudaLaunch:
    """One launch, compiled once. second: rows of the second weight, where the form has two."""
    sizes: tuple[int | None, ...] = (count, *shape, BIAS)
    names, numbers = ZERO_POINTERS if form.zeros else POINTERS, ("4i", sizes)
    if form.products:
        names, numbers = PAIR_POINTERS, ("6i", (*sizes, second, 0))
    programs = variant.programs(rows_of_tiles(shape[0], second))
    return CudaLaunch(KERNEL, variant, form, names, programs, variant.shared(form), numbers)


__all__ = [
    "MOST_ROWS",
    "add_product",
    "is_served",
    "launch_for",
    "launch_of",
    "pair_launch_for",
    "sm90_sparse24_w4a16_gemv",
    "sm90_sparse24_w4a16_gemv_pair",
    "sm90_sparse24_w4a16_gemv_swiglu",
]
