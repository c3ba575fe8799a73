"""2:4 metadata as kernels read it: permutations of the canonical bytes of `reference.sparsity.compress`, and their inverses.

Canonical: row r, byte b holds the groups 2b (low half) and 2b + 1 (high half). With k = 4 * group, M rows and K columns after
padding, T the tile of K, and / an integer division, a group's 4 bits lie at

* `cutlass_sm90_8bit_k64`, `_k128` (T = 64, 128): byte (k/T)(T/8)M + (T/8)r + (k%T)/8, half (k/4)%2: the canonical bytes, in
  panels of T columns. M % 64, K % T. torchao's kernel and CUTLASS's compressor have T = 128.
* `cutlass_sm90_16bit_k64`, `_k128` (n = T/32 = 2, 4): byte 256n((k/T)(M/64) + r/64) + 64n((r/16)%4) + 32n((k/16)%2) + 4n(r%8) +
  4((k%T)/32) + 2((r/8)%2) + (k%16)/8, half (k/4)%2. M % 64, K % T. It depends on the tile of K of the GEMM that reads it.
* `cutlass_sm80_16bit`: words of 16 bits, c = k/16, d = r/32*32 + (r%8)*4 + (r%32)/8; where d is even and c odd, d + 1 and c - 1
  take their place, where d is odd and c even, d - 1 and c + 1. Word (c/2)2M + 2d + c%2, in it byte (k%16)/8, half (k/4)%2.
  M % 32, K % 32.
* `cutlass_sm80_8bit`: words of 32 bits, c = k/32, d = r/16*16 + (r%8)*2 + (r%16)/8, else the same. M % 16, K % 64.
* `cusparselt_sm90_16bit`: byte 8K(r/64) + 256(k/32) + 64((r%64)/16) + 8(r%8) + 2((k%16)/4) + (k%32)/16, half (r%16)/8. M % 64,
  K % 32. NVIDIA documents no order; this one was found by others from its output, for 16-bit values.

16 bit: float16 and bfloat16; 8 bit: e4m3, e5m2, int8, uint8. `METADATA_LAYOUTS` names them. Rows and columns of padding, and
groups whose indices are 0, 0, become 1110 (elements 2 and 3): PTX leaves 0000 undefined, and the values of such a group are 0.

Sources: CUTLASS, sm90_sparse_config.inl (`TensorEAtom`, `fill_layoutE`) and host_reorder.h (`reorder_meta`); the tile kernel of
torchao's sparsify24.cu; PTX ISA, sections 9.7.14.6 and 9.7.15.6, for the meaning of the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.arrays.namespace import Array, Namespace, as_array, choice, namespace_of
from reference.sparsity.compress import is_traced, pack_metadata, unpack_metadata

Index = npt.NDArray[np.int32]
#: What a group without kept elements says: 2 | 3 << 2.
NOTHING_KEPT = 0b1110
VALID = (0b0100, 0b1000, 0b1001, 0b1100, 0b1101, NOTHING_KEPT)


@dataclass(frozen=True)
class MetadataLayout:
    """Where the 4 bits of a group lie. rows, columns: what M and K are padded to multiples of.

    place: of (r, k, M, K) the index in halves of bytes, low half first; r and k are int32 arrays that broadcast.
    """

    rows: int
    columns: int
    place: Callable[[Index, Index, int, int], Index]

    def padded(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(M, K) of a matrix, each padded."""
        m, k = shape
        return -(-m // self.rows) * self.rows, -(-k // self.columns) * self.columns


def arrange_metadata(metadata: Array, layout: str) -> Array:
    """Canonical metadata in the order of a kernel: uint8 (M * K / 8,), M and K padded as the layout asks.

    metadata: uint8 (rows, bytes) of `compress`, NumPy, JAX or torch. layout: a name of `METADATA_LAYOUTS`. Values are padded
    with zeros to (M, K / 2) by the caller. A group 0, 0 becomes 2, 3, the rest of the padding, too.

    Raises TypeError for metadata that is not uint8; ValueError for another number of axes, an unknown layout, and for 4 bits
    that name no two elements in order, with their number (not seen under `jax.jit` and `torch.compile`).
    """
    record = _layout(layout)
    ns, metadata = _uint8(metadata, "metadata", 2)
    rows, stored = ns.shape(metadata)
    groups = unpack_metadata(ns, metadata, 2 * stored)
    _check_groups_valid(ns, groups)
    m, k = record.padded((rows, 8 * stored))
    groups = _pad(ns, ns.where(groups == 0, NOTHING_KEPT, groups), m, k // 4)
    source = ns.constant(_orders(layout, m, k)[1], groups)
    return pack_metadata(ns, ns.take(groups.reshape(-1), source).reshape(1, -1))[0]


def restore_metadata(stored: Array, layout: str, shape: tuple[int, int]) -> Array:
    """Canonical metadata, uint8 (rows, ceil(K / 8)), of what `arrange_metadata` or a kernel stored for a matrix of `shape`.

    stored: uint8, as many as the padded matrix has, of any shape. shape: (rows, K) of the dense matrix, K % 4 = 0. What
    a library wrote as 0, 0 comes back as 2, 3; the last high half of an odd number of groups is 0.

    Raises TypeError for what is not uint8; ValueError for an unknown layout, another size than the layout gives this shape,
    K % 4 != 0, or 4 bits that name no two elements in order.
    """
    record = _layout(layout)
    ns, stored = _uint8(stored, "stored metadata", None)
    rows, columns = shape
    if columns % 4:
        raise ValueError(
            f"2:4 metadata is of whole groups of four, got shape {tuple(shape)}; pad the columns"
        )
    m, k = record.padded((rows, columns))
    flat = stored.reshape(-1)
    if len(flat) != m * k // 8:
        raise ValueError(
            f"{layout} stores {m * k // 8} bytes for shape {tuple(shape)}, padded to {(m, k)}; got {len(flat)}: "
            f"give the shape of the dense matrix and the layout that it was written in"
        )
    halves = unpack_metadata(ns, flat[None], 2 * len(flat))[0]
    target = ns.constant(_orders(layout, m, k)[0], halves)
    groups = ns.take(halves, target).reshape(m, k // 4)[:rows, : columns // 4]
    _check_groups_valid(ns, groups)
    return pack_metadata(ns, ns.where(groups == 0, NOTHING_KEPT, groups))


def _panels(tile: int) -> MetadataLayout:
    """CUTLASS on sm_90, 8-bit values."""

    def place(r: Index, k: Index, m: int, _: int) -> Index:
        byte: Index = k // tile * (tile // 8) * m + tile // 8 * r + k % tile // 8
        return 2 * byte + k // 4 % 2

    return MetadataLayout(64, tile, place)


def _atoms(tile: int) -> MetadataLayout:
    """CUTLASS on sm_90, 16-bit values."""
    n = tile // 32

    def place(r: Index, k: Index, m: int, _: int) -> Index:
        atom = 256 * n * (k // tile * (m // 64) + r // 64)
        row = 64 * n * (r // 16 % 4) + 4 * n * (r % 8) + 2 * (r // 8 % 2)
        column = 32 * n * (k // 16 % 2) + 4 * (k % tile // 32) + k % 16 // 8
        byte: Index = atom + row + column
        return 2 * byte + k // 4 % 2

    return MetadataLayout(64, tile, place)


def _interleaved(word: int) -> MetadataLayout:
    """CUTLASS on sm_80; word: dense elements of a word of metadata, 16 or 32."""
    rows = 512 // word

    def place(r: Index, k: Index, m: int, _: int) -> Index:
        c, d = k // word, r // rows * rows + r % 8 * (rows // 8) + r % rows // 8
        up, down = (d % 2 == 0) & (c % 2 == 1), (d % 2 == 1) & (c % 2 == 0)
        move = up.astype(np.int32) - down
        c, d = c - move, d + move
        index: Index = c // 2 * 2 * m + 2 * d + c % 2
        return index * (word // 4) + k % word // 4

    return MetadataLayout(rows, 2 * word, place)


def _paired_rows(r: Index, k: Index, _: int, columns: int) -> Index:
    row = 8 * columns * (r // 64) + 64 * (r % 64 // 16) + 8 * (r % 8)
    return 2 * (row + 256 * (k // 32) + 2 * (k % 16 // 4) + k % 32 // 16) + r % 16 // 8


METADATA_LAYOUTS: dict[str, MetadataLayout] = {
    "cutlass_sm90_8bit_k64": _panels(64),
    "cutlass_sm90_8bit_k128": _panels(128),
    "cutlass_sm90_16bit_k64": _atoms(64),
    "cutlass_sm90_16bit_k128": _atoms(128),
    "cutlass_sm80_16bit": _interleaved(16),
    "cutlass_sm80_8bit": _interleaved(32),
    "cusparselt_sm90_16bit": MetadataLayout(64, 32, _paired_rows),
}


@lru_cache(maxsize=4)
def _orders(layout: str, m: int, k: int) -> tuple[Index, Index]:
    """(place of each group, group at each place), flat, for padded M and K; the second inverts the first."""
    r, column = np.arange(m, dtype=np.int32)[:, None], np.arange(0, k, 4, dtype=np.int32)[None]
    place = METADATA_LAYOUTS[layout].place(r, column, m, k).reshape(-1).astype(np.int32)
    source = np.empty_like(place)
    source[place] = np.arange(place.size, dtype=np.int32)
    return place, source


def _layout(layout: str) -> MetadataLayout:
    return METADATA_LAYOUTS[choice(layout, tuple(METADATA_LAYOUTS), "a metadata layout")]


def _uint8(x: Any, what: str, axes: int | None) -> tuple[Namespace, Array]:
    x = as_array(x)
    ns = namespace_of(x)
    if ns.dtype_name(x) != "uint8":
        raise TypeError(
            f"{what} is uint8, got {ns.dtype_name(x)} of shape {ns.shape(x)}; view its bytes as uint8"
        )
    if axes is not None and len(ns.shape(x)) != axes:
        raise ValueError(
            f"{what} of a kernel is that of a matrix, got shape {ns.shape(x)}; arrange each by itself"
        )
    return ns, x


def _pad(ns: Namespace, groups: Array, rows: int, columns: int) -> Array:
    """int32 groups (., .) to (rows, columns), filled with NOTHING_KEPT."""
    m, k = ns.shape(groups)
    right = ns.full((m, columns - k), NOTHING_KEPT, "int32", groups)
    below = ns.full((rows - m, columns), NOTHING_KEPT, "int32", groups)
    return ns.concatenate([ns.concatenate([groups, right], 1), below], 0)


def _check_groups_valid(ns: Namespace, groups: Array) -> None:
    """ValueError unless each group is 0 or names two elements, the lower first."""
    if is_traced(ns, groups):
        return
    wrong = int(((groups != 0) & ((groups & 3) >= (groups >> 2))).sum())
    if wrong:
        raise ValueError(
            f"4 bits of 2:4 metadata are one of {', '.join(f'{code:04b}' for code in VALID)}; {wrong} groups are not: "
            f"pass what compress returned, or name the layout that these bytes are in"
        )
