"""Two products in one launch of `sm90_sparse24_w4a16_gemv` in the emulator: the bits of each alone, silu of one times the
other."""

import re

import numpy as np
import pytest
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_sparse24_w4a16_gemv.host import GATED, TWO, Form, fitted
from fast.launch import nvrtc
from fast.launch.cuda import SHARED_FOLDER
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.emulator.device.machine import Machine
from tests.emulator.device.memory import Memory
from tests.emulator.device.stand_in import bytes_at
from tests.emulator.faults import assert_seen, at_night, every_second, unchanged
from tests.fast.kernels.sm90.products import require_nvrtc, sparse24_pair, sparse24_w4a16_gemv
from tests.gpu.sparsity.cases import as_tensors, exact_case, random_case
from tests.support.linear_cases import exact_result, outside

BF16, F16, WIDE = "bfloat16", "float16", "float32"
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
    made = sparse24_pair(x, *both, variant=one, early=early, seed=1)
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
    for got, weight in zip(sparse24_pair(x, *both, variant=one, seed=2), both, strict=True):
        assert_same_bits(got, sparse24_w4a16_gemv(x, *weight, variant=one))
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
    got = sparse24_pair(x, *both, variant=one, gated=True, early=early, seed=1)
    assert_same_bits(
        got, reference.swiglu(*(exact_result(x, sparse_int4_weight(*weight), None) for weight in both))
    )


GATES_KERNEL = """
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
    text = "typedef unsigned int u32;\n" + (SHARED_FOLDER / "gated.cuh").read_text() + GATES_KERNEL
    text = re.sub(r"\bHALF\b", str(int(dtype == torch.float16)), text)
    ptx = nvrtc.compile_source(text, {}, ("--gpu-architecture=sm_90a", "--std=c++17"), ptx=True)[0].decode()
    # The emulator knows parameters in one structure.
    ptx = re.sub(r"\.param \.u64 (\w+)", r".param .align 8 .b8 \1[8]", ptx.rstrip("\0"))
    memory = Memory()
    for one in (gate, up, y):
        memory.regions[one.data_ptr()] = bytes_at(one.data_ptr(), one.nbytes)
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
    made = sparse24_pair(x, *both, variant=one, gated=gated, change=change)
    return (made,) if gated else made
