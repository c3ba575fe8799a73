"""The product of rows sorted by expert and arranged weights: its kernel compiled for Hopper, what it takes and refuses.

Bits are compared in Triton's interpreter (`programs/products/linear_small.py`, through `test_linear_small.test_bits`).
"""

import platform
import re

import pytest
import torch

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.linear_small import grouped, host
from tests.fast.kernels.compiling.kernel_compiler import launched
from tests.fast.linear.test_linear_small import BF16, HALF, WGMMA, empty_weight, paired

EXPERTS = 8
ENDS = torch.zeros(EXPERTS, dtype=torch.int32)


def experts(*kind, **more):
    """Memory that nobody reads."""
    return grouped.stacked([empty_weight(*kind, **more)] * EXPERTS)


@pytest.mark.parametrize(
    ("element", "group", "count", "dtype", "zero"),
    [
        ("int4", 128, 128, BF16, False), ("int4", 32, 128, BF16, True), ("e4m3", 0, 128, HALF, False),
        ("int8", 0, 8, BF16, True), ("int4", 128, 512, HALF, False),
    ],
)  # fmt: skip
def test_the_kernel_compiles_as_that_of_one_weight(element, group, count, dtype, zero):
    """The weight goes from registers to the tensor core, which is waited for before they change; nothing is spilled."""
    w = experts(1024, 4096, element, group, zero=zero)
    (machine,) = launched(
        lambda: grouped.grouped_linear_small(torch.empty((count, 4096), dtype=dtype), w, ENDS)
    )
    assert (machine.kernel, machine.local, machine.stack) == ("grouped_linear_small_kernel", 0, 0)
    assert all(list(paired(machine)))
    assert set(WGMMA.findall(machine.ptx)) == {"{"}
    assert set(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", machine.ptx)) == {"0"}


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
    assert host.MOST_ROWS > grouped.MOST_AVERAGE
