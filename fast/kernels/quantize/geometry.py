"""Where the blocks of a contiguous tensor lie, as the arguments of `blocks.blocks_kernel`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fast.launch.launcher import INT32, ceil_div, power_above
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import flat_size

# Elements of one block that a tile may hold; larger blocks take two passes.
LARGEST_TILE = 16384
# Elements of a tile where blocks are small (one warp, 64 elements a thread), and of a part of a large block.
TILE = 2048
CHUNK = 8192
SMALLEST_TILE = 512
# Blocks along an axis that is not the last (`columns`): neighbouring columns of a tile, at least, of which a thread has WIDTH
# or, where scales come from an earlier pass, CHUNK_WIDTH; rows of a part of a large block; elements of a warp, which has no
# room for as many where there are masks, and fewer where each number is a load of its own.
COLUMNS = 64
WIDTH, CHUNK_WIDTH = 8, 16
COLUMN_CHUNK = 64
WARP, MASKED_WARP, NARROW_WARP = 4096, 2048, 1024


@dataclass(frozen=True)
class Geometry:
    """Blocks as tiles: `programs` of P blocks (or, chunked, parts of blocks) with SIZE elements each; see `blocks`.

    inner: the width of a two-dimensional block, or how many neighbouring columns a thread has (`columns`).
    """

    shape: str
    programs: int
    blocks: int
    integers: tuple[int, ...]
    chunked: bool
    masked: bool
    wide: bool
    size: int
    inner: int
    p: int
    warps: int


def geometry(blocks: Blocks) -> Geometry | None:
    """How a kernel covers these blocks, or None where no kernel does."""
    shape = blocks.shape or (1,)
    total = prod(shape)
    if total == 0:
        return None
    if isinstance(blocks.block, str):
        return flat_geometry(total, flat_size(blocks.block) or total)
    if isinstance(blocks.block, tuple):
        return _rectangles(shape, blocks.axis, blocks.block)
    length = shape[blocks.axis]
    lead, after = prod(shape[: blocks.axis]), prod(shape[blocks.axis + 1 :])
    size = length if blocks.block == -1 else blocks.block
    if after > 1:
        return columns_geometry(lead, length, after, min(size, length))
    if length % size == 0:
        return flat_geometry(total, size)
    return _short_rows(lead, length, size)


def flat_geometry(total: int, size: int, largest: int = LARGEST_TILE, elements: int = TILE) -> Geometry:
    """Blocks of neighbouring elements of the flattened tensor; those beyond `largest` in parts.

    elements: of a tile where blocks are small.
    """
    count = ceil_div(total, size)
    wide = total > INT32 - 2 * LARGEST_TILE
    if size > largest:
        chunks = ceil_div(size, CHUNK)
        integers = (count, 1, 1, size, total, chunks, 0, 0, 0, 0, 1)
        masked = size % CHUNK != 0 or total % size != 0
        return Geometry("flat", count * chunks, count, integers, True, masked, wide, CHUNK, CHUNK, 1, 4)
    tile = power_above(size)
    # Instructions that make several codes at once want whole words in a thread.
    p = max(1, SMALLEST_TILE // tile, min(elements // tile, power_above(count)))
    masked = tile != size or count % p != 0 or total % size != 0
    integers = (count, 1, 1, size, total, 1, 0, 0, 0, 0, 1)
    warps = 1 if tile < TILE else _warps(tile, masked)
    return Geometry("flat", ceil_div(count, p), count, integers, False, masked, wide, tile, tile, p, warps)


def _warps(elements: int, masked: bool) -> int:
    """32 elements a thread, four 16-byte loads of 16-bit numbers; more in the largest tiles, where masks leave registers."""
    return max(1, min(8 if masked else 4, elements // 1024))


def columns_geometry(
    lead: int, length: int, after: int, size: int, largest: int = 2 * LARGEST_TILE
) -> Geometry:
    """Blocks along an axis that is not the last; `after` columns are contiguous. largest: elements of a tile."""
    rows = ceil_div(length, size)
    wide = lead * length * after > INT32 - 2 * LARGEST_TILE
    chunked = size > 256
    tile = COLUMN_CHUNK if chunked else power_above(size)
    chunks = ceil_div(size, tile) if chunked else 1
    p = min(power_above(after), max(COLUMNS, TILE // tile), max(largest // tile, 1))
    p = max(p, SMALLEST_TILE // tile)
    masked = after % p != 0 or length % size != 0 or size % tile != 0
    integers = (0, after, rows, size, length, chunks, length * after, size * after, 0, after, 1)
    programs = ceil_div(after, p) * rows * lead * chunks
    count = lead * rows * after
    width = min(CHUNK_WIDTH if chunked else WIDTH, p, after & -after)
    warps = max(1, p * tile // (NARROW_WARP if width == 1 else MASKED_WARP if masked else WARP))
    return Geometry("columns", programs, count, integers, chunked, masked, wide, tile, width, p, warps)


def _short_rows(lead: int, length: int, size: int) -> Geometry | None:
    """Rows whose last block is short."""
    if size & (size - 1) or size > LARGEST_TILE:
        return None
    columns = ceil_div(length, size)
    wide = lead * length > INT32 - 2 * LARGEST_TILE
    p = max(1, TILE // size)
    integers = (lead * columns, columns, lead, length, lead, 1, 0, length, size, 0, 1)
    programs = ceil_div(lead * columns, p)
    return Geometry(
        "tiles", programs, lead * columns, integers, False, True, wide, size, size, p, _warps(p * size, True)
    )


def _rectangles(shape: tuple[int, ...], axis: int, block: tuple[int, int]) -> Geometry | None:
    """Two-dimensional blocks over the last two axes: block[1] along `axis`, block[0] along the other."""
    if axis < len(shape) - 2:
        return None
    height, inner = block if axis == len(shape) - 1 else block[::-1]
    size = height * inner
    if size & (size - 1) or size > LARGEST_TILE:
        return None
    lead, row_limit, length = prod(shape[:-2]), shape[-2], shape[-1]
    rows, columns = ceil_div(row_limit, height), ceil_div(length, inner)
    count = lead * rows * columns
    p = max(1, TILE // size)
    masked = bool(row_limit % height or length % inner or count % p)
    # The blocks of a tile lie side by side, so that their rows are read together.
    strips = not masked and columns % p == 0 and p > 1 and size > inner >= WIDTH
    wide = prod(shape) > INT32 - 2 * LARGEST_TILE
    integers = (
        count,
        columns,
        rows,
        length,
        row_limit,
        1,
        row_limit * length,
        height * length,
        inner,
        length,
        1,
    )
    return Geometry(
        "strips" if strips else "tiles",
        ceil_div(count, p),
        count,
        integers,
        False,
        masked,
        wide,
        size,
        inner,
        p,
        _warps(p * size, masked),
    )
