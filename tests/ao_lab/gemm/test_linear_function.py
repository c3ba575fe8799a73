"""F.linear of a `QuantizedTensor` past the dispatcher: when it goes straight, the same bits, nothing stale.

F.linear outside of the dispatcher gives what the dispatcher gives; what is kept with a weight never grows stale.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn import Parameter, functional
from torch.utils._python_dispatch import TorchDispatchMode

from ao_lab import (
    Float8DynamicActivationFloat8WeightConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    NVFP4WeightOnlyConfig,
    QuantizedTensor,
    Recipe,
    quantize_,
    quantized,
)
from ao_lab.tensor.op_registry import EAGER_FUNCTIONS
from reference import SCHEMES
from tests.support.quantized_weights import same, weight
from tests.support.runs import forks

# torch's rules for tangents are made when they are first asked for, by what it has deprecated.
FORWARD = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
RECIPES = {
    "weights alone": Recipe(weight=SCHEMES["int4_g32_asymmetric"]),
    "int8": Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"]),
    "float8": Recipe(weight=SCHEMES["fp8_rowwise"], activation=SCHEMES["fp8_rowwise"]),
    "emulated": Recipe(weight=SCHEMES["mxfp4"], activation=SCHEMES["mxfp8_e4m3"]),
    "reference": Recipe(weight=SCHEMES["nvfp4"], kernel="reference"),
}


@pytest.fixture
def straight(monkeypatch):
    """Whether each call of F.linear was computed without the dispatcher."""
    seen, original = [], EAGER_FUNCTIONS[functional.linear]

    def noted(*args, **kwargs):
        made = original(*args, **kwargs)
        seen.append(made is not None)
        return made

    monkeypatch.setitem(EAGER_FUNCTIONS, functional.linear, noted)
    return seen


def ordinary(x, w, bias=None):
    """The same through the dispatcher."""
    with torch.enable_grad():
        return functional.linear(x, w, bias).detach()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("shape", [(256,), (5, 256), (1, 256), (2, 3, 256), (0, 256)])
def test_same_bits(straight, recipe, wrapped, shape):
    t = quantized(weight(48, 256), RECIPES[recipe])
    t = Parameter(t, requires_grad=False) if wrapped else t
    for dtype in (torch.float32, torch.bfloat16):
        x = weight(*shape, seed=1, dtype=dtype)
        for bias in (None, weight(48, seed=2, dtype=dtype), Parameter(weight(48, seed=3, dtype=dtype))):
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    made = functional.linear(x, t, bias=bias)
                assert same(made, ordinary(x, t, bias))
                assert not made.requires_grad
    assert straight == [not wrapped or type(t) is QuantizedTensor] * len(straight)
    assert len(straight) == 12


def test_gradients_are_asked_for_at_the_dispatcher(straight):
    t, x = quantized(weight(48, 256), "int8_rowwise"), weight(5, 256, seed=1).requires_grad_()
    functional.linear(x, t).sum().backward()
    assert same(x.grad, x.new_ones(5, 48) @ t.dequantize())
    assert straight == []


class Operations(TorchDispatchMode):
    """The operations that reach a mode."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@FORWARD
@torch.no_grad()
def test_modes_transforms_autocast_and_tangents_see_the_operation(straight):
    t, x = quantized(weight(48, 256), RECIPES["int8"]), weight(5, 256, seed=1)
    with Operations() as mode:
        functional.linear(x, t)
    assert any("mm" in str(func) or "linear" in str(func) for func in mode.seen)
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.linear(x, t).dtype == torch.bfloat16
    alone = quantized(weight(48, 256), "int8_rowwise")
    assert torch.vmap(lambda row: functional.linear(row, alone))(x).allclose(
        functional.linear(x, alone), atol=1e-4
    )
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(functional.linear(forward_ad.make_dual(x, torch.ones_like(x)), t))
        assert made.tangent.allclose(t.dequantize().sum(1).expand(5, 48), atol=1e-3)
    # The last is the tangent's own product.
    assert straight == [False, False, False, True, False, False]


