"""A weight is guarded by its form alone: another form is seen, in place or not; another weight compiles nothing anew."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

import ao_lab
from ao_lab import QuantizedTensor, quantize_, quantized
from ao_lab.config.recipe import Recipe
from ao_lab.tensor import weight_guards
from ao_lab.tensor.weight_guards import GUARDED, form_of
from reference import Scales
from reference.schemes.schemes import scheme_of

pytestmark = pytest.mark.usefixtures("few_objects")

X = torch.linspace(-2, 2, 3 * 128).reshape(3, 128)


@pytest.fixture(autouse=True, params=["guards", "dict_tags", "leaves"])
def how(request, monkeypatch):
    """How torch looks at modules: by all guards; not at all while dicts do not change; so, and weights are leaves (2.11)."""
    torch.compiler.reset()
    if request.param == "leaves":
        monkeypatch.setattr(weight_guards, "may_be_leaf", lambda: True)
    with config.patch(use_recursive_dict_tags_for_guards=request.param != "guards"), torch.no_grad():
        yield request.param


def network(scheme="int4_g32"):
    net = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)).requires_grad_(
        False
    )
    for at, layer in enumerate(net):
        layer.weight = parameter(scheme, at)
    return net


def parameter(scheme, seed=0, shape=(128, 128), **options):
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    recipe = scheme if isinstance(scheme, Recipe) else Recipe(weight=scheme_of(scheme))
    return nn.Parameter(quantized(dense, recipe, **options), requires_grad=False)


class Compiled:
    """A network's compiled call, and how often it was compiled. The backend keeps no program: weights can be swapped."""

    def __init__(self, net):
        def step(x):
            return net(x)

        self.net, self.before = net, counters["stats"]["unique_graphs"]
        self.code, self.call = (
            step.__code__,
            torch.compile(step, backend="eager", fullgraph=True, dynamic=False),
        )

    def agrees(self, x=X):
        """Three times, since dict tags are noted in the first call and relied on in the next."""
        for _ in range(3):
            torch.testing.assert_close(self.call(x), self.net(x), rtol=0, atol=0)
        return counters["stats"]["unique_graphs"] - self.before


def guard_lines(step):
    [entry] = _debug_get_cache_entry_list(step.code)
    return [line for line in str(entry.guard_manager).splitlines() if "_parameters['weight']" in line]


def test_parts_have_no_guards(how):
    step = Compiled(network())
    assert step.agrees() == 1
    lines = guard_lines(step)
    assert sum("LAMBDA_GUARD" in line for line in lines) == 2
    assert not [line for line in lines if ".codes" in line or ".scale" in line or ".zero" in line]
    assert any("__tensor_flatten__" in line for line in lines) == (
        how == "dict_tags" and torch.__version__ >= "2.12"
    )
    leaves = how == "leaves" or (how == "dict_tags" and torch.__version__ < "2.12")
    assert sum("tag_safe=(True, False)" in line for line in lines) == (2 if leaves else 0)


def test_another_weight_of_the_form_is_another_weight():
    step = Compiled(network())
    step.agrees()
    step.net[0].weight = parameter("int4_g32", 7)
    step.net[1].weight.data = parameter("int4_g32", 8)
    step.net[1].weight.copy_(torch.randn(128, 128))
    assert step.agrees() == 1
    for scheme, programs in (("int4_g32", 1), ("int8_rowwise", 2), ("nvfp4", 3)):
        step.net.load_state_dict({"1.weight": parameter(scheme, 5)}, strict=False, assign=True)
        assert step.agrees() == programs


def strided(weight):
    """The same weight with its codes in memory by columns."""
    parts = {**weight.parts, "codes": weight.codes.t().contiguous().t()}
    return nn.Parameter(weight.remade(parts), requires_grad=False)


def in_layout(weight, name):
    return nn.Parameter(weight.to_layout(name), requires_grad=False)


