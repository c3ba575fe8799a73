"""The host side of two products of one x in one launch of `sm90_sparse24_w4a16_gemv`, and of silu of the first times the
second.

At its beginning and end a launch has few bytes under way (times: reports/LOG.md). Weights of one x lose that once, and have the
variant of one weight with the rows of both: each product has the bits that this variant gives it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fast.kernels.sm90_sparse24_w4a16_gemv.host import MOST_ROWS, is_served, launch_of
from fast.kernels.sm90_sparse24_w4a16_gemv.launch import PAIR_POINTERS, SparseSkinnyLaunch, is_loadable
from fast.kernels.sm90_sparse24_w4a16_gemv.select import choose
from fast.kernels.sm90_sparse24_w4a16_gemv.variants import GATED, TWO, Form, Variant, rows_of_tiles
from fast.launch.call import Call
from fast.launch.launcher import same_device

#: Codes, metadata and scales of a weight, as `linear_sparse_int4` takes them.
Weight = Sequence[torch.Tensor]


def launch_for(
    x: torch.Tensor, first: Weight, second: Weight, group: int, products: int, variant: Variant | None = None
) -> SparseSkinnyLaunch | None:
    """What multiplies x by two weights (N, K) and (M, K); products: TWO or GATED. Its pointers are `launch.PAIR_POINTERS`.

    Operands are those of `check_operands` with one group. None where other kernels have to: as `host.launch_for`, weights on
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
    if given is None or not is_loadable(given, form, x.get_device()):
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
    """x (..., K) times the transposes of two weights: (..., N) and (..., M) in x's dtype. None as `launch_for`.

    key: see `launch.cache`.
    """
    call = _recorded(x, first, second, launch_for(x, first, second, group, TWO, variant))
    if call is None:
        return None
    made: tuple[torch.Tensor, torch.Tensor] = call.result(("y", "y2"), key)
    return made


def sm90_sparse24_w4a16_gemv_swiglu(
    x: torch.Tensor, gate: Weight, up: Weight, group: int, variant: Variant | None = None, key: Any = None
) -> torch.Tensor | None:
    """`reference.swiglu` of the two products of `sm90_sparse24_w4a16_gemv_pair` by this variant, the bits of that: (..., N) in
    x's dtype.

    None as `launch_for`; key: see `launch.cache`.
    """
    call = _recorded(x, gate, up, launch_for(x, gate, up, group, GATED, variant))
    if call is None:
        return None
    made: torch.Tensor = call.result("y", key)
    return made


def _recorded(
    x: torch.Tensor, first: Weight, second: Weight, launch: SparseSkinnyLaunch | None
) -> Call | None:
    """The call whose launch made "y", and "y2" where there are two."""
    if launch is None:
        return None
    names = ("codes", "metadata", "scale")
    parts = dict(zip((*names, *(f"{name}2" for name in names)), (*first, *second), strict=True))
    call = Call({"x": x, **parts})
    call.allocate("y", (*x.shape[:-1], launch.sizes[1]), x.dtype)
    if launch.products == TWO:
        call.allocate("y2", (*x.shape[:-1], launch.second), x.dtype)
    call.launch(launch, PAIR_POINTERS)  # type: ignore[arg-type]
    return call


__all__ = ["launch_for", "sm90_sparse24_w4a16_gemv_pair", "sm90_sparse24_w4a16_gemv_swiglu"]
