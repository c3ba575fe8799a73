"""Preshuffled weights whose inputs are quantized: which recipes have them, what multiplies them, and what stays plain.

GPUs are stood in for by CPU tensors, whose products go through the plain parts.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ao_lab
import ao_lab.tensor.preshuffled as rule
from ao_lab import Recipe, explain, quantize_, quantized
from ao_lab.gemm import fused
from ao_lab.gemm.fused import groups_reason, most_fused_rows
from ao_lab.gemm.select import PRODUCTS, select_kernel
from fast.kernels.sm90_w4a16_gemm import host as sm90_w4a16_gemm
from fast.matmul.preshuffled.linear import ALL_ROWS, linear_small, rows_as_stored
from reference import SCHEMES
from tests.ao_lab.gemm.capability import set_capability

LAYOUT = "preshuffled"
BF16 = torch.bfloat16
CONFIGS = {
    "int8 by int4": lambda: ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
    "float8 by int4": lambda: ao_lab.Float8DynamicActivationInt4WeightConfig(),
    "mxfp8": lambda: ao_lab.MXDynamicActivationMXWeightConfig(),
    "int8 by int8 in groups": lambda: ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8),
    "nvfp4": lambda: ao_lab.NVFP4DynamicActivationNVFP4WeightConfig(),
}
PLAIN = {
    "int8": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "float8 tensor": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(),
    "float8 rows": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()),
}


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of this host count as those of a GPU with kernels."""
    monkeypatch.setattr(rule, "has_kernels", lambda x: True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 384)).to(BF16).requires_grad_(False)


def weight_of(name, activation, shape=(256, 384)):
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16)
    return quantized(dense, Recipe(weight=SCHEMES[name], activation=SCHEMES[activation]))


def on_gpu(t, **changes):
    """A weight (K, N) as `select` sees it there."""
    names = ("recipe", "scheme", "meta", "shape", "block_axis", "zero", "codes", "scale", "input_scales")
    fields = {name: getattr(t, name) for name in names} | changes
    if t.meta.layout == LAYOUT:
        fields["stored"] = t.stored
    return SimpleNamespace(**fields, device=torch.device("cuda", 0), is_cuda=True)


@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN])
def test_quantize_chooses_it(name, gpu, monkeypatch):
    """Where no kernel multiplies codes of both; the same weight and the same products otherwise."""
    net, plain = network(), network()
    quantize_(net, (CONFIGS | PLAIN)[name]())
    assert net[0].weight.meta.layout == (LAYOUT if name in CONFIGS else "plain")
    monkeypatch.setattr(rule, "has_kernels", lambda x: False)
    quantize_(plain, (CONFIGS | PLAIN)[name]())
    assert plain[0].weight.meta.layout == "plain"
    assert torch.equal(net[0].weight, plain[0].weight)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(BF16)
    assert torch.equal(net(x), plain(x))
    assert torch.equal(net[0].weight @ x.t(), plain[0].weight @ x.t())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gpu_multiplies_by_the_fused_kernel(name, monkeypatch):
    set_capability(monkeypatch, (9, 0))
    net = network()
    quantize_(net, CONFIGS[name]())
    plain = net[0].weight
    t = plain.to_layout(LAYOUT)
    w = on_gpu(t.transposed())
    assert [select_kernel(w, dtype) for dtype in (BF16, torch.float16, torch.float32)] == ["fused"] * 3
    assert [most_fused_rows(w, dtype) for dtype in (BF16, torch.float16, torch.float32)] == [128, 128, 0]
    assert select_kernel(w, torch.float64) == "dequantize"
    assert select_kernel(on_gpu(plain.transposed()), BF16) == "dequantize"
    assert select_kernel(t.transposed(), BF16) == "dequantize"
    set_capability(monkeypatch, (8, 0))
    assert select_kernel(w, BF16) == "dequantize"


def test_explain_says_up_to_how_many_rows(monkeypatch):
    net = network()
    quantize_(net, CONFIGS["float8 by int4"]())
    net[0].weight = nn.Parameter(net[0].weight.to_layout(LAYOUT), requires_grad=False)
    monkeypatch.setattr(ao_lab.QuantizedTensor, "is_cuda", True)
    assert "fused, up to 128 rows" in str(explain(net))
    monkeypatch.setattr(fused, "rows_as_stored", lambda w, dtype: ALL_ROWS)
    assert explain(net).changed[0].kernel == "fused"


@pytest.mark.parametrize(
    ("name", "most"), [("int4_g128", ALL_ROWS), ("nf4", 2048), ("nvfp4", 1024), ("mxfp4", ALL_ROWS)]
)
def test_rows_that_read_the_weight_as_it_is_stored(monkeypatch, name, most):
    """On Hopper where NVRTC is; else, and of other shapes, those of the kernel of few rows."""
    stored = on_device(weight_of(name, "int8_rowwise", (4096, 4096)).to_layout(LAYOUT).stored)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(sm90_w4a16_gemm, "missing_compiler", lambda: None)
    assert rows_as_stored(stored, BF16) == most
    assert rows_as_stored(stored, torch.float32) == 0
    monkeypatch.setattr(sm90_w4a16_gemm, "missing_compiler", lambda: "no NVRTC")
    assert rows_as_stored(stored, BF16) == 128
    monkeypatch.setattr(sm90_w4a16_gemm, "missing_compiler", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert rows_as_stored(stored, BF16) == 128


def on_device(stored):
    """A stored weight whose codes say that a GPU has them."""
    codes = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), shape=stored.codes.shape)
    fields = {name: getattr(stored, name) for name in ("scheme", "shape", "scale", "zero")}
    return SimpleNamespace(codes=codes, **fields)


