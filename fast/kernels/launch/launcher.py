"""Launches: through Triton's JIT the first time, straight to the driver afterwards.

Triton's own call takes as long as a small kernel runs, most of it spent on finding out again which compiled kernel the
arguments ask for. A `Fixed` kernel holds on to it: everything but the addresses stays the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from fast.kernels.launch.plan import Pass
from fast.kernels.quantize.geometry import LARGEST_TILE
from fast.kernels.quantize.kernel import blocks_kernel

# In every job what is read comes before what is written, as XLA hands arrays over.
POINTERS = tuple(blocks_kernel.arg_names[:10])
# Compiled kernels take addresses that are multiples of this; others go through the JIT, which specialises anew.
ALIGNMENT = 16
# The compiler's option by which products and sums are rounded one by one, as the reference rounds them. Kernels have it unless
# they say that they promise less.
UNFUSED = {"enable_fp_fusion": False}
# Registers a lane where rows of 14336 are rounded: three programs on a multiprocessor, where the compiler's 128 leave room for
# two; 0.97 of the copy rate instead of 0.91 for a spill of two words.
ROUNDING_REGISTERS = 80
HOOKS = triton.knobs.runtime
# Builds of torch without CUDA do not have these.
current_device = getattr(torch._C, "_cuda_getDevice", None)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# Launches a compiled kernel on a stream, given the addresses of its pointers.
Call = Callable[[int, Sequence[int | None]], Any]
# Programs along up to three axes.
Grid = tuple[int, int, int]


class Fixed:
    """A kernel with a fixed grid and fixed arguments (`tail`) after its pointers. options: of the compiler."""

    def __init__(
        self, kernel: Any, grid: int | Grid, tail: tuple[Any, ...], warps: int, **options: Any
    ) -> None:
        self.kernel, self.tail, self.warps = kernel, tail, warps
        self.options = {**UNFUSED, **options}
        self.grid = (grid, 1, 1) if isinstance(grid, int) else grid
        self.compiled: dict[int, Any] = {}
        self.calls: dict[int, Call] = {}

    def run(self, pointers: Sequence[torch.Tensor | None], device: int) -> None:
        """Run on contiguous tensors of one CUDA device, on its current stream."""
        addresses = [None if p is None else p.data_ptr() for p in pointers]
        if device not in self.compiled or hooked() or any(a and a % ALIGNMENT for a in addresses):
            self.compile(pointers, device)
            return
        call = self.straight(device, len(addresses))
        if current_device() == device:
            call(current_stream(device), addresses)
            return
        with torch.cuda.device(device):
            call(current_stream(device), addresses)

    def compile(self, pointers: Sequence[torch.Tensor | None], device: int) -> None:
        """Run through the JIT, and keep the kernel if it is the one for aligned addresses."""
        if interpreted():
            self.kernel[self.grid](*pointers, *self.tail)
            return
        with torch.cuda.device(device):
            compiled = self.kernel[self.grid](*pointers, *self.tail, num_warps=self.warps, **self.options)
        if compiled is not None and not any(p is not None and p.data_ptr() % ALIGNMENT for p in pointers):
            self.compiled[device] = compiled

    def straight(self, device: int, pointers: int) -> Call:
        """The call of the kernel that was compiled for the device."""
        found = self.calls.get(device)
        if found is None:
            found = self.calls[device] = straight(self.compiled[device], self.grid, pointers, self.tail)
        return found


class Launch(Fixed):
    """A pass of the block kernel, ready to run on tensors by the names of its arguments."""

    def __init__(self, step: Pass) -> None:
        place = step.place
        self.names = {**step.reads, **step.writes, **step.updates}
        self.buffers = [self.names.get(name) for name in POINTERS]
        tail = (
            *place.integers, place.blocks, step.rule, step.job, place.shape, place.chunked, place.masked, place.wide,
            place.size, place.inner, place.p,
        )  # fmt: skip
        super().__init__(blocks_kernel, place.programs, tail, place.warps, **_registers(step))

    def __call__(self, tensors: dict[str, Any], device: int) -> None:
        """Run on contiguous tensors of one CUDA device, on its current stream."""
        self.run([None if name is None else tensors[name] for name in self.buffers], device)


def _registers(step: Pass) -> dict[str, int]:
    """A limit where the largest tile is rounded under masks by instructions of its own: rows of 14336 16-bit numbers."""
    place, do = step.place, step.job
    large = place.shape == "flat" and place.masked and not place.chunked and place.size == LARGEST_TILE
    # Masks of single numbers, other sequences and random words need more, and would spill.
    plain = place.integers[3] % ALIGNMENT == 0 and step.rule.hot.value != "" and "words" not in step.reads
    rounded = do.output in ("bfloat16", "float16") and not do.dequantize
    return {"maxnreg": ROUNDING_REGISTERS} if large and plain and rounded and place.warps == 8 else {}


def straight(compiled: Any, grid: Grid, pointers: int, tail: tuple[Any, ...]) -> Call:
    """A function that hands a stream and addresses to a compiled kernel, with as little before the driver as there can be."""
    stream, *marks = (object() for _ in range(pointers + 1))
    function, handed = _beneath(
        compiled.run,
        (*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *marks, *tail),
    )
    at = _place(stream, handed)
    before, after, last = handed[:at], handed[at + 1 :], handed[-1]
    if isinstance(last, tuple) and _place(marks[0], last) == 0:
        # Triton 3.7: a kernel's arguments are one tuple at the end.
        between, rest = after[:-1], last[pointers:]
        return lambda stream, addresses: function(*before, stream, *between, (*addresses, *rest))
    first = _place(marks[0], after)
    between, rest = after[:first], after[first + pointers :]
    return lambda stream, addresses: function(*before, stream, *between, *addresses, *rest)


def _place(mark: object, arguments: tuple[Any, ...]) -> int:
    """Where an argument is, -1 where it is not."""
    return next((at for at, value in enumerate(arguments) if value is mark), -1)


def _beneath(run: Any, arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The C function that Triton's launcher ends in, and what it hands down; the launcher itself where that cannot be known.

    What the launcher adds depends on Triton's version, so a copy of it is watched. Kernels with scratch memory, which the
    launcher allocates each time, keep it.
    """
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return run, arguments
    if not hasattr(run, "launch"):
        return run, arguments
    handed: list[tuple[Any, ...]] = []
    watched = copy.copy(run)
    watched.launch = lambda *given: handed.append(given)
    watched(*arguments)
    return (run.launch, handed[0]) if len(handed) == 1 else (run, arguments)


def together(x: torch.Tensor, *others: Any) -> bool:
    """Whether all tensors lie on one device; where they do not, no kernel can read them."""
    return all(other is None or other.device == x.device for other in others)


def hooked() -> bool:
    """Whether somebody wants to hear of launches (`triton.knobs.runtime`, profilers): only the JIT tells them."""
    enter, leave = HOOKS.launch_enter_hook, HOOKS.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)
