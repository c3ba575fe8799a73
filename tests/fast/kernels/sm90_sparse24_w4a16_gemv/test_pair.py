"""Two products in one launch of `sm90_sparse24_w4a16_gemv` in the emulator: the bits of each alone, silu of one times the
other."""

import re

import numpy as np
import pytest
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_sparse24_w4a16_gemv import host, launch, pair
from fast.kernels.sm90_sparse24_w4a16_gemv.select import choose
from fast.kernels.sm90_sparse24_w4a16_gemv.variants import (
    GATED,
    SOURCE,
    TWO,
    Form,
    Variant,
    fitted,
    rows_of_tiles,
    sources,
)
from fast.launch import nvrtc
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import Memory
from tests.emulator.device.stand_in import _bytes
from tests.emulator.faults import assert_seen, at_night, every_second, unchanged
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc
from tests.fast.kernels.sm90_sparse24_w4a16_gemv.emulated import Device
from tests.gpu.sparsity.int4_cases import as_tensors, exact_case, random_case
from tests.support.linear_cases import exact_result, outside

BF16, F16, WIDE = "bfloat16", "float16", "float32"
SPILLS = re.compile(r"(\d+) bytes spill stores")
#: Rows of x, rows of both weights, columns, group; dtypes of x and scales; tokens, columns of a stage, splits, tiles; of a
#: multiprocessor.
CASES = {
    "a tile each": ((1, (16, 16), 512, 128), BF16, WIDE, (8, 512, 1, 1), 1),
    "a program has tiles of both, rows cut": ((3, (37, 50), 1280, 64), F16, BF16, (8, 256, 2, 3), 1),
    "four parts, the second smaller, 16 rows": ((16, (68, 5), 1024, 32), BF16, WIDE, (16, 256, 4, 1), 1),
    "two programs, the first smaller": ((2, (20, 90), 768, 128), BF16, BF16, (8, 256, 1, 2), 2),
}  # fmt: skip
GATES = {
    "one tile of each": ((1, 16, 512, 128), BF16, WIDE, (8, 512, 1, 2), 1),
    "rows cut, two parts": ((5, 37, 1280, 64), F16, BF16, (8, 256, 2, 2), 1),
    "four parts, 16 rows": ((16, 61, 1024, 32), BF16, WIDE, (16, 256, 4, 4), 1),
    "a ring of tiles": ((2, 100, 768, 128), F16, WIDE, (8, 256, 1, 6), 2),
}  # fmt: skip


def two_weights(count, rows, *others, make=exact_case):
    """x, and parts of both weights."""
    first, second = (as_tensors(make(count, n, *others, seed=seed)) for seed, n in enumerate(rows))
    return first.x, first[1:4], second[1:4]


def variant_of(x, weight, sizes, at_once, products):
    group = 4 * weight[0].shape[1] // weight[2].shape[1]
    form = Form(group, weight[2].dtype != torch.float32, x.dtype == torch.float16, products)
    return fitted(form, *sizes, x.shape[1], at_once)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
def test_each_product_is_exact(name, early):
    require_nvrtc()
    (count, rows, k, group), dtype, storage, sizes, at_once = CASES[name]
    x, *both = two_weights(count, rows, k, group, dtype, storage)
    one = variant_of(x, both[0], sizes, at_once, TWO)
    made = Device(early=early, seed=1).two(x, *both, variant=one)
    for got, weight in zip(made, both, strict=True):
        assert_same_bits(got, exact_result(x, sparse_int4_weight(*weight), None))