@FORWARD
def test_gradient_transforms():
    alone, x = quantized(weight(48, 256), "int8_rowwise"), weight(256, seed=1)
    made = torch.func.grad(lambda v: functional.linear(v, alone).sum())(x)
    assert made.allclose(alone.dequantize().sum(0), atol=1e-4)
    with torch.no_grad():
        made = torch.func.jvp(lambda v: functional.linear(v, alone), (x,), (torch.ones_like(x),))[1]
    assert made.allclose(alone.dequantize().sum(1), atol=1e-3)


@torch.no_grad()
def test_what_is_left_to_the_dispatcher(straight):
    """Other subclasses, tensors of no memory, and its errors."""
    t, x = quantized(weight(48, 256), "int8_rowwise"), weight(5, 256, seed=1)
    assert functional.linear(x.to("meta"), t.to("meta")).shape == (5, 48)
    functional.linear(quantized(x, "int8_rowwise"), t)
    with pytest.raises(RuntimeError, match="at least 1D"):
        functional.linear(torch.tensor(1.0), t)
    assert straight == [False, False, False]
    with pytest.raises(ValueError, match="the last axes must be the same"):
        functional.linear(x[:, 1:], t)


@torch.no_grad()
def test_compiled_as_one_graph():
    for recipe in ("weights alone", "int8", "emulated"):
        t, x = quantized(weight(48, 256), RECIPES[recipe]), weight(5, 256, seed=1)
        compiled = torch.compile(lambda x, t=t: functional.linear(x, t), fullgraph=True, backend="aot_eager")
        assert same(compiled(x), functional.linear(x, t))
        assert same(compiled(x), functional.linear(x, t))


def used(seed=0):
    """A layer that has computed, for two dtypes."""
    layer = torch.nn.Linear(256, 48, bias=False)
    layer.weight = Parameter(quantized(weight(48, 256, seed=seed), "int4_g32"), requires_grad=False)
    with torch.no_grad():
        layer(weight(5, 256)), layer(weight(5, 256, dtype=torch.bfloat16))
    return layer


def is_current(layer, dense):
    """The layer computes with this weight, straight as through the dispatcher."""
    x = weight(5, 256, seed=9, dtype=dense.dtype)
    wanted = ordinary(x, quantized(dense, "int4_g32"))
    with torch.no_grad():
        assert same(layer(x), wanted)
    assert same(layer(x).detach(), wanted)


def test_other_numbers_are_seen():
    """In place, by a state, and by tensors that change places."""
    other = weight(48, 256, seed=4)
    layer = used()
    with torch.no_grad():
        layer.weight.copy_(other)
    is_current(layer, other)
    layer = used()
    layer.load_state_dict(used(seed=4).state_dict())
    is_current(layer, other)
    layer = used()
    layer.load_state_dict(used(seed=4).state_dict(), assign=True)
    is_current(layer, other)
    layer, second = used(), used(seed=4)
    torch.utils.swap_tensors(layer.weight, second.weight)
    is_current(layer, other)
    is_current(second, weight(48, 256))
    layer.weight = second.weight
    is_current(layer, weight(48, 256))


def test_another_dtype_and_device_are_seen():
    assert set(vars(used().weight)["_settled"]) == {torch.float32, torch.bfloat16, "programs"}
    layer = used().to(torch.bfloat16)
    x = weight(5, 256, dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert same(layer(x), ordinary(x, layer.weight))
        assert used().to("meta")(x.to("meta")).is_meta


def test_copies_and_files_hold_the_parts_once():
    """A copy's cache is of the copy's parts; a file has none."""
    layer = used()
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.copy_(weight(48, 256, seed=4))
    is_current(twin, weight(48, 256))
    with torch.no_grad():
        twin.weight.copy_(weight(48, 256, seed=5))
    is_current(twin, weight(48, 256, seed=5))
    is_current(layer, weight(48, 256, seed=4))
    fresh = torch.nn.Linear(256, 48, bias=False)
    fresh.weight = Parameter(quantized(weight(48, 256), "int4_g32"), requires_grad=False)
    sizes = []
    for one in (fresh, used()):
        file = io.BytesIO()
        torch.save(one.weight, file)
        sizes.append(file.tell())
        file.seek(0)
        assert same(torch.load(file, weights_only=True).dequantize(), fresh.weight.dequantize())
    assert sizes[0] == sizes[1]


def test_results_of_one_recipe_do_not_leak_into_another():
    t, x = quantized(weight(48, 256), "int8_rowwise"), weight(5, 256, seed=1)
    with torch.no_grad():
        first = functional.linear(x, t)
        other = functional.linear(x, t.with_recipe(activation=SCHEMES["int8_rowwise"]))
        transposed = functional.linear(weight(5, 48), t.t())
    assert not same(first, other)
    assert same(transposed, ordinary(weight(5, 48), t.t()))


CONFIGS = [
    Int8WeightOnlyConfig(),
    Int4WeightOnlyConfig(group_size=32),
    Int8DynamicActivationInt8WeightConfig(),
    Float8DynamicActivationFloat8WeightConfig(),
]
every_config = pytest.mark.parametrize("config", CONFIGS)
X = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))


