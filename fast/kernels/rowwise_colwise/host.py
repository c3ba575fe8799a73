"""The host side of quantizing along rows and columns: which matrices the kernels take, and what they leave."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch

from fast import dispatch
from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.host import block_launch
from fast.kernels.quantize.plan import flat_geometry
from fast.kernels.rowwise_colwise import mx as kernel
from fast.kernels.rowwise_colwise.tiles import INT32, leave_maxima, pairs_kernel, tiles_kernel
from fast.kernels.scheme.constants import SchemeConstants, constants_of
from fast.kernels.scheme.fast_path_rules import HARDWARE
from fast.launch.launcher import FLOAT_NAMES, Call, CompiledLaunch, ceil_div, interpreted, same_device
from reference import Quantized, Scales
from reference.arrays.namespace import namespace_of
from reference.formats.storage import storage_dtype
from reference.quantize.blocks import Blocks
from reference.quantize.scales import check_scales
from reference.schemes.schemes import Scheme, scheme_of

Both = tuple[Quantized, Quantized]
# The names of the results' codes and scales.
NAMES = (("codes", "scale"), ("transposed", "transposed_scale"))


def fused_both(
    x: torch.Tensor, record: str | Scheme, scales: Any, tiled: bool, packed: bool = False, key: Any = None
) -> Both | None:
    """Both results from one read, or None where no kernel does that. key: of the call, see `dispatch`."""
    scheme = scheme_of(record)
    call = _launched(x, scheme, scales, tiled, packed)
    if call is None:
        return None
    # 8-bit codes are their own packed storage.
    both = tuple(
        Quantized(*names, None, None, shape, 1, scheme, packed, tiled)
        for names, shape in zip(NAMES, (tuple(x.shape), tuple(x.shape)[::-1]), strict=True)
    )
    result: Both = call.result(both, key, record)
    return result


def _launched(x: torch.Tensor, scheme: Scheme, scales: Any, tiled: bool, packed: bool) -> Call | None:
    name = FLOAT_NAMES.get(x.dtype)
    if name is None or not x.is_contiguous() or x.numel() == 0:
        return None
    if scheme.scale.block == 32 and scales is None:
        rule = constants_of(scheme, name)
        if kernel.covers_mx(x, rule) and not (packed and scheme.format.bits < 8):
            return kernel.mx_both(x, rule, tiled)
    if scales is None and not tiled and _serves(x, scheme, packed) and not _shares_codes(x, scheme):
        return launch_tiles(x, scheme, True)
    if scales is not None and not tiled and scheme.scale.block == "tensor":
        rule = constants_of(scheme, name)
        return _given(x, scheme, rule, scales) if kernel.covers_given(x, rule) else None
    return None


def _serves(x: torch.Tensor, scheme: Scheme, packed: bool) -> bool:
    """Whether `tiles` makes the codes: nearest ones, 8-bit codes or unpacked ones."""
    return not (packed and scheme.format.bits < 8) and covers(x, scheme) != ""


def _shares_codes(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether one tile of float32 codes would leave in both layouts: compiled so, some transposed bytes were other elements'
    (triton 3.6.0 on Hopper, every run: reports/LOG.md). Each copy by itself is right."""
    return x.dtype == torch.float32 and (
        scheme.scale.block == "tensor" or isinstance(scheme.scale.block, tuple)
    )


def columns_only(x: torch.Tensor, record: str | Scheme, packed: bool, key: Any = None) -> Quantized | None:
    """x.T along its last axis, from a contiguous x (M, K), or None where no kernel reads x so."""
    scheme = scheme_of(record)
    if not _serves(x, scheme, packed):
        return None
    output = Quantized(*NAMES[1], None, None, tuple(x.shape)[::-1], 1, scheme, packed)
    result: Quantized = _columns(x, scheme).result(output, key, record)
    return result


