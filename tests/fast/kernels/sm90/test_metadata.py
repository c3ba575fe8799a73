"""The order of 2:4 metadata, against the tables of the PTX ISA, element by element; masks as bits, against NumPy.

Masked weights in the kernel's order: the reference's bits under an emulator, and what they compile to for Hopper.
"""

import platform
from itertools import product

import numpy as np
import pytest
import torch

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

import fast
from fast import dispatch
from fast.kernels.sm90_sparse24_gemm.arrange import (
    arrange,
    count_undefined,
    pack_bits,
    packed_shape,
    restore,
    shape_of,
    unpack_bits,
)
from fast.kernels.sm90_sparse24_gemm.masked import compress_masked, keep
from fast.sparsity import compress as public
from tests.emulator.interpreter_process import lines_of
from tests.fast.kernels.compiling.kernel_compiler import launched
from tests.fast.kernels.compiling.kernel_samples import by_day, named

CHOICES = torch.tensor([0b0100, 0b1000, 0b1001, 0b1100, 0b1101, 0b1110], dtype=torch.uint8)


def metadata(rows, stored, seed=0):
    g = torch.Generator().manual_seed(seed)
    low, high = (CHOICES[torch.randint(0, 6, (rows, stored), generator=g)] for _ in range(2))
    return low | high << 4


