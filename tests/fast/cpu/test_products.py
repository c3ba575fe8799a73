"""Products that a CPU prepares with a layer's weight: the bits of the ordinary call, whatever happens to weight and inputs."""

import importlib
import weakref
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

import ao_lab
import fast
from ao_lab.tensor import matmul_ops
from fast.cpu import prepared_dequantize, products
from fast.cpu import quantize as rounding
from fast.cpu.linear import linear_of_rows
from fast.matmul.weights import parts
from reference import Scales

cpu_ops = importlib.import_module("fast.matmul.cpu_ops")  # `fast.matmul` is a function too

CONFIGS = {
    "int8": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "int8, zero points": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(
        activation_scheme="int8_rowwise_asymmetric"
    ),
    "int8 of transformers": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig().for_layout(
        "compressed-tensors"
    ),
    "int8, static": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(activation_scheme="int8_tensorwise"),
    "fp8": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(),
    "nvfp4": lambda: ao_lab.NVFP4DynamicActivationNVFP4WeightConfig(),
    "int4 alone": lambda: ao_lab.Int4WeightOnlyConfig(group_size=32),
    "int4 alone, zero points": lambda: ao_lab.Int4WeightOnlyConfig(scheme="int4_g32_asymmetric"),
    "fp8 of transformers": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig().for_layout(
        "compressed-tensors"
    ),
    "int4 alone, values": lambda: ao_lab.SchemeConfig(scheme="torchao.int4_g32_tinygemm"),
    "nvfp4 alone": lambda: ao_lab.NVFP4WeightOnlyConfig(),
    "nf4 alone": lambda: ao_lab.NF4WeightOnlyConfig(),
}


#: Those whose inputs are rounded to values, of which the loop writes no float16.
ROUNDED = ("fp8", "nvfp4", "fp8 of transformers", "int8 of transformers")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(rounding, "SOON", 0)
    monkeypatch.setattr(prepared_dequantize, "SOON", 0)


def layer(name, bias=True, dtype=torch.bfloat16):
    torch.manual_seed(5)
    made = torch.nn.Sequential(torch.nn.Linear(128, 160, bias=bias, dtype=dtype)).requires_grad_(False)
    ao_lab.quantize_(made, CONFIGS[name]())
    if name == "int8, static":
        scales = Scales(torch.tensor(0.05), None, None)
        weight = ao_lab.quantized(made[0].weight.dequantize(), made[0].weight.recipe, input_scales=scales)
        made[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    return made


def inputs(*shape, dtype=torch.bfloat16, seed=1):
    return torch.randn(*shape, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ordinary(made, x):
    """What a layer gives that has no program yet."""
    with torch.no_grad():
        return deepcopy(made)(x)


def program(made):
    """What the layer's weight keeps, the last one."""
    return [*made[0].weight.__dict__["_settled"][matmul_ops.PROGRAMS].programs.values()][-1]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_are_those_of_the_ordinary_call(name, bias, dtype, monkeypatch):
    made = layer(name, bias, dtype)
    calls = []
    for kind in ("dequantized", "fused", "integers"):
        function = getattr(products, kind)
        monkeypatch.setattr(products, kind, lambda *a, f=function: calls.append(f) or f(*a))
    for shape in ((1,), (1, 1), (2, 3)):
        x = inputs(*shape, dtype=dtype)
        want = made(x)
        got = made(inputs(*shape, dtype=dtype))
        assert len(calls) == (0 if dtype == torch.float16 and name in ROUNDED else 1)
        assert got.shape == want.shape
        assert torch.equal(got, want)
        other = inputs(*shape, dtype=dtype, seed=2) * 30
        assert torch.equal(made(other), ordinary(made, other))
        calls.clear()


@torch.no_grad()
@pytest.mark.parametrize("name", ["int8", "int8, static", "int8 of transformers", "fp8"])
def test_what_the_loop_is_not_for_goes_the_ordinary_way(name):
    made = layer(name)
    x = inputs(1)
    made(x)
    assert program(made) is not None
    x[0, 3] = float("nan")
    assert made(x).isnan().all()
    assert program(made).launch(program(made), x, None) is None


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("int4 alone, zero points", "zero"),
        ("int4 alone, values", "zero"),
        ("nvfp4 alone", "outer"),
        ("nf4 alone", "outer"),
    ],
)
def test_parts_beside_the_scales_are_read_in_every_call(name, part):
    made, x = layer(name), inputs(1)
    before = made(x)
    values = getattr(made[0].weight, part)
    values.copy_(values.flip(0) if part == "zero" else values * 2)
    changed = made(x)
    assert torch.equal(changed, ordinary(made, x))
    assert not torch.equal(changed, before)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["int8", "int8 of transformers", "fp8", "int4 alone, zero points"])
