"""Products of a `QuantizedTensor` on a CPU: the quick function, and operands that do not belong together."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

import ao_lab
from ao_lab import Recipe, quantized
from ao_lab.gemm import choices, codes
from ao_lab.gemm.select import select_kernel
from fast.cpu import linear
from reference import SCHEMES, Scales
from tests.support.quantized_weights import weight as numbers


@pytest.fixture(autouse=True)
def untuned(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    choices.forget()
    yield
    choices.forget()


def weight_of(scheme, activation=None, kernel="auto", device="cpu", dtype=torch.bfloat16, **options):
    recipe = Recipe(
        weight=SCHEMES[scheme], activation=activation and SCHEMES[activation], kernel=kernel, **options
    )
    return quantized(numbers(48, 128, dtype=dtype).to(device), recipe)


def set_scales_rows(monkeypatch, takes):
    """Whether torch takes a scale for each row on this CPU."""
    monkeypatch.setattr(codes, "cpu_scales_rows", lambda: takes)


def scales_given(monkeypatch):
    """The shapes of scales that `torch._scaled_mm` is given."""
    seen, multiply = [], torch._scaled_mm

    def multiplied(a, b, scale_a, scale_b, **options):
        seen.append((tuple(scale_a.shape), tuple(scale_b.shape)))
        return multiply(a, b, scale_a=scale_a, scale_b=scale_b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", multiplied)
    return seen


@pytest.mark.parametrize("static", [False, True])
def test_one_scale_is_given_for_each_row(monkeypatch, static):
    """Under one scale torch multiplies element by element on a CPU, 1000 times as long. The numbers are the same."""
    if not codes.cpu_scales_rows():
        pytest.skip("this torch takes one scale alone")
    scales = Scales(torch.tensor(0.02), None, None) if static else None
    scheme = SCHEMES["fp8_tensorwise"]
    recipe = Recipe(weight=scheme, activation=scheme, kernel="scaled_mm")
    w, x = quantized(numbers(48, 128), recipe, input_scales=scales), numbers(9, 128, seed=1)
    set_scales_rows(monkeypatch, False)
    one = codes.scaled_mm(x, w.t(), None)
    set_scales_rows(monkeypatch, True)
    seen = scales_given(monkeypatch)
    torch.testing.assert_close(functional.linear(x, w), one, rtol=1e-5, atol=1e-5)
    assert seen == [((9, 1), (1, 48))]


def test_the_default_decodes_8_bit_floats_and_torchs_product_is_there_by_name(monkeypatch):
    set_scales_rows(monkeypatch, False)
    w, x = weight_of("fp8_tensorwise", "fp8_tensorwise"), numbers(3, 128, dtype=torch.bfloat16)
    assert select_kernel(w.t(), x.dtype) == "fused"
    named, seen = w.with_recipe(kernel="scaled_mm"), scales_given(monkeypatch)
    assert functional.linear(x, named).shape == (3, 48)
    assert seen == [((), ())]
    assert (
        select_kernel(weight_of("fp8_tensorwise", "fp8_tensorwise", device="meta").t(), x.dtype)
        == "scaled_mm"
    )


@pytest.mark.parametrize("scheme", ["fp8_tensorwise", "fp8_rowwise"])
@pytest.mark.parametrize(("of_inputs", "of_weight"), [("cpu", "meta"), ("meta", "cpu")])
def test_operands_on_two_devices_are_refused(scheme, of_inputs, of_weight):
    """torch's product of 8-bit floats does not look, and returned memory that nothing was written to."""
    w = weight_of(scheme, scheme, "scaled_mm", device=of_weight)
    x = torch.ones(3, 128, dtype=torch.bfloat16, device=of_inputs)
    message = rf"inputs are on {of_inputs}, the weight is on {of_weight}; move either by \.to\(device\)"
    with pytest.raises(ValueError, match=message):
        functional.linear(x, w)


@pytest.mark.parametrize("scheme", ["fp8_tensorwise", "fp8_rowwise"])
def test_8_bit_floats_are_compiled_whole(scheme):
    torch._dynamo.reset()
    w, x = weight_of(scheme, scheme), numbers(3, 128, dtype=torch.bfloat16)
    compiled = torch.compile(functional.linear, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w), functional.linear(x, w))


CONFIGS = {
    "int8": ao_lab.Int8WeightOnlyConfig,
    "int4": ao_lab.Int4WeightOnlyConfig,
    "int8 dynamic": ao_lab.Int8DynamicActivationInt8WeightConfig,
    "fp8 dynamic": ao_lab.Float8DynamicActivationFloat8WeightConfig,
    "nvfp4 dynamic": ao_lab.NVFP4DynamicActivationNVFP4WeightConfig,
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_layer_computes_in_the_dtype_of_its_inputs_whatever_its_bias_has(config, dtype):
    """Of one row and of several; autocast gives them its own dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 48, dtype=torch.bfloat16))
    ao_lab.quantize_(model, config())
    bias = model[0].bias.detach().to(dtype)
    for rows in (1, 3):
        x = numbers(rows, 128, seed=1, dtype=dtype)
        made, wanted = model(x), functional.linear(x, model[0].weight, bias)
        assert made.dtype == dtype
        torch.testing.assert_close(made, wanted)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == (dtype if dtype == torch.float64 else torch.bfloat16)
        x.requires_grad_()
        model(x).sum().backward()
        assert (x.grad.dtype, model[0].bias.grad.dtype) == (dtype, torch.bfloat16)


@pytest.mark.parametrize("has_vnni", [False, True])
def test_inputs_of_another_length_are_refused(monkeypatch, has_vnni):
    """Integer sums are added in parts, which may fit each other where the lengths do not."""
    monkeypatch.setattr(linear, "HAS_VNNI", has_vnni)
    recipe = Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"])
    w = quantized(torch.ones(8, 2048), recipe)
    with pytest.raises(ValueError, match=r"inputs of shape \(2, 1024\).*inputs have 2048 columns"):
        functional.linear(torch.ones(2, 1024), w)


#: Schemes of a weight and its inputs.
SHARDED = [
    ("int8_rowwise", None),
    ("int4_g32", None),
    ("nvfp4", None),
    ("fp8_rowwise", "fp8_rowwise"),
    ("int8_rowwise", "int8_rowwise"),
    ("int4_g32", "int8_rowwise"),
]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("scheme", "activation"), SHARDED)
def test_shards_give_the_bits_of_the_whole_weight(scheme, activation, dtype, rows):
    """Those of rows and of columns; beside zeros in place of the other columns' inputs, which add nothing to sums."""
    recipe = Recipe(weight=SCHEMES[scheme], activation=activation and SCHEMES[activation])
    w, x = quantized(numbers(256, 512, dtype=dtype), recipe), numbers(rows, 512, seed=1, dtype=dtype)
    whole = functional.linear(x, w)
    assert torch.equal(torch.cat([functional.linear(x, w[:128]), functional.linear(x, w[128:])], -1), whole)
    for part in (slice(256), slice(256, None)):
        alone = torch.zeros_like(x)
        alone[:, part] = x[:, part]
        assert torch.equal(functional.linear(x[:, part], w[:, part]), functional.linear(alone, w))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", [48, 2048])
def test_tangents_go_through_layers_of_any_size(rows, size):
    w, x = quantized(numbers(size, 128), "int8_rowwise"), numbers(rows, 128, seed=1)
    with forward_ad.dual_level():
        y = functional.linear(forward_ad.make_dual(x, torch.ones_like(x)), w)
        tangent = forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(tangent, torch.ones_like(x) @ w.dequantize().t())
