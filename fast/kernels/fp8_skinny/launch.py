"""A variant launched as `linear_skinny` launches its own: on tensors, then by addresses alone."""

from __future__ import annotations

import ctypes
import struct
import warnings
from functools import lru_cache

from fast.kernels.fp8_skinny.variants import MOST_SHARED, Variant, sources
from fast.kernels.hopper.driver import function_of
from fast.kernels.hopper.nvrtc import cached_cubin
from fast.kernels.launch.launcher import Signature
from fast.kernels.linear_skinny.launch import Compiled, Launch, SkinnyLaunch, launcher

#: `Problem` of the source: addresses of x, x_scale, codes, scale, bias, y; count, n, k, bias_kind.
ARGUMENTS = struct.Struct("=6Q4i")
#: Pointers of a launch in their order.
POINTERS = ("x", "x_scale", "codes", "scale", "bias", "y")


class Fp8SkinnyLaunch(SkinnyLaunch):
    """A variant with its shape (n, k), in place of a `launcher.CompiledLaunch`."""

    names = POINTERS

    def __init__(self, variant: Variant, count: int, shape: tuple[int, int]) -> None:
        self.variant, self.sizes = variant, (count, *shape)  # type: ignore[assignment]
        self.programs = variant.programs(shape[0])
        self.compiled: dict[Signature, Compiled] = {}

    def launch(self, bias_kind: int, device: int) -> Launch:
        """What launches with a bias of a dtype, by its number in KINDS."""
        variant: Variant = self.variant  # type: ignore[assignment]
        function, shared = loaded(variant, device), variant.shared(self.sizes[0], self.sizes[2])
        return launcher(function, self.programs, variant.threads, shared, (*self.sizes, bias_kind), ARGUMENTS)


@lru_cache(maxsize=256)
def loaded(variant: Variant, device: int) -> ctypes.c_void_p:
    """The kernel of a variant on a device, compiled at first use."""
    cubin = cached_cubin(*sources(variant), name="fp8_skinny")
    return function_of(cubin, "fp8_skinny", MOST_SHARED, device)


@lru_cache(maxsize=256)
def is_loadable(variant: Variant, device: int) -> bool:
    """Whether a variant compiles and loads; where it does not, a warning says why, once."""
    try:
        return bool(loaded(variant, device))
    except (RuntimeError, OSError) as error:
        warnings.warn(f"fp8_skinny is left out, another kernel multiplies: {error}", stacklevel=2)
        return False


__all__ = ["ARGUMENTS", "POINTERS", "Fp8SkinnyLaunch", "is_loadable", "loaded"]