STATIC = Recipe(weight=scheme_of("int8_rowwise"), activation=scheme_of("int8_tensorwise"))
DYNAMIC = Recipe(weight=scheme_of("int4_g32"), activation=scheme_of("int8_rowwise"))
OTHERS = {
    "scheme": lambda: parameter("int8_rowwise", 3),
    "blocks": lambda: parameter("int4_g64", 3),
    "zero points": lambda: parameter("int4_g32_asymmetric", 3),
    "shape": lambda: parameter("int4_g32", 3, (48, 128)),
    "strides": lambda: strided(parameter("int4_g32", 3)),
    "dtype": lambda: nn.Parameter(
        quantized(torch.randn(128, 128).bfloat16(), "int4_g32"), requires_grad=False
    ),
    "activation": lambda: parameter(DYNAMIC, 3),
    "layout": lambda: in_layout(parameter("mxfp8_e4m3", 3), "tiled"),
    "preshuffled": lambda: in_layout(parameter("int4_g32", 3), "preshuffled"),
    "dense": lambda: nn.Parameter(torch.randn(128, 128), requires_grad=False),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_weight_of_another_form_is_seen(other):
    step = Compiled(network())
    step.agrees()
    step.net[1].weight = OTHERS[other]()
    assert step.agrees() == 2
    step.net[1].weight = parameter("int4_g32", 5)
    assert step.agrees() == 2


@pytest.mark.parametrize(
    "other", ["scheme", "blocks", "zero points", "shape", "strides", "activation", "preshuffled"]
)
def test_a_weight_that_becomes_another_in_place_is_seen(other):
    step = Compiled(network())
    step.agrees()
    step.net[1].weight.data = OTHERS[other]().data
    assert step.agrees() == 2


def test_a_weight_that_is_swapped_is_seen(how):
    step = Compiled(network())
    step.agrees()
    if how == "leaves" and torch.__version__ >= "2.12":
        with pytest.raises(RuntimeError, match="swap"):  # why weights are no leaves there
            step.net.bfloat16()
        return
    torch.utils.swap_tensors(step.net[1].weight, parameter("int8_rowwise", 9))
    assert step.agrees() == 2


def test_a_model_that_is_converted_in_place_is_seen(how):
    if how == "leaves" and torch.__version__ >= "2.12":
        pytest.skip("swap_tensors refuses")
    step = Compiled(network())
    step.agrees()
    step.net.to(torch.float32)  # as it was: exchanged, and the same
    assert step.agrees() == 1
    step.net.bfloat16()
    assert step.agrees(X.bfloat16()) == 2
    step.net.float()
    assert step.agrees() == 2


def test_static_scales_of_inputs_are_parts():
    step = Compiled(network(scheme="int8_rowwise"))
    step.net[0].weight = parameter(STATIC, 1, input_scales=Scales(torch.tensor(0.02)))
    step.agrees()
    step.net[0].weight = parameter(STATIC, 1)
    assert step.agrees() == 2


def test_weights_that_are_no_modules_are_guarded_as_torch_does():
    programs = []

    def backend(program, inputs):
        programs.append(program)
        return program.forward

    def step(x, w):
        return nn.functional.linear(x, w)

    call = torch.compile(step, backend=backend, dynamic=False)
    for at, scheme in enumerate(("int4_g32", "int8_rowwise", "int4_g64")):
        w = parameter(scheme).data
        for _ in range(2):
            torch.testing.assert_close(call(X, w), step(X, w), rtol=0, atol=0)
        assert len(programs) == at + 1
    entries = _debug_get_cache_entry_list(step.__code__)
    assert all("L['w'].codes" in str(entry.guard_manager) for entry in entries)


def test_open_sizes_are_guarded_as_torch_does(monkeypatch):
    monkeypatch.setattr(weight_guards, "_are_known", lambda *_: False)
    step = Compiled(network())
    assert step.agrees() == 1
    assert any("_parameters['weight'].codes" in line for line in guard_lines(step))


def test_forms_are_one_object_each_and_not_copied():
    one, other = parameter("int4_g32", 1), parameter("int4_g32", 2)
    assert form_of(one) is form_of(other)
    assert form_of(one) is not form_of(parameter("int4_g64", 1))
    copied = copy.deepcopy(one)
    assert copied._form is None
    assert form_of(copied) is one._form
    with torch.inference_mode():
        inside = parameter("int4_g32", 1)
    assert form_of(inside) is not form_of(one)


def test_modules_are_let_go():
    before = len(GUARDED)
    step = Compiled(network())
    step.agrees()
    assert len(GUARDED) == before + 2
    del step
    torch.compiler.reset()
    gc.collect()
    assert len(GUARDED) <= before


def test_a_quantized_model_of_the_default_path():
    net = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)).requires_grad_(False)
    quantize_(net, ao_lab.Int8DynamicActivationInt8WeightConfig())
    step = Compiled(net)
    assert step.agrees() == 1
    assert all(
        isinstance(net[at].weight, QuantizedTensor) and net[at].weight._form is not None for at in (0, 2)
    )


def test_guards_of_an_untested_torch_stay_as_they_are(monkeypatch):
    """A guard too few lets a program run that was compiled for another weight."""
    made = torch._guards.Guard.create
    monkeypatch.setattr(torch, "__version__", "2.9.0+cu128")
    weight_guards.guard_by_form(ao_lab.QuantizedTensor)
    assert torch._guards.Guard.create is made
