"""Which matrices and schemes `tiles` and `pairs` cover, and their launches."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

import torch

from fast.kernels.launch.call import FLOAT_NAMES, Call
from fast.kernels.launch.launcher import CompiledLaunch, interpreted
from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.block_launch import block_launch
from fast.kernels.quantize.geometry import ceil_div, flat_geometry
from fast.kernels.rowwise_colwise import kernel
from fast.kernels.rowwise_colwise.maxima import INT32, leave_maxima
from fast.kernels.rowwise_colwise.pairs import pairs_kernel
from fast.kernels.rowwise_colwise.tiles import tiles_kernel
from fast.kernels.scheme.constants import SchemeConstants, constants_of
from fast.kernels.scheme.fast_path_rules import HARDWARE
from reference.formats.storage import storage_dtype
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Scheme

# Sides beyond this would overflow the numbers of programs.
LONGEST = 2**24
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
TWICE = ("vectors", "tensor")
# By `tiles.KIND`.
TILINGS = {
    "vectors": Tiling(64, 64, 2, 4),
    "tensor": Tiling(64, 64, 2, 4),
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


# With 80 registers a multiprocessor has 24 warps; vectors of scales would spill some words.
PATCHES = {
    "vectors": Patches(),
    "tensor": Patches(registers=80),
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
    """The kind of the scheme's blocks where the kernel serves, else ""."""
    name, kind = FLOAT_NAMES.get(x.dtype), kind_of(scheme)
    plain = scheme.outer is None and scheme.zero is None and scheme.scale.statistic == "absmax"
    if name is None or not plain or not x.is_contiguous() or x.numel() == 0 or max(x.shape) >= LONGEST:
        return ""
    rule = constants_of(scheme, name)
    path = rule.fast_path.value
    # Powers of two: right, but slower than a copy where `mx_pairs_kernel` does not serve.
    mx = kind == "blocks" and path in (*HARDWARE, *kernel.SMALLER)
    return kind if (mx if rule.power_of_two else path in HARDWARE) else ""


def launch_tiles(
    x: torch.Tensor, scheme: Scheme, both: bool, tiling: Tiling | Patches | None = None, **maxima: int
) -> Call:  # fmt: skip
    """Run what `covers` says the kernels serve; it makes codes and scale (both), transposed and transposed_scale.

    tiling, maxima (see `leave_maxima`): results do not depend on them.
    """
    kind, shape = kind_of(scheme), tuple(x.shape)
    call = Call({"x": x}, words=("x",))
    rule = constants_of(scheme, FLOAT_NAMES[x.dtype], not interpreted())
    sides = (("codes", "scale", shape),) if both else ()
    for codes, scale, size in (*sides, ("transposed", "transposed_scale", shape[::-1])):
        call.allocate(codes, size, torch.uint8)
        kept = Blocks.of(size, scheme.scale, -1).scale_shape
        call.allocate(scale, kept, storage_dtype(scheme.scale.storage))
    if kind == "vectors":
        leave_maxima(call, rule, both, **maxima)
    elif kind == "tensor":
        _leave_largest(call, scheme)
    tiling = tiling or (PATCHES[kind] if takes_pairs(x, scheme) else tiling_of(scheme))
    launch = _launch_of_patches if isinstance(tiling, Patches) else _launch_of_tiles
    names = ("x", "statistic", "codes", "scale", "transposed", "transposed_scale")
    call.launch(launch(shape, scheme, rule, both, tiling), names)
    return call


def takes_pairs(x: torch.Tensor, scheme: Scheme) -> bool:
    """Whether `pairs` serves: 16-bit floats to 8-bit ones under float32 scales, whole tiles, blocks of 128."""
    scale, whole = scheme.scale, x.shape[0] % 128 == 0 and x.shape[1] % 128 == 0
    sized = scale.block in (-1, "tensor", 128, (128, 128)) and scale.storage == "float32"
    return bool(sized and whole and x.element_size() == 2 and scheme.format.bits == 8)


def _launch_of_patches(
    shape: tuple[int, ...], scheme: Scheme, rule: SchemeConstants, both: bool, patches: Patches
) -> CompiledLaunch:
    """A launch of `pairs_kernel`."""
    kind, down, across = kind_of(scheme), patches.down, patches.across
    tall, wide = shape[0] // (32 * down), shape[1] // (64 * across)
    tail = (*shape, rule, kind, both, kind in TWICE, gcd(tall, patches.band), down, across)
    return CompiledLaunch(pairs_kernel, tall * wide, tail, down * across, maxnreg=patches.registers)


def _launch_of_tiles(
    shape: tuple[int, ...], scheme: Scheme, rule: SchemeConstants, both: bool, tile: Tiling
) -> CompiledLaunch:
    """A launch of `tiles_kernel`."""
    kind, block = kind_of(scheme), scheme.scale.block
    tall, wide = ceil_div(shape[0], tile.rows), ceil_div(shape[1], tile.columns)
    masked = bool(shape[0] % tile.rows or shape[1] % tile.columns)
    size = block if kind == "blocks" else 1
    tail = (
        *shape, tall, rule, kind, both, kind in TWICE, masked, prod(shape) >= INT32, tile.band, size, tile.rows, tile.columns,
    )  # fmt: skip
    return CompiledLaunch(tiles_kernel, tall * wide, tail, tile.warps)


def tiling_of(scheme: Scheme) -> Tiling:
    """The tiling of a scheme; that of squares is their size."""
    block = scheme.scale.block
    if isinstance(block, tuple) and block[0] < 128:
        return Tiling(block[0], block[1], 1 if block[0] == 32 else 4, 1)
    return TILINGS[kind_of(scheme)]


def _leave_largest(call: Call, scheme: Scheme) -> None:
    """Allocate `statistic`, and leave the pattern of the matrix's largest magnitude there."""
    x = call.tensors["x"]
    blocks = Blocks.of(tuple(x.shape), scheme.scale, -1)
    of = plans.problem_of(FLOAT_NAMES[x.dtype], scheme, blocks, not interpreted())
    assert of is not None, "whole tensors have a plan"
    plan = plans.statistic_of(of, flat_geometry(x.numel(), x.numel()))
    for name, buffer in plan.buffers.items():
        call.allocate(name, *buffer)
    call.launch(*block_launch(plan.passes[0]))
