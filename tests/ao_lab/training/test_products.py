"""Which function computes a training product; what torch's products of blocks are given; the product of codes that few rows
take."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits
from ao_lab.training import products
from ao_lab.training.products import PRODUCTS
from reference.training.recipe import RECIPES, Operand, Product
from tests.support import cublaslt
from tests.support.refusals import refused

M, N = 32, 256


def scaled(codes, scales, block):
    """float64 values of codes (R, K) with scales (R / block, K / 128)."""
    wide = scales.double().repeat_interleave(block, 0).repeat_interleave(128, 1)
    return codes.double() * wide


def torch_rule(left, right, scale_a, scale_b, bias=None, out_dtype=None):
    """`torch._scaled_mm` of blocks, and what it asks of strides (ATen's is_blockwise_1x128 and is_blockwise_128x128)."""
    cublaslt.check(left, right, scale_a, scale_b, bias, None, out_dtype)
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
    cublaslt.check_v2(left, right, scale_a, a, swizzle_a, scale_b, b, swizzle_b, bias, dtype)
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
    monkeypatch.setattr(products, "capability", lambda device: 90)


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
        return products.blocks_unsupported_reason(
            fast.quantize(torch.ones(a), first), fast.quantize(torch.ones(b), second)
        )

    assert reason((32, 128), block, (128, 128), square) is None
    assert "of a, and" in reason((128, 128), square, (128, 128), square)
    assert "must divide" in reason((32, 192), block, (128, 192), square)
    assert "rows must be" in reason((24, 128), block, (128, 128), square)
    assert "of a, and" in reason((32, 128), RECIPES["rowwise"].output.a.scheme, (128, 128), square)


ROWWISE, TENSORWISE = "fp8_rowwise", "fp8_tensorwise"
HOPPER, OTHER = (9, 0), (10, 0)


def product(name, accumulation="fast"):
    """A product of two operands of a scheme."""
    operand = Operand(scheme=reference.SCHEMES[name])
    return Product(a=operand, b=operand, accumulation=accumulation)


def operand(name, shape):
    """Codes that only say where they would be."""
    q = fast.quantize(torch.ones(1, 32), name)
    scale = torch.empty(() if q.scale.dim() == 0 else (shape[0], 1), device="cuda")
    codes = torch.empty(shape, dtype=torch.uint8, device="cuda")
    return replace(q, codes=codes, scale=scale, shape=shape)


@pytest.mark.parametrize(
    ("schemes", "shape", "accumulation", "capability", "chosen"),
    [
        ((ROWWISE, ROWWISE), (64, 14336, 4096), "fast", HOPPER, "codes"),
        ((ROWWISE, ROWWISE), (64, 4096, 14336), "precise", HOPPER, "codes"),
        ((ROWWISE, TENSORWISE), (16, 4096, 4096), "precise", HOPPER, "codes"),
        ((ROWWISE, ROWWISE), (1024, 1024, 2048), "fast", HOPPER, "codes"),
        ((ROWWISE, ROWWISE), (1024, 1024, 2048), "precise", HOPPER, "scaled_mm"),
        ((ROWWISE, ROWWISE), (16384, 14336, 4096), "fast", HOPPER, "scaled_mm"),
        ((TENSORWISE, TENSORWISE), (64, 14336, 4096), "fast", HOPPER, "scaled_mm"),
        ((ROWWISE, ROWWISE), (64, 14336, 4096), "fast", OTHER, "scaled_mm"),
        ((ROWWISE, "mxfp8_e4m3"), (64, 14336, 4096), "fast", HOPPER, "dequantize"),
    ],
)
def test_few_rows_are_multiplied_as_codes(schemes, shape, accumulation, capability, chosen, monkeypatch):
    """Where that was measured to be faster, and nowhere else; a product that is asked for is not looked at."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(products, "tuned", lambda *_: None)
    monkeypatch.setattr(products, "_able_before", {})  # what was found for another GPU
    m, n, k = shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        a, b = operand(schemes[0], (m, k)), operand(schemes[1], (n, k))
        record = product(ROWWISE, accumulation)
        assert products.select_product("output", a, b, torch.bfloat16, record) == chosen


def test_what_the_function_of_codes_refuses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    reason = products.PRODUCTS["codes"].unsupported_reason
    with FakeTensorMode(allow_non_fake_inputs=True):
        good = operand(ROWWISE, (64, 128))
        assert reason(good, good) is None
        for bad, text in (
            (torch.ones(64, 128), "quantized"), (operand("int8_rowwise", (64, 128)), "e4m3"),
            (operand("mxfp8_e4m3", (64, 128)), "one float32 scale"), (operand(ROWWISE, (0, 128)), "rows and columns"),
        ):  # fmt: skip
            assert text in reason(good, bad)
        assert "multiple of 16" in reason(operand(ROWWISE, (64, 40)), operand(ROWWISE, (64, 40)))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: OTHER)
        assert "9.0" in reason(good, good)


@pytest.mark.parametrize("accumulation", ["fast", "precise"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_product_of_codes_is_one_block_of_the_reference(dtype, accumulation):
    """What the kernel's exact sums are scaled by, in order, on a CPU."""
    generator = torch.Generator().manual_seed(0)
    a, b = (fast.quantize(torch.randn(n, 64, generator=generator), ROWWISE) for n in (5, 32))
    bias = torch.randn(32, generator=generator)
    run = products.PRODUCTS["codes"].run
    made = run(a, b, product(ROWWISE, accumulation), getattr(torch, dtype), bias)
    assert_same_bits(made, reference.linear(a, b, bias, accumulation="blocked", block=64, out_dtype=dtype))
    refused(TypeError, "quantized matrix", run, a, bias, product(ROWWISE), torch.float32, None)


def test_autocast_does_not_round_what_is_emulated():
    """The operands are products of a code and a scale, which 16 bits do not hold."""
    generator = torch.Generator().manual_seed(0)
    a, b = (fast.quantize(torch.randn(n, 64, generator=generator), ROWWISE) for n in (16, 32))
    run = products.PRODUCTS["emulate"].run
    plain = run(a, b, product(ROWWISE), torch.float32, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(run(a, b, product(ROWWISE), torch.float32, None), plain)


def operands_of(name, m, n, k):
    recipe = RECIPES[name].output
    return [
        products.stand_in(op.scheme.key, shape, "torch.bfloat16", "cpu")
        for op, shape in ((recipe.a, (m, k)), (recipe.b, (n, k)))
    ]


@pytest.mark.parametrize(
    ("name", "shape", "captured", "expected"),
    [
        ("rowwise", (2048, 1024, 1024), False, "codes"),
        ("rowwise", (2048, 1024, 1024), True, "emulate"),
        ("rowwise", (4096, 2048, 1024), False, "codes"),
        ("rowwise", (4096, 2048, 2048), False, "emulate"),
        ("rowwise", (2000, 1024, 1024), False, "emulate"),
        ("rowwise", (128, 128, 16384), False, "emulate"),
        ("tensorwise", (2048, 1024, 1024), False, "emulate"),
    ],
)
def test_brief_products_under_powers_of_two(monkeypatch, name, shape, captured, expected):
    """By one launch where launches are made one by one; torch's own kernel in a graph, and where bits may differ."""
    monkeypatch.setitem(PRODUCTS, "codes", replace(PRODUCTS["codes"], unsupported_reason=lambda a, b: None))
    monkeypatch.setattr(products, "is_captured", lambda x: captured)
    monkeypatch.setattr(products, "_able_before", {})
    a, b = operands_of(name, *shape)
    record = RECIPES[name].output
    assert (
        products.select_product("output", a, b, torch.bfloat16, replace(record, accumulation="precise"))
        == expected
    )


def test_what_cublas_has_no_kernel_for_goes_by_codes(monkeypatch):
    """It says so when it is called; from then on it is not asked."""
    asked = []

    def refused(*given):
        asked.append(given)
        raise RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"
        )

    monkeypatch.setattr(products, "scaled_mm", refused)
    monkeypatch.setattr(products, "_codes_unsupported", lambda a, b: None)
    monkeypatch.setitem(PRODUCTS, "codes", replace(PRODUCTS["codes"], unsupported_reason=lambda a, b: None))
    monkeypatch.setitem(
        PRODUCTS, "scaled_mm", replace(PRODUCTS["scaled_mm"], unsupported_reason=lambda a, b: None)
    )
    monkeypatch.setattr(products, "_able_before", {})
    monkeypatch.setattr(products, "_refused", set())
    recipe = RECIPES["tensorwise"].output
    x, w = (fast.quantize(torch.randn(rows, 256).bfloat16(), "fp8_tensorwise") for rows in (128, 64))
    assert products.select_product("output", x, w, torch.bfloat16, recipe) == "scaled_mm"
    made = [products.product("output", x, w, recipe, torch.bfloat16) for _ in range(2)]
    assert len(asked) == 1
    expected = products.linear_of_codes(x, w, None, dtype=torch.bfloat16, fast_sums=True)
    assert all(torch.equal(y, expected) for y in made)
    assert products.select_product("output", x, w, torch.bfloat16, recipe) == "codes"


def test_other_errors_of_torch_are_raised(monkeypatch):
    def failed(*given):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(products, "scaled_mm", failed)
    x = fast.quantize(torch.randn(128, 256).bfloat16(), "fp8_tensorwise")
    with pytest.raises(RuntimeError, match="out of memory"):
        PRODUCTS["scaled_mm"].run(x, x, RECIPES["tensorwise"].output, torch.bfloat16, None)
