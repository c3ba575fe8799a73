"""`linear_small`: what it takes and refuses, its rule of tiles, and its kernels compiled for Hopper without a GPU.

Bits are compared in Triton's interpreter (`programs/products/linear_small.py`); where registers lie only a GPU knows.
"""

import platform
import re
from dataclasses import replace
from itertools import product

import pytest
import torch

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.triton_small_m import dense, host, layout
from fast.kernels.triton_small_m.host import FULL, MOST_REGISTERS, MOST_SHARED, Tiling
from fast.kernels.triton_small_m.layout import FACTORED, WORDS
from fast.scale_factors import ArrangedWeight, filled, rows_of_words, rows_with_parts
from reference import SCHEMES
from tests.emulator.interpreter_process import lines_of
from tests.fast.kernels.compiling.kernel_compiler import launched
from tests.fast.kernels.compiling.kernel_samples import by_day, named
from tests.support.linear_cases import weight

BF16, HALF = torch.bfloat16, torch.float16
SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (100, 160))
COUNTS = (1, 2, 16, 17, 33, 64, 128)
WGMMA = re.compile(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*(\S)")


def empty_weight(n, length, element, group, zero=False):
    """Memory that nobody reads."""
    rows, columns = filled(n), filled(length)
    blocks = -(-columns // group) if group else 1
    words = torch.empty((rows // 64, columns // 64, WORDS[element]), dtype=torch.int32)
    zeros = torch.empty((blocks, rows // 2), dtype=torch.int32) if zero else None
    scale = torch.empty((blocks, rows))
    if element in FACTORED:
        scale = torch.empty((rows_of_words(columns, group), rows // 2), dtype=torch.int32)
    if element == "nf4":
        scale = torch.empty((rows_with_parts(rows, columns, n * blocks), rows), dtype=torch.int32)
    return ArrangedWeight(words, scale, zeros, (n, length), element, group)


@pytest.mark.parametrize(("part", "cases"), [("day", 20), pytest.param("", 59, marks=pytest.mark.nightly)])
def test_bits(part, cases):
    assert len(lines_of("linear_small", "weights", *part.split())) == cases


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("element", "group"), [("int4", 128), ("int4", 32), ("int8", 0), ("e4m3", 0), ("e2m1", 16), ("nf4", 64)]
)
def test_the_rule_is_a_candidate_that_fits(shape, element, group):
    """Its tiles are whole ones, no row of X is left out, and big weights have a program for most multiprocessors."""
    rows, columns = map(filled, shape)
    for count in COUNTS:
        rule, *others = host.candidates(rows, columns, element, group, count)
        assert rule == host.tiling_of(rows, columns, element, group, count)
        for tiling in (rule, *others):
            assert tiling.fits(rows, columns, element, group)
            assert tiling.shared(element, group) <= MOST_SHARED
        assert len(others) >= 3
        if rows * columns >= 1 << 22:
            assert FULL // 2 <= rule.programs(rows, count) <= 4 * FULL


@pytest.mark.parametrize(
    ("element", "group"),
    [
        *product(("int4", "int8", "e4m3"), (0, 32, 128)),
        ("e2m1", 16),
        ("e2m1", 32),
        ("e4m3_mx", 32),
        ("nf4", 64),
    ],
)
def test_the_rule_fits_any_weight(element, group):
    """Of shapes small and large: whole tiles, no empty part of K, and registers that are not spilled."""
    for rows in (128, 384, 1024, 6144, 28672, 128256):
        for columns in (128, 384, 1152, 4096, 11008, 28672):
            for count in COUNTS:
                tiling = host.tiling_of(rows, columns, element, group, count)
                assert tiling.fits(rows, columns, element, group)
                assert tiling.registers(element) <= 32 * tiling.warps * MOST_REGISTERS
                assert tiling.block_m >= 16
                assert tiling.splits == 1 or tiling.programs(rows, count) <= 2 * FULL


RULED = [("int4", 128), ("int8", 128), ("e2m1", 16), ("e4m3_mx", 32), ("nf4", 64)]


@pytest.mark.parametrize(
    ("element", "group", "count"),
    by_day(
        [(*RULED[at], (1, 32, 64, 128)[(at + step) % 4]) for step in range(4) for at in range(len(RULED))],
        lambda case: named(element=case[0], count=case[2]),
    ),
)
def test_nothing_is_spilled_by_the_rule(element, group, count):
    zero = element not in (*FACTORED, "nf4")
    w, x = empty_weight(4096, 4096, element, group, zero), torch.empty((count, 4096), dtype=BF16)
    machine, *_ = launched(lambda: host.linear_small(x, w))
    assert (machine.local, machine.stack) == (0, 0)


# Products of an 8-billion-parameter model's layers and what takes other branches; the tiles, and the most registers.
COMPILED = [
    (("int4", 128, 1), {}, Tiling(16, 64, 128, 1, 4, 4), 80), (("int4", 128, 1), {}, Tiling(16, 64, 256, 2, 4, 4, True), 96),
    (("int4", 128, 2), {"zero": True}, Tiling(16, 64, 128, 2, 4, 4), 80),
    (("int4", 32, 16), {}, Tiling(16, 64, 128, 1, 4, 4), 72), (("int4", 128, 16), {}, Tiling(16, 128, 128, 1, 6, 4), 144),
    (("int4", 32, 16), {"zero": True, "dtype": HALF}, Tiling(16, 128, 128, 1, 4, 8), 72),
    (("int4", 64, 32), {}, Tiling(32, 64, 128, 1, 4, 4), 96), (("int4", 128, 64), {}, Tiling(64, 128, 128, 1, 4, 8), 128),
    (("int4", 128, 64), {"bias": True}, Tiling(64, 256, 64, 2, 4, 8), 255),
    (("int4", 256, 128), {"dtype": HALF}, Tiling(128, 128, 128, 1, 3, 8), 255),
    (("int8", 0, 16), {}, Tiling(16, 64, 128, 1, 4, 4), 80),
    (("int8", 128, 16), {"zero": True}, Tiling(16, 64, 128, 2, 4, 4), 80),
    (("int8", 32, 9), {}, Tiling(16, 128, 128, 1, 4, 4), 96),
    (("e4m3", 0, 16), {"dtype": HALF, "bias": True}, Tiling(16, 64, 256, 1, 4, 4), 96),
    (("e4m3", 128, 64), {}, Tiling(64, 128, 128, 1, 4, 8), 128),
    (("e2m1", 32, 16), {}, Tiling(16, 128, 128, 2, 6, 4), 128), (("e2m1", 16, 1), {}, Tiling(16, 64, 256, 2, 4, 4, True), 96),
    (("e2m1", 16, 16), {"bias": True}, Tiling(16, 128, 128, 1, 6, 4), 144),
    (("e2m1", 16, 64), {}, Tiling(64, 128, 128, 1, 4, 8), 128), (("e2m1", 16, 128), {}, Tiling(64, 256, 64, 1, 4, 8), 255),
    (("e2m1", 16, 9), {"dtype": HALF}, Tiling(16, 64, 128, 1, 4, 4), 96),
    (("e2m1", 32, 9), {"dtype": HALF}, Tiling(16, 128, 128, 1, 4, 4), 96),
    (("e4m3_mx", 32, 16), {}, Tiling(16, 128, 128, 1, 6, 8), 80), (("e4m3_mx", 32, 1), {}, Tiling(16, 64, 128, 2, 4, 4), 96),
    (("e4m3_mx", 32, 9), {"dtype": HALF}, Tiling(16, 128, 128, 1, 4, 4), 104),
    (("nf4", 64, 1), {}, Tiling(16, 128, 128, 2, 6, 4), 168),
    (("nf4", 64, 16), {"dtype": HALF}, Tiling(16, 64, 128, 1, 4, 4), 168),
    (("nf4", 64, 64), {}, Tiling(64, 128, 128, 2, 4, 8), 184),
    (("nf4", 64, 128), {"bias": True}, Tiling(64, 128, 128, 1, 3, 8), 184),
]  # fmt: skip


def features_of(case):
    """What the kernel has branches for."""
    (element, group, _), more, tiling, _ = case
    tiles = named(tokens=tiling.block_m, splits=tiling.splits > 1, early=tiling.early, warps=tiling.warps)
    groups = named(none=group == 0, short=group == 32, long=group == 256, of_16=group == 16)
    return [*tiles, *groups, *named(element=element, **more)]


def paired(machine):
    """Layouts of the words that assembly takes two of: whether the second register of a lane is the next word."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", machine.ttgir, re.M))
    for line in machine.ttgir.splitlines():
        if "elementwise_inline_asm" in line and "packed_element = 2" in line:
            for name in re.findall(r"tensor<\w+xi32, (#\w+)>", line.rpartition(" : ")[2].partition("->")[0]):
                layout = layouts[name]
                yield "register = [[0, 1]" in layout or re.search(
                    r"sizePerThread = \[1, [24]\].*order = \[1, 0\]", layout
                )


@pytest.mark.parametrize(("which", "more", "tiling", "registers"), by_day(COMPILED, features_of))
def test_kernels_compile_as_they_are_meant_to(which, more, tiling, registers):
    """The weight goes from registers to the tensor core, which is waited for before they change; nothing is spilled."""
    element, group, count = which
    dtype = more.get("dtype", BF16)
    w = empty_weight(14336, 4096, element, group, more.get("zero", False))
    bias = torch.empty(14336, dtype=dtype) if more.get("bias") else None
    x = torch.empty((count, 4096), dtype=dtype)
    main, *others = launched(lambda: host.linear_small(x, w, bias, tiling=tiling))
    assert [m.kernel for m in others] == ["sum_splits_kernel"] * (tiling.splits > 1)
    for machine in (main, *others):
        assert (machine.local, machine.stack) == (0, 0)
    assert main.registers <= registers
    pairs = list(paired(main))
    assert pairs
    assert all(pairs), "assembly decodes words together that are no neighbours"
    operands = WGMMA.findall(main.ptx)
    assert operands
    assert set(operands) == {"{"}, "the weight is read from shared memory"
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", main.ptx)) == {"0"}
    # From registers sums that go on from product to product came out wrong: each begins at zero.
    loop = main.order[: max(at for at, name in enumerate(main.order) if name.startswith("HGMMA"))]
    assert not any(name.startswith(("STS", "LDL", "STL")) for name in loop), "weights make a detour"


def test_eight_rows_are_products_of_a_warp():
    """Tiles of 8 rows of X are `mma`, which no hazard is known of."""
    w, x = empty_weight(14336, 4096, "int4", 128), torch.empty((8, 4096), dtype=BF16)
    (machine,) = launched(lambda: host.linear_small(x, w, tiling=Tiling(8, 64, 128, 1, 4, 4)))
    assert machine.named("HMMA") > 0
    assert all(paired(machine))
    assert (machine.named("HGMMA"), machine.local, machine.stack) == (0, 0, 0)


@pytest.mark.parametrize("name", ["int4_g128", "fp8_rowwise", "nf4"])
def test_the_layout_compiles(name):
    w = weight(SCHEMES[name], 100, 384)
    machines = launched(lambda: layout.arrange(w))
    assert [m.kernel for m in machines] == ["arrange_kernel"]
    machines += launched(lambda: layout.restored_codes(empty_weight(100, 256, "int4", 128)))
    assert all((m.local, m.stack) == (0, 0) for m in machines)


@pytest.mark.parametrize(
    "name",
    [
        "nf4", "torchao.nf4", "te.nvfp4", "te.nvfp4_16x16", "compressed_tensors.nvfp4", "mxfp8_e5m2", "int2_g32",
        "torchao.int4_g32_tinygemm", "fp8_rowwise_e5m2", "fp8_128x128",
    ],
)  # fmt: skip
def test_other_weights_are_for_other_kernels(name):
    """NF4 of so few columns."""
    assert host.arrange(weight(SCHEMES[name], 128, 256)) is None


def test_lengths_that_are_no_multiple_of_32_are_for_other_kernels():
    assert host.arrange(weight(SCHEMES["int8_rowwise"], 16, 272)) is None


def test_what_other_kernels_take():
    """More rows, none, other floats."""
    w, x = empty_weight(128, 256, "int4", 128), torch.empty((129, 256), dtype=BF16)
    assert host.linear_small(x, w) is None
    assert host.linear_small(x[:0], w) is None
    assert host.linear_small(x[:2].float(), w) is None


def test_errors():
    w, x = empty_weight(128, 256, "int4", 128), torch.empty((2, 256), dtype=BF16)
    with pytest.raises(ValueError, match="the last axes must be the same"):
        host.linear_small(x[:, :128], w)
    with pytest.raises(ValueError, match="bias has shape"):
        host.linear_small(x, w, torch.empty(127))
    with pytest.raises(ValueError, match="move them to one device"):
        host.linear_small(x.to("meta"), w)
    with pytest.raises(ValueError, match="take one of `candidates`"):
        host.linear_small(x, w, tiling=Tiling(16, 64, 512, 1, 2, 4))


@pytest.mark.parametrize(
    ("element", "group", "zero"),
    by_day(
        [
            ("int4", 128, False), ("int4", 32, True), ("int8", 0, False), ("e4m3", 0, False), ("int4", 128, True),
            ("e2m1", 32, False), ("e2m1", 16, False), ("e4m3_mx", 32, False), ("nf4", 64, False),
        ],
        lambda case: named(element=case[0], zero=case[2]),
    ),
)  # fmt: skip
def test_the_dense_weight_compiles(element, group, zero):
    """Words in loads and values in stores of 16 bytes, nothing spilled."""
    loads_of_dense(empty_weight(14336, 4096, element, group, zero), element, group)


def test_dense_experts_compile():
    """As those of one weight, of lengths that are filled."""
    w = empty_weight(5760, 2880, "int4", 32, zero=True)
    many = {part: torch.stack([getattr(w, part)] * 2) for part in ("words", "scale", "zero")}
    loads_of_dense(replace(w, **many), "int4", 32)


def loads_of_dense(w, element, group):
    """What the kernel moves."""
    (machine,) = launched(lambda: dense.arranged_dense(w, BF16))
    assert (machine.local, machine.stack) == (0, 0)
    assert all(list(paired(machine)))
    assert machine.accesses("STG") == {16: 8}
    # Factors of 16 columns are four words of a pair of rows.
    assert machine.accesses("LDG")[16] == {"int4": 2, "e2m1": 2}.get(
        "int4" if element == "nf4" else element, 4
    ) + (group == 16)
