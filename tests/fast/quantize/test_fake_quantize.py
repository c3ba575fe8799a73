"""`fast.quantize.fake_quantize`: values with a mask of the blocks that reach beyond the codes, and gradients masked by them in
place."""

import platform
from unittest import mock

import pytest
import torch

import fast
from ao_lab.testing.strategies import assert_same_bits
from fast.quantize import fake_quantize
from tests.emulator.interpreter_process import lines_of
from tests.gpu.harness.subject import Asked
from tests.gpu.models import qat

SCHEME = "int8_rowwise_asymmetric"


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
@pytest.mark.parametrize(("group", "cases"), [("places", 8), ("sequences", 12)])
def test_kernels_agree_with_the_reference(group, cases):
    assert len(lines_of("gradients", "saturation", group)) == cases


def test_without_kernels_there_is_no_mask():
    """Then the gradient is that of `fake_quantize_vjp`, in memory of its own."""
    x = torch.tensor([[-127.5, 0.5, 127.5], [1.0, 2.0, 3.0]])
    y, mask = fake_quantize.fake_quantize_with_mask(x, SCHEME)
    assert mask is None
    assert_same_bits(y, fast.fake_quantize(x, SCHEME))
    g = torch.full_like(x, 5.0)
    dx = fake_quantize.mask_gradient(g, x, mask, SCHEME)
    assert_same_bits(dx, fast.fake_quantize_vjp(g, x, SCHEME)[0])
    # The scale is 1: both ends round away from zero, and the zero point is that of the lower one.
    assert dx[0].tolist() == [5.0, 5.0, 0.0]
    assert g.eq(5.0).all()


def test_a_gradient_that_is_not_like_its_tensor_is_refused():
    from fast.kernels.quantize import host

    x, mask = torch.zeros(2, 64), torch.zeros(2, dtype=torch.uint8)
    for g in (torch.zeros(64, 2).t(), torch.zeros(2, 32), torch.zeros(2, 64, dtype=torch.float16)):
        with (
            mock.patch.object(host, "Call", side_effect=AssertionError),
            pytest.raises(ValueError, match="clip: g is contiguous and like x"),
        ):
            host.clip(g, x, mask, SCHEME, -1)


@pytest.mark.parametrize(
    "mask", [torch.zeros(3, dtype=torch.uint8), torch.zeros(2), torch.zeros(2, dtype=torch.bool), torch.zeros(2, 64).byte()]
)  # fmt: skip
def test_a_mask_of_another_shape_or_dtype_is_refused(mask):
    from fast.kernels.quantize import host

    x = torch.zeros(2, 64)
    with pytest.raises(ValueError, match="the saturation mask has one uint8 for each of 2 blocks"):
        host.clip(torch.zeros(2, 64), x, mask, SCHEME, -1)
    with pytest.raises(ValueError, match="on one device"):
        host.clip(torch.zeros(2, 64), x, torch.zeros(2, dtype=torch.uint8, device="meta"), SCHEME, -1)


def test_gradients_are_those_of_the_public_functions():
    """The checks of a GPU, where they run the reference."""
    checks = list(qat.checks(Asked(device="cpu")))
    assert len(checks) == 3 * len(qat.CASES)
    assert [line for _, check in checks for line in check()] == []