def layer(config, inputs=128, outputs=64, device=None):
    torch.manual_seed(0)
    with torch.device(device or "cpu"):
        made = nn.Linear(inputs, outputs)
    quantize_(made, config)
    return made


@every_config
def test_the_meta_device(config):
    made = layer(config, device="meta")
    with torch.no_grad():
        assert made(X.to("meta")).shape == (4, 64)


@every_config
def test_names_of_arguments(config):
    made = layer(config)
    with torch.no_grad():
        assert torch.equal(F.linear(input=X, weight=made.weight, bias=made.bias), made(X))


@every_config
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_lengths_of_zero(config):
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert layer(config)(X[:0]).shape == (0, 64)
            assert layer(config)(torch.zeros(2, 0, 128)).shape == (2, 0, 64)
            assert layer(config, outputs=0)(X).shape == (4, 0)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_inputs_of_length_zero():
    made = layer(Int8WeightOnlyConfig(), inputs=0)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert torch.equal(made(torch.zeros(2, 3, 0)), made.bias.expand(2, 3, 64))


@every_config
def test_wrong_inputs_are_torchs_errors(config):
    made = layer(config)
    for wrong in (torch.tensor(1.0), X[:, :64], X[0, :64], X.half(), X.to(torch.int64), X.to("meta")):
        errors = []
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                try:
                    made(wrong)
                except (RuntimeError, ValueError, TypeError) as error:
                    errors.append(str(error))
                else:
                    errors.append("")
        assert errors[0] == errors[1]


@every_config
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_without_gradients(config):
    made, direction = layer(config), torch.ones_like(X)
    tangents = []
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), forward_ad.dual_level():
            tangents.append(forward_ad.unpack_dual(made(forward_ad.make_dual(X, direction))).tangent)
    assert torch.equal(*tangents)
    assert torch.allclose(tangents[0], direction @ made.weight.dequantize().t(), atol=1e-4)


@every_config
def test_data_is_replaced(config):
    made, other = layer(config), quantized(torch.randn(64, 128), config.recipe())
    with torch.no_grad():
        made(X)
        made.weight.data = other
        assert torch.equal(made.weight, other)
        assert torch.equal(made(X), F.linear(X, other, made.bias))
        made.weight.data = made.weight.data.to(torch.bfloat16)
        assert made.weight.dtype == made.weight.dequantize().dtype == torch.bfloat16
        made.weight.data = dense = torch.randn(64, 128)
        assert torch.equal(made(X), F.linear(X, quantized(dense, config.recipe()), made.bias))


def test_tiled_scales_are_read_anew():
    config = NVFP4WeightOnlyConfig()
    made, values = layer(config, outputs=128), torch.randn(128, 128)
    tiled = made.weight.detach().to_layout("tiled")
    with torch.no_grad():
        F.linear(X, tiled)
        tiled.copy_(values)
        wanted = quantized(values, config.recipe()).to_layout("tiled")
        assert torch.equal(tiled.dequantize(), wanted.dequantize())
        assert torch.equal(F.linear(X, tiled), F.linear(X, wanted))


def test_memory_that_processes_share():
    """In a process of its own: what torch does with a tensor without memory ends it."""
    code = (
        "import torch, ao_lab; m = torch.nn.Linear(128, 64); ao_lab.quantize_(m, ao_lab.Int4WeightOnlyConfig()); "
        "assert not m.weight.is_shared(); m.share_memory(); assert m.weight.is_shared() and m.weight.codes.is_shared(); "
        "m(torch.ones(1, 128))"
    )
    assert forks.python("-c", code, timeout=120).returncode == 0
