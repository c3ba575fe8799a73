"""Launches that go from Python directly to the CUDA driver: every private interface of Triton and torch that we use is here.

Triton's own call takes as long as a small kernel runs, most of it spent on finding again which compiled kernel the arguments
ask for. `DirectLaunch` keeps the compiled kernel and calls the C function beneath Triton's launcher. That function is no public
interface, so this is done for the versions in TESTED alone; with any other version every launch is `kernel[grid](...)`.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton

#: Versions of Triton (major.minor) whose launcher the tests and the GPU validation have covered.
TESTED = ("3.6", "3.7")
SUPPORTED = ".".join(triton.__version__.split(".")[:2]) in TESTED
HOOKS = triton.knobs.runtime
# Builds of torch without CUDA do not have these.
current_device = getattr(torch._C, "_cuda_getDevice", None)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# Programs along three axes.
Grid = tuple[int, int, int]
# Makes an uninitialized tensor on the current device from shape, strides and dtype.
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


class DirectLaunch:
    """A compiled kernel with its grid and the arguments (`tail`) after its pointers."""

    def __init__(self, compiled: Any, grid: Grid, pointers: int, tail: tuple[Any, ...]) -> None:
        self.compiled, self.grid, self.pointers, self.tail = compiled, grid, pointers, tail

    @cached_property
    def function(self) -> Callable[[int, Sequence[int | None]], Any]:
        """Launches on a stream, given the addresses of the pointers, with as little before the driver as possible."""
        compiled, count = self.compiled, self.pointers
        stream, *marks = (object() for _ in range(count + 1))
        launch, passed = _beneath(
            compiled.run,
            (*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *marks, *self.tail),
        )  # fmt: skip
        at = _position(stream, passed)
        before, after, last = passed[:at], passed[at + 1 :], passed[-1]
        if isinstance(last, tuple) and _position(marks[0], last) == 0:
            # Triton 3.7: a kernel's arguments are one tuple at the end.
            between, rest = after[:-1], last[count:]
            return lambda stream, addresses: launch(*before, stream, *between, (*addresses, *rest))
        first = _position(marks[0], after)
        between, rest = after[:first], after[first + count :]
        return lambda stream, addresses: launch(*before, stream, *between, *addresses, *rest)


def _position(mark: object, arguments: tuple[Any, ...]) -> int:
    """Where an argument is, -1 where it is not."""
    return next((at for at, value in enumerate(arguments) if value is mark), -1)


def _beneath(run: Any, arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The C function that Triton's launcher ends in, and what it passes down; the launcher itself where that cannot be known.

    What the launcher adds depends on Triton's version, so a copy of it is observed. Kernels with scratch memory, which the
    launcher allocates each time, keep it.
    """
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if scratch or not hasattr(run, "launch"):
        return run, arguments
    passed: list[tuple[Any, ...]] = []
    observed = copy.copy(run)
    observed.launch = lambda *given: passed.append(given)
    observed(*arguments)
    return (run.launch, passed[0]) if len(passed) == 1 else (run, arguments)


def hooked() -> bool:
    """Whether somebody wants to hear of launches (`triton.knobs.runtime`, profilers): only `kernel[grid]` tells them."""
    enter, leave = HOOKS.launch_enter_hook, HOOKS.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@lru_cache(maxsize=1)
def _set_bytes() -> Callable[[int, int, int, int], int] | None:
    """The driver's `cuMemsetD8Async` (address, value, bytes, stream); None where the driver is not found by its name."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemsetD8Async
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
    return function  # type: ignore[no-any-return]


def zero(address: int | None, size: int, stream: int) -> bool:
    """Set bytes of the current device to 0 on a stream, in less host time than `Tensor.zero_`; whether that was done."""
    function = _set_bytes()
    return function is not None and address is not None and function(address, 0, size, stream) == 0


def allocator(device: torch.device) -> Allocate:
    """What allocates on the current device, which is to be this one.

    torch.compile's own programs allocate past the dispatcher, in less time; where torch has no such function any more, the
    public one does.
    """
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is not None:
        return quick  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
