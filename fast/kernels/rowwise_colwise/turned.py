"""The transpose of a matrix of bytes: under one scale for the tensor the codes of x.T are those of x, elsewhere.

torch copies a transposed view byte by byte, each from another row. Here a thread takes four rows of a word of four columns and
makes four words of them, one for each column, so that memory is read and written in words along rows, and what goes through
shared memory between the two are words too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast import dispatch
from fast.kernels.quantize.plan import LARGEST_TILE
from fast.launch.launcher import INT32, Call, CompiledLaunch, ceil_div

#: Elements of a word.
WORD = 4
#: Groups of four rows, and words of a row, of a program: 128 bytes along a row of either matrix.
DOWN, ACROSS, WARPS = 32, 32, 4


@triton.jit
def bytes_of_column(a, b, c, d, BITS: tl.constexpr):
    """Of words of four rows, uint32, the word of one column, whose bytes begin at these bits."""
    low = ((a >> BITS) & 255) | (((b >> BITS) & 255) << 8)
    high = ((c >> BITS) & 255) | (((d >> BITS) & 255) << 8)
    return low | (high << 16)


@triton.jit
def turned_bytes_kernel(
    x, y, groups, words, WIDE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr
):  # fmt: skip
    """y (4 words, 4 groups) is x (4 groups, 4 words) transposed, uint8 of both. WIDE: places need more than 31 bits."""
    x = x.to(tl.pointer_type(tl.uint32), bitcast=True)
    y = y.to(tl.pointer_type(tl.uint32), bitcast=True)
    tiles = tl.cdiv(words, ACROSS)
    group = tl.program_id(0) // tiles * DOWN + tl.arange(0, DOWN)[:, None]
    word = tl.program_id(0) % tiles * ACROSS + tl.arange(0, ACROSS)[None, :]
    inside = (group < groups) & (word < words)
    at = (group.to(tl.int64) if WIDE else group) * 4 * words + word
    a = tl.load(x + at, mask=inside, other=0)
    b = tl.load(x + at + words, mask=inside, other=0)
    c = tl.load(x + at + 2 * words, mask=inside, other=0)
    d = tl.load(x + at + 3 * words, mask=inside, other=0)
    column = tl.trans(word * 4)
    target = (column.to(tl.int64) if WIDE else column) * groups + tl.trans(group)
    there = tl.trans(inside)
    for byte in tl.static_range(4):
        tl.store(y + target + byte * groups, tl.trans(bytes_of_column(a, b, c, d, 8 * byte)), mask=there)


def turned_bytes(x: torch.Tensor) -> torch.Tensor:
    """x (N, K), uint8 and contiguous, as (K, N), contiguous; by torch where 4 divides not both lengths."""
    rows, columns = x.shape
    if rows % WORD or columns % WORD or not x.numel():
        return x.t().contiguous()
    key = dispatch.key_of("turned_bytes", "uint8", (), (x,))
    call = dispatch.find(key)
    found: Any = None if call is None else call(x)
    return _launched(x, key) if found is None else found


def _launched(x: torch.Tensor, key: Any) -> torch.Tensor:
    groups, words = x.shape[0] // WORD, x.shape[1] // WORD
    call = Call({"x": x}, words=("x",))
    call.allocate("y", (x.shape[1], x.shape[0]), torch.uint8)
    wide = x.numel() // WORD > INT32 - LARGEST_TILE
    programs = ceil_div(groups, DOWN) * ceil_div(words, ACROSS)
    launch = CompiledLaunch(turned_bytes_kernel, programs, (groups, words, wide, DOWN, ACROSS), WARPS)
    call.launch(launch, ["x", "y"])
    result: torch.Tensor = call.result("y", key, "uint8")
    return result
