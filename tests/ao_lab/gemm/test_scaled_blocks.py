"""Products of layers under scales of blocks: torch's rules are kept for any number of rows; others are refused."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fast
from ao_lab import quantized
from ao_lab.config.recipe import Recipe
from ao_lab.gemm import codes, select
from ao_lab.gemm.codes import blocks_reason
from reference.schemes.schemes import scheme_of
from tests.ao_lab.gemm.capability import set_capability
from tests.ao_lab.training.test_products import torch_rule, torch_rule_2

FINE, SQUARE = "fp8_1x128", "fp8_128x128"


@pytest.fixture
def rules(monkeypatch):
    """torch's product with its rules of strides and of rows."""

    def multiply(left, *operands, **options):
        assert left.shape[0] % 16 == 0
        return torch_rule(left, *operands, **options)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setattr(torch.ops.aten, "_scaled_mm_v2", torch_rule_2)


@pytest.mark.parametrize("rows", [1, 5, 16, 33])
@pytest.mark.parametrize("length", [512, 640])
@pytest.mark.parametrize("weight", [FINE, SQUARE])
def test_any_number_of_rows(rows, length, weight, rules):
    generator = torch.Generator().manual_seed(rows)
    x, dense = (torch.randn(count, length, generator=generator).to(torch.bfloat16) for count in (rows, 256))
    w = quantized(dense, Recipe(weight=scheme_of(weight), activation=scheme_of(FINE)))
    bias = torch.linspace(-1, 1, 256).to(torch.bfloat16)
    y = codes.scaled_mm(x, w.t(), bias)
    truth = fast.dequantize(fast.quantize(x, FINE)).double() @ w.dequantize(torch.float64).T + bias.double()
    assert (y.shape, y.dtype) == ((rows, 256), torch.bfloat16)
    torch.testing.assert_close(y, truth.to(torch.bfloat16))


@pytest.mark.parametrize("part", [slice(None, 512), slice(512, None)])
def test_a_weight_that_was_sliced_along_its_sums(part, rules):
    """Its scales are a view of the whole one's."""
    generator = torch.Generator().manual_seed(3)
    x, dense = (torch.randn(count, 1024, generator=generator).to(torch.bfloat16) for count in (16, 256))
    w = quantized(dense, Recipe(weight=scheme_of(SQUARE), activation=scheme_of(FINE)))[:, part]
    truth = fast.dequantize(fast.quantize(x[:, part], FINE)).double() @ w.dequantize(torch.float64).T
    torch.testing.assert_close(codes.scaled_mm(x[:, part], w.t(), None), truth.to(torch.bfloat16))


class Layer(torch.nn.Linear):
    def forward(self, x):
        return select.PRODUCTS["scaled_mm"].run(x, self.weight.t(), None)


def test_rows_that_an_export_leaves_open():
    with torch.no_grad():
        module = Layer(512, 256, bias=False)
        recipe = Recipe(weight=scheme_of(SQUARE), activation=scheme_of(FINE))
        module.weight = torch.nn.Parameter(
            quantized(module.weight.to(torch.bfloat16), recipe), requires_grad=False
        )
        rows = torch.export.Dim("rows", min=2, max=4096)
        x = torch.randn(33, 512, dtype=torch.bfloat16)
        made = torch.export.export(module, (x,), dynamic_shapes=({0: rows},))
    assert "scaled_mm_blocks" in made.graph_module.code


def layer(weight, activation, shape, dtype=torch.bfloat16):
    """A weight on a GPU that is there in name alone."""
    dense = torch.empty(shape, device="cuda:0", dtype=dtype)
    return quantized(dense, Recipe(weight=scheme_of(weight), activation=scheme_of(activation)))


@pytest.mark.parametrize(
    ("weight", "activation", "shape", "newest", "taken"),
    [
        (SQUARE, FINE, (256, 512), (9, 0), True),
        (SQUARE, FINE, (256, 640), (9, 0), True),
        (FINE, FINE, (144, 512), (9, 0), True),
        (SQUARE, FINE, (256, 512), (10, 0), False),
        (SQUARE, FINE, (144, 512), (9, 0), False),
        (FINE, FINE, (136, 512), (9, 0), False),
        ("fp8_rowwise", FINE, (256, 512), (9, 0), False),
        (SQUARE, "fp8_rowwise", (256, 512), (9, 0), False),
    ],
)
def test_which_layers_it_multiplies(weight, activation, shape, newest, taken, monkeypatch):
    set_capability(monkeypatch, newest)
    with FakeTensorMode(), torch.no_grad():
        w = layer(weight, activation, shape)
        assert (select.select_kernel(w.t(), torch.bfloat16) == "scaled_mm") == taken


def test_other_results_than_bfloat16_are_left_to_the_dense_weight(monkeypatch):
    set_capability(monkeypatch, (9, 0))
    with FakeTensorMode(), torch.no_grad():
        w = layer(SQUARE, FINE, (256, 512), torch.float16)
        assert select.select_kernel(w.t(), torch.float16) == "dequantize"


def test_scales_that_do_not_multiply_codes_are_refused():
    plain, encoding = scheme_of(FINE), scheme_of("torchao.fp8_rowwise_training")
    assert blocks_reason(plain, scheme_of(SQUARE), (256, 512)) is None
    assert "1x128" in str(blocks_reason(encoding, plain, (256, 512)))
    assert "e4m3" in str(blocks_reason(plain, scheme_of("int8_rowwise"), (256, 512)))
