"""A variant launched as `sm90_w4a16_gemv` launches its own: on tensors, then by addresses alone."""

from __future__ import annotations

import ctypes
import struct
import warnings
from functools import lru_cache

from fast.kernels.sm90_sparse24_w4a16_gemv.variants import MOST_SHARED, Form, Variant, rows_of_tiles, sources
from fast.kernels.sm90_w4a16_gemv.launch import Compiled, Launch, SkinnyLaunch, launcher
from fast.launch.driver import function_of
from fast.launch.launcher import Signature
from fast.launch.nvrtc import cached_cubin

#: `Problem` of the source: addresses of x, codes, metadata, scale, bias, y; count, n, k, bias_kind.
ARGUMENTS = struct.Struct("=6Q4i")
#: Of two products codes, metadata, scale and y of the second stand behind those of the first, its rows and a gap at the end.
PAIR_ARGUMENTS = struct.Struct("=10Q6i")
#: With zero points their address is the last.
ZERO_ARGUMENTS = struct.Struct("=7Q4i")
#: Pointers of a launch in their order.
POINTERS = ("x", "codes", "metadata", "scale", "bias", "y")
PAIR_POINTERS = (*POINTERS, "codes2", "metadata2", "scale2", "y2")
ZERO_POINTERS = (*POINTERS, "zero")


class SparseSkinnyLaunch(SkinnyLaunch):
    """A variant with its shape (n, k), in place of a `launcher.CompiledLaunch`. second: rows of the second weight, where the
    form has two."""

    def __init__(
        self, variant: Variant, form: Form, count: int, shape: tuple[int, int], second: int = 0
    ) -> None:
        self.variant, self.form, self.sizes = variant, form, (count, *shape)  # type: ignore[assignment]
        self.products, self.second = form.products, second
        self.names, self.layout = layout_of(form)
        self.programs = variant.programs(rows_of_tiles(shape[0], second))
        self.compiled: dict[Signature, Compiled] = {}

    def launch(self, bias_kind: int, device: int) -> Launch:
        """What launches with a bias of a dtype, by its number in KINDS."""
        variant: Variant = self.variant  # type: ignore[assignment]
        form: Form = self.form  # type: ignore[assignment]
        function, shared = loaded(variant, form, device), variant.shared(form)
        rest = self.arguments(bias_kind)
        return launcher(function, self.programs, variant.threads, shared, rest, self.layout)

    def arguments(self, bias_kind: int) -> tuple[int, ...]:
        """Those behind the pointers."""
        more = (self.second, 0) if self.products else ()
        return (*self.sizes, bias_kind, *more)


def layout_of(form: Form) -> tuple[tuple[str, ...], struct.Struct]:
    """Pointers of a launch, and how the source has its arguments."""
    if form.products:
        return PAIR_POINTERS, PAIR_ARGUMENTS
    return (ZERO_POINTERS, ZERO_ARGUMENTS) if form.zeros else (POINTERS, ARGUMENTS)


@lru_cache(maxsize=256)
def loaded(variant: Variant, form: Form, device: int) -> ctypes.c_void_p:
    """The kernel of a variant on a device, compiled at first use."""
    cubin = cached_cubin(*sources(variant, form), name="sm90_sparse24_w4a16_gemv")
    return function_of(cubin, "sm90_sparse24_w4a16_gemv", MOST_SHARED, device)


@lru_cache(maxsize=256)
def is_loadable(variant: Variant, form: Form, device: int) -> bool:
    """Whether a variant compiles and loads; where it does not, a warning says why, once."""
    try:
        return bool(loaded(variant, form, device))
    except (RuntimeError, OSError) as error:
        warnings.warn(
            f"sm90_sparse24_w4a16_gemv is left out, another kernel multiplies: {error}", stacklevel=2
        )
        return False


__all__ = [
    "ARGUMENTS",
    "PAIR_ARGUMENTS",
    "PAIR_POINTERS",
    "POINTERS",
    "ZERO_ARGUMENTS",
    "ZERO_POINTERS",
    "SparseSkinnyLaunch",
    "is_loadable",
    "loaded",
]
