"""The mean squared error of each token's outputs, and its gradient: a read of both operands each way, and no float32 copy.

Channels of a token are a row. Differences, squares and sums are float32. A gradient is (g / channels) * (2 * difference), each
rounded to float32, then to y's dtype: the bits of torch's `(y.float() - wanted.float()).square().mean(-1)` on a CPU. On a GPU
torch multiplies g by 1 / channels, which has other bits where channels are no power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import read, widened
from fast.kernels.sm90.bf16x2 import narrowed
from fast.launch.launcher import FLOAT_NAMES, UNFUSED, interpreted, same_device

#: Channels of a token at most: a program has them all.
MOST = 16384


@triton.jit
def difference(y, wanted, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    """(offsets, which exist, y - wanted in float32) of a row."""
    inside = tl.arange(0, TILE) < CHANNELS
    at = tl.program_id(0).to(tl.int64) * CHANNELS + tl.arange(0, TILE)
    return at, inside, widened(read(y + at, inside)) - widened(read(wanted + at, inside))


@triton.jit
def errors_kernel(y, wanted, errors, CHANNELS: tl.constexpr, TILE: tl.constexpr):
    """The mean square of a row."""
    _, _, off = difference(y, wanted, CHANNELS, TILE)
    channels = tl.full((), CHANNELS, tl.float32)
    tl.store(errors + tl.program_id(0), tl.div_rn(tl.sum(off * off, axis=0), channels))


@triton.jit
def gradients_kernel(
    y, wanted, g, dy, CHANNELS: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr
):  # fmt: skip
    """The gradient of y of a row, for a gradient g of its error."""
    at, inside, off = difference(y, wanted, CHANNELS, TILE)
    share = tl.div_rn(tl.load(g + tl.program_id(0)), tl.full((), CHANNELS, tl.float32))
    tl.store(dy + at, narrowed(share * (2 * off), DTYPE, HAS_PTX), mask=inside)


class _TokenErrors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, wanted)
        errors = torch.empty(y.shape[:-1], dtype=torch.float32, device=y.device)
        _run(errors_kernel, (y, wanted, errors))
        return errors

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        y, wanted = ctx.saved_tensors
        dy = torch.empty_like(y)
        _run(gradients_kernel, (y, wanted, g.contiguous(), dy), FLOAT_NAMES[y.dtype], not interpreted())
        return dy, None


def is_supported(y: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether these are float outputs of a row a program."""
    alike = y.shape == wanted.shape and same_device(y, wanted)
    return alike and {y.dtype, wanted.dtype} <= set(FLOAT_NAMES) and 0 < y.shape[-1] <= MOST


def token_errors(y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean of (y - wanted)^2 over channels, float32 (..., tokens) of (..., tokens, channels); y has a gradient.

    Both on one device, of float32, bfloat16 or float16 and of one shape with at most `MOST` channels (`is_supported`).
    """
    return _TokenErrors.apply(y.contiguous(), wanted.contiguous())  # type: ignore[no-any-return, no-untyped-call]


def _run(kernel: Any, pointers: tuple[torch.Tensor, ...], *more: Any) -> None:
    count, channels = pointers[0].numel(), pointers[0].shape[-1]
    size = triton.next_power_of_2(channels)
    options = {} if interpreted() else {"num_warps": min(max(size // 1024, 1), 8), **UNFUSED}
    if count:
        with torch.cuda.device(pointers[0].get_device()):
            kernel[(count // channels,)](*pointers, channels, size, *more, **options)


__all__ = ["is_supported", "token_errors"]
