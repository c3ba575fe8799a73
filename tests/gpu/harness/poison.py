"""Fresh outputs that hold a known byte, guarded on both sides: shows elements that a kernel forgets and stores beyond the end.

While `poisoned` is active, torch.empty and its relatives return memory filled with one byte, cut out of a larger buffer. On
the way out the bytes around every output must still be that byte. What is allocated in C++ or by a compiled program does not
come this way; for that, `fill_freed` leaves the byte in memory that the allocator hands out next. `outputs` gives the same to
launchers that allocate by `launcher.allocator`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

GUARD = 256  # bytes before and after; keeps the alignment that the allocator gives
PATCHED = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
_EMPTY = torch.empty
Buffers = list[tuple[torch.Tensor, int]]


class WroteBeyond(AssertionError):
    """A kernel changed bytes that belong to no output."""


@contextmanager
def poisoned(byte: int) -> Iterator[None]:
    """Outputs of this thread's torch.empty hold `byte`; WroteBeyond where their surroundings changed."""
    buffers: Buffers = []
    originals = [(owner, name, getattr(owner, name)) for owner, name in PATCHED]
    for owner, name, original in originals:
        setattr(owner, name, _wrapped(original, byte, buffers, threading.get_ident()))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
    check_guards(buffers, byte)


def _wrapped(original: Callable[..., Any], byte: int, buffers: Buffers, thread: int) -> Callable[..., Any]:
    def make(*args: Any, **keywords: Any) -> Any:
        made = original(*args, **keywords)
        plain = type(made) is torch.Tensor and made.layout == torch.strided and made.device.type != "meta"
        other = keywords.get("out") is not None or keywords.get("pin_memory")
        if not plain or other or threading.get_ident() != thread or _special():
            return made
        return _surrounded(made, byte, buffers)

    return make


def _special() -> bool:
    """Whether torch traces, or records a CUDA graph, whose memory must not be touched from here."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return capturing or torch.compiler.is_compiling()


def _surrounded(made: torch.Tensor, byte: int, buffers: Buffers) -> torch.Tensor:
    """A tensor like `made` in the middle of a filled buffer."""
    size = made.untyped_storage().nbytes()
    whole = -(-size // 16) * 16
    buffer = _EMPTY(whole + 2 * GUARD, dtype=torch.uint8, device=made.device).fill_(byte)
    buffers.append((buffer, size))
    inside = _EMPTY(0, dtype=made.dtype, device=made.device)
    inside.set_(buffer.untyped_storage(), GUARD // made.element_size(), made.size(), made.stride())
    return inside.requires_grad_(made.requires_grad)


def check_guards(buffers: Buffers, byte: int) -> None:
    """WroteBeyond if a byte outside an output is no longer what it was."""
    for buffer, size in buffers:
        around = torch.cat([buffer[:GUARD], buffer[GUARD + size :]])
        touched = torch.nonzero(around != byte).flatten().tolist()
        if touched:
            places = [place if place < GUARD else place + size for place in touched]
            offsets = ", ".join(str(place - GUARD) for place in places[:8])
            raise WroteBeyond(
                f"{len(touched)} bytes outside an output of {size} bytes were written, at {offsets}"
            )


def fill_freed(sizes: Iterable[int], device: torch.device, byte: int) -> None:
    """Leave `byte` in freed memory of these sizes, which the allocator gives to the next output of that size."""
    buffers = [_EMPTY(max(size, 1), dtype=torch.uint8, device=device).fill_(byte) for size in sizes]
    del buffers


def outputs(byte: int, buffers: Buffers) -> Callable[..., torch.Tensor]:
    """What allocates contiguous outputs as `launcher.allocator` would, poisoned; `check_guards` looks at them after it."""

    def make(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _surrounded(_EMPTY(shape, dtype=dtype, device="cuda"), byte, buffers)

    return make
