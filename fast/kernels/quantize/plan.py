"""What the host does for each function, as data: passes of the block kernel over named buffers, for any array library.

A `Plan` names the buffers that its passes leave behind, with shapes, dtypes and initial values, and for each pass which
buffer a kernel argument stands for. Whoever runs it (`block_launch`, `ao_lab.jax`) allocates the buffers and launches; nothing
here holds an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from fast.kernels.quantize.geometry import LARGEST_TILE, SMALLEST_TILE, Geometry, flat_geometry, geometry
from fast.kernels.scheme.constants import BlockOp, SchemeConstants, block_op, constants_of, is_two_level
from fast.launch.launcher import ALIGNMENT, INT32, interpreted, power_above
from reference import Quantized
from reference.formats.encode import check_mode
from reference.formats.formats import FORMATS
from reference.formats.storage import packed_shape, storage_dtype
from reference.quantize.blocks import Blocks
from reference.quantize.scales import scale_groups
from reference.quantize.stored import tiled_size
from reference.schemes.schemes import Scheme

DTYPES = ("float32", "bfloat16", "float16")
# Identities of maximum and minimum over magnitudes and order keys: largest magnitude, lowest key, highest key.
RANGE = (0, 0x7FFFFFFF, -0x80000000)
# Elements of a tile of short blocks where gradients are masked in place.
MASK_TILE = 1024
#: Elements of a warp where one block is all there is: it has the multiprocessor to itself, whose time is what it waits for.
ALONE = 512
#: Warps of such a program at most.
MOST_WARPS = 32
#: Elements of one block of 16-bit numbers that one program quantizes by MOST_WARPS warps: 32 of a thread, in its 64 registers.
LARGEST_ALONE = 32768
#: Parts of one block of which each program of the last pass finds the statistic from theirs, which no pass fills before.
MOST_PARTS = 256
#: Scales of which one program makes an average.
AVERAGED = 4096
#: Numbers that every program that quantizes scales averages at most.
MOST_AVERAGES = 1024


class Buffer(NamedTuple):
    """An array that a plan makes. fill: the value that each row starts with; () where a pass writes every element."""

    shape: tuple[int, ...]
    dtype: str
    fill: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pass:
    """A launch. reads, writes, updates: arguments of the kernel; what is updated holds its fill before.

    names: the arrays of arguments whose names are not theirs.
    """

    place: Geometry
    rule: SchemeConstants
    block_op: BlockOp
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def array(self, argument: str) -> str:
        """The name of the array that an argument stands for."""
        return self.names.get(argument, argument)


@dataclass(frozen=True)
class Plan:
    """Passes in order, and the buffers that they make; other names that they read are the caller's arrays."""

    passes: tuple[Pass, ...]
    buffers: Mapping[str, Buffer]

    def __add__(self, after: Plan) -> Plan:
        return Plan((*self.passes, *after.passes), {**self.buffers, **after.buffers})

    def on_tiles(self, **changes: int) -> Plan:
        """The plan with these fields of its last pass's geometry."""
        *before, last = self.passes
        return replace(self, passes=(*before, replace(last, place=replace(last.place, **changes))))


@dataclass(frozen=True)
class Problem:
    """A tensor's shape and dtype, its scheme, its blocks and how the kernel covers them; see `problem_of`.

    marking: codes only show which elements saturate.
    """

    dtype: str
    scheme: Scheme
    blocks: Blocks
    place: Geometry
    hardware: bool
    marking: bool = False

    @property
    def rule(self) -> SchemeConstants:
        """The constants of the scheme."""
        return constants_of(self.scheme, self.dtype, self.hardware, self.marking)

    @property
    def values(self) -> Buffer:
        """An array like the tensor."""
        return Buffer(self.blocks.shape, self.dtype)


def problem_of(dtype: str, scheme: Scheme, blocks: Blocks, hardware: bool = True) -> Problem | None:
    """What plans are made from, or None where no kernel covers the tensor. hardware: not in the interpreter."""
    zero = scheme.zero
    # Zero points that are numbers are read and written as these.
    zero_covered = zero is None or zero.rule != "value" or zero.storage in ("bfloat16", "float32")
    covered = dtype in DTYPES and zero_covered and _has_levels(scheme, blocks)
    place = geometry(blocks) if covered else None
    return None if place is None else Problem(dtype, scheme, blocks, place, hardware)


