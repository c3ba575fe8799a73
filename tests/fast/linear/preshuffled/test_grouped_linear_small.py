"""The product of rows sorted by expert and arranged weights: its kernel compiled for Hopper, what it takes and refuses.

Bits are compared in Triton's interpreter (`programs/products/linear_small.py`, through `test_linear_small.test_bits`).
"""

import platform
import re
from itertools import product

import pytest
import torch

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.triton_small_m import grouped
from fast.kernels.triton_small_m.host import MOST_SHARED, Tiling
from tests.fast.kernels.compiling.kernel_compiler import launched
from tests.fast.kernels.compiling.kernel_samples import by_day, named
from tests.fast.linear.preshuffled.test_linear_small import BF16, HALF, WGMMA, empty_weight, paired

EXPERTS = 8
ENDS = torch.zeros(EXPERTS, dtype=torch.int32)


def experts(*kind, **more):
    """Memory that nobody reads."""
    return grouped.stacked([empty_weight(*kind, **more)] * EXPERTS)


FORMS = [
    ("int4", 128, 128, BF16, False), ("int4", 32, 128, BF16, True), ("e4m3", 0, 128, HALF, False),
    ("int8", 0, 8, BF16, True), ("int4", 128, 512, HALF, False), ("int4", 128, 2, BF16, True), ("e4m3", 0, 2, HALF, False),
    ("int8", 128, 512, BF16, True), ("e4m3", 128, 16, BF16, False), ("int8", 32, 2, BF16, True),
    ("int4", 32, 2, BF16, True), ("e2m1", 16, 2, BF16, False), ("e2m1", 32, 128, BF16, False),
    ("e4m3_mx", 32, 512, BF16, False),
]  # fmt: skip


def features_of(case):
    """What the kernel has branches for, and whether its weight is large; small groups of integers take long to compile."""
    element, group, count, dtype, zero, rows = case
    return named(element=element, of_16=group == 16, at_once=count, dtype=dtype, zero=zero, rows=rows)


@pytest.mark.parametrize(
    ("element", "group", "count", "dtype", "zero", "rows"),
    by_day([(*form, rows) for rows in (1024, 14336) for form in FORMS], features_of),
)
def test_the_kernel_compiles_as_that_of_one_weight(element, group, count, dtype, zero, rows):
    """The weight goes from registers to the tensor core, which is waited for before they change; nothing is spilled."""
    w = experts(rows, 4096, element, group, zero=zero)
    (machine,) = launched(
        lambda: grouped.grouped_linear_small(torch.empty((count, 4096), dtype=dtype), w, ENDS)
    )
    assert (machine.kernel, machine.local, machine.stack) == ("triton_small_m_experts_kernel", 0, 0)
    assert all(list(paired(machine)))
    assert set(WGMMA.findall(machine.ptx)) == {"{"}
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", machine.ptx)) == {"0"}


@pytest.mark.parametrize(
    ("element", "group"),
    [*product(("int4", "int8", "e4m3"), (0, 32, 128)), ("e2m1", 16), ("e2m1", 32), ("e4m3_mx", 32)],
)
def test_the_rule_fits_any_weight(element, group):
    for rows in (128, 384, 1024, 6144, 28672):
        for columns in (128, 384, 1152, 4096, 14336):
            for count in (1, 7, 16, 64, 200, 4096, 16384):
                for each in (2, 8, 64, 256):
                    block_n, block_k, stages, warps = grouped.tile_of(rows, columns, element, count, each)
                    at_once = grouped.rows_at_once(count, each)
                    tiling = Tiling(at_once, block_n, block_k, 1, stages, warps)
                    assert tiling.fits(rows, columns, element, group)
                    assert at_once <= grouped.MOST_TILE
                    assert tiling.shared(element, group) <= MOST_SHARED


def test_what_it_does_not_take():
    w, x = experts(128, 256, "int4", 128), torch.empty((5, 256))
    assert grouped.grouped_linear_small(x, w, ENDS) is None
    assert grouped.grouped_linear_small(x[:0].bfloat16(), w, ENDS) is None


def test_errors():
    w, x = experts(128, 256, "int4", 128), torch.empty((5, 256), dtype=BF16)
    for given, text in (
        ((x[:, :128], w, ENDS), r"rows \(T, K\) of the same K"),
        ((x, w, ENDS[:3]), r"one number for each of 8 experts, got torch.int32 of shape \(3,\)"),
        ((x, w, ENDS.long()), "ends must be int32"),
        ((x.to("meta"), w, ENDS), "move them to one device"),
    ):
        with pytest.raises(ValueError, match=text):
            grouped.grouped_linear_small(*given)
    with pytest.raises(ValueError, match="one shape, scheme and kind of zero point"):
        grouped.stacked([empty_weight(128, 256, "int4", 128), empty_weight(128, 256, "int8", 128)])
