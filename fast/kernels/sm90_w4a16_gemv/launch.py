"""A variant launched as `fast.launch.call` launches kernels of Triton: `run` on tensors, then by addresses alone.

Launches are programmatic: a kernel may begin while the one in front of it ends, whose results it waits for. Listeners to
Triton's launches do not hear of them.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.sm90_w4a16_gemv.variants import KINDS, MOST_SHARED, STEP, Direct, Form, Variant, sources
from fast.launch.direct import current_stream
from fast.launch.driver import (
    NO_CONTEXT,
    LaunchAttribute,
    LaunchConfig,
    check,
    driver,
    ensure_context,
    function_of,
)
from fast.launch.launcher import ALIGNMENT, Signature
from fast.launch.nvrtc import cached_cubin

#: `Problem` of the source: addresses of x, words, scale, zero, x_scale, bias, y; count, n, k, bias_kind.
ARGUMENTS = struct.Struct("=7Q4i")
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
PROGRAMMATIC = 6
#: Pointers of a launch in their order.
POINTERS = ("x", "codes", "scale", "zero", "x_scale", "bias", "y")

Launch = Callable[[int, Sequence[int | None]], Any]


class Compiled:
    """What was compiled for a signature: `function(stream, addresses)` launches."""

    def __init__(self, function: Launch) -> None:
        self.function = function


class SkinnyLaunch:
    """A variant with its shape, in place of a `launcher.CompiledLaunch`. names: of its pointers, a bias among them."""

    names: tuple[str, ...] = POINTERS

    def __init__(self, variant: Variant | Direct, form: Form, count: int, shape: tuple[int, int]) -> None:
        self.variant, self.form, self.sizes = variant, form, (count, *shape)
        self.programs = variant.programs(shape[0])
        self.compiled: dict[Signature, Compiled] = {}

    def run(self, pointers: Sequence[torch.Tensor | None], device: int) -> Signature:
        """Run on contiguous tensors of one device, on its current stream; what it was compiled for."""
        pointers = [
            one if one is None or one.data_ptr() % ALIGNMENT == 0 else one.clone() for one in pointers
        ]
        signature = (device, *(None if one is None else one.dtype for one in pointers))
        known = self.compiled.get(signature)
        if known is None:
            bias = pointers[self.names.index("bias")]
            kind = 0 if bias is None else KINDS.index(str(bias.dtype).removeprefix("torch."))
            known = self.compiled[signature] = Compiled(self.launch(kind, device))
        with torch.cuda.device(device):
            addresses = [None if one is None else one.data_ptr() for one in pointers]
            known.function(current_stream(device), addresses)  # type: ignore[misc]
        return signature

    def launch(self, bias_kind: int, device: int) -> Launch:
        """What launches with a bias of a dtype, by its number in KINDS."""
        count, _, k = self.sizes
        function, shared = (
            loaded(self.variant, self.form, device),
            self.variant.shared(self.form, count, k // STEP),
        )
        return launcher(function, self.programs, self.variant.threads, shared, (*self.sizes, bias_kind))


@lru_cache(maxsize=256)
def loaded(variant: Variant | Direct, form: Form, device: int) -> ctypes.c_void_p:
    """The kernel of a variant on a device, compiled at first use."""
    return function_of(cached_cubin(*sources(variant, form)), "sm90_w4a16_gemv", MOST_SHARED, device)


@lru_cache(maxsize=256)
def is_loadable(variant: Variant | Direct, form: Form, device: int) -> bool:
    """Whether a variant compiles and loads; where it does not, a warning says why, once."""
    try:
        return bool(loaded(variant, form, device))
    except (RuntimeError, OSError) as error:
        warnings.warn(f"sm90_w4a16_gemv is left out, another kernel multiplies: {error}", stacklevel=2)
        return False


class _Ready(threading.local):
    """The arguments and the configuration of a launch, which each thread has for itself: others may launch meanwhile.

    Made once, as making them takes a thread longer than filling in what differs (times: reports/LOG.md).
    """

    def __init__(self, programs: int, threads: int, shared: int, size: int) -> None:
        memory = ctypes.create_string_buffer(size)
        self.attribute = LaunchAttribute(PROGRAMMATIC, 0, (ctypes.c_uint * 16)(1))
        place = ctypes.addressof(self.attribute)
        config = LaunchConfig((programs, 1, 1), (threads, 1, 1), shared, None, place, 1)
        self.parts = memory, (ctypes.c_void_p * 1)(ctypes.addressof(memory)), config, ctypes.byref(config)


def launcher(
    function: ctypes.c_void_p,
    programs: int,
    threads: int,
    shared: int,
    rest: tuple[int, ...],
    layout: struct.Struct = ARGUMENTS,
) -> Launch:
    """A launch on a stream, of addresses in the order of the kernel's pointers. layout: of those and `rest`."""
    launch, pack = driver().cuLaunchKernelEx, layout.pack_into
    ready = _Ready(programs, threads, shared, layout.size)

    def run(stream: int, addresses: Sequence[int | None]) -> None:
        memory, arguments, config, place = ready.parts
        pack(memory, 0, *[address or 0 for address in addresses], *rest)
        config.stream = stream
        status = launch(place, function, arguments, None)
        if status == NO_CONTEXT:
            ensure_context(torch.cuda.current_device())
            status = launch(place, function, arguments, None)
        if status:
            check(status, "launching a product of few rows")

    return run


__all__ = ["ARGUMENTS", "POINTERS", "SkinnyLaunch", "is_loadable", "launcher", "loaded"]
