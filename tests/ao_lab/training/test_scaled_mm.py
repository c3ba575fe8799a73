"""What torch's products of blocks are given: scales as they ask for them, on a model of their rules."""

import pytest
import torch

import fast
from ao_lab.training import products, scaled_mm
from reference.training import RECIPES
from reference.training.recipe import Product

M, N = 32, 256


def scaled(codes, scales, block):
    """float64 values of codes (R, K) with scales (R / block, K / 128)."""
    wide = scales.double().repeat_interleave(block, 0).repeat_interleave(128, 1)
    return codes.double() * wide


def torch_rule(left, right, scale_a, scale_b, bias=None, out_dtype=None):
    """`torch._scaled_mm` of blocks, and what it asks of strides (ATen's is_blockwise_1x128 and is_blockwise_128x128)."""
    (m, k), n = left.shape, right.shape[1]
    assert k % 512 == 0 or scale_b.shape == (k // 128, n)
    assert scale_a.shape == (m, k // 128)
    assert scale_a.stride() == (1, m)
    if scale_b.shape == (k // 128, n):
        assert scale_b.is_contiguous()
        b = scaled(right.t(), scale_b.t(), 1)
    else:
        assert scale_b.shape == (k // 128, n // 128)
        assert scale_b.stride() == (1, k // 128)
        b = scaled(right.t(), scale_b.t(), 128)
    y = scaled(left, scale_a, 1) @ b.T
    return (y if bias is None else y + bias.double()).to(out_dtype)


def torch_rule_2(left, right, scale_a, a, swizzle_a, scale_b, b, swizzle_b, bias, dtype):
    """`aten::_scaled_mm_v2`: scales of squares are padded along K to a multiple of 4."""
    (m, k), n = left.shape, right.shape[1]
    padded = -(-k // 512) * 4
    assert (a, b, swizzle_a, swizzle_b) == ([4], [5], [0], [0])
    assert scale_a[0].shape == (m, k // 128)
    assert scale_a[0].stride() == (1, m)
    assert scale_b[0].shape == (padded, n // 128)
    assert scale_b[0].stride() == (1, padded)
    values = scaled(right.t(), scale_b[0].t()[:, : k // 128], 128)
    y = scaled(left, scale_a[0], 1) @ values.T
    return (y if bias is None else y + bias.double()).to(dtype)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", torch_rule)
    monkeypatch.setattr(torch.ops.aten, "_scaled_mm_v2", torch_rule_2)
    monkeypatch.setattr(scaled_mm, "capability", lambda device: 90)


@pytest.mark.parametrize("blocks", [4, 5])
@pytest.mark.parametrize("direction", ["output", "weight_grad"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks(blocks, direction, dtype, model):
    record: Product = getattr(RECIPES["blockwise"], direction)
    generator = torch.Generator().manual_seed(blocks)
    a, b = (torch.randn(rows, 128 * blocks, generator=generator) for rows in (M, N))
    a, b = fast.quantize(a, record.a.scheme), fast.quantize(b, record.b.scheme)
    bias = torch.linspace(-1, 1, N).to(dtype)
    assert products.select_product(direction, a, b, dtype) == "scaled_mm_blocks"
    y = products.product(direction, a, b, record, dtype, bias)
    truth = fast.dequantize(a).double() @ fast.dequantize(b).double().T + bias.double()
    torch.testing.assert_close(y, truth.to(dtype))


def test_what_blocks_are_refused(model):
    record = RECIPES["blockwise"].output
    block, square = record.a.scheme, record.b.scheme

    def reason(a, first, b, second):
        return scaled_mm.blocks_unsupported_reason(
            fast.quantize(torch.ones(a), first), fast.quantize(torch.ones(b), second)
        )

    assert reason((32, 128), block, (128, 128), square) is None
    assert "of a, and" in reason((128, 128), square, (128, 128), square)
    assert "must divide" in reason((32, 192), block, (128, 192), square)
    assert "rows must be" in reason((24, 128), block, (128, 128), square)
    assert "of a, and" in reason((32, 128), RECIPES["rowwise"].output.a.scheme, (128, 128), square)
