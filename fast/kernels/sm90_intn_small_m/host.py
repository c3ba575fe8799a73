"""The host side of `sm90_intn_small_m`: what it takes, and its launch."""

from __future__ import annotations

from functools import lru_cache

import torch

from fast.kernels.sm90_intn_small_m.variants import KERNEL, MOST_ROWS, STEP, WIDTHS, Form, Variant, choose
from fast.launch import cuda
from fast.launch.call import Call
from fast.launch.cuda import BIAS, CudaLaunch
from reference import Quantized
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import Scheme

#: Pointers of a launch in the order of the source's `Problem`; then count, n, k and the bias's dtype.
POINTERS = ("x", "codes", "scale", "zero", "bias", "y")


def launch_for(
    w: Quantized, count: int, dtype: torch.dtype, variant: Variant | None = None
) -> CudaLaunch | None:
    """What multiplies `count` rows of a dtype by a stored weight (N, K); its pointers are POINTERS.

    None where another kernel has to: no rows or more than MOST_ROWS, weights of which `form_of` knows nothing, variants that do
    not fit, compile or load. variant: by default that of `choose`.
    """
    form = form_of(w.scheme, tuple(w.shape), w.axis, w.packed)
    if form is None or not 0 < count <= MOST_ROWS:
        return None
    form = form._replace(half=dtype == torch.float16)
    given = variant or choose(form, count, *w.shape)
    if given is None or not given.takes(form, w.shape[1]):
        return None
    if not cuda.is_loadable(KERNEL, given, form, w.codes.get_device()):
        return None
    return launch_of(given, form, count, (w.shape[0], w.shape[1]))


def sm90_intn_small_m(
    x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None, variant: Variant | None = None
) -> torch.Tensor | None:
    """`fast.linear` by this kernel alone, of operands that it would have checked; None as `launch_for`."""
    launch = launch_for(w, x.numel() // w.shape[1], x.dtype, variant)
    if launch is None:
        return None
    check_quantized(w)
    call = Call({"x": x, "codes": w.codes, "scale": w.scale, "zero": w.zero, "bias": bias})
    call.allocate("y", (*x.shape[:-1], w.shape[0]), x.dtype)
    call.launch(launch, POINTERS)
    y: torch.Tensor = call.result("y")
    return y


@lru_cache(maxsize=4096)
def form_of(scheme: Scheme, shape: tuple[int, ...], axis: int, packed: bool) -> Form | None:
    """A weight's form, beside bfloat16; None for those that the kernel does not read.

    It reads matrices of packed integers in WIDTHS bits along rows of whole steps, each 32 columns, 64, or a multiple of 128, or
    each row, with a float32 scale and perhaps a zero point in int8.
    """
    fmt, scale, zero = scheme.format, scheme.scale, scheme.zero
    integers = fmt.kind == "int" and fmt.bits in WIDTHS and not fmt.fraction_bits and fmt.nan_code is None
    plain = (
        scale.storage == "float32"
        and scale.stored == "decode"
        and scheme.outer is None
        and not scale.flat_size
    )
    zeros = zero is None or (zero.rule == "code" and zero.storage == "int8" and fmt.signed)
    if not (packed and integers and plain and zeros) or len(shape) != 2 or axis != 1:
        return None
    if not isinstance(scale.block, int) or (scale.block != -1 and scale.block % 32):
        return None
    length = shape[1]
    group = length if scale.block == -1 else scale.block
    whole = (
        length > 0 and length % STEP == 0 and length % group == 0 and (group in (32, 64) or group % STEP == 0)
    )
    return Form(fmt.bits, group, zero is not None, fmt.signed, False) if whole else None


@lru_cache(maxsize=4096)
def launch_of(variant: Variant, form: Form, count: int, shape: tuple[int, int]) -> CudaLaunch:
    """One launch, compiled once."""
    n, k = shape
    sizes = ("4i", (count, n, k, BIAS))
    return CudaLaunch(
        KERNEL, variant, form, POINTERS, variant.programs(count, n), variant.shared(form, k), sizes
    )


__all__ = ["MOST_ROWS", "form_of", "launch_for", "sm90_intn_small_m"]
