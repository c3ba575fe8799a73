"""`sm90_sparse24_w4a16_gemv` in the emulator, bit for bit: codes, metadata, scales, tiles, parts of K; planted faults."""

import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sm90_sparse24_w4a16_gemv.host import Form, fitted
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.emulator.faults import assert_seen, at_night, every_second
from tests.fast.kernels.sm90.products import require_nvrtc, sparse24_w4a16_gemv
from tests.gpu.sparsity.cases import as_tensors, exact_case, random_case, zero_points
from tests.support.linear_cases import exact_result, outside

BF16, F16, WIDE = "bfloat16", "float16", "float32"
#: Rows of x, rows and columns of the weight, group; dtypes of x and scales; tokens, columns of a stage, splits, tiles; of a
#: multiprocessor.
CASES = {
    "one row": ((1, 16, 512, 128), BF16, WIDE, (8, 512, 1, 1), 1),
    "rows cut, parts of K that differ": ((5, 37, 1280, 64), F16, BF16, (8, 256, 2, 2), 1),
    "four parts, one longer, 16 rows": ((16, 61, 1280, 32), BF16, WIDE, (16, 256, 4, 1), 1),
    "a scale of two reads of metadata": ((11, 48, 1024, 256), BF16, WIDE, (16, 512, 2, 2), 1),
    "three tiles": ((2, 130, 1024, 128), F16, WIDE, (8, 512, 1, 3), 1),
    "scales of four bytes, two programs": ((2, 20, 768, 128), BF16, BF16, (8, 256, 1, 2), 2),
    "five tiles in a ring of three": ((3, 77, 768, 64), BF16, WIDE, (8, 256, 1, 5), 1),
    "parts of K with nothing": ((8, 16, 256, 64), F16, WIDE, (8, 256, 2, 1), 1),
}  # fmt: skip


#: The same with zero points: of 2, 4, 8 and 16 bytes of a row of a stage.
ZEROS = {
    "four of a stage": ((1, 16, 1024, 128), BF16, WIDE, (8, 512, 2, 1), 1),
    "eight, rows cut, parts of K that differ": ((5, 37, 1280, 32), F16, BF16, (8, 256, 2, 2), 1),
    "sixteen, 16 rows, a ring of tiles": ((16, 77, 1024, 32), BF16, WIDE, (16, 512, 1, 5), 1),
    "two, stages that share a copy": ((11, 48, 2048, 256), F16, WIDE, (16, 512, 2, 2), 1),
    "two, of 256 columns, four parts": ((3, 61, 1536, 128), BF16, BF16, (8, 256, 4, 1), 1),
    "four, two programs": ((2, 20, 768, 64), BF16, BF16, (8, 256, 1, 2), 2),
    "24 rows at once, of parts of K": ((19, 33, 1024, 64), BF16, WIDE, (24, 256, 4, 1), 1),
}  # fmt: skip


def variant_of(case, sizes, at_once=1, **form):
    group = 4 * case.codes.shape[1] // case.scale.shape[1]
    form = Form(group, case.scale.dtype != torch.float32, case.x.dtype == torch.float16, **form)
    return fitted(form, *sizes, case.x.shape[1], at_once)


def exact(case):
    return exact_result(case.x, sparse_int4_weight(*case[1:4]), case.bias)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
def test_variants_give_exact_sums(name, early):
    require_nvrtc()
    shape, dtype, storage, sizes, at_once = CASES[name]
    case = as_tensors(exact_case(*shape, dtype, storage, 1))
    got = sparse24_w4a16_gemv(*case, variant=variant_of(case, sizes, at_once), early=early, seed=1)
    assert_same_bits(got, exact(case))


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name",
    at_night(
        ZEROS, "four of a stage", "sixteen, 16 rows, a ring of tiles", "two, of 256 columns, four parts"
    ),
)
def test_zero_points_are_taken_off(name, early):
    """Of all values of codes and zero points."""
    require_nvrtc()
    shape, dtype, storage, sizes, at_once = ZEROS[name]
    case = exact_case(*shape, dtype, storage, 1)
    case, zero = as_tensors(case), torch.from_numpy(zero_points(case, 1))
    one = variant_of(case, sizes, at_once, zeros=True)
    got = sparse24_w4a16_gemv(*case, variant=one, zero=zero, early=early, seed=1)
    assert_same_bits(got, exact_result(case.x, sparse_int4_weight(*case[1:4], zero), case.bias))