def nibble(canonical, row, k):
    """The 4 bits of the group that begins at element k; padding keeps 2 and 3."""
    if row >= canonical.shape[0] or k // 8 >= canonical.shape[1]:
        return 0b1110
    return int(canonical[row, k // 8]) >> (k // 4 % 2 * 4) & 15


@pytest.mark.parametrize("shape", [(64, 32), (70, 33), (130, 7), (1, 1)])
def test_words_of_8_bits(shape):
    """A thread's word: 32 elements of row 16 warp + quad + 8 (t % 2), from 32 (t / 2) on, of the 64 of an instruction."""
    canonical = metadata(*shape)
    words = arrange(canonical, 8).view(-1, shape_of(*shape, 8)[1], 128, 2, 4)
    for block, panel in ((0, 0), (words.shape[0] - 1, words.shape[1] - 1)):
        for thread in range(128):
            warp, quad, t = thread // 32, thread % 32 // 4, thread % 4
            row = 64 * block + 16 * warp + quad + 8 * (t % 2)
            for s in range(2):
                word = int.from_bytes(bytes(words[block, panel, thread, s].tolist()), "little")
                k = 128 * panel + 64 * s + 32 * (t // 2)
                assert [word >> 4 * i & 15 for i in range(8)] == [
                    nibble(canonical, row, k + 4 * i) for i in range(8)
                ]


@pytest.mark.parametrize("shape", [(64, 32), (70, 33), (130, 7), (1, 1)])
def test_words_of_16_bits(shape):
    """Threads 0 and 1 of four: 16 elements of row 16 warp + quad in the low half, of the row 8 below in the high half."""
    canonical = metadata(*shape)
    words = arrange(canonical, 16).view(-1, shape_of(*shape, 16)[1], 64, 2, 4)
    for block, panel in ((0, 0), (words.shape[0] - 1, words.shape[1] - 1)):
        for pair in range(64):
            row = 64 * block + pair // 16 * 16 + pair // 2 % 8
            for s in range(2):
                word = int.from_bytes(bytes(words[block, panel, pair, s].tolist()), "little")
                k = 64 * panel + 32 * s + 16 * (pair % 2)
                wanted = [nibble(canonical, row + 8 * half, k + 4 * i) for half in range(2) for i in range(4)]
                assert [word >> 4 * i & 15 for i in range(8)] == wanted


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shape", [(64, 32), (70, 33), (1, 1), (200, 100)])
def test_canonical_bytes_come_back(shape, bits):
    canonical = metadata(*shape)
    made = arrange(canonical, bits)
    assert tuple(made.shape) == shape_of(*shape, bits)
    assert made.shape[1] % 2 == 0
    assert torch.equal(restore(made, bits, shape), canonical)


def test_groups_that_name_nothing():
    """0, 0 becomes 2, 3; others are counted."""
    canonical = metadata(3, 4)
    canonical[1, 2] = 0x40
    assert restore(arrange(canonical, 8), 8, (3, 4))[1, 2] == 0x4E
    assert count_undefined(canonical) == 0
    canonical[0, 0], canonical[2, 3] = 0x54, 0x4F
    assert count_undefined(canonical) == 2


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shape", [(64, 256), (70, 264), (128, 1024)])
def test_what_compress_writes_is_defined(shape, bits):
    """Zeros among the kept, and groups of zeros alone: none of them is named 0, 0."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    w[:, ::3], w[3], w[:, :8] = 0, 0, 0
    made = fast.compress(w, "2:4")[1]
    assert count_undefined(made) == 0
    assert torch.equal(arrange(made, bits, defined=True), arrange(made, bits))
    assert torch.equal(restore(arrange(made, bits, defined=True), bits, tuple(made.shape)), made)


@pytest.mark.parametrize("shape", [(16, 32), (3, 5), (2, 4, 12), (9,), (0, 8)], ids=str)
def test_bits_are_those_of_numpy(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = pack_bits(mask)
    assert (bits.dtype, bits.shape) == (torch.uint8, packed_shape(shape))
    assert np.array_equal(bits.numpy(), np.packbits(mask.numpy(), axis=-1))
    back = unpack_bits(bits, shape[-1])
    assert back.dtype == torch.bool
    assert torch.equal(back, mask)


@pytest.mark.parametrize("dtype", by_day(public.DTYPES, lambda dtype: named(size=dtype.itemsize)))
@pytest.mark.parametrize("part", ["day", pytest.param("", marks=pytest.mark.nightly)])
def test_bits_are_those_of_the_reference(dtype, part):
    assert lines_of("sparsity", "masked", str(dtype), *part.split()) == [str(dtype)]


@pytest.mark.parametrize(
    ("shape", "turned", "marks"),
    by_day(
        product([(1024, 1024), (16, 48)], [False, True], ["bool", "bits"]),
        lambda case: [("whole and turned", case[:2]), ("turned by", case[1:])],
    ),
)
def test_nothing_leaves_a_thread(shape, turned, marks):
    """No stack and no shared memory; octets are read whole."""
    w = torch.zeros(shape, dtype=torch.float16)
    mask = w != 0 if marks == "bool" else pack_bits(w != 0)
    (machine,) = launched(lambda: compress_masked(w, mask, turned))
    assert (machine.local, machine.stack) == (0, 0)
    assert machine.named("STS", "LDS", "STSM", "LDSM", "SHFL", "BAR") == 0
    assert machine.registers <= 80
    assert machine.accesses("LDG") == {16: 8, 8 if marks == "bool" else 1: 8}
    assert machine.accesses("STG") == {8: 8, 1: 8}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masked_weights_by_bits_move_wide(dtype):
    """16 bytes at once in both directions, in place too; of the bits each thread reads its own once."""
    w = torch.zeros(1024, 1024, dtype=dtype)
    for out in (None, w):
        (machine,) = launched(lambda out=out: keep(w, pack_bits(w != 0), out))
        assert (machine.local, machine.stack) == (0, 0)
        wide = machine.elements * dtype.itemsize / 16
        assert machine.accesses("STG") == {16: wide}
        assert machine.accesses("LDG")[16] == wide
        assert sum(machine.accesses("LDG").values()) == wide + 1


def test_the_function_reaches_the_kernel(monkeypatch):
    """Results have the shapes of a product's operands: values, and metadata filled up to 64 rows and 128 columns."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
    w = torch.zeros(80, 144, dtype=torch.bfloat16)
    shapes = []

    def both():
        for mask in (w != 0, pack_bits(w != 0)):
            for turned in (False, True):
                shapes.append([tuple(part.shape) for part in public.compress_masked(w, mask, turned)])
        return shapes

    assert [machine.kernel for machine in launched(both)] == 4 * ["masked_kernel"]
    assert shapes == 2 * [[(80, 72), (2, 4, 512)], [(144, 40), (3, 2, 512)]]
