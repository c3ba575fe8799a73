"""Memory for what lies between two operations on a tile, kept by each thread from one call to the next.

The system hands out large new memory page by page, at first touch: of a tile of 2 MiB that takes as long as its arithmetic.
"""

from __future__ import annotations

import threading
from math import prod

import torch

#: Bytes that a thread keeps under one name; what is larger is made for one call.
KEPT = 1 << 22


class _Kept(threading.local):
    def __init__(self) -> None:
        self.parts: dict[str, torch.Tensor] = {}


_KEPT = _Kept()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the CPU whose memory is that of the last one of this name in this thread; its values are any."""
    size = prod(shape) * dtype.itemsize
    if size > KEPT:
        return torch.empty(shape, dtype=dtype, device="cpu")
    kept = _KEPT.parts.get(name)
    if kept is None or kept.numel() < size:
        # Memory that was made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            kept = _KEPT.parts[name] = torch.empty(size, dtype=torch.uint8, device="cpu")
    return kept[:size].view(dtype).view(shape)


__all__ = ["scratch"]