def _has_levels(scheme: Scheme, blocks: Blocks) -> bool:
    """Whether the scales are not quantized themselves, or `second_level` does it: a row of them, as 8-bit integers."""
    if scheme.outer is None or not is_two_level(scheme):
        return True
    storage, group = FORMATS[scheme.scale.storage], scheme.outer.block
    int8 = storage.kind == "int" and storage.signed and storage.bits == 8 and scheme.zero is None
    groups = scheme.outer.statistic == "absmax" and isinstance(group, int) and 0 < group <= LARGEST_TILE
    return int8 and groups and len(blocks.scale_shape) == 1


@lru_cache(maxsize=256)
def first_level(scheme: Scheme) -> Scheme:
    """The record of the scales before they are quantized themselves, which makes the codes that do not wait for that."""
    scale = replace(scheme.scale, storage="float32")
    return replace(scheme, scale=scale, outer=None, codes_from="stored")


def scale_buffers(of: Problem) -> dict[str, Buffer]:
    """Scales and zero points of a tensor."""
    shape, scheme = of.blocks.scale_shape, of.scheme
    scale = {"scale": Buffer(shape, storage_dtype(scheme.scale.storage))}
    if of.rule.two_level and scheme.outer is not None:
        groups = scale_groups(of.blocks, scheme.outer, scheme).scale_shape
        return {**scale, "outer": Buffer(groups, "float32"), "zero": Buffer((), "float32")}
    outer = {"outer": Buffer((), "float32")} if of.rule.has_outer else {}
    zero = {} if scheme.zero is None else {"zero": Buffer(shape, storage_dtype(scheme.zero.storage))}
    return {**scale, **outer, **zero}


def code_buffer(of: Problem, packed: bool) -> Buffer:
    """Codes, one per element or packed."""
    shape = packed_shape(of.blocks.shape, of.scheme.format) if packed else of.blocks.shape
    return Buffer(shape, "uint8" if of.scheme.format.bits <= 8 else "uint16")


def tiled_buffer(shape: tuple[int, ...]) -> Buffer:
    """Tiled scales of a matrix of them, of whose padding no kernel knows."""
    size = tiled_size(shape)
    return Buffer((size,), "uint8", () if size == prod(shape) else (0,))


def packs(of: Problem, writes: bool = False) -> bool:
    """Whether the kernel can read and write packed codes: of 2 to 7 bits, whole bytes per block, blocks along the last axis.

    writes: whether it can write them, as it can those of 4 bits in two-dimensional blocks side by side too.
    """
    place, bits = of.place, of.scheme.format.bits
    if writes and place.shape == "strips" and of.scheme.rounding == "nearest_even":
        return bits == 4
    if bits == 1 or bits >= 8 or place.shape != "flat" or place.chunked or not of.blocks.shape:
        return False
    unit = {2: 4, 6: 16}.get(bits, 8)
    length, last = place.integers[3], of.blocks.shape[-1]
    whole = prod(of.blocks.shape) % length == 0
    return whole and length == place.size and length % unit == 0 and last * bits % 8 == 0


def paired(of: Problem, packed: bool) -> bool:
    """Whether codes under scales from the tensor are made of pairs by `fp4` or `fp6`, so that x is read in words."""
    plain = of.place.shape in ("flat", "strips") and not of.place.masked
    return of.rule.pairs and plain and (packed or (of.rule.bits == 4 and not of.rule.ranged))


def tiles(of: Problem, given: str) -> bool:
    """Whether the kernel can write tiled scales: a matrix that `check_tiled` accepts, whole blocks in a tile, none given."""
    plain = of.place.shape == "flat" and not of.place.chunked and given != "all" and not of.rule.two_level
    return plain and tiled_size(of.blocks.scale_shape) < INT32


def quantizing(of: Problem, given: str = "", packed: bool = False, tiled: bool = False) -> Plan:
    """Codes and scales. given: "" (scales from x), "outer" or "all".

    packed: packed codes, where `packs` says so. tiled: tiled scales, where `tiles` says so.
    """
    codes = {"codes": code_buffer(of, packed)}
    plan = _scaled(of, given, codes, codes=True, packed=packed, tiled=tiled)
    if not tiled:
        return plan
    buffers = {**plan.buffers, "scale": tiled_buffer(of.blocks.scale_shape)}
    # For tiled scales the last pass counts the blocks of a row where other passes count all.
    return replace(plan, buffers=buffers).on_tiles(blocks=of.blocks.scale_shape[1])


