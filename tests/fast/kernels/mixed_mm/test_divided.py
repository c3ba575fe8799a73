"""Tiles that are divided between clusters: plans against what they are to be, and the kernel in the emulator, bit for bit.

Clusters run at the same time there: a cluster waits for the sums of others, and finds memory full of other bits before.
"""

import struct
from itertools import pairwise

import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from fast.kernels.mixed_mm.plan import Plan, plans
from fast.kernels.mixed_mm.select import plan_of
from fast.kernels.mixed_mm.variants import Variant
from tests.emulator.device.mixed_stand_in import MixedStandIn
from tests.fast.kernels.mixed_mm.test_emulated import expected, given, integers, stored
from tests.fast.kernels.sparse_mm.examples import require_nvrtc
from tests.fast.kernels.sparse_mm.test_emulated import replaced

BF16, F16 = torch.bfloat16, torch.float16
ONE, PAIRS, THREE = Variant(16, 1, 1, 3, True), Variant(32, 2, 1, 4, True), Variant(16, 1, 1, 3, True, 3)
#: Variant; scheme; shape (M, N, K); dtypes of x and of a bias; clusters at once, and whole and divided tiles.
CASES = {
    "fewer tiles than clusters": (ONE, "int4_g128", (16, 256, 384), BF16, BF16, 3, (0, 2)),
    "each tile in three": (ONE, "int4_g32_asymmetric", (9, 128, 384), F16, None, 3, (0, 1)),
    "one and a half a cluster": (ONE, "int8_rowwise", (48, 128, 256), BF16, None, 2, (0, 3)),
    "a whole wave before": (ONE, "mxfp4", (80, 128, 256), BF16, F16, 2, (2, 3)),
    "blocks that end in a step": (ONE, "nvfp4", (48, 128, 256), BF16, None, 2, (0, 3)),
    "blocks of several steps": (ONE, "int8_g128", (16, 256, 384), BF16, None, 3, (0, 2)),
    "three warpgroups": (THREE, "mxfp8_e4m3", (9, 256, 256), BF16, BF16, 3, (0, 2)),
    "pairs": (PAIRS, "int4_g64", (20, 384, 256), F16, BF16, 3, (0, 2)),
    "as many tiles as clusters": (ONE, "fp8_rowwise", (32, 128, 256), BF16, None, 2, (2, 0)),
}  # fmt: skip


@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", CASES)
def test_elements_of_the_weight_are_those_of_dequantize(name, early):
    require_nvrtc()
    variant, scheme, (m, n, k), dtype, biased, at_once, tiles = CASES[name]
    plan = plan_of(variant, m, n, k, at_once)
    assert (plan.whole, plan.shared) == tiles
    w, dense = stored(scheme, n, k)
    x, bias = given(m, n, k, dtype, biased)
    found = MixedStandIn(early=early, seed=1, at_once=at_once).multiplied(x, w, bias, variant)
    assert_same_bits(found, expected(x, dense, bias))


@pytest.mark.parametrize("at_once", [2, 4])
def test_sums(at_once):
    require_nvrtc()
    x, w, right = integers(37, 128, 512)
    found = MixedStandIn(early=False, at_once=at_once).multiplied(x, w, None, ONE)
    assert_same_bits(found, right)


#: A fault of the kernel, and what is changed.
FAULTS = {
    "nobody waits for sums": ("  if (thread == 0) {\n    u32 mark;", "  if (false) {\n    u32 mark;"),
    "marks are set before all have written": ("  sync_group(group);  // the mark's release is for what all of them wrote", ""),
    "sums are added before all know of them": ("  sync_group(group);\n  const float* from", "  const float* from"),
    "sums of one other only": ("i <= others; i++", "i <= min(others, 1); i++"),
    "sums of another warpgroup": ("* GROUPS + group; }", "* GROUPS; }"),
    "tiles are written by all that have a part": ("if (work.is_given(p)) {", "if (false) {"),
    "all steps to the tile's end": ("last = 2 * (end - tile * each)", "last = p.steps"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees_faults(fault):
    """Else the tests above would say nothing."""
    require_nvrtc()
    x, w, right = integers(9, 128, 384)
    seen = []
    for seed in range(6):
        stand_in = MixedStandIn(early=True, seed=seed, at_once=3, change=replaced(*FAULTS[fault]))
        try:
            seen.append(not torch.equal(stand_in.multiplied(x, w, None, ONE), right))
        except (ValueError, TypeError, RuntimeError, struct.error):
            seen.append(True)
        if seen[-1]:
            break
    assert any(seen)


def starts(plan):
    """Of each cluster, the first pair of stages of shared tiles that it has, as the kernel divides them; and the end."""
    return [plan.shared * plan.pairs * at // plan.clusters for at in range(plan.clusters + 1)]


@pytest.mark.parametrize("at_once", [1, 2, 3, 5, 30, 66, 132])
@pytest.mark.parametrize("tokens", [16, 100, 1000, 2112])
@pytest.mark.parametrize(("features", "length"), [(128, 256), (1024, 640), (4096, 1408)])
def test_plans(tokens, features, length, at_once):
    """What is said of the longest share and of added sums is right; no share is empty; whole tiles are whole waves."""
    one, tiles = Variant(16, 1, 1, 3, True), -(-tokens // 16) * features // 128
    for plan in plans(one, tokens, features, length, at_once):
        assert (plan.whole + plan.shared, plan.pairs) == (tiles, length // 128)
        assert plan.clusters <= at_once
        if not plan.shared:
            continue
        assert (plan.whole % plan.clusters, plan.parts) == (0, 2 * plan.clusters)
        begin = starts(plan)
        assert all(0 < last - first <= plan.longest for first, last in pairwise(begin))
        others = [
            sum(at * plan.pairs < start < (at + 1) * plan.pairs for start in begin)
            for at in range(plan.shared)
        ]
        assert max(others) <= plan.added
    whole = Plan(min(tiles, at_once), tiles, 0, length // 128, 0)
    assert list(plans(one._replace(divided=False), tokens, features, length, at_once)) == [whole]


def test_more_columns_than_are_counted_are_not_divided():
    """16 million of them: pairs of stages times clusters are a number of 32 bits."""
    one, most = Variant(16, 1, 1, 3, True), 2**32 // (131 * 132)
    assert plan_of(one, 16, 131 * 128, 128 * most, 132).shared == 131
    assert plan_of(one, 16, 131 * 128, 128 * (most + 1), 132).shared == 0


def test_what_others_hold_is_as_large_as_it_has_to_be():
    """Sums of 64 features by the tokens of a tile for each warpgroup, and their marks."""
    assert plan_of(Variant(256, 2, 1, 5, True), 1024, 14336, 4096, 66).parts == 66 * 2 * 2
    assert plan_of(Variant(256, 1, 1, 5), 1024, 14336, 4096, 132).parts == 0
