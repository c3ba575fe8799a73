"""The kernel's PTX in the emulator, bit for bit: every element of the weight, integers, the order of words, swizzles, barriers.

Rows of x with one 1 copy elements of the weight; products of integers are exact. So what the emulator does not know, how the
tensor core rounds, does not enter.
"""

from dataclasses import replace

import pytest
import torch

import fast
from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.linear_small.layout import ArrangedWeight
from fast.kernels.sm90_w4a16_gemm.host import weight_of
from fast.kernels.sm90_w4a16_gemm.variants import Variant
from fast.launch.nvrtc import CompileError
from fast.matmul.preshuffled import layout
from tests.emulator.device.mixed_stand_in import MixedStandIn
from tests.emulator.faults import assert_seen, every_second
from tests.fast.kernels.compiling.day_cases import by_day
from tests.fast.kernels.compiling.day_cases import named as named_features
from tests.fast.kernels.sm90_sparse24_gemm.examples import require_nvrtc

BF16, F16 = torch.bfloat16, torch.float16
#: Variant; scheme; shape (M, N, K); dtype of x; that of a bias.
CASES = {
    "int4": (Variant(16, 1, 1, 3), "int4_g128", (19, 256, 256), BF16, None),
    "groups of 64": (Variant(32, 1, 1, 3), "int4_g64", (33, 128, 256), BF16, torch.float32),
    "groups of 32": (Variant(16, 1, 1, 4), "int4_g32", (17, 128, 384), F16, F16),
    "groups of 32 with zero points": (Variant(16, 1, 1, 3), "int4_g32_asymmetric", (5, 128, 256), BF16, BF16),
    "int4 with zero points": (Variant(16, 2, 1, 3), "int4_g128_asymmetric", (20, 384, 256), F16, None),
    "int8": (Variant(16, 2, 1, 3), "int8_rowwise", (9, 256, 256), BF16, F16),
    "int8 with zero points": (Variant(16, 1, 1, 3), "int8_rowwise_asymmetric", (9, 128, 128), BF16, None),
    "e4m3": (Variant(16, 1, 1, 3), "fp8_rowwise", (9, 128, 256), BF16, None),
    "e4m3, one scale": (Variant(16, 1, 1, 3), "fp8_tensorwise", (9, 128, 256), F16, None),
    "mxfp8": (Variant(16, 1, 1, 3), "mxfp8_e4m3", (9, 128, 256), BF16, None),
    "mxfp8, splits": (Variant(32, 1, 3, 3), "mxfp8_e4m3", (33, 256, 640), F16, BF16),
    "mxfp4": (Variant(16, 1, 1, 3), "mxfp4", (19, 256, 384), BF16, None),
    "mxfp4, pairs": (Variant(32, 2, 2, 4), "mxfp4", (33, 384, 256), F16, F16),
    "nvfp4": (Variant(16, 1, 1, 3), "nvfp4", (19, 256, 384), BF16, torch.float32),
    "nvfp4, pairs": (Variant(32, 2, 1, 4), "nvfp4", (33, 384, 256), F16, None),
    "nvfp4, splits": (Variant(16, 1, 2, 3), "nvfp4", (20, 128, 640), BF16, BF16),
    "split in three": (Variant(16, 1, 3, 3), "int4_g64", (20, 128, 640), BF16, None),
    "split in two": (Variant(32, 1, 2, 3), "int4_g128", (33, 256, 640), BF16, BF16),
    "pairs, splits": (Variant(32, 2, 2, 5), "int8_rowwise", (40, 384, 256), F16, torch.float32),
    "boxes without tokens": (Variant(96, 1, 1, 3), "int4_g128", (100, 128, 256), BF16, None),
    "boxes without tokens, pairs": (Variant(96, 2, 1, 4), "mxfp4", (130, 256, 256), BF16, None),
    "boxes without tokens, splits": (Variant(96, 2, 2, 5), "int4_g64", (30, 256, 256), BF16, None),
    "turns": (Variant(32, 1, 1, 4, turns=2), "int4_g128", (33, 256, 512), BF16, BF16),
    "turns, groups of 32": (Variant(16, 1, 1, 6, turns=2), "int4_g32_asymmetric", (17, 128, 640), F16, None),
    "turns, e4m3": (Variant(96, 1, 1, 4, turns=2), "fp8_rowwise", (70, 128, 256), BF16, None),
    "turns, nvfp4": (Variant(32, 1, 1, 4, turns=2), "nvfp4", (20, 256, 256), BF16, None),
    "wide": (Variant(192, 2, 1, 4), "int4_g128", (200, 256, 256), BF16, BF16),
}  # fmt: skip


def features_of(name):
    """Each scheme, each way of tiles, and what x and a bias are."""
    one, scheme, _, dtype, biased = CASES[name]
    tiles = named_features(pair=one.pair, splits=one.splits > 1, turns=one.turns, boxes=one.tokens >= 96)
    return [*tiles, *named_features(scheme=scheme, dtype=dtype, biased=biased)]


def stored(scheme, n, k, seed=0):
    """A weight as the kernel takes it, and what it stands for."""
    draw = torch.Generator().manual_seed(seed)
    w = fast.quantize(
        torch.randn(n, k, generator=draw) * 3, named(scheme), packed=named(scheme).format.bits < 8
    )
    p = layout.preshuffled(w)
    form = layout.form_of(p.scheme, k)
    return ArrangedWeight(p.codes, p.scale, p.zero, p.shape, *form), fast.dequantize(w)


