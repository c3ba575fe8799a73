"""Vector instructions for loops that Numba compiles: codes become 16 numbers at a time, and small blocks of dot products.

LLVM turns simple loops into vector instructions by itself, but not those that read codes across bytes, interleave them and
look numbers up, nor those with products of bfloat16. So their steps are written here in LLVM's own vector types, which it
lowers to whatever the processor has; two instructions are named where the processor has them: a look-up of 16 numbers in a
register (AVX-512), and products of pairs of bfloat16 (AVX-512 BF16).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.extending import intrinsic

from fast.cpu.loops.decoding import FLOAT, INTEGER

#: Groups of codes that a step decodes, and numbers of a vector.
LANES = 16
#: Vectors are loaded and multiplied in pieces of so many bfloat16.
PIECE = 32
#: How zero points enter: not at all, subtracted from codes, or added to numbers.
NO_ZERO, CODE_ZERO, VALUE_ZERO = 0, 1, 2

FLOAT32, INT8, INT16, INT32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
SINGLES, WORDS = ir.VectorType(FLOAT32, LANES), ir.VectorType(INT32, LANES)


class _BFloat16(ir.Type):
    """LLVM's type, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


HALVES = ir.VectorType(_BFloat16(), 2 * LANES)


def _features() -> frozenset[str]:
    """What Numba compiles for."""
    if config.CPU_FEATURES is not None or config.CPU_NAME is not None or not config.ENABLE_AVX:
        return frozenset(name[1:] for name in (config.CPU_FEATURES or "").split(",") if name.startswith("+"))
    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


FEATURES = _features()
#: Whether 16 numbers fit a register, and whether products of bfloat16 have an instruction.
WIDE, BFLOAT16 = "avx512f" in FEATURES, {"avx512f", "avx512bf16"} <= FEATURES
#: Rows of inputs in a block of dot products: as many sums as registers hold.
COLUMNS = 4 if WIDE else 2
#: Rows of weights in such a block.
ROWS = COLUMNS


def _words(value: int) -> ir.Constant:
    return ir.Constant(WORDS, [value] * LANES)


def _singles(value: float) -> ir.Constant:
    return ir.Constant(SINGLES, [float(value)] * LANES)


