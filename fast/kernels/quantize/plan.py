"""What the host does for each function, as data: passes of the block kernel over named buffers, for any array library.

A `Plan` names the buffers that its passes leave behind, with shapes, dtypes and initial values, and for each pass which
buffer a kernel argument stands for. Whoever runs it (`ao_lab.jax` here, any other library likewise) allocates the buffers and
launches; nothing here holds an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from fast.kernels.launch.buffer import Buffer
from fast.kernels.quantize.geometry import (
    INT32,
    LARGEST_TILE,
    SMALLEST_TILE,
    Geometry,
    flat_geometry,
    geometry,
    power_above,
)
from fast.kernels.scheme.constants import SchemeConstants, constants_of, is_two_level
from fast.kernels.tile.block_op import BlockOp, block_op
from reference.formats.formats import FORMATS
from reference.formats.pack import packed_shape
from reference.formats.storage import storage_dtype
from reference.quantize.blocks import Blocks
from reference.quantize.scales import scale_groups
from reference.quantize.tiled_scales import tiled_size
from reference.schemes.schemes import Scheme

DTYPES = ("float32", "bfloat16", "float16")
# Identities of maximum and minimum over magnitudes and order keys: largest magnitude, lowest key, highest key.
RANGE = (0, 0x7FFFFFFF, -0x80000000)
# Elements of a tile of short blocks whose gradients are looked at.
CLIPPED = 1024
# Elements of a warp where one block is all there is: it has the multiprocessor to itself, whose time is what it waits for.
ALONE, MOST_WARPS = 512, 32
# Scales of which one program makes an average, and how many numbers every program that quantizes scales may average.
AVERAGED, LEFT = 4096, 1024


@dataclass(frozen=True)
class Pass:
    """A launch. reads, writes, updates: kernel argument -> name of the buffer; what is updated holds its fill before."""

    place: Geometry
    rule: SchemeConstants
    block_op: BlockOp
    reads: Mapping[str, str]
    writes: Mapping[str, str] = field(default_factory=dict)
    updates: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Passes in order, and the buffers that they make; other names that they read are the caller's arrays."""

    passes: tuple[Pass, ...]
    buffers: Mapping[str, Buffer]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """A tensor's shape and dtype, its scheme, its blocks and how the kernel covers them; see `problem_of`."""

    dtype: str
    scheme: Scheme
    blocks: Blocks
    place: Geometry
    hardware: bool

    @property
    def rule(self) -> SchemeConstants:
        """The constants of the scheme."""
        return constants_of(self.scheme, self.dtype, self.hardware)


def problem_of(dtype: str, scheme: Scheme, blocks: Blocks, hardware: bool = True) -> Problem | None:
    """What plans are made from, or None where no kernel covers the tensor. hardware: not in the interpreter."""
    # Zero points that are numbers are read and written as these.
    kept = (
        scheme.zero is None or scheme.zero.rule != "value" or scheme.zero.storage in ("bfloat16", "float32")
    )
    place = geometry(blocks) if dtype in DTYPES and _has_levels(scheme, blocks) and kept else None
    return None if place is None else Problem(dtype, scheme, blocks, place, hardware)


def _has_levels(scheme: Scheme, blocks: Blocks) -> bool:
    """Whether the scales are not quantized themselves, or `second_level` does it: a row of them, as 8-bit integers."""
    if scheme.outer is None or not is_two_level(scheme):
        return True
    storage, group = FORMATS[scheme.scale.storage], scheme.outer.block
    kept = storage.kind == "int" and storage.signed and storage.bits == 8 and scheme.zero is None
    plain = scheme.outer.statistic == "absmax" and isinstance(group, int) and 0 < group <= LARGEST_TILE
    return kept and plain and len(blocks.scale_shape) == 1


@lru_cache(maxsize=256)
def first_level(scheme: Scheme) -> Scheme:
    """The record of the scales before they are quantized themselves, which makes the codes that do not wait for that."""
    scale = replace(scheme.scale, storage="float32")
    return replace(scheme, scale=scale, outer=None, codes_from="stored")