def test_a_weight_that_changes_is_read_anew(name, rows):
    made, x = layer(name), inputs(rows)
    before = made(x)
    weight = made[0].weight
    weight.scale.mul_(0.5)
    changed = made(x)
    assert torch.equal(changed, ordinary(made, x))
    assert not torch.equal(changed, before)
    weight.codes.data = weight.codes.flip(0)
    assert torch.equal(made(x), ordinary(made, x))
    ao_lab_again = ao_lab.quantized(torch.randn(160, 128, dtype=torch.bfloat16), weight.recipe)
    made[0].weight.data = ao_lab_again
    assert torch.equal(made(x), ordinary(made, x))


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4 alone", "int8 of transformers"])
def test_results_may_be_changed_in_place_with_a_gradient(name, rows):
    """As adapters add to a frozen layer's output: a view that was made without one is refused."""
    made, added = layer(name, dtype=torch.float32), torch.ones(160, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            y = made(inputs(rows, dtype=torch.float32))
        y.add_(added).sum().backward()


# The operator, which programs call with the parts of a weight: what it keeps lives as long as the codes.


def of_parts(x, w, bias=None):
    return torch.ops.ao_lab.cpu_linear(x, *parts(w), bias, list(w.shape), w.scheme.key, w.packed)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g32_asymmetric", "nvfp4", "fp8_rowwise"])
def test_the_operators_bits_are_those_of_the_ordinary_call(scheme, rows, monkeypatch):
    """Of the first call and of later ones, of other inputs, dtypes and biases, and of codes and scales that were changed."""
    w, other = (fast.quantize(inputs(160, dtype=torch.float32, seed=seed), scheme) for seed in (1, 2))
    prepared = []
    monkeypatch.setattr(cpu_ops, "_prepared", lambda *a, f=cpu_ops._prepared: prepared.append(a) or f(*a))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for bias in (None, inputs(2, dtype=dtype).flatten()[:160]):
            for seed in range(4):
                x = inputs(rows, dtype=dtype, seed=seed)
                assert torch.equal(of_parts(x, w, bias), linear_of_rows(x, w, bias))
    assert len(prepared) == 6
    for name in ("codes", "scale", "outer", "zero"):
        if getattr(w, name) is not None:
            getattr(w, name).copy_(getattr(other, name))
    assert torch.equal(of_parts(x, w), linear_of_rows(x, other))
    w.codes.set_(fast.quantize(inputs(160, dtype=torch.float32), scheme).codes.clone())
    assert torch.equal(of_parts(x, w), linear_of_rows(x, w))


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
def test_what_an_operator_keeps_goes_with_the_codes(rows):
    """Their memory too, without a look for garbage."""
    w, x = fast.quantize(inputs(160, dtype=torch.float32), "int8_rowwise"), inputs(rows)
    memory = w.codes.numpy().copy()
    w, gone = replace(w, codes=torch.from_numpy(memory)), weakref.ref(memory)
    del memory
    for _ in range(3):
        of_parts(x, w)
    assert w.codes in cpu_ops._KEPT
    kept = len(cpu_ops._KEPT)
    del w
    assert len(cpu_ops._KEPT) == kept - 1
    assert gone() is None


@torch.no_grad()
def test_the_operator_refuses_in_every_call():
    w, x = fast.quantize(inputs(160, dtype=torch.float32), "int8_rowwise"), inputs(3)
    for _ in range(3):
        of_parts(x, w)
        with pytest.raises(ValueError, match=r"bias of shape \(159,\) for 160 outputs"):
            of_parts(x, w, torch.zeros(159))
        with pytest.raises(ValueError, match="the last axes must be the same"):
            of_parts(x[:, 1:], w)
