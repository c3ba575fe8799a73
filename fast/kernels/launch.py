"""Launches of `blocks.blocks_kernel`: through Triton's JIT the first time, straight to the driver afterwards.

Triton's own call takes as long as a small kernel runs, most of it spent on finding out again which compiled kernel the
arguments ask for. A `Launch` holds on to it: everything but the addresses is fixed by the pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from fast.kernels.blocks import blocks_kernel
from fast.kernels.passes import Pass

POINTERS = ("x", "g", "words", "codes", "scale", "outer", "zero", "statistic", "outer_statistic", "y")
# Compiled kernels take addresses that are multiples of this; others go through the JIT, which specialises anew.
ALIGNMENT = 16
HOOKS = triton.knobs.runtime


class Launch:
    """A pass of the block kernel, ready to run on tensors by the names of its arguments."""

    def __init__(self, step: Pass) -> None:
        place = step.place
        self.names = {**step.reads, **step.writes, **step.updates}
        self.buffers = [self.names.get(name) for name in POINTERS]
        self.grid = place.programs
        self.tail = (
            *place.integers, place.blocks, step.rule, step.job, place.shape, place.chunked, place.masked, place.wide,
            place.size, place.inner, place.p,
        )  # fmt: skip
        self.warps = place.warps
        self.compiled: dict[int, Any] = {}

    def __call__(self, tensors: dict[str, Any], device: int) -> None:
        """Run on contiguous tensors of one CUDA device, on its current stream."""
        pointers = [None if name is None else tensors[name] for name in self.buffers]
        addresses = [None if p is None else p.data_ptr() for p in pointers]
        compiled = self.compiled.get(device)
        hooked = HOOKS.launch_enter_hook.calls or HOOKS.launch_exit_hook.calls
        if compiled is None or hooked or any(address and address % ALIGNMENT for address in addresses):
            self.compile(pointers, device)
        else:
            self.direct(addresses, device, compiled)

    def compile(self, pointers: list[Any], device: int) -> None:
        """Run through the JIT, and keep the kernel if it is the one for aligned addresses."""
        if interpreted():
            blocks_kernel[(self.grid,)](*pointers, *self.tail)
            return
        with torch.cuda.device(device):
            compiled = blocks_kernel[(self.grid,)](
                *pointers, *self.tail, num_warps=self.warps, enable_fp_fusion=False
            )
        if not any(p is not None and p.data_ptr() % ALIGNMENT for p in pointers):
            self.compiled[device] = compiled

    def direct(self, addresses: list[int | None], device: int, compiled: Any) -> None:
        """Hand addresses to the compiled kernel on the device's current stream."""
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self.direct(addresses, device, compiled)
            return
        compiled.run(
            self.grid, 1, 1, torch._C._cuda_getCurrentRawStream(device), compiled.function, compiled.packed_metadata, None,
            None, None, *addresses, *self.tail,
        )  # fmt: skip


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)