def test_the_product_quantizes_inputs():
    """The public path to the operator, whose reference a CPU runs."""
    t = weight_of("int4_g128", "int8_rowwise").to_layout(LAYOUT)
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(1)).to(BF16)
    made = fused.fused(x, t.transposed(), None)
    wanted = ao_lab.matmul(
        ao_lab.quantize(x, "int8_rowwise"), t.plain.dequantize(torch.float32).t(), out_dtype=BF16
    )
    assert torch.equal(made, wanted)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: weight_of("int8_rowwise", "int8_rowwise"), "codes are multiplied by those of its inputs"),
        (lambda: weight_of("fp8_rowwise", "fp8_rowwise_e5m2"), "codes are multiplied by those of its inputs"),
        (lambda: weight_of("fp8_1x128", "fp8_1x128"), "codes are multiplied by those of its inputs"),
        (lambda: weight_of("fp8_128x128", "fp8_1x128"), "codes are multiplied by those of its inputs"),
        (
            lambda: weight_of("int4_g128", "int8_rowwise", (2, 128, 128)),
            "inputs of experts must not be quantized",
        ),
    ],
)
def test_what_stays_plain(make, text, gpu):
    t = make()
    with pytest.raises(ValueError, match=text):
        t.to_layout(LAYOUT)
    assert rule.for_products(t) is t


def test_given_scales_are_not_taken(gpu):
    """Static scales of inputs: the weight stays plain, and the kernel says why."""
    t = weight_of("int4_g128", "int8_rowwise")
    one = torch.ones(())
    given = t.remade({**t.parts, "input_scale": one})
    assert rule.for_products(given) is given
    assert "scales of its inputs must not be given" in str(rule.unsupported_reason(given))
    w = on_gpu(t.to_layout(LAYOUT).transposed(), input_scales=one)
    assert fused.weight_reason(w, BF16) == "scales of its inputs must not be given"


def test_recipes_change_the_layout():
    t = quantized(torch.randn(256, 384).to(BF16), "int4_g128").to_layout(LAYOUT)
    assert t.with_recipe(activation=SCHEMES["int8_rowwise"]).meta.layout == LAYOUT
    rows = quantized(torch.randn(256, 384).to(BF16), "fp8_rowwise").to_layout(LAYOUT)
    assert t.with_recipe(activation=SCHEMES["fp8_1x128"]).meta.layout == LAYOUT
    assert rows.with_recipe(activation=SCHEMES["fp8_rowwise"]).meta.layout == "plain"
    experts = quantized(torch.randn(2, 128, 128).to(BF16), "int4_g128").to_layout(LAYOUT)
    asked = experts.with_recipe(activation=SCHEMES["int8_rowwise"])
    assert groups_reason(on_gpu(asked.transposed()), BF16) == "its inputs must not be quantized"


def test_plain_weights_are_told_why():
    w = on_gpu(weight_of("int4_g128", "int8_rowwise").transposed())
    w.recipe = replace(w.recipe, kernel="fused")
    assert "but those of preshuffled matrices" in str(fused.weight_reason(w, BF16))
    assert PRODUCTS["fused"].unsupported_reason(weight_of("int4_g128", "int8_rowwise").transposed(), BF16)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_1x128", "nf4"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_inputs_that_16_bits_do_not_hold_go_through_their_scheme(name, dtype, monkeypatch):
    """They are rounded in their own dtype, and the weight is multiplied as it is stored; gradients go straight through."""
    t = weight_of("int4_g128", name).to_layout(LAYOUT)
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    wanted = linear_small(ao_lab.fake_quantize(x, name), t.stored)
    monkeypatch.setattr(ao_lab.QuantizedTensor, "dequantize", None)
    made = fused.fused(x, t.transposed(), None)
    assert torch.equal(made, wanted)
    g = torch.ones_like(made)
    assert torch.equal(torch.autograd.grad(made, x, g)[0], torch.autograd.grad(wanted, x, g)[0])


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_programs_that_are_traced_have_the_operator(rows, monkeypatch):
    """Of tensors that only say where they would be: one operator, whatever the number of rows."""
    set_capability(monkeypatch, (9, 0))
    seen, run = [], fused.linear_small_dynamic
    monkeypatch.setattr(fused, "linear_small_dynamic", lambda *a: seen.append(a) or run(*a))
    with FakeTensorMode(), torch.no_grad():
        dense = torch.empty(384, 256, device="cuda:0", dtype=BF16)
        recipe = Recipe(weight=SCHEMES["int4_g128"], activation=SCHEMES["fp8_rowwise"])
        t = quantized(dense, recipe).to_layout(LAYOUT)
        made = nn.functional.linear(dense.new_empty(2, rows, 256), t, dense.new_empty(384))
    assert (made.shape, made.dtype, made.device.type) == ((2, rows, 384), BF16, "cuda")
    assert [one[1] for one in seen] == [SCHEMES["fp8_rowwise"]]
