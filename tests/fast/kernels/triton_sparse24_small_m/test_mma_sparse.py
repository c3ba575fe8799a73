"""`triton_sparse24_small_m_kernel`, lane by lane: every kept code meets the input that its index names, and its scale.

Sums are exact, so that one wrong place shows in the bits. See `tests.emulator.gluon_lanes`.
"""

import itertools
import platform
from dataclasses import replace

import numpy as np
import pytest

import reference
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.gpu.sparsity.cases import exact_case, random_case

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.triton_sparse24_small_m import arrange, host, mma_sparse
from fast.kernels.triton_sparse24_small_m.host import Tiling
from tests.emulator.gluon_lanes import Pointer, sparse_body

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
