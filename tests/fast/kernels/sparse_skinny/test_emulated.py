"""The kernel's PTX in the emulator, against the exact product bit for bit: codes, metadata, scales, rounds, parts of K."""

import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.sparse_skinny.variants import Form, fitted
from reference.sparsity.linear_sparse_int4 import sparse_int4_weight
from tests.fast.kernels.sparse_mm.examples import require_nvrtc
from tests.fast.kernels.sparse_skinny.emulated import Device
from tests.gpu.sparsity.products.int4_cases import as_tensors, exact_case, random_case
from tests.support.linear_cases import exact_result, outside

BF16, F16, WIDE = "bfloat16", "float16", "float32"
#: Rows of x, rows and columns of the weight, group; dtypes of x and scales; tokens, columns of a stage, height, slabs, phases,
#: splits; slots, None for those that fit.
CASES = {
    "one row": ((1, 16, 512, 128), BF16, WIDE, (8, 512, 1, 1, 1, 1), None),
    "rows and slabs cut, parts of K": ((5, 165, 2048, 64), F16, BF16, (8, 256, 2, 2, 2, 2), None),
    "three phases, 16 rows": ((16, 61, 1792, 32), BF16, WIDE, (16, 256, 2, 1, 3, 1), None),
    "a scale of two reads of metadata": ((11, 48, 2048, 256), BF16, WIDE, (16, 512, 1, 2, 2, 2), None),
    "seven tiles of a warp": ((2, 130, 1024, 128), F16, WIDE, (8, 512, 7, 1, 2, 1), None),
    "scales of four bytes": ((2, 20, 2304, 128), BF16, BF16, (8, 256, 1, 1, 2, 1), None),
    "the ring goes round, float16": ((3, 33, 2560, 128), F16, WIDE, (8, 256, 1, 1, 2, 1), 2),
    "the ring goes round, 16 rows": ((9, 16, 4096, 32), BF16, BF16, (16, 512, 1, 1, 2, 1), 3),
    "a part of K with nothing": ((1, 16, 256, 64), BF16, WIDE, (8, 256, 1, 1, 2, 2), None),
}  # fmt: skip


def variant_of(case, sizes, slots):
    """With fewer slots than fit, one round less ahead than there are slots."""
    group = 4 * case.codes.shape[1] // case.scale.shape[1]
    form = Form(group, case.scale.dtype != torch.float32, case.x.dtype == torch.float16)
    made = fitted(form, sizes, len(case.x), case.x.shape[1])
    return made if slots is None else made._replace(slots=slots, ahead=slots - 1)


def exact(case):
    return exact_result(case.x, sparse_int4_weight(*case[1:4]), case.bias)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
def test_variants_give_exact_sums(name, early):
    require_nvrtc()
    shape, dtype, storage, sizes, slots = CASES[name]
    case = as_tensors(exact_case(*shape, dtype, storage, 1))
    got = Device(early=early, seed=1).product(*case, variant=variant_of(case, sizes, slots))
    assert_same_bits(got, exact(case))


def test_without_a_bias_and_with_another_dtype_s():
    require_nvrtc()
    case = as_tensors(exact_case(1, 16, 512, 128))
    for bias in (None, case.bias.half(), case.bias.float()):
        given = case._replace(bias=bias)
        one = variant_of(given, (8, 512, 1, 1, 1, 1), None)
        wanted = exact_result(
            case.x.float(), sparse_int4_weight(*case[1:4]), None if bias is None else bias.float()
        )
        assert_same_bits(Device().product(*given, variant=one), wanted.bfloat16())


def test_random_values_are_within_the_bound():
    require_nvrtc()
    case = as_tensors(random_case(2, 32, 1024, 64))
    got = Device().product(*case, variant=variant_of(case, (8, 256, 1, 2, 2, 2), None))
    assert outside(got, case.x, sparse_int4_weight(*case[1:4]), case.bias) == 0


FAULTS = {
    "a round is read before it is there": ("cp.async.wait_group %0;", "// %0"),
    "threads read what others still copy": ("    __syncthreads();  // a round", "    // a round"),
    "sums are added before all are there": ("  sync_cluster();\n  finish", "  finish"),
    "the ring is taken by sums before it is read": ("  __syncthreads();\n  leave", "  leave"),
    "a slot too far": ("AHEAD < SLOTS ? round + AHEAD :", "AHEAD < SLOTS ? round + AHEAD + 1 :"),
    "bytes of the other half of K": ("first(pair % 2 ? 0x5511 : 0x4400)", "first(pair % 2 ? 0x7733 : 0x6622)"),
    "metadata of the wrong groups": ("indices(pair % 2 ? 0x7531 : 0x6420)", "indices(pair % 2 ? 0x6420 : 0x7531)"),
    "metadata of the other instruction": ("at % 4 * 4", "(at + 2) % 4 * 4"),
    "x in another order": ("at.lane / 8 % 2 * 32 + at.lane / 16 * 16", "at.lane / 8 % 2 * 16 + at.lane / 16 * 32"),
    "the other row's scale": ("i < 2 ? low : high", "i < 2 ? high : low"),
    "the next group's scale": ("at * 32 / GROUP * SCALE_BYTES", "(at * 32 / GROUP ^ 1) * SCALE_BYTES"),
    "rows behind the last are written": ("    if (row + at >= p.n) continue;\n", ""),
    "rows behind the last are read": ("min(row + own, rows - 1)", "(row + own)"),
    "rows of x behind the last": ("min(8 * t + at.lane % 8, p.count - 1)", "(8 * t + at.lane % 8)"),
    "pieces without their order": ("order_of<CODES>(at.row) * 16", "0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault):
    require_nvrtc()
    old, new = FAULTS[fault]

    def change(text):
        assert old in text
        return text.replace(old, new)

    case = as_tensors(exact_case(3, 39, 1280, 64))
    one, expected, seen = variant_of(case, (8, 256, 1, 2, 2, 1), 2), exact(case), False
    for early, seed in ((False, 3), (True, 3), (False, 4)):
        try:
            got = Device(early=early, seed=seed, change=change).product(*case, variant=one)
            seen |= not torch.equal(got, expected)
        except (RuntimeError, ValueError, RuntimeWarning):
            seen = True
        if seen:
            return
    assert seen