@pytest.mark.parametrize("zeros", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_chunks_of_rows(zeros):
    """The last one cut."""
    require_nvrtc()
    case = exact_case(21, 37, 1024, 128)
    case, zero = as_tensors(case), torch.from_numpy(zero_points(case)) if zeros else None
    one = variant_of(case, (8, 512, 2, 2), zeros=zeros)._replace(chunks=3)
    got = sparse24_w4a16_gemv(*case, variant=one, zero=zero, seed=1)
    assert_same_bits(got, exact_result(case.x, sparse_int4_weight(*case[1:4], zero), case.bias))


def test_without_a_bias_and_with_another_dtype_s():
    require_nvrtc()
    case = as_tensors(exact_case(1, 16, 512, 128))
    for bias in (None, case.bias.half(), case.bias.float()):
        given = case._replace(bias=bias)
        one = variant_of(given, (8, 512, 1, 1))
        wanted = exact_result(
            case.x.float(), sparse_int4_weight(*case[1:4]), None if bias is None else bias.float()
        )
        assert_same_bits(sparse24_w4a16_gemv(*given, variant=one), wanted.bfloat16())


def test_random_values_are_within_the_bound():
    require_nvrtc()
    case = as_tensors(random_case(2, 32, 1024, 64))
    got = sparse24_w4a16_gemv(*case, variant=variant_of(case, (8, 256, 2, 1)))
    assert outside(got, case.x, sparse_int4_weight(*case[1:4]), case.bias) == 0


FAULTS = {
    "a tile is read before it is there": ("cp.async.wait_group %0;", "// %0"),
    "lanes read what others still copy": ("    __syncwarp();\n    load(", "    load("),
    "a tile too early": ('"n"(AHEAD - 1)', '"n"(AHEAD)'),
    "warps' sums are added before all are there": ("  __syncthreads();\n  finish", "  finish"),
    "parts of K are added before all are there": ("    sync_cluster();\n", ""),
    "bytes of the other half of K": ("first(pair % 2 ? 0x5511 : 0x4400)", "first(pair % 2 ? 0x7733 : 0x6622)"),
    "metadata of the wrong groups": ("indices(pair % 2 ? 0x7531 : 0x6420)", "indices(pair % 2 ? 0x6420 : 0x7531)"),
    "metadata of the other instruction": ("at % 4 * 4", "(at + 2) % 4 * 4"),
    "x in another order": ("b[i][t][1] = b[i][t][2], b[i][t][2] = second;", "(void)second;"),
    "x of the neighbouring lanes": ("exchange(v[1], v[3], late, at.lane ^ 2)", "exchange(v[1], v[3], late, at.lane ^ 1)"),
    "the other row's scale": ("i < 2 ? low : high", "i < 2 ? high : low"),
    "the next group's scale": ("at * 32 / GROUP * SCALE_BYTES", "(at * 32 / GROUP ^ 1) * SCALE_BYTES"),
    "rows behind the last are written": ("if (row + i < t.n) to[i]", "to[i]"),
    "four rows behind the last are written": ("if (row < t.n) *", "*"),
    "another's share of the rows": ("four = split * SHARE + own;", "four = own;"),
    "sums of another part of K": ("received + split * SENT", "received"),
    "sums among those of its own": ("received = left + TILES * PHASES * LEFT", "received = left"),
    "a tile in the place of one that is read": ("TILES <= AHEAD ? TILES : AHEAD + 1", "AHEAD"),
    "tiles that nobody asked for": ("has && tile + AHEAD < TILES", "false"),
    "rows behind the last are read": ("min(row + own, rows - 1)", "(row + own)"),
    "rows of x behind the last": ("token < p.count ? from[4 * i]", "true ? from[4 * i]"),
    "pieces without their order": ("order_of<CODES>(at.row) * 16", "0"),
    "pieces of metadata without their order": ("order_of<METADATA>(at.row) * 16", "0"),
    "a warp behind the last stage": ("has = stage < span.last", "has = true"),
    "sums of tiles that are not cleared": ("    clear(total);\n", "    if (tile == 0) clear(total);\n"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_planted_faults_are_seen(fault):
    require_nvrtc()
    rows = 68 if fault.startswith("four") else 71
    assert_seen(FAULTS[fault], is_right, [(rows, False, 3), (rows, True, 3), (rows, False, 4)])


def is_right(way, change):
    rows, early, seed = way
    case = as_tensors(exact_case(3, rows, 1280, 64))
    one = variant_of(case, (8, 256, 2, 3))
    got = sparse24_w4a16_gemv(*case, variant=one, early=early, seed=seed, change=change)
    return torch.equal(got, exact(case))


ZERO_FAULTS = {
    "the other row's zero point": ("less_of(zero + 8 * ZERO_BYTES)", "less_of(zero)"),
    "zero points of the neighbouring stage": ("stage * POINTS % 4", "(stage + 1) * POINTS % 4"),
    "zero points of the first stages": ("i64(stage) * POINTS / 4 * 4", "0"),
    "the next group's zero point": ("zero = places.zero + at * 32 / GROUP", "zero = places.zero + (at * 32 / GROUP ^ 1)"),
    "one half alone": ("0x00080001u", "0x00000001u"),
    "rows of a chunk are those of the first": ("p.x += i64(begun) * p.k * 2, ", ""),
    "chunks write over each other": ("static_cast<char*>(p.y) + i64(begun) * p.n * 2", "p.y"),
    "rows behind the last of a chunk": ("min(TOKENS, p.count - begun)", "TOKENS"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(ZERO_FAULTS))
def test_planted_faults_of_zero_points_and_chunks_are_seen(fault):
    require_nvrtc()
    assert_seen(ZERO_FAULTS[fault], zeros_are_right, [3])


def zeros_are_right(seed, change):
    case = exact_case(11, 37, 1536, 128)
    case, zero = as_tensors(case), torch.from_numpy(zero_points(case))
    one = variant_of(case, (8, 256, 2, 2), zeros=True)._replace(chunks=2)
    got = sparse24_w4a16_gemv(*case, variant=one, zero=zero, seed=seed, change=change)
    return torch.equal(got, exact_result(case.x, sparse_int4_weight(*case[1:4], zero), case.bias))