def scale_buffers(of: Problem) -> dict[str, Buffer]:
    """Scales and zero points of a tensor."""
    shape, scheme = of.blocks.scale_shape, of.scheme
    made = {"scale": Buffer(shape, storage_dtype(scheme.scale.storage))}
    if of.rule.two_level and scheme.outer is not None:
        groups = scale_groups(of.blocks, scheme.outer, scheme).scale_shape
        return {**made, "outer": Buffer(groups, "float32"), "zero": Buffer((), "float32")}
    if of.rule.has_outer:
        made["outer"] = Buffer((), "float32")
    if scheme.zero is not None:
        made["zero"] = Buffer(shape, storage_dtype(scheme.zero.storage))
    return made


def quantizing(of: Problem, given: str = "", packed: bool = False, tiled: bool = False) -> Plan:
    """Codes and scales. given: "" (scales from x), "outer" or "all".

    packed: packed codes, where `packs` says so. tiled: tiled scales, where `tiles` says so.
    """
    codes = {"codes": code_buffer(of, packed)}
    if of.rule.two_level and not given:
        return _with_second_level(of, codes, {"codes": True, "packed": packed})
    plan = _scaled(of, given, codes, {"codes": True, "packed": packed, "tiled": tiled})
    return _with_tiles(of, plan) if tiled else plan


def _with_tiles(of: Problem, plan: Plan) -> Plan:
    """A plan whose last pass writes tiled scales: it counts the blocks of a row where other passes count all."""
    rows, blocks = of.blocks.scale_shape
    size = tiled_size((rows, blocks))
    buffer = Buffer((size,), "uint8", () if size == rows * blocks else (0,))
    last = replace(plan.passes[-1], place=replace(plan.passes[-1].place, blocks=blocks))
    return replace(plan, passes=(*plan.passes[:-1], last), buffers={**plan.buffers, "scale": buffer})


def tiles(of: Problem, given: str) -> bool:
    """Whether the kernel can write tiled scales: a matrix that `check_tiled` accepts, whole blocks in a tile, none given."""
    plain = of.place.shape == "flat" and not of.place.chunked and given != "all" and not of.rule.two_level
    return plain and tiled_size(of.blocks.scale_shape) < INT32


def choosing(of: Problem, given: str = "") -> Plan:
    """Scales alone."""
    if of.rule.two_level:
        return _with_second_level(of, {}, {})
    return _scaled(of, given, {}, {})


def fake_quantizing(of: Problem, given: str = "") -> Plan:
    """x quantized and dequantized in registers; where scales are quantized themselves, by way of codes in memory."""
    if of.rule.two_level:
        packed = packs(of)
        return joined(quantizing(of, given, packed), dequantizing(of, packed), ("y",))
    return _scaled(of, given, {"y": Buffer(of.blocks.shape, of.dtype)}, {"output": of.dtype}, keep=False)


def masking(of: Problem, given: str = "") -> Plan:
    """The gradient g where the element did not saturate, for scales from x. given: "" or "outer"."""
    if of.rule.two_level:
        return _two_level_masking(of)
    rule = constants_of(of.scheme, of.dtype, of.hardware, True)
    plan = _scaled(of, given, {"y": Buffer(of.blocks.shape, of.dtype)}, {"gradient": True}, keep=False)
    last = plan.passes[-1]
    passes = [replace(one, rule=rule) for one in plan.passes[:-1]]
    return replace(plan, passes=(*passes, _masked(last, of, rule)))


def notes(of: Problem) -> bool:
    """Whether `noting` serves: integers with zero points, whose codes keep the order of the elements, in whole tiles."""
    scheme, scale = of.scheme, of.scheme.scale
    house = (scheme.nan, scheme.apply, scheme.arithmetic, scheme.rounding, scheme.overflow)
    plain = house == ("block", "reciprocal", "float32", "nearest_even", "saturate") and scheme.outer is None
    ranged = scheme.zero is not None and scheme.zero.rule == "code" and scale.statistic == "minmax_with_zero"
    return (
        plain and ranged and scale.storage == "float32" and not of.rule.fraction_bits and not of.place.chunked
    )


def noting(of: Problem) -> Plan:
    """x quantized and dequantized, and for each block whether it reaches beyond the codes; where `notes` says so."""
    made = {"y": Buffer(of.blocks.shape, of.dtype), "codes": Buffer((of.place.blocks,), "uint8")}
    return _scaled(of, "", made, {"output": of.dtype, "saturation": "mask"}, keep=False)


def clipping(of: Problem) -> Plan:
    """`masking` in the gradient's own memory, given the notes of `noting` as codes."""
    do = block_op(saturation="gradient")
    reads = {"x": "x", "codes": "codes"}
    return Plan((Pass(_small(of.place), of.rule, do, reads, {}, {"g": "g"}),), {}, ())