@pytest.mark.parametrize(
    "name", at_night(CASES, "four parts, the second smaller, 16 rows", "two programs, the first smaller")
)
def test_each_product_has_the_bits_that_it_has_alone(name):
    require_nvrtc()
    (count, rows, k, group), dtype, storage, sizes, at_once = CASES[name]
    x, *both = two_weights(count, rows, k, group, dtype, storage, make=random_case)
    one = variant_of(x, both[0], sizes, at_once, TWO)
    for got, weight in zip(Device(seed=2).two(x, *both, variant=one), both, strict=True):
        assert_same_bits(got, Device().product(x, *weight, variant=one))
        assert outside(got, x, sparse_int4_weight(*weight), None) == 0


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", GATES)
def test_silu_of_one_times_the_other(name, early):
    """Of the rounded sums."""
    require_nvrtc()
    (count, rows, k, group), dtype, storage, sizes, at_once = GATES[name]
    x, *both = two_weights(count, (rows, rows), k, group, dtype, storage)
    x = x / 64  # small enough for silu to matter, and exact
    one = variant_of(x, both[0], sizes, at_once, GATED)
    got = Device(early=early, seed=1).two(x, *both, variant=one, gated=True)
    assert_same_bits(
        got, reference.swiglu(*(exact_result(x, sparse_int4_weight(*weight), None) for weight in both))
    )


