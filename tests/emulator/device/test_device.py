"""What runs of instructions are written out as is what the instructions' own steps make; floats are those of ml_dtypes.

A planted fault counts as seen only where it was planted, alone makes the result wrong, and leaves a source that compiles.
"""

import random
import struct
from fractions import Fraction
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from fast.launch import nvrtc
from fast.launch.nvrtc import CompileError
from tests.emulator.device import floats, opcodes, warp_opcodes
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import Memory
from tests.emulator.device.opcodes import Operands
from tests.emulator.device.program import Instruction
from tests.emulator.device.translated import NAMES, may_wait, runs, statement, tables
from tests.emulator.faults import assert_seen
from tests.fast.kernels.sm90.products import require_nvrtc

NARROW = [
    0,
    1,
    2,
    31,
    32,
    63,
    64,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x3F80,
    0x7F80,
    0xFF80,
    0x7C00,
    0xFC01,
]
WORDS = [*NARROW, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x00000001, 0x80000001,
         0x7F7FFFFF, 0x477FEFFF, 0x477FF000, 0x3F808000, 0x3F818000, 0x33000000, 0x33000001]  # fmt: skip
WIDE = [*WORDS, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
INTEGERS = [f"{name}.{kind}" for kind in ("s32", "u32", "s64", "u64") for name in ("add", "sub", "mul.lo", "mul.wide", "mul.hi",
            "shr", "mad.lo", "setp.lt", "setp.ge", "setp.eq", "setp.ne", "setp.gt", "setp.le")]  # fmt: skip
INTEGERS += [f"{name}.b{width}" for width in (16, 32, 64) for name in ("and", "or", "xor", "not", "mov")]
INTEGERS += [
    "shl.b32",
    "shl.b64",
    "neg.s32",
    "neg.s64",
    "cvt.u64.u32",
    "cvt.s64.s32",
    "cvt.u16.u32",
    "cvt.u32.u16",
    "cvt.s32.s8",
]
FLOATS = [
    "add.f32", "add.rn.f32", "sub.f32", "sub.rn.f32", "mul.f32", "mul.rn.f32", "fma.rn.f32",
    "cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32",
    "mul.rn.bf16x2", "add.rn.bf16x2", "fma.rn.bf16x2", "mul.rn.f16x2", "add.rn.f16x2", "fma.rn.f16x2", "mov.f32",
]  # fmt: skip
CHOICES = ["selp.b32", "and.pred", "or.pred", "xor.pred", "not.pred", "mov.pred"]


def counted(opcode):
    """How many operands an instruction reads."""
    name = opcode.split(".")[0]
    return {
        "mad": 3,
        "fma": 3,
        "selp": 3,
        "not": 1,
        "mov": 1,
        "neg": 1,
        "cvt": 2 if "x2" in opcode else 1,
    }.get(name, 2)


def both_ways(opcode, operands, values):
    """The result by the step, and by the text; operands: names of registers, the first one the target."""
    o = Operands({}, {})
    text = statement(opcode, operands, o)
    assert text is not None, opcode
    step = warp_opcodes.of_warp(opcode, operands, o, 0, None) or opcodes.compiled(opcode, operands, o)
    found = []
    for run in (step, lambda th: exec(text, dict(NAMES), {"r": th.registers, "th": th})):
        thread = SimpleNamespace(registers=[None] * (len(o.numbers) + 1))
        for name, value in values.items():
            thread.registers[o.at(name)] = value
        run(thread)
        found.append(thread.registers[o.at(operands[0])])
    return found


def drawn(opcode, count, rounds=60):
    """Operands of all kinds that an instruction may have."""
    draw = random.Random(opcode)
    wide = opcode.endswith("64")
    for _ in range(rounds):
        yield [
            draw.choice(WIDE if wide else WORDS)
            if draw.random() < 0.5
            else draw.getrandbits(64 if wide else 32)
            for _ in range(count)
        ]


@pytest.mark.parametrize("opcode", INTEGERS + FLOATS)
def test_the_text_is_the_step(opcode):
    names = "abc"[: counted(opcode)]
    for values in drawn(opcode, len(names)):
        if opcode.startswith("mul.hi") and not opcode.endswith("s32"):
            values = [value & 0xFFFFFFFF for value in values]
        step, text = both_ways(opcode, ("d", *names), dict(zip(names, values, strict=True)))
        assert text == step, (opcode, values)


@pytest.mark.parametrize("opcode", CHOICES)
def test_choices(opcode):
    names = "abc"[: counted(opcode)]
    for bits in range(8):
        values = {name: bool(bits >> at & 1) for at, name in enumerate(names)}
        step, text = both_ways(opcode, ("d", *names), values)
        assert text == step


def test_logic_of_three():
    """Every table that is written out; the others stay steps."""
    assert len(tables()) > 100
    draw = random.Random(0)
    for table in tables():
        values = {name: draw.getrandbits(32) for name in "abc"}
        step, text = both_ways("lop3.b32", ("d", "a", "b", "c", str(table)), values)
        bits = [
            table >> (4 * (values["a"] >> i & 1) + 2 * (values["b"] >> i & 1) + (values["c"] >> i & 1)) & 1
            for i in range(32)
        ]
        assert text == step == sum(bit << i for i, bit in enumerate(bits)), table


def test_bytes_of_two_words():
    draw = random.Random(1)
    for _ in range(200):
        selector = draw.getrandbits(16)
        values = {name: draw.getrandbits(32) for name in "ab"}
        data = struct.pack("<II", *values.values())
        numbers = [selector >> 4 * at & 15 for at in range(4)]
        wanted = bytes(data[one] if one < 8 else 255 * (data[one - 8] >> 7) for one in numbers)
        found = both_ways("prmt.b32", ("d", "a", "b", str(selector)), values)
        assert found == [int.from_bytes(wanted, "little")] * 2


def test_halves_of_a_register():
    for opcode, bits in (("mov.b32", 32), ("mov.b64", 64)):
        half = random.Random(bits).getrandbits(bits // 2)
        assert both_ways(opcode, ("d", "{a,b}"), {"a": 5, "b": half}) == [5 | half << bits // 2] * 2


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16])
def test_floats_of_16_bits(kind):
    """All of them in pairs with others, and float32 near ties, against ml_dtypes and NumPy."""
    values = np.array(floats.values_of(kind))
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore", over="ignore"):
        assert np.array_equal(values, patterns.view(kind).astype(np.float64), equal_nan=True)
        upper = patterns.astype(np.uint32)[::7] << 16
        near = np.concatenate(
            [upper | tail for tail in (0, 1, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0xFFFF)]
        )
        wanted = near.view(np.float32).astype(kind)
    wanted = np.where(np.isnan(wanted), 0x7FFF, wanted.view(np.uint16))
    of_pattern = floats.to_bfloat16 if kind is ml_dtypes.bfloat16 else floats.to_float16
    assert [of_pattern(value) for value in near.tolist()] == wanted.tolist()


def test_float32():
    """Against NumPy: sums and products are rounded once, of NaN there is one."""
    draw = np.random.default_rng(0)
    words = np.concatenate([np.array(WORDS, np.uint32), draw.integers(0, 1 << 32, 3000, dtype=np.uint32)])
    a, b = words.view(np.float32), draw.permutation(words).view(np.float32)
    with np.errstate(all="ignore"):
        for make in (np.add, np.subtract, np.multiply):
            wanted = make(a, b)
            wanted = np.where(np.isnan(wanted), 0x7FFFFFFF, wanted.view(np.uint32))
            given = zip(a.view(np.uint32).tolist(), b.view(np.uint32).tolist(), strict=True)
            assert [floats.pattern(make(floats.real(x), floats.real(y))) for x, y in given] == wanted.tolist()


def test_fma_rounds_once():
    draw = random.Random(2)
    for _ in range(2000):
        a, b, c = (
            np.float32(draw.choice((-1, 1)) * draw.random() * 2.0 ** draw.randrange(-30, 30))
            for _ in range(3)
        )
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        made = np.float32(floats.real(floats.pattern(warp_opcodes.fused(a, b, c))))
        beside = [np.nextafter(made, np.float32(side)) for side in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(made)) - exact) <= abs(Fraction(float(one)) - exact) for one in beside)


