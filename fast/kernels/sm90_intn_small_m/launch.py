"""A variant launched as `sm90_w4a16_gemv` launches its own: on tensors, then by addresses alone."""

from __future__ import annotations

import ctypes
import struct
import warnings
from functools import lru_cache

from fast.kernels.sm90_intn_small_m.variants import MOST_SHARED, Form, Variant, sources
from fast.kernels.sm90_w4a16_gemv.launch import Compiled, Launch, SkinnyLaunch, launcher
from fast.launch.driver import function_of
from fast.launch.launcher import Signature
from fast.launch.nvrtc import cached_cubin

#: `Problem` of the source: addresses of x, codes, scale, zero, bias, y; count, n, k, bias_kind.
ARGUMENTS = struct.Struct("=6Q4i")
#: Pointers of a launch in their order.
POINTERS = ("x", "codes", "scale", "zero", "bias", "y")


class BitsLaunch(SkinnyLaunch):
    """A variant with its shape (n, k), in place of a `launcher.CompiledLaunch`."""

    names = POINTERS

    def __init__(self, variant: Variant, form: Form, count: int, shape: tuple[int, int]) -> None:
        self.variant, self.form, self.sizes = variant, form, (count, *shape)  # type: ignore[assignment]
        self.programs = variant.programs(count, shape[0])
        self.compiled: dict[Signature, Compiled] = {}

    def launch(self, bias_kind: int, device: int) -> Launch:
        """What launches with a bias of a dtype, by its number in KINDS."""
        variant: Variant = self.variant  # type: ignore[assignment]
        form: Form = self.form  # type: ignore[assignment]
        function, shared = loaded(variant, form, device), variant.shared(form, self.sizes[2])
        return launcher(function, self.programs, variant.threads, shared, (*self.sizes, bias_kind), ARGUMENTS)


@lru_cache(maxsize=256)
def loaded(variant: Variant, form: Form, device: int) -> ctypes.c_void_p:
    """The kernel of a variant on a device, compiled at first use."""
    cubin = cached_cubin(*sources(variant, form), name="sm90_intn_small_m")
    return function_of(cubin, "sm90_intn_small_m", MOST_SHARED, device)


@lru_cache(maxsize=256)
def is_loadable(variant: Variant, form: Form, device: int) -> bool:
    """Whether a variant compiles and loads; where it does not, a warning says why, once."""
    try:
        return bool(loaded(variant, form, device))
    except (RuntimeError, OSError) as error:
        warnings.warn(f"sm90_intn_small_m is left out, another kernel multiplies: {error}", stacklevel=2)
        return False


__all__ = ["ARGUMENTS", "POINTERS", "BitsLaunch", "is_loadable", "loaded"]
