"""Guards that are left out: what is exchanged in a compiled model is still seen; what a description settles is not compared."""

import copy
import json

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional

import ao_lab
from ao_lab.compile.generation import WithoutModules, WithoutParts, guard_options

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)


class Noted(WithoutParts):
    """Notes the guards that it leaves out."""

    left_out: list = []  # noqa: RUF012

    def __call__(self, entries):
        kept = super().__call__(entries)
        self.left_out += [entry.name for entry, keep in zip(entries, kept, strict=True) if not keep]
        return kept


def network(seed=0, width=64, config=None):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 8)).requires_grad_(False)
    ao_lab.quantize_(net, config or ao_lab.Int4WeightOnlyConfig(group_size=32))
    return net


def compiled(net, **options):
    """The compiled network, and the programs that were compiled so far."""
    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    programs = []

    def compiler(program, inputs):
        programs.append(program)
        return make_boxed_func(program.forward)

    call = torch.compile(net, backend=aot_autograd(fw_compiler=compiler), dynamic=False, options=options)
    return call, programs


def plain(net, x):
    for layer in net:
        x = functional.linear(x, layer.weight.dequantize(), layer.bias)
    return x


def agree(call, net, x):
    with torch.no_grad():
        torch.testing.assert_close(call(x), plain(net, x), rtol=1e-4, atol=1e-4)


def test_only_parts_are_left_out():
    Noted.left_out.clear()
    net, x = network(), torch.randn(3, 64)
    call, _ = compiled(net, guard_filter_fn=Noted("not empty, which torch would take for none"))
    agree(call, net, x)
    names = {name.rpartition("_parameters")[2] for name in Noted.left_out}
    assert names == {f"['weight'].{part}" for part in ("codes", "scale", "zero")}
    assert len(Noted.left_out) == 6


def test_what_is_exchanged_is_seen():
    """Other numbers without a program anew; another scheme, another shape and a dense weight with one."""
    net, x = network(), torch.randn(3, 64)
    call, programs = compiled(net, **guard_options(frozen=False))
    agree(call, net, x)
    net[0].weight = network(seed=1)[0].weight
    agree(call, net, x)
    assert len(programs) == 1
    net[0].weight = network(seed=2, config=ao_lab.Int8WeightOnlyConfig())[0].weight
    agree(call, net, x)
    assert len(programs) == 2
    net[1] = nn.Sequential(nn.Linear(64, 5), nn.Identity())[0].requires_grad_(False)
    with torch.no_grad():
        assert call(x).shape == (3, 5)
    assert len(programs) == 3


def test_static_scales_of_inputs_are_compared():
    """They are there or not, whatever the description says."""
    entries = [entry("weight", "TENSOR_SUBCLASS_METADATA_MATCH", network()[0].weight)]
    parts = ("codes", "scale", "outer", "zero", "input_scale", "input_zero")
    entries += [entry(f"weight.{part}", "TENSOR_MATCH", None) for part in parts]
    assert WithoutParts()(entries) == [True, False, False, False, False, True, True]
    # The same names in a tensor that is none of ours.
    entries[0] = entry("weight", "TENSOR_SUBCLASS_METADATA_MATCH", nn.Parameter(torch.ones(1)))
    assert all(WithoutParts()(entries))


def entry(name, kind, value):
    from types import SimpleNamespace

    return SimpleNamespace(name=name, guard_type=kind, value=value)


def test_frozen_modules_are_not_looked_at():
    net, x = network(), torch.randn(3, 64)
    call, programs = compiled(net, **guard_options(frozen=True))
    agree(call, net, x)
    net[0].weight.copy_(torch.randn(64, 64))  # the same tensors
    agree(call, net, x)
    with torch.no_grad():
        assert call(torch.randn(4, 64)).shape == (4, 8)  # inputs are looked at
    assert len(programs) == 2


@pytest.mark.parametrize("kind", [WithoutParts, WithoutModules])
def test_options_are_equal_to_their_copies(kind):
    one = guard_options(frozen=kind is WithoutModules)["guard_filter_fn"]
    assert type(one) is kind
    assert copy.deepcopy(one) == one
    assert type(copy.deepcopy(one)) is kind
    assert json.loads(json.dumps(one)) == one
    assert guard_options(frozen=False) != guard_options(frozen=True)