def test_a_run_ends_where_others_come_in_and_where_threads_wait():
    """A loop: a branch out of its middle, one back to its beginning, a barrier behind."""
    lines = [
        ("mov.u32", ("i", "0"), None), ("add.u32", ("i", "i", "1"), None), ("setp.eq.u32", ("p", "i", "n"), None),
        ("bra", ("$out",), "p"), ("bra.uni", ("$loop",), None), ("bar.sync", ("0",), None), ("mov.u32", ("d", "7"), "!p"),
        ("mov.u32", ("e", "8"), "p"),
    ]  # fmt: skip
    o = Operands({"$loop": 1, "$out": 5}, {})
    instructions = [Instruction(*one) for one in lines]
    steps = [None if may_wait(one.opcode) else (lambda th: None) for one in instructions]
    code = runs(instructions, steps, o)
    thread = SimpleNamespace(registers=[None] * 8)
    thread.registers[o.at("n")] = 3
    assert code[0](thread) == 1
    assert [code[1](thread) for _ in range(3)] == [1, 1, 5]
    assert code[5] is None
    assert code[6](thread) == 8
    assert [thread.registers[o.at(name)] for name in "ipde"] == [3, True, None, 8]


FAULT_SOURCE = "y = a + b;"
FAULT = ("a + b", "a - b")