def batch_columns(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes (E * K, M) of a contiguous batch x (E, M, K), along M, and their scales; None where no kernel reads x so.

    Matrices have nothing in common. Scales stand as in `quantize` of the codes' shape, but where the scheme has one for the
    tensor: (E * K, 1), at each column that of its matrix.
    """
    key = dispatch.key_of("batch_columns", scheme, (), (x,))
    call = dispatch.find(key)
    output: tuple[torch.Tensor, torch.Tensor] | None = None if call is None else call(x)
    if output is not None:
        return output
    if x.dim() != 3 or not _serves(x, scheme, False):
        return None
    result: tuple[torch.Tensor, torch.Tensor] = _columns(x, scheme).result(NAMES[1], key, scheme)
    return result


def _columns(x: torch.Tensor, scheme: Scheme) -> Call:
    """The columns of a matrix, or of each of a batch."""
    name, sized = FLOAT_NAMES[x.dtype], scheme.scale.block == 32 and x.element_size() == 2
    if sized and kernel.covers_mx(x, constants_of(scheme, name)):
        return kernel.mx_columns(x, constants_of(scheme, name, not interpreted()))
    return launch_tiles(x, scheme, False)


def _given(x: torch.Tensor, scheme: Scheme, rule: SchemeConstants, scales: Any) -> Call | None:
    shapes = (tuple(x.shape), tuple(x.shape)[::-1])
    stored: list[Scales] = []
    for given, shape in zip(scales, shapes, strict=True):
        checked = check_scales(namespace_of(x), given, scheme, Blocks.of(shape, scheme.scale, -1))
        if checked is None:
            return None
        stored.append(checked)
    if not same_device(x, stored[0].scale, stored[1].scale):
        return None
    return kernel.given_both(x, rule, (stored[0].scale, stored[1].scale))


# Which matrices and schemes `tiles` and `pairs` cover, and their launches.

# Sides beyond this would overflow the numbers of programs.
LONGEST = 2**24
# What a grid's second axis has at most.
MOST_MATRICES = 65535
# Sides of two-dimensional blocks, which are tiles, and lengths of blocks in a tile.
SQUARES, LENGTHS = (32, 64, 128), (16, 32, 64, 128)


@dataclass(frozen=True)
class Tiling:
    """Rows, columns and warps of a tile, and how many tiles programs go down before they go on to the next columns."""

    rows: int
    columns: int
    warps: int
    band: int


# Kinds whose scales are known after a first read: the second one goes backwards.
TWICE = ("vectors", "tensor", "spread")
# By `tiles.KIND`.
TILINGS = {
    "vectors": Tiling(64, 64, 2, 4),
    "tensor": Tiling(64, 64, 2, 4),
    # With two warps 32 bytes would be spilled.
    "spread": Tiling(64, 64, 4, 4),
    "blocks": Tiling(128, 128, 8, 1),
    "square": Tiling(128, 128, 8, 1),
}


@dataclass(frozen=True)
class Patches:
    """Patches of 32 x 64 down and across in a tile of `pairs`, each a warp, its band, and registers of a thread, at most."""

    down: int = 4
    across: int = 2
    band: int = 2
    registers: int = 96


# With 80 registers a multiprocessor has 24 warps; of both copies, vectors of scales would spill some words.
ALONE = 80
PATCHES = {
    "vectors": Patches(),
    "tensor": Patches(registers=80),
    "spread": Patches(),
    "blocks": Patches(),
    "square": Patches(registers=80),
}


def kind_of(scheme: Scheme) -> str:
    """What `tiles` calls the scheme's blocks; "" for others."""
    block = scheme.scale.block
    if isinstance(block, tuple):
        return "square" if block[0] == block[1] and block[0] in SQUARES else ""
    return {-1: "vectors", "tensor": "tensor"}.get(block, "blocks" if block in LENGTHS else "")


def covers(x: torch.Tensor, scheme: Scheme) -> str:
    """The kind of the scheme's blocks where the kernel serves, else "". x: a matrix, or a batch for its columns alone."""
    name, kind = FLOAT_NAMES.get(x.dtype), kind_of(scheme)
    plain = scheme.outer is None and scheme.zero is None and scheme.scale.statistic == "absmax"
    if name is None or not plain or not x.is_contiguous() or x.numel() == 0 or max(x.shape) >= LONGEST:
        return ""
    if x.dim() == 3 and not _fits_batch(x, kind, scheme):
        return ""
    rule = constants_of(scheme, name)
    path = rule.fast_path.value
    # Powers of two: right, but slower than a copy where `mx_pairs_kernel` does not serve.
    mx = kind == "blocks" and path in (*HARDWARE, *kernel.SMALLER)
    return kind if (mx if rule.power_of_two else path in HARDWARE) else ""


def _fits_batch(x: torch.Tensor, kind: str, scheme: Scheme) -> bool:
    """Whether matrices are numbers of the grid's second axis, and squares end where matrices do."""
    size = scheme.scale.block[0] if isinstance(scheme.scale.block, tuple) else 1
    whole = x.shape[1] % size == 0 and x.shape[2] % size == 0
    return x.shape[0] <= MOST_MATRICES and (kind != "square" or whole)


def launch_tiles(
    x: torch.Tensor, scheme: Scheme, both: bool, tiling: Tiling | Patches | None = None, **maxima: int
) -> Call:  # fmt: skip
    """Run what `covers` says the kernels serve; it makes codes and scale (both), transposed and transposed_scale.

    x: a matrix, or, where not both, a batch: transposed has the columns of each matrix, one after the other, and each of them a
    scale where the scheme has one for the tensor. tiling, maxima (see `leave_maxima`): results do not depend on them.
    """
    shape, kind = tuple(x.shape), kind_of(scheme)
    name = _kernel_kind(shape, scheme)
    call = Call({"x": x}, words=("x",))
    rule = constants_of(scheme, FLOAT_NAMES[x.dtype], not interpreted())
    if both:
        _allocate(call, ("codes", "scale"), shape, scheme)
    _allocate(call, ("transposed", "transposed_scale"), _turned(shape), scheme, len(shape) == 3)
    if kind == "vectors":
        leave_maxima(call, rule, both, **maxima)
    elif kind == "tensor":
        _leave_largest(call, scheme)
    tiling = tiling or (PATCHES[name] if takes_pairs(x, scheme) else tiling_of(scheme, name))
    launch = _launch_of_patches if isinstance(tiling, Patches) else _launch_of_tiles
    names = ("x", "statistic", "codes", "scale", "transposed", "transposed_scale")
    call.launch(launch(shape, scheme, rule, both, tiling), names)
    return call


def _turned(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of the transposed matrix, or of those of a batch, one after the other."""
    *batch, rows, columns = shape
    return prod(batch) * columns, rows


def _allocate(
    call: Call, names: tuple[str, str], shape: tuple[int, int], scheme: Scheme, batch: bool = False
) -> None:
    """Allocate codes and scales of a matrix."""
    kept = Blocks.of(shape, scheme.scale, -1).scale_shape
    if batch and scheme.scale.block == "tensor":
        kept = (shape[0], 1)
    call.allocate(names[0], shape, torch.uint8)
    call.allocate(names[1], kept, storage_dtype(scheme.scale.storage))


def takes_pairs(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether `pairs` serves: 16-bit floats to 8-bit ones under float32 scales, whole tiles, blocks of 128."""
    scale, whole = scheme.scale, x.shape[-2] % 128 == 0 and x.shape[-1] % 128 == 0
    sized = scale.block in (-1, "tensor", 128, (128, 128)) and scale.storage == "float32"
    return bool(sized and whole and x.element_size() == 2 and scheme.format.bits == 8)


def _launch_of_patches(
    shape: tuple[int, ...], scheme: Scheme, rule: SchemeConstants, both: bool, patches: Patches
) -> CompiledLaunch:
    """A launch of `pairs_kernel`."""
    kind, down, across = _kernel_kind(shape, scheme), patches.down, patches.across
    *batch, rows, columns = shape
    tall, wide = rows // (32 * down), columns // (64 * across)
    band = gcd(tall, patches.band)
    tail = (rows, columns, rule, kind, both, kind in TWICE, band, down, across, bool(batch))
    grid = (tall * wide, prod(batch), 1)
    registers = patches.registers if both else min(patches.registers, ALONE)
    return CompiledLaunch(pairs_kernel, grid, tail, down * across, maxnreg=registers)


def _kernel_kind(shape: tuple[int, ...], scheme: Scheme) -> str:
    """`kind_of`; "spread" for matrices of a batch with a scale each."""
    kind = kind_of(scheme)
    return "spread" if len(shape) == 3 and kind == "tensor" else kind


def _launch_of_tiles(
    shape: tuple[int, ...], scheme: Scheme, rule: SchemeConstants, both: bool, tile: Tiling
) -> CompiledLaunch:
    """A launch of `tiles_kernel`."""
    kind, block = _kernel_kind(shape, scheme), scheme.scale.block
    *batch, rows, columns = shape
    tall, wide = ceil_div(rows, tile.rows), ceil_div(columns, tile.columns)
    masked = bool(rows % tile.rows or columns % tile.columns)
    size = block if kind == "blocks" else 1
    tail = (
        rows, columns, tall, rule, kind, both, kind in TWICE, masked, rows * columns >= INT32, tile.band, size, tile.rows,
        tile.columns, bool(batch),
    )  # fmt: skip
    return CompiledLaunch(tiles_kernel, (tall * wide, prod(batch), 1), tail, tile.warps)


def tiling_of(scheme: Scheme, kind: str) -> Tiling:
    """The tiling of a scheme and what `tiles` calls its blocks; that of squares is their size."""
    block = scheme.scale.block
    if isinstance(block, tuple) and block[0] < 128:
        return Tiling(block[0], block[1], 1 if block[0] == 32 else 4, 1)
    return TILINGS[kind]


def _leave_largest(call: Call, scheme: Scheme) -> None:
    """Allocate `statistic`, and leave the pattern of the matrix's largest magnitude there, or of each matrix's of a batch."""
    x = call.tensors["x"]
    matrices = x.shape[0] if x.dim() == 3 else 1
    blocks = Blocks.of(tuple(x.shape), scheme.scale, -1)
    of = plans.problem_of(FLOAT_NAMES[x.dtype], scheme, blocks, not interpreted())
    assert of is not None, "whole tensors have a plan"
    plan = plans.statistic_of(of, flat_geometry(x.numel(), x.numel() // matrices))
    for name, buffer in plan.buffers.items():
        call.allocate(name, *buffer)
    call.launch(*block_launch(plan.passes[0]))