def _loaded(builder: Any, address: Any, kind: ir.Type, offset: Any = None) -> Any:
    """A vector at an address (an integer) and perhaps so many bytes behind it."""
    place = address if offset is None else builder.add(address, offset)
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def _stored(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _shuffled(builder: Any, first: Any, second: Any, order: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(INT32, len(order)), list(order))
    return builder.shuffle_vector(first, second, mask)


def _spread(builder: Any, number: Any) -> Any:
    """A number in every lane."""
    vector = builder.insert_element(ir.Constant(SINGLES, ir.Undefined), number, ir.Constant(INT32, 0))
    return _shuffled(builder, vector, vector, [0] * LANES)


def _byte_planes(builder: Any, address: Any, size: int) -> list[Any]:
    """The bytes of LANES groups of `size` bytes: the first byte of every group, the second, ... as int32."""
    raw = _loaded(builder, address, ir.VectorType(INT8, LANES * size))
    planes = [raw] if size == 1 else [
        _shuffled(builder, raw, raw, [lane * size + byte for lane in range(LANES)]) for byte in range(size)
    ]  # fmt: skip
    return [builder.zext(plane, WORDS) for plane in planes]


def _codes(builder: Any, planes: list[Any], bits: int, in_group: int) -> list[Any]:
    """The codes of LANES groups: the first of every group, the second, ... Bits above a code's are any."""
    made = []
    for place in range(in_group):
        byte, shift = place * bits >> 3, place * bits & 7
        code = planes[byte] if shift == 0 else builder.lshr(planes[byte], _words(shift))
        if shift + bits > 8:
            code = builder.or_(code, builder.shl(planes[byte + 1], _words(8 - shift)))
        made.append(
            code if bits == 8 and len(planes) == in_group else builder.and_(code, _words((1 << bits) - 1))
        )
    return made


def _numbers(builder: Any, code: Any, bits: int, decoding: Sequence[int], unit: Any, table: Any) -> Any:
    """What codes stand for, as `fast.cpu.loops.decoding.Decoding` says."""
    kind, flip, less, has_unit, mantissa, bias, special = decoding
    if WIDE and bits <= 4:
        return _looked_up(builder, code, _loaded(builder, table, SINGLES))
    code = builder.and_(code, _words((1 << bits) - 1))
    if kind == INTEGER:
        integer = builder.sub(builder.xor(code, _words(flip)), _words(less))
        number = builder.sitofp(integer, SINGLES)
        return builder.fmul(number, _spread(builder, unit)) if has_unit else number
    if kind == FLOAT:
        return _float(builder, code, bits, mantissa, bias, special)
    return _gathered(builder, code, table)


def _looked_up(builder: Any, code: Any, table: Any) -> Any:
    """Entries of a table of 16 numbers, one instruction."""
    kind = ir.FunctionType(SINGLES, [SINGLES, WORDS])
    function = builder.module.declare_intrinsic("llvm.x86.avx512.permvar.sf.512", fnty=kind)
    return builder.call(function, [table, code])


def _float(builder: Any, code: Any, bits: int, mantissa: int, bias: int, special: int) -> Any:
    """`Decoding.numbers` of FLOAT: subnormals by a product, so that no float32 on the way is one."""
    magnitude = builder.and_(code, _words((1 << (bits - 1)) - 1))
    pattern = builder.add(builder.shl(magnitude, _words(23 - mantissa)), _words((127 - bias) << 23))
    if special < 1 << (bits - 1):
        is_special = builder.icmp_unsigned(">=", magnitude, _words(special))
        pattern = builder.select(is_special, builder.or_(pattern, _words(0x7F800000)), pattern)
    small = builder.fmul(builder.sitofp(magnitude, SINGLES), _singles(2.0 ** (1 - bias - mantissa)))
    is_small = builder.icmp_unsigned("<", magnitude, _words(1 << mantissa))
    pattern = builder.select(is_small, builder.bitcast(small, WORDS), pattern)
    sign = builder.shl(builder.lshr(code, _words(bits - 1)), _words(31))
    return builder.bitcast(builder.or_(pattern, sign), SINGLES)


def _gathered(builder: Any, code: Any, table: Any) -> Any:
    """Entries of a table in memory."""
    made = ir.Constant(SINGLES, ir.Undefined)
    for lane in range(LANES):
        place = ir.Constant(INT32, lane)
        entry = builder.shl(
            builder.zext(builder.extract_element(code, place), ir.IntType(64)), ir.Constant(ir.IntType(64), 2)
        )
        made = builder.insert_element(made, _loaded(builder, table, FLOAT32, entry), place)
    return made


def _interleaved(builder: Any, planes: list[Any]) -> list[Any]:
    """Numbers in the order of their codes: the first of each plane, the second of each, ..."""
    streams = [[plane] for plane in planes]
    while len(streams) > 1:
        half = len(streams) // 2
        streams = [_zipped(builder, streams[at], streams[at + half]) for at in range(half)]
    return streams[0]


def _zipped(builder: Any, first: list[Any], second: list[Any]) -> list[Any]:
    made = []
    for one, other in zip(first, second, strict=True):
        for begin in (0, LANES // 2):
            order = [lane for at in range(begin, begin + LANES // 2) for lane in (at, LANES + at)]
            made.append(_shuffled(builder, one, other, order))
    return made


def _rounded(builder: Any, number: Any) -> Any:
    """The upper halves of float32 as bfloat16 rounds them, ties to even; NaN stays NaN where its lower half is 0."""
    word = builder.bitcast(number, WORDS)
    odd = builder.and_(builder.lshr(word, _words(16)), _words(1))
    return builder.lshr(builder.add(word, builder.add(odd, _words(0x7FFF))), _words(16))


def _at_bfloat16(builder: Any, number: Any) -> Any:
    """float32 rounded to bfloat16's numbers."""
    return builder.bitcast(builder.shl(_rounded(builder, number), _words(16)), SINGLES)


@intrinsic(prefer_literal=True)
def decode(typing_context, codes, out, steps, unit, table, scale, zero, layout, decoding, scaling):  # type: ignore[no-untyped-def]
    """Numbers of `steps` times LANES groups of codes, scaled, from one address to another: float32, or bfloat16.

    codes, out, table, scale, zero: addresses; scale and zero of float32, one for each number. unit: float32. Constants: layout
    is (bits, codes of a group, bytes of a group), decoding (kind, flip, less, whether unit counts, mantissa, bias, special),
    scaling (how zero points enter, whether numbers are divided, whether every operation rounds to bfloat16, whether bfloat16
    is written).
    """
    bits, in_group, size = _constants(layout)
    fields = _constants(decoding)
    enters, divides, rounds, half = _constants(scaling)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        codes, out, steps, unit, table, scale, zero = arguments[:7]
        with _loop(builder, steps, 1, ()) as (step, _):
            source = builder.add(codes, builder.mul(step, step.type(LANES * size)))
            place = builder.mul(step, step.type(4 * LANES * in_group))
            target = builder.add(out, builder.lshr(place, step.type(1)) if half else place)
            planes = _codes(builder, _byte_planes(builder, source, size), bits, in_group)
            numbers = [_numbers(builder, code, bits, fields, unit, table) for code in planes]
            for at, number in enumerate(_interleaved(builder, numbers)):
                offset = builder.add(place, step.type(4 * LANES * at))
                if enters == CODE_ZERO:
                    number = builder.fsub(number, _loaded(builder, zero, SINGLES, offset))
                    number = _at_bfloat16(builder, number) if rounds else number
                scales = _loaded(builder, scale, SINGLES, offset)
                number = builder.fdiv(number, scales) if divides else builder.fmul(number, scales)
                number = _at_bfloat16(builder, number) if rounds and enters == VALUE_ZERO else number
                if enters == VALUE_ZERO:
                    number = builder.fadd(number, _loaded(builder, zero, SINGLES, offset))
                if half:
                    number = builder.trunc(_rounded(builder, number), ir.VectorType(INT16, LANES))
                _stored(builder, number, builder.add(target, step.type((2 if half else 4) * LANES * at)))
        return context.get_dummy_value()

    addresses = (*(types.uintp,) * 3, types.float32, *(types.uintp,) * 3)
    return types.void(*addresses, layout, decoding, scaling), generate


def _constants(given: Any) -> list[int]:
    """The values of a tuple of literals."""
    return [int(one.literal_value) for one in given]


@intrinsic(prefer_literal=True)
def dots(typing_context, w, w_stride, x, x_stride, length, out, rows, columns, half):  # type: ignore[no-untyped-def]
    """The dot products of `rows` rows of w and `columns` of x, as float32 (rows, columns) at the address out.

    w, x: addresses of rows of float32, or where `half` of bfloat16, strides and length in bytes, length a multiple of 64. Sums
    are float32 in any order; products of bfloat16 come in pairs, and numbers below 2**-126 count as 0.
    """
    counts = [(r, c) for r in range(rows.literal_value) for c in range(columns.literal_value)]
    kind = HALVES if half.literal_value else SINGLES

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        w, w_stride, x, x_stride, length, out = arguments[:6]
        left = [builder.add(w, builder.mul(w_stride, w_stride.type(r))) for r in range(rows.literal_value)]
        right = [
            builder.add(x, builder.mul(x_stride, x_stride.type(c))) for c in range(columns.literal_value)
        ]
        with _loop(builder, length, 64, [_singles(0.0)] * len(counts)) as (offset, sums):
            ws = [_loaded(builder, address, kind, offset) for address in left]
            xs = [_loaded(builder, address, kind, offset) for address in right]
            add = _with_pairs if half.literal_value else _with_product
            sums[:] = [add(builder, total, ws[r], xs[c]) for total, (r, c) in zip(sums, counts, strict=True)]
        for at, total in enumerate(sums):
            _stored(builder, _sum(builder, total), builder.add(out, ir.Constant(out.type, 4 * at)))
        return context.get_dummy_value()

    numbers = (types.uintp,) * 6
    return types.void(*numbers, rows, columns, half), generate


@contextmanager
def _loop(
    builder: Any, end: Any, step: int, values: Sequence[ir.Constant]
) -> Iterator[tuple[Any, list[Any]]]:
    """A loop whose counter runs from 0 in steps to an end beyond 0; it carries a list of values: after it, the last."""
    before = builder.block
    body, after = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(body)
    builder.position_at_end(body)
    counter = builder.phi(end.type)
    phis = [builder.phi(value.type) for value in values]
    carried = list(phis)
    yield counter, carried
    following = builder.add(counter, end.type(step))
    for phi, first, last in zip([counter, *phis], [end.type(0), *values], [following, *carried], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", following, end), body, after)
    builder.position_at_end(after)


def _with_product(builder: Any, total: Any, w: Any, x: Any) -> Any:
    return builder.fadd(total, builder.fmul(w, x, flags=("contract",)), flags=("contract",))


def _with_pairs(builder: Any, total: Any, w: Any, x: Any) -> Any:
    """Plus the products of pairs of bfloat16, one instruction."""
    kind = ir.FunctionType(SINGLES, [SINGLES, HALVES, HALVES])
    function = builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", fnty=kind)
    return builder.call(function, [total, w, x])


def _sum(builder: Any, total: Any) -> Any:
    """The sum of a vector's lanes."""
    name, kind = "llvm.vector.reduce.fadd.v16f32", ir.FunctionType(FLOAT32, [FLOAT32, SINGLES])
    function = builder.module.declare_intrinsic(name, fnty=kind)
    return builder.call(function, [ir.Constant(FLOAT32, -0.0), total], fastmath=("reassoc",))


__all__ = [
    "BFLOAT16",
    "CODE_ZERO",
    "COLUMNS",
    "LANES",
    "NO_ZERO",
    "PIECE",
    "ROWS",
    "VALUE_ZERO",
    "decode",
    "dots",
]
