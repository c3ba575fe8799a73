"""Rows sorted by expert: tables of groups, columns gathered or quantized, zeros where grouped products write nothing.

`zero_tail_` and `zero_empty_`: rows of no group, and weight gradients of groups without rows. How much that is stands in
`ends` on the GPU alone, so programs are started for everything and leave at once where there is nothing to do.

`group_columns`: columns as transposed 8-bit codes (and MX codes below), groups filled up by zeros, without a copy. As
`rowwise_colwise.tiles` and `mx`, of 16-bit floats in patches of 32 x 64; rows come by index, and a row of no index is zeros.
KIND says what has one scale:

* ``"vectors"``: a column in a group. `group_maxima_kernel` has found their largest magnitudes before.
* ``"tensor"``: a group. The same.
* ``"blocks"``: 128 places.
* ``"mx"``: 32 places, powers of two.

A group's scale stands at each STEP of its places, and for each column in `table`.

`group_maxima_kernel`: the largest magnitude of each column in each group, or of each group, of 16-bit floats in pairs of
neighbouring columns. A program goes down a strip of grains, 16 places of one group each, and leaves its maxima where the group
changes and at the end, by atomic maximum.

`group_layout`: where rows stand once each group is filled up to a multiple of a step, all tables from one launch. A program
has some places and sees all groups: their ends are sums over as many numbers as there are experts.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from fast import dispatch
from fast.kernels.bits import high_float, low_float
from fast.kernels.rowwise_colwise import mx as mx
from fast.kernels.rowwise_colwise.mx import (
    LOW_HALF,
    MAGNITUDES,
    along_columns,
    larger_halves,
    largest_halves,
    patchwise,
)
from fast.kernels.rowwise_colwise.tiles import (
    as_float32,
    column_codes,
    largest_of_columns,
    scales_of,
    turned_words,
)
from fast.kernels.scheme.constants import constants_of
from fast.kernels.scheme.fast_path_rules import HARDWARE
from fast.launch.launcher import FLOAT_NAMES, Call, CompiledLaunch, ceil_div, interpreted, power_above
from reference.formats.storage import storage_dtype
from reference.schemes.schemes import Scheme

#: Places that have one owner: every step is a multiple of it.
LAYOUT_GRAIN = 16
#: Comparisons of a program.
COMPARED = 4096
#: Places of a program at least.
FEWEST = 16
#: Places of a program at most.
MOST_PLACES = 1024
#: Groups that a program can see.
MOST_EXPERTS = 4096


@triton.jit
def layout_kernel(
    offsets, ends, source, owners, experts, rows, places,
    STEP: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """ends (experts,), source (places,) and owners (places / GRAIN,), as `group_layout` says. EXPERTS: a power of two."""
    expert = tl.arange(0, EXPERTS)
    known = expert < experts
    stop = tl.load(offsets + expert, mask=known, other=0)
    start = tl.load(offsets + expert - 1, mask=known & (expert > 0), other=0)
    filled = (stop - start + (STEP - 1)) // STEP * STEP
    end = tl.cumsum(tl.where(known, filled, 0), 0)
    begin = end - filled
    if tl.program_id(0) == 0:
        tl.store(ends + expert, end, mask=known)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = place[:, None] - begin[None, :] + start[None, :]
    mine = known[None, :] & (place[:, None] >= begin[None, :]) & (row < stop[None, :]) & (row < rows)
    # At most one group has a row here.
    result = tl.max(tl.where(mine, row, -1), axis=1)
    tl.store(source + place, result, mask=place < places)
    grain = tl.program_id(0) * (TILE // GRAIN) + tl.arange(0, TILE // GRAIN)
    before = known[None, :] & (end[None, :] <= grain[:, None] * GRAIN)
    tl.store(owners + grain, tl.sum(before.to(tl.int32), axis=1), mask=grain * GRAIN < places)


def group_layout(
    offsets: torch.Tensor, rows: int, places: int, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ends (E,), source (P,), owners (P / 16,)), int32, of offsets (E,) int32 that end within `rows`.

    ends: the place after each group and its filling. source: the row at each of P = `places`, -1 for none. owners: the group of
    each 16 places, E beyond the last. step: a multiple of 16 that divides P.
    """
    key = dispatch.key_of("group_layout", "", (rows, places, step), (offsets,))
    call = dispatch.find(key)
    result = None if call is None else call(offsets)
    if result is None:
        result = _columns_described(offsets, rows, places, step).result(("ends", "source", "owners"), key)
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = result
    return results