def expected(x, dense, bias):
    """Exact sums, the bias added in float32, one rounding."""
    sums = (x.double() @ dense.to(x.dtype).double().t()).float()
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


def given(m, n, k, dtype, biased, seed=0):
    """Rows with one 1 each, and a bias."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.zeros(m, k, dtype=dtype)
    x[torch.arange(m), torch.randint(0, k, (m,), generator=draw)] = 1
    return x, None if biased is None else torch.randn(n, generator=draw).to(biased)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", by_day(CASES, features_of))
def test_elements_of_the_weight_are_those_of_dequantize(name, early):
    require_nvrtc()
    variant, scheme, (m, n, k), dtype, biased = CASES[name]
    w, dense = stored(scheme, n, k)
    x, bias = given(m, n, k, dtype, biased)
    found = MixedStandIn(early=early, seed=1).multiplied(x, w, bias, variant)
    assert_same_bits(found, expected(x, dense, bias))


def integers(m, n, k):
    """Integers, scales that are powers of two."""
    w, _ = stored("int4_g128", n, k)
    w = replace(
        w,
        scale=2.0 ** torch.randint(-1, 2, w.scale.shape, generator=torch.Generator().manual_seed(1)).float(),
    )
    x = torch.randint(-2, 3, (m, k), generator=torch.Generator().manual_seed(2)).to(BF16)
    dense = layout.all_rows(w.words, "int4")
    codes = torch.stack([dense & 15, dense >> 4], -1).reshape(n, k).to(torch.int8)
    values = torch.where(codes > 7, codes - 16, codes).float().view(n, -1, 128) * w.scale.t()[:, :, None]
    return x, w, expected(x, values.view(n, k), None)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_sums(early):
    require_nvrtc()
    x, w, right = integers(37, 256, 640)
    assert weight_of(w).parts == 1
    assert_same_bits(MixedStandIn(early=early).multiplied(x, w, None, Variant(32, 2, 1, 3)), right)


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("stages", [2 * 2, pytest.param(2 * 3, marks=pytest.mark.nightly)])
def test_sums_of_those_that_take_turns(early, stages):
    """Several tiles of a program, of more tokens than are left at once."""
    require_nvrtc()
    x, w, right = integers(96, 256, 640)
    assert_same_bits(
        MixedStandIn(early=early).multiplied(x, w, None, Variant(80, 1, 1, stages, turns=2)), right
    )


@pytest.mark.parametrize("stages", [3, 5])
def test_stages_are_those_of_one_turn(stages):
    """Else a warpgroup would not see whether it waits for a phase, or for the next but one."""
    require_nvrtc()
    x, w, _ = integers(16, 128, 256)
    with pytest.raises(CompileError, match="STAGES"):
        MixedStandIn(early=True).multiplied(x, w, None, Variant(16, 1, 1, stages, turns=2))


#: A fault of the kernel, and what is changed.
FAULTS = {
    "a stage is handed back while it is read": ("if (!begins) release(before);", "release(own);"),
    "nobody waits for the copies": ("wait_for(ring.full + 8 * at.stage, at.parity);", ""),
    "words of other columns": ("i == 1 ? w.y", "i == 1 ? w.z"),
    "scales of another row": ("rows.scale[r % 2]", "rows.scale[r / 2]"),
    "scales of another block": ("left = PARTS > 1 ? 1 : p.each;", "left = 1;"),
    "a buffer is written while it is copied": ("wait_written<1>();", ";"),
    "it ends before it is written": ("if (SPLITS == 1 && thread == 0 && turn == 0) wait_written<0>();", ""),
    "columns of another instruction": ("x + 2 * j", "x"),
}  # fmt: skip


#: The same of warpgroups that take turns.
FAULTS_OF_TURNS = {
    "a stage is handed back while it is read": ("if (step > steps.first) release(before);", "release(at.stage);"),
    "operands are written while they are read": ("finish<0>(sum);\n#pragma unroll\n      for", "#pragma unroll\n      for"),
    "sums of another turn are left out": ("add_sums(sum + i", "if (i > 4) add_sums(sum + i"),
    "nobody waits for sums": ("sync_named(left);", ";"),
    "sums are left before others were taken": ("if (!opening) sync_named(taken);", ";"),
    "both take the same stages": ("at(turn)", "at(0)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", every_second(FAULTS_OF_TURNS))
def test_the_emulator_sees_faults_of_turns(fault):
    require_nvrtc()
    assert_seen(FAULTS_OF_TURNS[fault], is_right_by_turns)


def is_right_by_turns(early, change):
    x, w, right = integers(80, 256, 640)
    stand_in = MixedStandIn(early=early, change=change)
    return torch.equal(stand_in.multiplied(x, w, None, Variant(80, 1, 1, 4, turns=2)), right)


@pytest.mark.parametrize("fault", every_second(FAULTS))
def test_the_emulator_sees_faults(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    x, w, right = integers(96, 128, 640)
    stand_in = MixedStandIn(early=early, change=change)
    return torch.equal(stand_in.multiplied(x, w, None, Variant(48, 1, 1, 3)), right)
