"""The host side of `sparse_skinny`: what it takes, and its launch."""

from __future__ import annotations

from functools import lru_cache

import torch

from fast.kernels.launch.launcher import interpreted
from fast.kernels.linear_skinny.host import HOPPER, capability, has_compiler
from fast.kernels.sparse_skinny.launch import SparseSkinnyLaunch, is_loadable
from fast.kernels.sparse_skinny.select import MOST_ROWS, choose
from fast.kernels.sparse_skinny.variants import Form, Variant

INPUTS = (torch.bfloat16, torch.float16)


def launch_for(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    group: int,
    variant: Variant | None = None,
) -> SparseSkinnyLaunch | None:
    """What multiplies x by a weight in 2:4 storage; its pointers are `launch.POINTERS`, bias and y as `linear_sparse_int4`.

    Operands are those of `check_operands`. None where another kernel has to: devices that are not Hopper's, no rows of x or
    more than MOST_ROWS, a K or groups that no variant divides. variant: by default that of `choose`.
    """
    n, k = codes.shape[0], 4 * codes.shape[1]
    count = x.numel() // k if k else 0
    if not n or not 0 < count <= MOST_ROWS or not is_served(x):
        return None
    form = Form(group, scale.dtype != torch.float32, x.dtype == torch.float16)
    given = variant or choose(form, count, n, k)
    if given is None or not is_loadable(given, form, x.get_device()):
        return None
    return launch_of(given, form, count, (n, k))


def is_served(x: torch.Tensor) -> bool:
    """Whether dtype and device are those of the kernel."""
    return (
        x.dtype in INPUTS
        and x.is_cuda
        and not interpreted()
        and capability(x.get_device()) == HOPPER
        and has_compiler()
    )


@lru_cache(maxsize=4096)
def launch_of(variant: Variant, form: Form, count: int, shape: tuple[int, int]) -> SparseSkinnyLaunch:
    """One launch, compiled once."""
    return SparseSkinnyLaunch(variant, form, count, shape)


__all__ = ["MOST_ROWS", "launch_for"]