def choosing(of: Problem, given: str = "") -> Plan:
    """Scales alone."""
    return _scaled(of, given, {})


def dequantizing(of: Problem, packed: bool = False) -> Plan:
    """Values of codes; of.dtype is that of the values."""
    do = block_op(dequantize=True, output=of.dtype, packed=packed, outer="given")
    return _single(of, do, ("codes", *scale_buffers(of)), {"y": of.values})


def fake_quantizing(of: Problem, given: str = "") -> Plan:
    """x quantized and dequantized in registers; where scales are quantized themselves, by way of codes in memory."""
    if of.rule.two_level:
        packed = packs(of)
        return quantizing(of, given, packed) + dequantizing(of, packed)
    return _scaled(of, given, {"y": of.values}, keep=False, output=of.dtype)


def masking(of: Problem, given: str = "") -> Plan:
    """The gradient g where the element did not saturate, for scales from x. given: "" or "outer"."""
    if of.rule.two_level and of.scheme.codes_from == "exact":
        scale_buffers(of)  # refuses short groups of scales where the record does
        of = replace(of, scheme=first_level(of.scheme))
    plan = _scaled(replace(of, marking=True), given, {"y": of.values}, keep=False, gradient=True)
    warps = plan.passes[-1].place.warps
    # 64 elements a thread, each with a gradient, do not stay in registers in float32.
    return plan.on_tiles(warps=2 * warps if of.dtype == "float32" and warps < 8 else warps)


def makes_saturation_mask(of: Problem) -> bool:
    """Whether `fake_quantizing_with_mask` serves: integers with zero points, in the order of the elements, in whole tiles."""
    scheme, scale = of.scheme, of.scheme.scale
    rules = (scheme.nan, scheme.apply, scheme.arithmetic, scheme.rounding, scheme.overflow)
    default = rules == ("block", "reciprocal", "float32", "nearest_even", "saturate") and scheme.outer is None
    ranged = scheme.zero is not None and scheme.zero.rule == "code" and scale.statistic == "minmax_with_zero"
    whole = not of.rule.fraction_bits and not of.place.chunked
    return default and ranged and scale.storage == "float32" and whole


def fake_quantizing_with_mask(of: Problem) -> Plan:
    """x quantized and dequantized, and which blocks saturate, as codes; where `makes_saturation_mask` says so."""
    outputs = {"y": of.values, "codes": Buffer((of.place.blocks,), "uint8")}
    return _scaled(of, "", outputs, keep=False, output=of.dtype, saturation="mask")


