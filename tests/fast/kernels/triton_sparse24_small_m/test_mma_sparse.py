"""`triton_sparse24_small_m_kernel`, lane by lane: every kept code meets the input that its index names, and its scale.

Sums are exact, so that one wrong place shows in the bits. See `tests.emulator.gluon_lanes`.

The assembly of `triton_sparse24_small_m_kernel`: what all codes and all indices become, in the PTX emulator.
"""

import itertools
import platform
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

import reference
from fast.kernels.triton_sparse24_small_m import arrange, host, mma_sparse
from fast.kernels.triton_sparse24_small_m.assembly import BYTES, DECODE_OPERANDS, DOWN, UP, decode_asm
from fast.kernels.triton_sparse24_small_m.host import Tiling
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.emulator.gluon_lanes import Pointer, sparse_body
from tests.emulator.ptx_opcodes import run
from tests.gpu.sparsity.cases import exact_case, metadata_of, random_case

#: Rows of inputs, rows and columns of the weight, columns of a scale, and tiles: whole and cut, one and several of each.
CASES = [
    ((1, 16, 128, 128), Tiling(1, 1, 1, 1)), ((3, 37, 512, 128), Tiling(2, 1, 2, 1)), ((8, 48, 1024, 128), Tiling(2, 1, 2, 2)),
    ((3, 16, 256, 64), Tiling(1, 1, 2, 1)), ((5, 17, 320, 64), Tiling(1, 2, 1, 1)), ((9, 33, 256, 64), Tiling(2, 2, 1, 2)),
    ((2, 20, 256, 32), Tiling(1, 1, 2, 1)), ((3, 16, 256, 32), Tiling(1, 2, 1, 1)), ((2, 17, 96, 32), Tiling(1, 1, 1, 1)),
    ((16, 40, 512, 256), Tiling(2, 2, 2, 1)), ((18, 64, 256, 256), Tiling(4, 1, 1, 1)), ((2, 5, 256, 128), Tiling(2, 1, 1, 1)),
    ((33, 16, 128, 128), Tiling(1, 4, 1, 1)), ((1, 32, 1536, 256), Tiling(2, 1, 4, 2)), ((1, 31, 64, 64), Tiling(1, 1, 4, 2)),
]  # fmt: skip

WIDE = [
    ((1, 16, 256, 128), Tiling(1, 1, 1, 2)), ((3, 37, 1024, 128), Tiling(2, 1, 2, 2)), ((4, 48, 2048, 128), Tiling(1, 1, 2, 4)),
    ((1, 40, 768, 128), Tiling(2, 1, 2, 2)), ((2, 5, 512, 128), Tiling(1, 1, 1, 4)), ((8, 33, 1024, 256), Tiling(2, 1, 2, 2)),
    ((7, 16, 512, 64), Tiling(1, 2, 1, 2)), ((16, 16, 512, 128), Tiling(1, 4, 1, 2)),
]  # fmt: skip


def multiplied(case, tiling, storage="float32"):
    """What all programs of a launch write, over numbers that no result is."""
    (count, length), rows = case.x.shape, len(case.codes)
    group = length // case.scale.shape[1]
    launch = host.launch_of(rows, length, group, count, storage, str(case.x.dtype), tiling)
    y = np.full((count, rows), 30000, case.x.dtype)
    pointers = [None if part is None else Pointer(part.ravel()) for part in case]
    if tiling.arranged:
        arranging, words = host.arrange_launch_of(length, group, count, launch.grid[1], tiling)
        # Numbers that no input is, where nothing is written.
        arranged = np.full(words, 0x7FC07FC0, np.int32)
        for program in itertools.product(*map(range, arranging.grid[:2])):
            sparse_body(arrange, "arrange_kernel", *program)(pointers[0], Pointer(arranged), *arranging.tail)
        pointers[0] = Pointer(arranged)
    for program in itertools.product(*map(range, launch.grid[:2])):
        sparse_body(mma_sparse, "triton_sparse24_small_m_kernel", *program)(
            *pointers, Pointer(y.reshape(-1)), *launch.tail
        )
    return y


@pytest.mark.parametrize(
    ("ahead", "arranged"), [(False, False), (True, False), (False, True)], ids=["", "ahead", "arranged"]
)
@pytest.mark.parametrize(("shape", "tiling"), CASES, ids=str)
def test_every_code_meets_its_input_and_its_scale(shape, tiling, ahead, arranged):
    tiling = replace(tiling, ahead=ahead, arranged=arranged)
    for dtype in ("bfloat16", "float16"):
        case = exact_case(*shape, dtype)
        assert (multiplied(case, tiling) == reference.linear_sparse_int4(*case)).all()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("shape", "tiling"), WIDE, ids=str)
