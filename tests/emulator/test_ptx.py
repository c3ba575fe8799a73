"""The PTX emulator against definitions of its own: Fractions, Python's integers, ml_dtypes, tables of values."""

import random
import re
import struct
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from reference.formats.formats import FORMATS
from tests.emulator.ptx_opcodes import OPCODES, RECIPROCAL, fused, run

KERNELS = Path(__file__).resolve().parents[2] / "fast" / "kernels"
PATTERNS = np.arange(1 << 16, dtype=np.uint32)
# The tensor core adds in an order of its own; what it is given, `test_linear_assembly` has. Of mma.sp:: the second half stands
# here.
NOT_EMULATED = ("mma.sync", "ordered_metadata.sync", "setp.ne", "selp.f32")
# Conversions of caches: their programs run in the interpreter, where the formulas stand in for them.
NOT_EMULATED += ("fma.rn.f16x2", "sub.f16x2")
# Of pointwise attention, whose programs take the sigmoid instead; what it errs by is in its bound.
NOT_EMULATED += ("tanh.approx.f32",)
SPECIAL = [0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x80000000, 0x80000001,
           0xBF800000, 0xFF800000, 0xFFC00001]  # fmt: skip


def words(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def value(bits):
    return struct.unpack("<f", struct.pack("<I", int(bits)))[0]


def rounded(exact):
    """A Fraction as float32, to nearest even: of the neighbours of its float64, the nearest, or the even one."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    finite = [v for v in around if np.isfinite(v)]
    return min(finite, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1))


def test_every_opcode_of_the_kernels_is_known():
    """By their text: whatever looks like an instruction in a string of a kernel's module."""
    text = (
        "".join(path.read_text() for path in KERNELS.rglob("*.py"))
        .replace("f16x2.{kind}x2", "f16x2.e4m3x2")
        .replace("{kind}", "bf16")
        .replace("{add}", "bf16x2")
        .replace("{round_to}", "f16")
    )
    found = set(re.findall(r"\b((?:[a-z]\w*)(?:\.\w+)*\.(?:[bsuf]\d+|[bf]+16x2|[us]16x2|e\dm\dx2))\s", text))
    assert len(found) > 20
    assert {
        opcode for opcode in found if not opcode.startswith(("reg", "fast.kernels", *NOT_EMULATED))
    } <= set(OPCODES)


@np.errstate(all="ignore")
def test_fma_rounds_once():
    """Random numbers of near exponents, and sums that float64 rounds to a tie of float32."""
    rng = np.random.default_rng(1)
    a, b, c = (
        np.ldexp(rng.standard_normal(20000), rng.integers(-9, 9, 20000)).astype(np.float32) for _ in range(3)
    )
    hard = [(1 + 2.0**-23, 1 + 2.0**-23, 2.0**-60), (2.0**-30, 2.0**-30, 1 + 2.0**-23), (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-80),
            (-(2.0**-40), 2.0**-40, 1.0), (2.0**-75, 2.0**-75, 2.0**-149), (2.0**-75, 2.0**-75, 2.0**-126),
            (1.5, 2.0**-149, -(2.0**-149)),
            (2.0**-100, 2.0**-50, 2.0**-149)]  # fmt: skip
    extra = np.array(hard, np.float32).T
    # (1 + 2**-23 + 2**-24) and a tail far below 53 bits.
    near = np.array([[2.0**-24, -(2.0**-24)], [1, 1], [1 + 2.0**-23] * 2], np.float32)
    a, b, c = (np.concatenate(parts) for parts in zip((a, b, c), extra, near, strict=True))
    for x, y, z, got in zip(a, b, c, fused(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert got == rounded(exact), (x, y, z)


def test_fma_of_a_sum_that_float64_rounds_to_a_tie():
    """(1 + 2**-12)**2 is 1 + 2**-11 + 2**-24, a tie of float32; that the sum lies 2**-70 beside it float64 does not see."""
    factor = np.float32([1 + 2.0**-12])
    for tail in (2.0**-70, -(2.0**-70)):
        exact = Fraction(float(factor[0])) ** 2 + Fraction(tail)
        assert fused(factor, factor, np.float32([tail]))[0] == rounded(exact)


def test_arithmetic_of_special_numbers():
    """One NaN; .sat makes +0 of it and of negative numbers."""
    assert run("add.rn.f32 $0, $1, $2;", "=f,f,f", [[0x7F800000], [0xFF800000]])[0] == 0x7FFFFFFF
    assert run("mul.rn.f32 $0, $1, $2;", "=f,f,f", [[0xFFC00001], [0]])[0] == 0x7FFFFFFF
    assert run("mul.rn.f32 $0, $1, 0f3F000000;", "=f,f", [[0x00000003]])[0] == 2
    made = run("fma.rn.sat.f32 $0, $1, $2, 0fBF800000;", "=f,f,f", [SPECIAL, [0x40000000] * len(SPECIAL)])[0]
    wanted = [0x3F800000 if v >= 1 else 0 for v in map(value, SPECIAL)]
    assert made.tolist() == wanted


@pytest.mark.parametrize("table", [0xEA, 0xE4, 0x28, 0xA8, 0xD8, 0x6A, 0x00, 0xFF, 0x96])
def test_lop3(table):
    a, b, c = words(50, 1), words(50, 2), words(50, 3)
    for x, y, z, got in zip(a, b, c, OPCODES["lop3.b32"](a, b, c, np.uint32(table)), strict=True):
        bits = [
            table >> (4 * (int(x) >> i & 1) + 2 * (int(y) >> i & 1) + (int(z) >> i & 1)) & 1
            for i in range(32)
        ]
        assert int(got) == sum(bit << i for i, bit in enumerate(bits))


def test_prmt():
    """All nibbles, the sign-copying ones included."""
    draw = random.Random(0)
    for _ in range(300):
        a, b, selector = (draw.getrandbits(32) for _ in range(3))
        data, out = a.to_bytes(4, "little") + b.to_bytes(4, "little"), []
        for place in range(4):
            nibble = selector >> 4 * place & 15
            byte = data[nibble & 7]
            out.append(byte if nibble < 8 else 255 * (byte >> 7))
        got = run("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [[a], [b], [selector]])[0]
        assert int(got[0]) == int.from_bytes(bytes(out), "little")


def test_dp4a():
    a, b, c = words(2000, 21), words(2000, 22), words(2000, 23)
    a[:2], b[:2], c[:2] = 0x80808080, (0x80808080, 0x7F7F7F7F), (0x7FFFFFFF, 0x80000000)
    got = OPCODES["dp4a.s32.s32"](a, b, c)
    for x, y, z, made in zip(a, b, c, got, strict=True):
        x, y = (struct.unpack("<4b", int(v).to_bytes(4, "little")) for v in (x, y))
        assert int(made) == (int(z) + sum(i * j for i, j in zip(x, y, strict=True))) % 2**32


def test_integers():
    a, b = words(200, 1), words(200, 2)
    for by in (0, 1, 16, 31, 32, 200):
        shifts = [
            run(f"{name} $0, $1, {by};", "=r,r", [a])[0].tolist()
            for name in ("shl.b32", "shr.u32", "shr.s32")
        ]
        assert shifts[0] == [int(v) << by & 0xFFFFFFFF for v in a]
        assert shifts[1] == [int(v) >> by for v in a]
        assert shifts[2] == [(int(v) - (int(v) >> 31 << 32) >> by) & 0xFFFFFFFF for v in a]
    assert OPCODES["sub.u32"](a, b).tolist() == [
        int(x) - int(y) & 0xFFFFFFFF for x, y in zip(a, b, strict=True)
    ]
    halves = [v.view(np.int16).reshape(-1, 2) for v in (a, b)]
    assert (OPCODES["min.s16x2"](a, b).view(np.int16).reshape(-1, 2) == np.minimum(*halves)).all()
    halves = [v.view(np.uint16) for v in halves]
    assert (OPCODES["min.u16x2"](a, b).view(np.uint16).reshape(-1, 2) == np.minimum(*halves)).all()
    assert (OPCODES["max.u16x2"](a, b).view(np.uint16).reshape(-1, 2) == np.maximum(*halves)).all()


def near_ties():
    """float32 patterns: all of bfloat16, each with half a unit of bfloat16 and float16 and the neighbours of that."""
    upper = PATTERNS << np.uint32(16)
    tails = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001]
    return np.concatenate([upper | np.uint32(tail) for tail in tails])


@np.errstate(all="ignore")
@pytest.mark.parametrize(("kind", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_conversions_to_16_bits(kind, dtype):
    bits = near_ties()
    made = run(f"cvt.rn.{kind}x2.f32 $0, $1, $2;", "=r,f,f", [bits, np.roll(bits, 1)])[0]
    v = bits.view(np.float32)
    wanted = np.where(np.isnan(v), 0x7FFF, v.astype(dtype).view(np.uint16)).astype(np.uint32)
    assert (made >> np.uint32(16) == wanted).all()
    assert (made & np.uint32(0xFFFF) == np.roll(wanted, 1)).all()


@np.errstate(all="ignore")
@pytest.mark.parametrize(("kind", "name"), [("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")])
def test_conversions_to_8_bits(kind, name):
    """The nearest of the format's values, found by the midpoints between them; a midpoint goes to the even code."""
    bits = near_ties()
    v = np.abs(bits.view(np.float32)).astype(np.float64)
    values = FORMATS[name].values[:128].astype(np.float64)
    values = values[np.isfinite(values)]
    middle = (values[1:] + values[:-1]) / 2
    code = np.searchsorted(middle, v)
    tie = (code < len(middle)) & (v == middle[np.minimum(code, len(middle) - 1)])
    code = np.where(tie & (code & 1 == 1), code + 1, code) | (bits >> np.uint32(31)) << np.uint32(7)
    code = np.where(np.isnan(v), 0x7F, code)
    asm = (
        f"{{ .reg .b16 l, h; cvt.rn.satfinite.{kind}x2.f32 l, $1, $1; mov.b32 h, 0; mov.b32 $0, {{l, h}}; }}"
    )
    made = run(asm, "=r,f", [bits])[0]
    assert (made == code.astype(np.uint32) * np.uint32(0x0101)).all()


@np.errstate(all="ignore")
@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]
)
def test_conversions_from_8_bits(kind, dtype):
    """All pairs of codes: values of the format, NaN as float16 has one."""
    made = run(f"cvt.rn.f16x2.{kind}x2 $0, $1;", "=r,r", [PATTERNS])[0]
    wanted = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64).astype(np.float16)
    wanted = np.where(np.isnan(wanted), 0x7FFF, wanted.view(np.uint16)).astype(np.uint32)
    assert (made & 0xFFFF == wanted[PATTERNS & 0xFF]).all()
    assert (made >> np.uint32(16) == wanted[PATTERNS >> np.uint32(8)]).all()


@np.errstate(all="ignore")
@pytest.mark.parametrize(("kind", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_sums_of_pairs_round_once(kind, dtype):
    """Against Fractions: the nearest of the format's numbers, or the even one of two."""
    a, b = (words(3000, seed) & np.uint32(0xBFFF) for seed in (5, 6))
    got = OPCODES[f"add.rn.{kind}x2"](a, b).astype(np.uint32) & np.uint32(0xFFFF)
    number = lambda bits: Fraction(float(np.uint16(bits).view(dtype)))  # noqa: E731
    for x, y, made in zip(a & 0xFFFF, b & 0xFFFF, got, strict=True):
        exact = number(x) + number(y)
        around = [int(made) + step for step in (-1, 0, 1) if (int(made) & 0x7FFF) + step >= 0]
        best = min(around, key=lambda n: (abs(number(n) - exact), n & 1))
        assert best & 0x7FFF == int(made) & 0x7FFF, (hex(x), hex(y))


@np.errstate(all="ignore")
@pytest.mark.parametrize(("kind", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_products_of_pairs(kind, dtype):
    """Against the product in float64, rounded by Fractions where it is subnormal."""
    rng = np.random.default_rng(3)
    halves = [rng.integers(0, 1 << 16, 6000, dtype=np.uint32) for _ in range(2)]
    got = OPCODES[f"mul.rn.{kind}x2"](*halves) & np.uint32(0xFFFF)
    a, b = (v.astype(np.uint16).view(dtype).astype(np.float64) for v in halves)
    table = np.sort(
        np.arange(0x7F80 if kind == "bf16" else 0x7C00, dtype=np.uint16).view(dtype).astype(np.float64)
    )
    product = a * b
    magnitude = np.abs(product)
    for index in np.flatnonzero(np.isfinite(product) & (magnitude <= table[-1])):
        at = min(max(int(np.searchsorted(table, magnitude[index])), 1), len(table) - 1)
        low, high = magnitude[index] - table[at - 1], table[at] - magnitude[index]
        wanted = at - 1 if low < high or (low == high and at & 1) else at
        assert int(got[index]) & 0x7FFF == wanted
        assert int(got[index]) >> 15 == int(np.signbit(product[index]))
    assert (got[np.isnan(product)] == 0x7FFF).all()


@np.errstate(all="ignore")
def test_fma_of_pairs_rounds_once():
    """Against Fractions: the nearest of bfloat16's numbers, or the even one of two."""
    rng = np.random.default_rng(4)
    a, b, c = (rng.integers(0, 1 << 16, 20000, dtype=np.uint32) & 0x8FFF | 0x3000 for _ in range(3))
    tie = np.uint32([[0x3F81, 0x3F81, 0x3F81], [0x3C00, 0x3B80, 0x3C00], [0x2000, 0x3F80, 0xA000]]).T
    for x, y, z in [*np.stack([a, b, c], 1)[:3000], *tie]:
        exact = Fraction(value(int(x) << 16)) * Fraction(value(int(y) << 16)) + Fraction(value(int(z) << 16))
        got = int(OPCODES["fma.rn.bf16x2"](x[None], y[None], z[None])[0]) & 0xFFFF
        around = [got + step for step in (-1, 0, 1) if 0 <= (got & 0x7FFF) + step < 0x7F80]
        best = min(around, key=lambda n: (abs(Fraction(value(n << 16)) - exact), n & 1))
        assert best & 0x7FFF == got & 0x7FFF, (hex(x), hex(y), hex(z))


@pytest.mark.parametrize("kind", ["f32", "bf16x2", "f16x2"])
def test_minima_and_maxima(kind):
    """-0 is below +0; a NaN loses, or with .NaN wins; two of them make one."""
    shift = 0 if kind == "f32" else 16
    widen = {
        "f32": value,
        "bf16x2": lambda b: value(b << 16),
        "f16x2": lambda b: float(np.uint16(b).view(np.float16)),
    }[kind]
    ones = [b >> shift for b in SPECIAL] + [0xFC00 if kind == "f16x2" else SPECIAL[-1] >> shift]
    nan = 0x7FFFFFFF >> shift
    for name, pick in (("min", min), ("max", max)):
        for a in ones:
            for b in ones:
                numbers = [v for v in (a, b) if widen(v) == widen(v)]
                quiet = pick(numbers, key=lambda v: (widen(v), -(v >> (31 - shift)))) if numbers else nan
                for suffix, wanted in (("", quiet), (".NaN", quiet if len(numbers) == 2 else nan)):
                    got = OPCODES[f"{name}{suffix}.{kind}"](np.uint32(a), np.uint32(b))
                    assert int(got) & 0xFFFFFFFF >> shift == wanted, (name, suffix, hex(a), hex(b))


def test_reciprocal():
    """Correctly rounded, subnormal numbers flushed; with an error of a unit where it is asked for."""
    v = np.array(SPECIAL + words(100, 5).tolist(), np.uint32)
    made = run("rcp.approx.ftz.f32 $0, $1;", "=f,f", [v])[0]
    for bits, got in zip(v.tolist(), made.tolist(), strict=True):
        magnitude = abs(value(bits))
        if magnitude != magnitude:
            assert got == 0x7FFFFFFF
        elif magnitude < 2.0**-126:
            assert got == bits & 0x80000000 | 0x7F800000
        elif magnitude > 2.0**126:
            assert got == bits & 0x80000000
        else:
            assert value(got) == rounded(1 / Fraction(value(bits)))
    for RECIPROCAL.error in (1, -1, 0):
        made = run("rcp.approx.ftz.f32 $0, $1;", "=f,f", [[0x40400000, 0x7F800000]])[0]
        assert made.tolist() == [0x3EAAAAAB + RECIPROCAL.error, 0]


def test_halves_of_registers():
    """A pair of registers, in a scope inside another."""
    asm = "{ .reg .b32 d; mov.b32 d, $2; { .reg .b16 p, q; mov.b32 {p, q}, d; cvt.f32.f16 $0, q; cvt.f32.f16 $1, p; } }"
    assert [int(v[0]) for v in run(asm, "=f,=f,r", [[0x3C00C000]])] == [0x3F800000, 0xC0000000]


@pytest.mark.parametrize(
    ("asm", "constraints", "message"),
    [
        ("{ .reg .b32 a; add.u32 a, b, $1; mov.b32 $0, a; }", "=r,r", "b is read before"),
        ("mov.b32 a, $1; mov.b32 $0, a;", "=r,r", "not declared"),
        ("mov.b32 $1, 5; mov.b32 $0, $1;", "=r,r", "is an input"),
        ("mov.b32 $0, 5; add.u32 $0, $0, $1;", "=r,r", "same register"),
        ("mov.b32 $0, $1;", "=r,r,r", "1 input registers"),
    ],
)
def test_what_a_compiler_may_spoil_is_refused(asm, constraints, message):
    with pytest.raises(ValueError, match=message):
        run(asm, constraints, [np.uint32([3])])


def test_unknown_instructions_are_named():
    with pytest.raises(NotImplementedError, match="sin"):
        run("sin.approx.f32 $0, $1;", "=f,f", [np.uint32([3])])


def test_early_clobbered_outputs_and_other_classes_may_be_written_first():
    for constraints in ("=&r,r", "=f,r"):
        assert run("mov.b32 $0, 5; add.u32 $0, $0, $1;", constraints, [np.uint32([3])])[0] == 8
