"""Products that a CPU prepares with a layer's weight: the bits of the ordinary call, whatever happens to weight and inputs."""

from copy import deepcopy

import pytest
import torch

import ao_lab
from ao_lab.tensor import matmul_ops
from fast.cpu import prepared_dequantize, products
from fast.cpu import quantize as rounding
from reference import Scales

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