KERNEL = """
extern "C" __global__ void gates(const unsigned short* gate, const unsigned short* up, unsigned short* y) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  y[i] = gated(gate[i], up[i]);
}
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("part", [0, *(pytest.param(at, marks=pytest.mark.nightly) for at in range(1, 8))])
def test_every_sixteen_bit_gate(dtype, part):
    """All patterns in eight parts, times numbers of every size, infinities and NaN."""
    require_nvrtc()
    gate = torch.arange(part, 1 << 16, 8)
    up = torch.cat([gate[::257], gate.flip(0)])[: len(gate)].to(torch.uint16)
    gate = gate.to(torch.uint16)
    y = torch.zeros_like(gate)
    text = "typedef unsigned int u32;\n" + SOURCE.with_name("gated.cuh").read_text() + KERNEL
    text = re.sub(r"\bHALF\b", str(int(dtype == torch.float16)), text)
    ptx = nvrtc.compile_source(text, {}, ("--gpu-architecture=sm_90a", "--std=c++17"), ptx=True)[0].decode()
    # The emulator knows parameters in one structure.
    ptx = re.sub(r"\.param \.u64 (\w+)", r".param .align 8 .b8 \1[8]", ptx.rstrip("\0"))
    memory = Memory()
    for one in (gate, up, y):
        memory.regions[one.data_ptr()] = _bytes(one.data_ptr(), one.nbytes)
    arguments = [np.array([one.data_ptr()], np.uint64).view(np.uint8) for one in (gate, up, y)]
    Machine(ptx, memory, arguments, {}, threads=128, shared=0, early=False).run(len(gate) // 128, 1)
    assert_same_bits(y.view(dtype), reference.swiglu(gate.view(dtype), up.view(dtype)))


FAULTS = {
    "the second weight begins a tile late": (TWO, "(p.n + 15) / 16", "p.n / 16"),
    "rows of the second are counted on": (TWO, "second ? number - first : number", "number"),
    "the second is written into the first": (TWO, "p.scale2, p.y2, p.n2", "p.scale2, p.y, p.n2"),
    "the second has the rows of the first": (TWO, "p.y2, p.n2, number", "p.y2, p.n, number"),
    "scales of the first": (TWO, "p.metadata2, p.scale2, p.y2", "p.metadata2, p.scale, p.y2"),
    "gate and up change places": (GATED, "? number % 2 :", "? number % 2 == 0 :"),
    "sums of a neighbour": (GATED, "four / 8 * 2 + four % 2", "four / 4"),
    "other rows of the same tile": (GATED, "? four / 2 : four) % 4", "? four : four) % 4"),
    "sums that are not rounded": (GATED, "gated(rounded(p, gate.v[i], 0)", "gated(rounded(p, gate.v[i] * 1.01f, 0)"),
    "a share of fours that is no whole pairs": (GATED, "i % (SHARE / EACH) * EACH", "i % (SHARE / EACH)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_planted_faults_are_seen(fault):
    require_nvrtc()
    products, *change = FAULTS[fault]
    assert_seen(change, is_right, [products])


def is_right(products, change):
    made = zip(two_products(products, change), two_products(products), strict=True)
    return all(torch.equal(got, right) for got, right in made)


def two_products(products, change=unchanged):
    """Both, or what one of them gates."""
    gated = products == GATED
    x, *both = two_weights(3, (37, 37 if gated else 50), 1280, 64)
    one = variant_of(x, both[0], (8, 256, 2, 4), 1, products)
    made = Device(change=change).two(x, *both, variant=one, gated=gated)
    return (made,) if gated else made


# What the host does


@pytest.mark.parametrize("count", [1, 8, 16])
@pytest.mark.parametrize(("rows", "k"), [((14336, 14336), 4096), ((1024, 1024), 4096), ((20, 20), 512)])
def test_tiles_of_a_gate_and_of_what_it_gates_are_pairs(rows, k, count):
    for half in (False, True):
        one = choose(Form(64, False, half, GATED), count, rows_of_tiles(*rows), k)
        assert one.tiles % 2 == 0
        assert (one.tiles * 4 // one.splits) % 2 == 0
    assert fitted(Form(64, False, False, GATED), 8, 512, 1, 3, 4096) is None
    assert fitted(Form(64, False, False, TWO), 8, 512, 1, 3, 4096) is not None


def test_a_gate_has_the_variant_that_was_measured_for_as_many_rows():
    for count in (1, 8, 16):
        alone = choose(Form(64, False, False), count, 28672, 4096)
        for products in (TWO, GATED):
            assert choose(Form(64, False, False, products), count, rows_of_tiles(14336, 14336), 4096) == alone


@pytest.mark.parametrize("products", [TWO, GATED])
@pytest.mark.parametrize(("group", "narrow", "half"), [(64, False, False), (32, True, True)])
def test_chosen_variants_compile_without_spills(products, group, narrow, half):
    require_nvrtc()
    form = Form(group, narrow, half, products)
    for one in {choose(form, count, 28672, 4096) for count in (1, 16)}:
        source, headers, options = sources(one, form)
        log = nvrtc.compile_source(source, headers, (*options, "--ptxas-options=-v"))[1]
        assert int(SPILLS.search(log)[1]) == 0, one


def test_a_launch_has_the_tiles_of_both():
    made = launch.SparseSkinnyLaunch(
        Variant(8, 256, 16, 1, 7), Form(64, False, False, TWO), 1, (100, 4096), 5
    )
    assert made.programs == 2  # seven tiles and one
    assert made.arguments(0) == (1, 100, 4096, 0, 5, 0)
    assert launch.PAIR_ARGUMENTS.size == 8 * len(launch.PAIR_POINTERS) + 24
    assert rows_of_tiles(100, 5) == 128


def test_operands_that_other_kernels_take(monkeypatch):
    x, first, second = two_weights(16, (32, 48), 512, 128)
    narrow = [*second[:2], second[2].bfloat16()]
    assert pair.launch_for(x, first, second, 128, TWO) is None, "a CPU"
    monkeypatch.setattr(pair, "is_served", lambda x: True)
    monkeypatch.setattr(pair, "is_loadable", lambda *_: True)
    assert pair.MOST_ROWS == host.MOST_ROWS == 16
    assert pair.launch_for(x, first, second, 128, TWO).second == 48
    assert pair.launch_for(x, first, first, 128, GATED).form == Form(128, False, False, GATED)
    assert pair.launch_for(x, first, second, 128, GATED) is None
    assert pair.launch_for(x, first, narrow, 128, TWO) is None
    assert pair.launch_for(torch.cat([x, x]), first, second, 128, TWO) is None
    assert pair.launch_for(x[:0], first, second, 128, TWO) is None
    assert pair.launch_for(x, first, [one[:0] for one in second], 128, TWO) is None
    assert pair.launch_for(x, first, [one.to("meta") for one in second], 128, TWO) is None
    assert pair.sm90_sparse24_w4a16_gemv_pair(x[:0], first, second, 128) is None
    assert pair.sm90_sparse24_w4a16_gemv_swiglu(x, first, second, 128) is None
