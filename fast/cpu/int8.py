"""Sums of products of signed bytes on a CPU, exact in int32, on any instructions.

`torch._int_mm` goes to oneDNN, which without VNNI adds pairs of products in 16 bits, and those saturate: of random bytes up to
127 every sum may be wrong, and nothing says so. float32 holds every integer up to 2**24, which the sum of 1024 products of
bytes does not pass, so parts of that length are exact in any order.
"""

from __future__ import annotations

import torch

from fast.cpu.capability import cpu_capability

#: Products whose sum float32 holds: 1024 * 128 * 128 = 2**24.
EXACT = 1024
#: Asked once, when this is imported: tracers cannot ask.
HAS_VNNI = cpu_capability().int8


def integer_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (M, K) times b (K, N), both int8, in int32 (M, N); exact where sums fit int32."""
    if HAS_VNNI:
        return torch._int_mm(a, b)
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.int32, device=a.device)
    for first in range(0, a.shape[1], EXACT):
        part = slice(first, first + EXACT)
        total = total + torch.mm(a[:, part].to(torch.float32), b[part].to(torch.float32)).to(torch.int32)
    return total


__all__ = ["integer_sums"]