def masking_in_place(of: Problem) -> Plan:
    """`masking` in the gradient's own memory, given the mask of `fake_quantizing_with_mask` as codes."""
    place, p = of.place, MASK_TILE // of.place.size
    if place.shape == "flat" and not place.masked and 1 < p < place.p and place.blocks % p == 0:
        # Tiles of one warp where blocks are short: most of them hold no block of the mask then.
        place = replace(place, p=p, warps=1, programs=place.blocks // p)
    return Plan((Pass(place, of.rule, block_op(saturation="gradient"), ("x", "codes"), (), ("g",)),), {})


def statistic_of(of: Problem, place: Geometry) -> Plan:
    """The statistic of every block, which a kernel with other tiles makes scales of."""
    return _statistic(of, place, "", "statistic")


def _single(of: Problem, do: BlockOp, reads: tuple[str, ...], outputs: dict[str, Buffer]) -> Plan:
    """One pass that writes buffers."""
    return Plan((Pass(of.place, of.rule, do, reads, tuple(outputs)),), outputs)


def _scaled(of: Problem, given: str, outputs: dict[str, Buffer], keep: bool = True, **op: Any) -> Plan:
    """An operation that uses given scales, or chooses them first. keep: scales that were chosen are written."""
    reads, scales = _operands(of, op), scale_buffers(of)
    if given == "all":
        return _single(of, block_op(source="given", outer="given", **op), (*reads, *scales), outputs)
    if of.rule.two_level:
        return _with_second_level(of, outputs, op)
    outer, before = "", Plan((), {})
    if of.rule.has_outer and given == "outer":
        outer, reads = "given", (*reads, "outer")
        del scales["outer"]
    elif of.rule.has_outer:
        outer, total = "statistic", prod(of.blocks.shape)
        before += _statistic(of, flat_geometry(total, total), outer, "outer_statistic")
    of, parts = _of_one_block(of, op), 1
    if of.place.chunked:
        parts = 1 if outer else _parts(of)
        before += _statistic(of, of.place, "", "statistic", parts)
    pairs = "codes" in op and paired(of, op["packed"])
    source = "statistic" if of.place.chunked else "tile"
    do = block_op(
        source=source, outer=outer, scales=keep, reverse=bool(before.passes), pairs=pairs, parts=parts, **op
    )
    # An outer scale that comes from a statistic is written in any case.
    written = {**outputs, **{name: b for name, b in scales.items() if keep or name == "outer"}}
    of = replace(of, place=_place(of, outer, pairs))
    plan = before + _single(of, do, (*reads, *before.buffers), written)
    # Where there are parts the last pass counts these, where other passes count blocks.
    return plan.on_tiles(blocks=of.place.integers[5]) if parts > 1 else plan


def _of_one_block(of: Problem, op: dict[str, Any]) -> Problem:
    """The problem in one tile where a program that is all there is quantizes more than others hold: one launch, not three."""
    total, place = prod(of.blocks.shape), of.place
    plain = (
        of.scheme.scale.statistic == "absmax"
        and not of.rule.has_outer
        and of.scheme.rounding == "nearest_even"
    )
    bytes_of_16_bits = (
        of.dtype != "float32" and of.rule.bits == 8 and "codes" in op and total % ALIGNMENT == 0
    )
    if place.chunked and _is_one(place) and total <= LARGEST_ALONE and plain and bytes_of_16_bits:
        return replace(of, place=flat_geometry(total, total, LARGEST_ALONE))
    return of


def _is_one(place: Geometry) -> bool:
    """Whether the whole tensor is one block."""
    return place.shape == "flat" and place.blocks == 1


def _parts(of: Problem) -> int:
    """The power of two above the number of parts of one block whose statistics lie side by side; 1 where they are added up."""
    chunks = of.place.integers[5]
    few = of.scheme.scale.statistic == "absmax" and _is_one(of.place) and chunks <= MOST_PARTS
    return power_above(chunks) if few else 1


def _operands(of: Problem, op: dict[str, Any]) -> tuple[str, ...]:
    """The caller's arrays that an operation reads beside scales: random words where it rounds elements by them."""
    words = ("words",) if op and of.scheme.rounding == "stochastic" else ()
    return ("x", *words, "g") if "gradient" in op else ("x", *words)


def _place(of: Problem, outer: str, pairs: bool) -> Geometry:
    """Tiles of the last pass. Where `fp6` and `fp4` serve, two warps with a block in each thread run faster than one."""
    place = of.place
    if _is_one(place) and not place.chunked:
        return replace(place, warps=max(place.warps, min(MOST_WARPS, place.size // ALONE)))
    if pairs and place.shape == "strips":
        return replace(place, warps=1)
    if not pairs or of.rule.ranged or outer == "statistic" or place.blocks % 64:
        return place
    return replace(place, p=64, warps=2, programs=place.blocks // 64)


def _statistic(of: Problem, place: Geometry, outer: str, name: str, parts: int = 1) -> Plan:
    """The statistic of every block, or of all elements for an outer scale, into a buffer of this name. parts: see `_parts`."""
    if parts > 1:
        do = block_op(statistic=True, parts=parts)
        one = Pass(place, of.rule, do, ("x",), ("statistic",), names={"statistic": name})
        return Plan((one,), {name: Buffer((place.programs,), "int32")})
    ranged = not outer and of.scheme.scale.statistic != "absmax"
    buffer = Buffer((3, place.blocks), "int32", RANGE) if ranged else Buffer((place.blocks,), "int32", (0,))
    do = block_op(statistic=True, outer=outer)
    one = Pass(place, of.rule, do, ("x",), updates=("statistic",), names={"statistic": name})
    return Plan((one,), {name: buffer})


def _with_second_level(of: Problem, outputs: dict[str, Buffer], op: dict[str, Any]) -> Plan:
    """Scales and their scales, and what is made of x and the scales: with the first, or, from stored ones, at the end."""
    unmarked = replace(of, marking=False)
    first = replace(unmarked, scheme=first_level(of.scheme))
    if of.scheme.codes_from == "exact":
        return _as_exact(_scaled(first, "", outputs, **op)) + _second_level(unmarked)
    plan = _as_exact(_scaled(first, "", {})) + _second_level(unmarked)
    if not op:
        return plan
    do = block_op(source="given", exact=True, **op)
    return plan + _single(of, do, (*_operands(of, op), *scale_buffers(of)), outputs)


def _as_exact(plan: Plan) -> Plan:
    """A plan whose scales are called "exact"."""
    passes = tuple(replace(one, names={**one.names, "scale": "exact"}) for one in plan.passes)
    return Plan(passes, {"exact" if name == "scale" else name: b for name, b in plan.buffers.items()})


def _second_level(of: Problem) -> Plan:
    """The scales "exact" quantized: their mean in as many passes as its tree takes, then their groups."""
    count = parts = of.blocks.scale_shape[0]
    plan, source = Plan((), {}), "exact"
    while parts > MOST_AVERAGES:
        # The tree is no higher than the power of two above the scales.
        place = _quickly(flat_geometry(parts, min(AVERAGED, power_above(parts))))
        names = {"x": source, "statistic": f"averages {len(plan.passes)}"}
        step = Pass(place, of.rule, block_op(level="averages"), ("x",), ("statistic",), names=names)
        plan += Plan((step,), {names["statistic"]: Buffer((place.blocks,), "float32")})
        source, parts = names["statistic"], place.blocks
    # Each program begins with the same mean.
    place = _quickly(flat_geometry(count, of.rule.group))
    # Of the integers that blocks of one row do without, the third is free: how many averages there are.
    place = replace(place, integers=(*place.integers[:2], parts, *place.integers[3:]))
    do = block_op(level="groups", parts=power_above(parts), share=1.0 / power_above(count))
    scales, names = scale_buffers(of), {"x": "exact", "statistic": source}
    return plan + Plan((Pass(place, of.rule, do, ("x", "statistic"), tuple(scales), names=names),), scales)


def _quickly(place: Geometry) -> Geometry:
    """Tiles with few elements a thread: of scales there are few, and a program's time is what a launch waits for."""
    return replace(place, warps=max(place.warps, place.p * place.size // SMALLEST_TILE))


# What a kernel that makes a tensor and quantizes it at once writes: codes and scales, and whether it can.


@dataclass(frozen=True)
class Outputs:
    """Buffers for the codes and scales of a tensor in blocks of `length` along the last axis."""

    problem: Problem
    length: int
    packed: bool
    block_op: BlockOp
    buffers: dict[str, Buffer]

    @property
    def rule(self) -> SchemeConstants:
        """The constants of the scheme."""
        return self.problem.rule

    def quantized(self) -> Quantized:
        """The result, with the names of its tensors."""
        blocks, zero = self.problem.blocks, "zero" if "zero" in self.buffers else None
        return Quantized(
            "codes", "scale", None, zero, blocks.shape, blocks.axis, self.problem.scheme, self.packed
        )


def outputs(like: torch.Tensor, dtype: str, scheme: Scheme, packed: bool) -> Outputs | None:
    """Outputs for a tensor of the shape and device of `like`, or None where it is quantized by a pass of its own.

    That is so unless a block is a row, or a power of two that divides rows, and unless its scale depends on nothing else.
    """
    if packed:
        packed_shape(tuple(like.shape), scheme.format)  # refuses a 0-d tensor
    check_mode(scheme.rounding, None)
    blocks = Blocks.of(tuple(like.shape), scheme.scale, -1)
    of = problem_of(dtype, scheme, blocks, not interpreted())
    length = _block_length(scheme, tuple(like.shape))
    if of is None or length is None or of.rule.two_level or of.rule.has_outer:
        return None
    sub_byte = packed and scheme.format.bits < 8
    if sub_byte and not packs(of):
        return None
    do = block_op(codes=True, scales=True, packed=sub_byte)
    return Outputs(of, length, packed, do, {"codes": code_buffer(of, sub_byte), **scale_buffers(of)})


def _block_length(scheme: Scheme, shape: tuple[int, ...]) -> int | None:
    """Elements of a block along the last axis, or None where a kernel over rows does not cover them."""
    block = scheme.scale.block
    if not isinstance(block, int) or not shape:
        return None
    length = shape[-1] if block == -1 else min(block, shape[-1])
    if length == 0 or shape[-1] % length or (length & (length - 1) and length != shape[-1]):
        return None
    return length