def compares(way, change):
    return change(FAULT_SOURCE) == FAULT_SOURCE


def compares_one_way(way, change):
    return change(FAULT_SOURCE) == FAULT_SOURCE or way


def raises(way, change):
    if change(FAULT_SOURCE) != FAULT_SOURCE:
        raise IndexError(FAULT_SOURCE)
    return True


@pytest.mark.parametrize("is_right", [compares, compares_one_way, raises])
def test_another_result_and_none_are_seen(is_right):
    assert_seen(FAULT, is_right)


def ignores_the_change(way, change):
    return True


def is_always_wrong(way, change):
    return change(FAULT_SOURCE) is None


def compares_nothing(way, change):
    return bool(change(FAULT_SOURCE))


@pytest.mark.parametrize(
    ("fault", "is_right", "why"),
    [
        (("a * b", "a / b"), compares, "the source has no 'a \\* b'"),
        (("a + b", "a + b"), compares, "is no fault"),
        (FAULT, ignores_the_change, "no source was changed"),
        (FAULT, compares_nothing, "nothing shows 'a - b'"),
        (FAULT, is_always_wrong, "without a fault it is not right either"),
    ],
)
def test_what_shows_nothing_is_refused(fault, is_right, why):
    with pytest.raises(AssertionError, match=why):
        assert_seen(fault, is_right)


def does_not_compile(way, change):
    if change(FAULT_SOURCE) != FAULT_SOURCE:
        raise CompileError(FAULT_SOURCE)
    return True


def test_a_source_that_does_not_compile_is_an_error():
    with pytest.raises(CompileError):
        assert_seen(FAULT, does_not_compile)


# Clusters that run at the same time in the emulator of a device: what one has written another sees, by a mark.

THREADS = 128
#: The second program gives numbers to the first one, behind a mark.
SOURCE = """
struct Given { int* numbers; unsigned* mark; int* found; };
extern "C" __global__ __launch_bounds__(128, 1) void given(const __grid_constant__ Given p) {
  const int thread = threadIdx.x;
  if (blockIdx.x == 1) {
    p.numbers[thread] = 1 + thread;
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (thread == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p.mark), "r"(1) : "memory");
    return;
  }
  if (thread == 0) {
    unsigned seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p.mark) : "memory");
    while (seen == 0);
  }
  asm volatile("bar.sync 1, 128;" ::: "memory");
  p.found[thread] = *reinterpret_cast<volatile int*>(p.numbers + thread);
}
"""
BARRIER = 'asm volatile("bar.sync 1, 128;" ::: "memory");'
#: Without the barrier of the one that writes, and of the one that reads.
FAULTS = {
    "the mark is set before all have written": SOURCE.replace(BARRIER, "", 1),
    "numbers are read before all know of them": BARRIER.join(SOURCE.split(BARRIER)[:2]) + SOURCE.split(BARRIER)[2],
}  # fmt: skip


def found(source, seed, at_once=2):
    """What the first program reads."""
    require_nvrtc()
    ptx = nvrtc.compile_source(source, {}, ("--gpu-architecture=sm_90a",), ptx=True)[0].decode().rstrip("\0")
    memory, arrays = Memory(), [np.zeros(4 * THREADS, np.uint8) for _ in range(3)]
    arguments = [np.array([memory.give(one) for one in arrays], np.int64).view(np.uint8)]
    machine = Machine(ptx, memory, arguments, {}, threads=THREADS, shared=0, early=True, seed=seed)
    machine.run(2, 1, at_once)
    return arrays[2].view(np.int32).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_a_cluster_waits_for_another(seed):
    assert found(SOURCE, seed) == list(range(1, THREADS + 1))


@pytest.mark.parametrize("fault", FAULTS)
def test_races_are_seen(fault):
    """Slow warps see to it that some seed shows them."""
    assert any(found(FAULTS[fault], seed) != list(range(1, THREADS + 1)) for seed in range(6))


def test_one_after_the_other_it_waits_for_ever():
    with pytest.raises(RuntimeError, match="no thread can go on"):
        found(SOURCE, 0, at_once=1)