def _columns_described(offsets: torch.Tensor, rows: int, places: int, step: int) -> Call:
    experts = offsets.shape[0]
    call = Call({"offsets": offsets})
    for name, size in (("ends", experts), ("source", places), ("owners", places // LAYOUT_GRAIN)):
        call.allocate(name, (size,), torch.int32)
    wide = power_above(experts)
    many = min(max(COMPARED // wide, FEWEST), MOST_PLACES)
    tail = (experts, rows, places, step, wide, many, LAYOUT_GRAIN)
    grid = max(ceil_div(places, many), 1)
    call.launch(CompiledLaunch(layout_kernel, grid, tail, WARPS), ("offsets", "ends", "source", "owners"))
    return call


#: Places that have one owner.
GRAIN = tl.constexpr(16)


@triton.jit
def _leave(
    top, statistic, owner, word, words, element: tl.constexpr, WHOLE: tl.constexpr, HAS_PTX: tl.constexpr
):
    """Maxima (WARPS, WORDS) of a group's pairs of columns into its row of `statistic`; WHOLE: into its one number."""
    pair = largest_halves(top, 0, HAS_PTX)
    low, high = as_float32(pair & LOW_HALF, element), as_float32(pair >> 16, element)
    if WHOLE:
        tl.atomic_max(statistic + owner, tl.max(tl.maximum(low, high), axis=0), sem="relaxed")
    else:
        own = statistic + owner.to(tl.int64) * (2 * words)
        tl.atomic_max(own + 2 * word, low, mask=word < words, sem="relaxed")
        tl.atomic_max(own + 2 * word + 1, high, mask=word < words, sem="relaxed")


@triton.jit
def group_maxima_kernel(
    x, source, owners, statistic, places, columns,
    WHOLE: tl.constexpr, HAS_PTX: tl.constexpr, TURNS: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """statistic (groups + 1, columns), or (WHOLE) (groups + 1,): patterns of the largest magnitudes; all 0 before.

    x: rows of an even number of columns; source, owners: see `layout.group_layout`. TURNS: grains of a strip, of ROWS places.
    """
    WORDS: tl.constexpr = COLUMNS // 2
    element: tl.constexpr = x.dtype.element_ty
    words = columns // 2
    across = tl.cdiv(words, WORDS)
    first = tl.program_id(0) // across * TURNS
    word = tl.program_id(0) % across * WORDS + tl.arange(0, WORDS)
    pairs = x.to(tl.pointer_type(tl.int32), bitcast=True)
    owner = tl.load(owners + first)
    top = tl.zeros((WARPS, WORDS), tl.int32)
    for grain in range(first, tl.minimum(first + TURNS, places // ROWS)):
        mine = tl.load(owners + grain)
        if mine != owner:
            _leave(top, statistic, owner, word, words, element, WHOLE, HAS_PTX)
            top = tl.zeros((WARPS, WORDS), tl.int32)
            owner = mine
        row = tl.load(source + grain * ROWS + tl.arange(0, ROWS))
        at = row.to(tl.int64)[:, None] * words + word[None, :]
        m = tl.load(pairs + at, mask=(row >= 0)[:, None] & (word < words)[None, :], other=0) & MAGNITUDES
        own = largest_halves(tl.reshape(m, (ROWS // WARPS, WARPS, WORDS)), 0, HAS_PTX)
        top = larger_halves(top, own, HAS_PTX)
    _leave(top, statistic, owner, word, words, element, WHOLE, HAS_PTX)


@triton.jit
def _group_factors(
    statistic, owners, scale, table, first, own_column, places, columns, experts,
    SCHEME: tl.constexpr, KIND: tl.constexpr, STEP: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Multipliers of the grains of a tile, (2 DOWN, columns or 1), whose scales are stored."""
    grain = first // GRAIN + tl.arange(0, 2 * DOWN)
    exists = grain < places // GRAIN
    owner = tl.load(owners + grain, mask=exists, other=experts)
    wide_owner = owner.to(tl.int64)[:, None]
    before = tl.load(owners + grain - 1, mask=exists & (grain > 0), other=-1)
    if KIND == "tensor":
        largest = tl.load(statistic + owner)[:, None]
    else:
        largest = tl.load(statistic + wide_owner * columns + own_column[None, :])
    stored, _, by = scales_of(largest, SCHEME)
    stored = tl.broadcast_to(stored, (2 * DOWN, own_column.shape[0]))
    begins = exists & (owner != before) & (owner < experts)
    tl.store(table + wide_owner * columns + own_column[None, :], stored, mask=begins[:, None])
    at = own_column[None, :] * (places // STEP) + (grain // (STEP // GRAIN))[:, None]
    tl.store(scale + at, stored, mask=(exists & (grain % (STEP // GRAIN) == 0))[:, None])
    return by


@triton.jit
def _grain_codes(low, high, by, SCHEME: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Words of four codes along columns, (64 ACROSS, 8 DOWN), under the multipliers of grains."""
    WARPS: tl.constexpr = DOWN * ACROSS
    if by.shape[1] == 1:
        of_low = tl.reshape(by, (DOWN, 1, 2, 1, 1))
        of_high = of_low
    else:
        of_low, of_high = tl.split(tl.reshape(by, (DOWN, 2, ACROSS, 32, 2)))
        of_low = tl.permute(of_low, (0, 2, 1, 3))[:, :, :, None, :]
        of_high = tl.permute(of_high, (0, 2, 1, 3))[:, :, :, None, :]
    low = tl.reshape(patchwise(low, WARPS), (DOWN, ACROSS, 2, 16, 32)) * of_low
    high = tl.reshape(patchwise(high, WARPS), (DOWN, ACROSS, 2, 16, 32)) * of_high
    low, high = tl.reshape(low, (WARPS, 32, 32)), tl.reshape(high, (WARPS, 32, 32))
    return turned_words(low, high, SCHEME, DOWN, ACROSS)


@triton.jit
def group_columns_kernel(
    x, source, owners, statistic, codes, scale, table, places, columns, experts,
    SCHEME: tl.constexpr, KIND: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """codes (columns, places), scale (columns, places / STEP or the block), table (experts, columns), 0 before.

    places: a multiple of 16; columns: of 64 ACROSS. Programs go down BAND tiles first, then to the next columns; those of KINDs
    with a first read from the end. num_warps is DOWN * ACROSS. source, owners: see `layout.group_layout`.
    """
    WARPS: tl.constexpr = DOWN * ACROSS
    WORDS: tl.constexpr = tl.pointer_type(tl.int32)
    IS_BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    program = tl.program_id(0)
    if KIND == "vectors" or KIND == "tensor":
        program = tl.num_programs(0) - 1 - program
    wide = columns // (64 * ACROSS)
    band, rest = program // (BAND * wide), program % (BAND * wide)
    high = tl.minimum(tl.cdiv(places, 32 * DOWN) - band * BAND, BAND)
    tile_row = band * BAND + rest % high
    first, column = tile_row * (32 * DOWN), (rest // high).to(tl.int64) * (64 * ACROSS)
    own_column = column + tl.arange(0, 64 * ACROSS)
    i = tl.arange(0, 32 * WARPS)
    patch = (i // 4) % WARPS
    place = first + i % 4 * 8 + patch // ACROSS * 32 + i // (4 * WARPS)
    row = tl.load(source + place, mask=place < places, other=-1)
    begin = row.to(tl.int64) * (columns // 2) + patch % ACROSS * 32
    at = (x + column).to(WORDS, bitcast=True) + begin[:, None] + tl.arange(0, 32)[None, :]
    w = tl.load(at, mask=(row >= 0)[:, None], other=0)
    magnitudes, low, high = w & MAGNITUDES, low_float(w, IS_BF16), high_float(w, IS_BF16)
    if KIND == "mx":
        result, code = along_columns(magnitudes, low, high, WARPS, IS_BF16, SCHEME)
        result = tl.reshape(
            tl.permute(tl.reshape(result, (DOWN, ACROSS, 8, 64)), (1, 3, 0, 2)), (64 * ACROSS, 8 * DOWN)
        )
        block = first // 32 + tl.arange(0, DOWN)
        to_scale = scale + own_column[:, None] * (places // 32) + block[None, :]
        code = tl.trans(tl.reshape(code, (DOWN, 64 * ACROSS))).to(tl.uint8)
        tl.store(to_scale, code, mask=(block < places // 32)[None, :])
    elif KIND == "blocks":
        of_columns = largest_of_columns(magnitudes, IS_BF16, SCHEME.has_ptx, DOWN, ACROSS)
        stored, _, by = scales_of(of_columns, SCHEME)
        tl.store(scale + own_column * (places // 128) + tile_row, stored)
        result = column_codes(low, high, by, SCHEME, DOWN, ACROSS)
    else:
        by = _group_factors(
            statistic, owners, scale, table, first, own_column, places, columns, experts, SCHEME, KIND, STEP, DOWN,
        )  # fmt: skip
        result = _grain_codes(low, high, by, SCHEME, DOWN, ACROSS)
    word = first // 4 + tl.arange(0, 8 * DOWN)
    to = codes.to(WORDS, bitcast=True) + own_column[:, None] * (places // 4) + word[None, :]
    if MASKED:
        tl.store(to, result, mask=(word < places // 4)[None, :])
    else:
        tl.store(to, result)


# `gather_transposed`: rows of a matrix, by index, as columns; one read, one write, no index on the host.

#: Rows and columns of a tile: 128 bytes of a row read at a time, as many of a column written.
GATHER_TILE = (64, 64)


@triton.jit
def gather_transposed_kernel(x, source, out, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[c, p] = x[source[p], c], or 0 where source[p] is negative. count: of p; width: of c."""
    p = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(source + p, mask=p < count, other=-1).to(tl.int64)
    inside = (row >= 0)[:, None] & (c < width)[None, :]
    values = tl.load(x + row[:, None] * width + c[None, :], mask=inside, other=0.0)
    target = c[:, None] * count + p[None, :]
    tl.store(out + target, tl.trans(values), mask=(c < width)[:, None] & (p < count)[None, :])


def gather_transposed(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """x (T, C), contiguous, and source (P,) int32, negative for a row of zeros: (C, P) in x's dtype."""
    count, width = source.shape[0], x.shape[1]
    out = torch.empty((width, count), dtype=x.dtype, device=x.device)
    if count and width:
        _launch(count, width).run((x, source, out), x.get_device())
    return out


@lru_cache(maxsize=4096)
def _launch(count: int, width: int) -> CompiledLaunch:
    rows, columns = GATHER_TILE
    grid = (-(-count // rows), -(-width // columns), 1)
    return CompiledLaunch(gather_transposed_kernel, grid, (count, width, rows, columns), WARPS)


#: Rows of a program, and elements that it writes at a time.
ROWS, TILE = 32, 1024
#: Programs of a group.
PARTS = 16
WARPS = 4


@triton.jit
def zero_tail_kernel(ends, y, experts, rows, width, ROWS: tl.constexpr, TILE: tl.constexpr):
    """y[r] = 0 for r >= ends[experts - 1], a few rows a program."""
    end = tl.load(ends + experts - 1)
    first = tl.program_id(0) * ROWS
    for r in range(tl.maximum(first, end), tl.minimum(first + ROWS, rows)):
        for c in range(0, width, TILE):
            at = c + tl.arange(0, TILE)
            row = tl.zeros((TILE,), tl.int64) + r
            tl.store(y + row * width + at, tl.zeros((TILE,), y.dtype.element_ty), mask=at < width)


@triton.jit
def zero_empty_kernel(ends, y, size, PARTS: tl.constexpr, TILE: tl.constexpr):
    """y[e] = 0, `size` elements, for every e with ends[e] == ends[e - 1]."""
    expert = tl.program_id(0)
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if start == end:
        for c in range(tl.program_id(1) * TILE, size, PARTS * TILE):
            at = c + tl.arange(0, TILE)
            nothing = tl.zeros((TILE,), y.dtype.element_ty)
            tl.store(y + expert.to(tl.int64) * size + at, nothing, mask=at < size)


def zero_tail_(y: torch.Tensor, ends: torch.Tensor) -> None:
    """y (T, N), contiguous: rows from ends[-1] on become zero. ends: (E,) int32."""
    if y.numel():
        _tail(ends.shape[0], *y.shape).run((ends, y), y.get_device())


def zero_empty_(y: torch.Tensor, ends: torch.Tensor) -> None:
    """y (E, ...), contiguous: entries of groups without rows become zero. ends: (E,) int32."""
    if y.numel():
        _empty(y.shape[0], y.numel() // y.shape[0]).run((ends, y), y.get_device())


@lru_cache(maxsize=4096)
def _tail(experts: int, rows: int, width: int) -> CompiledLaunch:
    return CompiledLaunch(zero_tail_kernel, -(-rows // ROWS), (experts, rows, width, ROWS, TILE), WARPS)


@lru_cache(maxsize=4096)
def _empty(experts: int, size: int) -> CompiledLaunch:
    return CompiledLaunch(zero_empty_kernel, (experts, PARTS, 1), (size, PARTS, TILE), WARPS)


#: Grains of a strip of `maxima`.
TURNS = 16
#: Columns of such a strip.
COLUMNS = 256
#: Warps of a program of `maxima`.
MAXIMA_WARPS = 4
#: Patches of a tile of `columns`, down and across.
DOWN, ACROSS = 4, 2
#: Tiles of a band.
BAND = 2
#: Registers of a thread, at most.
REGISTERS = {"vectors": 80, "tensor": 80, "blocks": 80, "mx": 80}
#: More would overflow numbers of programs.
LONGEST = 2**24
KINDS = {-1: "vectors", "tensor": "tensor", 128: "blocks", 32: "mx"}


def kind_of(x: torch.Tensor, scheme: Scheme, step: int) -> str:
    """What `columns` calls the scheme's blocks where it serves rows x (T, C) in groups filled up to `step`; else ""."""
    block = scheme.scale.block
    kind = "" if isinstance(block, tuple) else KINDS.get(block, "")
    plain = scheme.outer is None and scheme.zero is None and scheme.scale.statistic == "absmax"
    sized = x.element_size() == 2 and x.shape[1] % 64 == 0 and x.numel() > 0 and max(x.shape) < LONGEST
    if not (kind and plain and sized and x.dtype in FLOAT_NAMES) or scheme.rounding == "stochastic":
        return ""
    rule = constants_of(scheme, FLOAT_NAMES[x.dtype])
    if kind == "mx":
        return kind if mx.is_mx(x, rule) and step % 32 == 0 else ""
    known = rule.fast_path.value in HARDWARE and scheme.scale.storage == "float32" and scheme.format.bits == 8
    return kind if known and step % (128 if kind == "blocks" else LAYOUT_GRAIN) == 0 else ""


def group_columns(
    x: torch.Tensor, scheme: Scheme, source: torch.Tensor, owners: torch.Tensor, experts: int, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """(codes (C, P), scales (C, P / step or the block), table (E, C) of scales where a group has one) of contiguous rows x.

    source, owners: of `layout.group_layout`. None where the kernels do not serve.
    """
    key = dispatch.key_of("group_columns", scheme, (experts, step), (x, source, owners))
    call = dispatch.find(key)
    result = None if call is None else call(x, source, owners)
    if result is None:
        kind = kind_of(x, scheme, step)
        if not kind:
            return None
        given = Call({"x": x, "source": source, "owners": owners}, words=("x",))
        names = ("codes", "scale", "table" if kind in ("vectors", "tensor") else None)
        result = _described(given, scheme, kind, experts, step).result(names, key, scheme)
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] = result
    return results


def _described(call: Call, scheme: Scheme, kind: str, experts: int, step: int) -> Call:
    """Allocate and launch."""
    (places,), columns = call.tensors["source"].shape, call.tensors["x"].shape[1]
    rule = constants_of(scheme, FLOAT_NAMES[call.tensors["x"].dtype], not interpreted())
    block: Any = step if kind in ("vectors", "tensor") else scheme.scale.block
    call.allocate("codes", (columns, places), torch.uint8)
    call.allocate("scale", (columns, places // block), storage_dtype(scheme.scale.storage))
    if kind in ("vectors", "tensor"):
        call.allocate("table", (experts, columns), torch.float32, (0,))
        _leave_maxima(call, kind == "tensor", bool(rule.has_ptx), experts)
    across = gcd(columns // 64, ACROSS)
    grid = ceil_div(places, 32 * DOWN) * (columns // (64 * across))
    masked = places % (32 * DOWN) != 0
    tail = (places, columns, experts, rule, kind, step, masked, BAND, DOWN, across)
    launch = CompiledLaunch(group_columns_kernel, grid, tail, DOWN * across, maxnreg=REGISTERS[kind])
    call.launch(launch, ("x", "source", "owners", "statistic", "codes", "scale", "table"))
    return call


def _leave_maxima(call: Call, whole: bool, has_ptx: bool, experts: int) -> None:
    """Allocate `statistic`, and leave maxima of groups there, those of no group last."""
    (places,), columns = call.tensors["source"].shape, call.tensors["x"].shape[1]
    call.allocate("statistic", ((experts + 1) * (1 if whole else columns),), torch.int32, (0,))
    tail = (places, columns, whole, has_ptx, TURNS, MAXIMA_WARPS, LAYOUT_GRAIN, COLUMNS)
    grid = ceil_div(places, TURNS * LAYOUT_GRAIN) * ceil_div(columns, COLUMNS)
    launch = CompiledLaunch(group_maxima_kernel, grid, tail, MAXIMA_WARPS)
    call.launch(launch, ("x", "source", "owners", "statistic"))


__all__ = [
    "MOST_EXPERTS",
    "gather_transposed",
    "group_columns",
    "group_layout",
    "kind_of",
    "zero_empty_",
    "zero_tail_",
]