def test_two_turns_at_a_read(shape, tiling, ahead):
    tiling = replace(tiling, ahead=ahead, wide=True)
    for dtype in ("bfloat16", "float16"):
        case = exact_case(*shape, dtype)
        assert (multiplied(case, tiling) == reference.linear_sparse_int4(*case)).all()


@pytest.mark.parametrize("shape", [(1, 48, 512, 128), (16, 32, 256, 64), (40, 16, 128, 32)], ids=str)
def test_chosen_tiles_bfloat16_scales_and_no_bias(shape):
    count, rows, length, group = shape
    case = exact_case(*shape, storage="bfloat16")._replace(bias=None)
    wanted = reference.linear_sparse_int4(*case)
    for given in (case, case._replace(scale=case.scale.view(np.uint16))):
        assert (multiplied(given, host.tiling_of(rows, length, group, count), "bfloat16") == wanted).all()


@pytest.mark.parametrize("shape", [(2, 32, 512, 128), (1, 16, 32, 32), (9, 16, 256, 64)], ids=str)
def test_sums_of_other_numbers_are_within_the_bound(shape):
    """Of the model here, whose instructions round once; and not by far: a thousandth of the bound is too little."""
    count, rows, length, group = shape
    case = random_case(*shape)
    w = sparse_int4_weight(*case[1:4])
    made = multiplied(case, host.tiling_of(rows, length, group, count)).astype(float)
    wanted = case.x.astype(float) @ reference.dequantize(w).astype(float).T + case.bias.astype(float)
    allowed = reference.linear_error_bound(case.x, w, case.bias)
    assert (abs(made - wanted) <= allowed).all()
    assert (abs(made - wanted) > allowed / 1000).any()


KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
#: Lanes of four, and random words.
LANES = np.arange(4096, dtype=np.uint32) % 4


def decoded(kind, codes, metadata):
    """Registers of the four instructions and their indices: codes (row, word, lane), metadata (row, word, lane)."""
    place = [np.array(BYTES)[LANES // 2], np.array(DOWN)[LANES % 2], np.array(UP)[LANES % 2], LANES]
    given = [*codes.reshape(4, -1), *metadata.reshape(8, -1), *place]
    made = run(decode_asm(kind), DECODE_OPERANDS, [v.astype(np.uint32) for v in given])
    return np.stack(made[:16]).reshape(4, 4, -1), np.stack(np.broadcast_arrays(*made[16:]))


@pytest.mark.parametrize("kind", KINDS)
def test_all_codes_in_all_places(kind):
    """Register 2 i + r of instruction 2 u + h has byte 2 h + i of word u of row r, the low half first, as exact numbers."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, 2, len(LANES)), np.uint32)
    made, _ = decoded(kind, words, np.zeros((2, 4, len(LANES)), np.uint32))
    for u, h, i, r in itertools.product(range(2), repeat=4):
        byte = words[r, u] >> np.uint32(8 * (2 * h + i)) & np.uint32(255)
        assert len(set(byte)) == 256
        halves = (
            np.ascontiguousarray(made[2 * u + h, 2 * i + r])
            .astype(np.uint32)
            .view(KINDS[kind])
            .reshape(-1, 2)
        )
        wanted = np.stack([(byte & 15 ^ 8).astype(int) - 8, (byte >> 4 ^ 8).astype(int) - 8], -1)
        assert (halves.astype(int) == wanted).all()
        assert not np.signbit(halves[wanted == 0]).any()


def test_indices_of_four_lanes():
    """Place t' of each half of the four words, word 0's half for instructions 0 and 1; row g low, row g + 8 high."""
    stored = [metadata_of(np.random.default_rng(seed), len(LANES), 128).view("<u4").T for seed in (1, 2)]
    _, made = decoded("bf16", np.zeros((2, 2, len(LANES)), np.uint32), np.stack(stored))
    for at, row, t in itertools.product(range(4), range(2), range(4)):
        half = np.uint32(16 * (at // 2))
        wanted = stored[row][t] >> half >> (4 * LANES) & np.uint32(15)
        assert (made[at] >> np.uint32(16 * row + 4 * t) & np.uint32(15) == wanted).all()
