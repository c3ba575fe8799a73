"""The host side of `sm90_sparse24_w4a16_gemv`: what it takes, and its launch."""

from __future__ import annotations

from functools import lru_cache

import torch

from fast.kernels.sm90_sparse24_w4a16_gemv.launch import SparseSkinnyLaunch, is_loadable
from fast.kernels.sm90_sparse24_w4a16_gemv.select import MOST_CHUNKED, MOST_ROWS, choose
from fast.kernels.sm90_sparse24_w4a16_gemv.variants import Form, Variant
from fast.kernels.sm90_w4a16_gemv.host import HOPPER, capability, has_compiler
from fast.launch.call import Call
from fast.launch.launcher import interpreted

INPUTS = (torch.bfloat16, torch.float16)


def launch_for(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    group: int,
    variant: Variant | None = None,
    zero: torch.Tensor | None = None,
) -> SparseSkinnyLaunch | None:
    """What multiplies x by a weight in 2:4 storage; its pointers are its `names`, bias and y as `linear_sparse_int4`.

    Operands are those of `check_operands`. None where another kernel has to: devices that are not Hopper's, no rows of x or
    more than MOST_CHUNKED, a K or groups that no variant divides. variant: by default that of `choose`.
    """
    n, k = codes.shape[0], 4 * codes.shape[1]
    count = x.numel() // k if k else 0
    if not n or not 0 < count <= MOST_CHUNKED or not is_served(x):
        return None
    form = Form(group, scale.dtype != torch.float32, x.dtype == torch.float16, zeros=zero is not None)
    given = variant or choose(form, count, n, k)
    if given is None or not is_loadable(given, form, x.get_device()):
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


def add_product(call: Call, launch: SparseSkinnyLaunch) -> None:
    """Launch a product in a call that has its operands, and allocate its result "y"."""
    x = call.inputs["x"]
    assert x is not None
    call.allocate("y", (*x.shape[:-1], launch.sizes[1]), x.dtype)
    call.launch(launch, launch.names)  # type: ignore[arg-type]


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
def launch_of(
    variant: Variant, form: Form, count: int, shape: tuple[int, int], second: int = 0
) -> SparseSkinnyLaunch:
    """One launch, compiled once. second: rows of the second weight, where the form has two."""
    return SparseSkinnyLaunch(variant, form, count, shape, second)


__all__ = ["MOST_ROWS", "add_product", "is_served", "launch_for", "launch_of", "sm90_sparse24_w4a16_gemv"]
