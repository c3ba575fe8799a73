"""A kernel with a fixed grid and fixed arguments, compiled once for each device and each dtype and presence of its pointers.

`kernel[grid](...)` compiles and launches; what it compiled is launched directly afterwards, see `direct`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from fast.kernels.launch import direct
from fast.kernels.launch.direct import DirectLaunch, Grid

# Compiled kernels take addresses that are multiples of this; for others `kernel[grid]` specializes anew.
ALIGNMENT = 16
# The compiler's option by which products and sums are rounded one by one, as the reference rounds them. Kernels have it unless
# they say that they promise less.
UNFUSED = {"enable_fp_fusion": False}

# What a kernel is compiled for: the device, and the dtype of each pointer, None where there is no tensor.
Signature = tuple[int | torch.dtype | None, ...]


class CompiledLaunch:
    """A kernel with a fixed grid and fixed arguments (`tail`) after its pointers. options: of the compiler."""

    def __init__(
        self, kernel: Any, grid: int | Grid, tail: tuple[Any, ...], warps: int, **options: Any
    ) -> None:
        self.kernel, self.tail, self.warps = kernel, tail, warps
        self.options = {**UNFUSED, **options}
        self.grid = (grid, 1, 1) if isinstance(grid, int) else grid
        #: What was compiled for aligned addresses.
        self.compiled: dict[Signature, DirectLaunch] = {}

    def run(self, pointers: Sequence[torch.Tensor | None], device: int) -> Signature:
        """Run on contiguous tensors of one CUDA device, on its current stream; what the kernel was compiled for."""
        addresses = [None if p is None else p.data_ptr() for p in pointers]
        aligned = not any(a and a % ALIGNMENT for a in addresses)
        signature = (device, *(None if p is None else p.dtype for p in pointers))
        known = self.compiled.get(signature) if aligned and not direct.hooked() else None
        if known is not None:
            with torch.cuda.device(device):
                known.function(direct.current_stream(device), addresses)  # type: ignore[misc]
            return signature
        compiled = self._compile(pointers, device)
        if aligned and compiled is not None and direct.SUPPORTED:
            self.compiled[signature] = self._direct(compiled, len(addresses))
        return signature

    def _direct(self, compiled: Any, pointers: int) -> DirectLaunch:
        """The compiled kernel to be launched past Triton."""
        return DirectLaunch(compiled, self.grid, pointers, self.tail)

    def _compile(self, pointers: Sequence[torch.Tensor | None], device: int) -> Any:
        """Compile where that is needed, and launch."""
        if interpreted():
            self.kernel[self.grid](*pointers, *self.tail)
            return None
        with torch.cuda.device(device):
            return self.kernel[self.grid](*pointers, *self.tail, num_warps=self.warps, **self.options)


def same_device(x: torch.Tensor, *others: Any) -> bool:
    """Whether all tensors lie on one device; where they do not, no kernel can read them."""
    return all(other is None or other.device == x.device for other in others)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)