def _small(place: Geometry) -> Geometry:
    """Tiles of one warp where blocks are short: most of them hold no noted block then."""
    p = CLIPPED // place.size
    if place.shape != "flat" or place.masked or not 1 < p < place.p or place.blocks % p:
        return place
    return replace(place, p=p, warps=1, programs=place.blocks // p)


def _masked(last: Pass, of: Problem, rule: SchemeConstants) -> Pass:
    """A pass that reads the gradient too."""
    # 64 elements a thread, each with a gradient, do not stay in registers in float32.
    warps = last.place.warps * (2 if of.dtype == "float32" and last.place.warps < 8 else 1)
    return replace(last, rule=rule, place=replace(last.place, warps=warps), reads={**last.reads, "g": "g"})


def _two_level_masking(of: Problem) -> Plan:
    """`masking` where scales are quantized themselves: by the scales that the codes come from."""
    if of.scheme.codes_from == "exact":
        scale_buffers(of)  # refuses short groups of scales where the record does
        return masking(replace(of, scheme=first_level(of.scheme)))
    plan = _with_second_level(of, {"y": Buffer(of.blocks.shape, of.dtype)}, {"gradient": True})
    last = _masked(plan.passes[-1], of, constants_of(of.scheme, of.dtype, of.hardware, True))
    return replace(plan, passes=(*plan.passes[:-1], last), results=("y",))


def code_buffer(of: Problem, packed: bool) -> Buffer:
    """Codes, one per element or packed."""
    shape = packed_shape(of.blocks.shape, of.scheme.format) if packed else of.blocks.shape
    return Buffer(shape, "uint8" if of.scheme.format.bits <= 8 else "uint16")


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


def _scaled(
    of: Problem, given: str, made: dict[str, Buffer], wanted: dict[str, Any], keep: bool = True
) -> Plan:
    """An operation that uses given scales, or chooses them first. keep: scales that were chosen are written."""
    reads, scales = {"x": "x"}, scale_buffers(of)
    if _draws(of) and wanted:
        reads["words"] = "words"
    if given == "all":
        do = block_op(source="given", outer="given", **wanted)
        only = Pass(of.place, of.rule, do, {**reads, **{name: name for name in scales}}, _same(made))
        return Plan((only,), made, tuple(made))
    passes, statistics, outer = [], {}, ""
    if of.rule.has_outer:
        outer = "given" if given == "outer" else "statistic"
    if outer == "statistic":
        total = prod(of.blocks.shape)
        passes.append(_statistic(of, flat_geometry(total, total), outer, "outer_statistic", statistics))
        reads["outer_statistic"] = "outer_statistic"
    if outer == "given":
        reads["outer"] = "outer"
        del scales["outer"]
    if of.place.chunked:
        passes.append(_statistic(of, of.place, "", "statistic", statistics))
        reads["statistic"] = "statistic"
    source = "statistic" if of.place.chunked else "tile"
    pairs = "codes" in wanted and paired(of, wanted["packed"])
    do = block_op(source=source, outer=outer, scales=keep, reverse=bool(passes), pairs=pairs, **wanted)
    # An outer scale that comes from a statistic is written in any case.
    left = {**made, **{name: b for name, b in scales.items() if keep or name == "outer"}}
    passes.append(Pass(_place(of, outer, pairs), of.rule, do, reads, _same(left)))
    return Plan(tuple(passes), {**left, **statistics}, tuple(left))


def paired(of: Problem, packed: bool) -> bool:
    """Whether codes under scales from the tensor are made of pairs by `fours` or `sixes`, so that x is read in words."""
    plain = of.place.shape in ("flat", "strips") and not of.place.masked
    return of.rule.pairs and plain and (packed or (of.rule.bits == 4 and not of.rule.ranged))


def _place(of: Problem, outer: str, pairs: bool) -> Geometry:
    """Tiles of the last pass. Where `sixes` and `fours` serve, two warps with a block in each thread run faster than one."""
    place = of.place
    if place.blocks == 1 and place.shape == "flat" and not place.chunked:
        return replace(place, warps=max(place.warps, min(MOST_WARPS, place.size // ALONE)))
    if pairs and place.shape == "strips":
        return replace(place, warps=1)
    if not pairs or of.rule.ranged or outer == "statistic" or place.blocks % 64:
        return place
    return replace(place, p=64, warps=2, programs=place.blocks // 64)


def _statistic(of: Problem, place: Geometry, outer: str, name: str, buffers: dict[str, Buffer]) -> Pass:
    """Leave the statistic of every block, or of all elements for an outer scale; its buffer joins `buffers`."""
    if outer:
        buffers[name] = Buffer((1,), "int32", (0,))
    elif of.scheme.scale.statistic == "absmax":
        buffers[name] = Buffer((place.blocks,), "int32", (0,))
    else:
        buffers[name] = Buffer((3, place.blocks), "int32", RANGE)
    return Pass(place, of.rule, block_op(statistic=True, outer=outer), {"x": "x"}, {}, {"statistic": name})


def _same(names: Mapping[str, Any]) -> dict[str, str]:
    return {name: name for name in names}


def joined(first: Plan, second: Plan, results: tuple[str, ...]) -> Plan:
    """One plan after the other, the second on buffers of the first."""
    return Plan((*first.passes, *second.passes), {**first.buffers, **second.buffers}, results)


def _with_second_level(of: Problem, made: dict[str, Buffer], wanted: dict[str, Any]) -> Plan:
    """Scales and their scales, and what is made of x and the scales: with the first, or, from stored ones, at the end."""
    first = replace(of, scheme=first_level(of.scheme))
    early = of.scheme.codes_from == "exact"
    start = _scaled(first, "", made if early else {}, wanted if early else {})
    named = [replace(one, writes=_named(one.writes, "scale", "exact")) for one in start.passes]
    buffers = {("exact" if name == "scale" else name): buffer for name, buffer in start.buffers.items()}
    plan = joined(replace(start, passes=tuple(named), buffers=buffers), _second_level(of), ())
    if wanted and not early:
        do = block_op(source="given", exact=True, **wanted)
        reads = {"x": "x", **_same(scale_buffers(of)), **({"words": "words"} if _draws(of) else {})}
        last = Pass(of.place, of.rule, do, reads, _same(made))
        plan = joined(plan, Plan((last,), made, ()), ())
    return replace(plan, results=(*made, *scale_buffers(of)))


def _named(names: Mapping[str, str], argument: str, name: str) -> dict[str, str]:
    """Names of buffers with another one for an argument."""
    return {**names, argument: name} if argument in names else dict(names)


def _draws(of: Problem) -> bool:
    """Whether elements are rounded by random words."""
    return of.scheme.rounding == "stochastic"


def _second_level(of: Problem) -> Plan:
    """The scales "exact" quantized: their mean in as many passes as its tree takes, then their groups."""
    buffers, passes = scale_buffers(of), list[Pass]()
    count = of.blocks.scale_shape[0]
    name, parts = "exact", count
    while parts > LEFT:
        # The tree is no higher than the power of two above the scales.
        place = _quickly(flat_geometry(parts, min(AVERAGED, power_above(parts))))
        into = f"averages {len(passes)}"
        buffers[into] = Buffer((place.blocks,), "float32")
        step = Pass(place, of.rule, block_op(level="averages"), {"x": name}, {"statistic": into})
        passes.append(step)
        name, parts = into, place.blocks
    # Each program begins with the same mean.
    place = _quickly(flat_geometry(count, of.rule.group))
    # Of the integers that blocks of one row do without, the third is free: how many averages there are.
    integers = (*place.integers[:2], parts, *place.integers[3:])
    do = block_op(level="groups", parts=power_above(parts), share=1.0 / power_above(count))
    reads = {"x": "exact", "statistic": name}
    passes.append(Pass(replace(place, integers=integers), of.rule, do, reads, _same(scale_buffers(of))))
    return Plan(tuple(passes), buffers, ())


def _quickly(place: Geometry) -> Geometry:
    """Tiles with few elements a thread: of scales there are few, and a program's time is what a launch waits for."""
    return replace(place, warps=max(place.warps, place.p * place.size // SMALLEST_TILE))


def dequantizing(of: Problem, packed: bool = False) -> Plan:
    """Values of codes; of.dtype is that of the values."""
    do = block_op(dequantize=True, output=of.dtype, packed=packed, outer="given")
    reads = {"codes": "codes", **_same(scale_buffers(of))}
    y = Buffer(of.blocks.shape, of.dtype)
    return Plan((Pass(of.place, of.rule, do, reads, {"y": "y"}),), {"y": y}, ("y",))
