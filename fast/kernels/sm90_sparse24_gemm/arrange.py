"""2:4 metadata in the order in which threads of the kernel read it: a permutation of the canonical bytes, and its inverse.

Canonical: row r, byte b, as `reference.compress` writes it. Here (blocks, panels, bytes): blocks of 64 rows; panels of 128
elements of 8 bits or 64 of 16, an even number of them; in a block and panel the two 32-bit words of each thread, one for each
instruction, side by side, threads in order. With warp w, quad g (lane / 4), t = lane % 4, instruction s, byte b of the word,
row r = 16 w + g + 8 h:

* 8 bits (1024 bytes): byte ((32 w + 4 g + t) 2 + s) 4 + b is canonical byte 16 p + 8 s + 4 (t / 2) + b of row h = t % 2.
* 16 bits (512 bytes): threads t and t + 2 read the same; byte ((16 w + 2 g + t % 2) 2 + s) 4 + b is canonical byte
  8 p + 4 s + 2 (t % 2) + b % 2 of row h = b / 2.

Rows and columns of padding keep elements 2 and 3 (1110), and so do groups that name 0, 0, which PTX leaves undefined.

Source: PTX ISA, section 9.7.15.6 (which threads provide metadata of which rows and columns).

Masks as bits, eight elements a byte: what layers that multiply compressed weights keep, an eighth of a bool tensor's memory.

Element k of the last axis is bit 7 - k % 8 of byte k // 8, as `numpy.packbits` has it; bits behind the last element are 0.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from reference.sparsity.layouts import NOTHING_KEPT, VALID

#: Elements of a byte.
OCTET = 8


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """uint8 (..., ceil(K / 8)) of a bool mask (..., K), on its device."""
    more = -mask.shape[-1] % OCTET
    marks = F.pad(mask.to(torch.uint8), (0, more)).reshape(*packed_shape(mask.shape), OCTET)
    return (marks << _places(mask.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: torch.Tensor, length: int) -> torch.Tensor:
    """The bool mask (..., length) that `pack_bits` packed."""
    marks = (bits.unsqueeze(-1) >> _places(bits.device)) & 1
    return marks.flatten(-2)[..., :length].bool()


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the bits of a mask of this shape."""
    return (*shape[:-1], -(-shape[-1] // OCTET))


def _places(device: torch.device) -> torch.Tensor:
    """How far an element's bit is from the lowest one."""
    return torch.arange(OCTET - 1, -1, -1, dtype=torch.uint8, device=device)


ROWS = 64
#: Canonical bytes of a row in a panel, and bytes of a block in a panel, by the bits of an element.
PANEL_BYTES = {8: 16, 16: 8}
BLOCK_BYTES = {8: 1024, 16: 512}
#: Axes of a block's rows and a panel's bytes: for 8 bits (warp, half, quad | instruction, column, byte).
ORDER = {8: (0, 4, 1, 3, 6, 2, 5, 7), 16: (0, 4, 1, 3, 6, 5, 2, 7)}
INVERSE = {8: (0, 2, 5, 3, 1, 6, 4, 7), 16: (0, 2, 6, 3, 1, 5, 4, 7)}


def arrange(metadata: torch.Tensor, bits: int, *, defined: bool = False) -> torch.Tensor:
    """uint8 (N, bytes) to (ceil(N / 64), panels, BLOCK_BYTES), on its device. bits: of an element. defined: whether no group
    names 0, 0, as `compress` writes none: whole blocks and panels then take one copy."""
    rows, stored = metadata.shape
    panels = -(-stored // (2 * PANEL_BYTES[bits])) * 2
    blocks = -(-rows // ROWS)
    result = metadata if defined else _defined(metadata)
    whole = (blocks * ROWS, panels * PANEL_BYTES[bits])
    padded = result
    if (rows, stored) != whole:
        padded = metadata.new_full(whole, NOTHING_KEPT * 0x11)
        padded[:rows, :stored] = result
    # Columns of 4 bytes for 8 bits, of 2 for 16.
    axes = (blocks, 4, 2, 8, panels, 2, 2, PANEL_BYTES[bits] // 4)
    return padded.view(axes).permute(ORDER[bits]).reshape(blocks, panels, BLOCK_BYTES[bits])


def restore(arranged: torch.Tensor, bits: int, shape: tuple[int, int]) -> torch.Tensor:
    """Canonical metadata of `shape` (N, bytes) from what `arrange` made."""
    blocks, panels, _ = arranged.shape
    rows, stored = shape
    back = arranged.view(blocks, panels, 4, 8, 2, 2, 2, PANEL_BYTES[bits] // 4).permute(INVERSE[bits])
    return back.reshape(blocks * ROWS, panels * PANEL_BYTES[bits])[:rows, :stored].contiguous()


def shape_of(rows: int, stored: int, bits: int) -> tuple[int, int, int]:
    """The shape of arranged metadata of canonical (rows, stored)."""
    return -(-rows // ROWS), -(-stored // (2 * PANEL_BYTES[bits])) * 2, BLOCK_BYTES[bits]


def _defined(metadata: torch.Tensor) -> torch.Tensor:
    """Groups 0, 0 become 2, 3."""
    low, high = metadata & 15, metadata >> 4
    return torch.where(low == 0, NOTHING_KEPT, low) | torch.where(high == 0, NOTHING_KEPT, high) << 4


def count_undefined(metadata: torch.Tensor) -> int:
    """Groups whose 4 bits name no two elements in order, 0, 0 not counted. The host waits for it."""
    table = torch.ones(16, dtype=torch.bool)
    table[[0, *VALID]] = False
    both = (table[:, None] | table[None, :]).reshape(-1).to(metadata.device)
    return int(both[metadata.reshape(-1).long()].sum())


__all__ = [
    "OCTET",
    "arrange",
    "count_undefined",
    "pack_bits",
    "packed_shape",
    "restore",
    "shape_of",
    "unpack_bits",
]
