"""Compiled layers with an open number of rows."""

import pytest
import torch
from torch import nn

import ao_lab
from reference.training import RECIPES

#: A block of 32 rows or several: torch itself compiles one scale along an axis apart from several.
TWO = ("mxfp8", "mxfp6")
#: The others draw random numbers, and run between compiled programs.
TRACED = tuple(name for name, recipe in RECIPES.items() if not recipe.is_stochastic)


# torch's tracer makes an instance of the function, of which torch itself warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    ["rowwise", *(pytest.param(one, marks=pytest.mark.nightly) for one in TRACED if one != "rowwise")],
)
def test_one_program_for_any_number_of_rows(name):
    """The bits of the layer that is not compiled, whether blocks divide the rows or not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64))
    ao_lab.convert_for_training_(net, name, pad=True)
    torch.compiler.reset()
    programs, aot_eager = [], torch._dynamo.lookup_backend("aot_eager")

    def counted(*given):
        programs.append(given)
        return aot_eager(*given)

    compiled = torch.compile(net, backend=counted, dynamic=True, fullgraph=True)
    for rows in (8, 33, 64, 100):
        x = torch.randn(rows, 64)
        made = []
        for step in (compiled, net):
            net.zero_grad()
            y = step(x)
            y.square().sum().backward()
            made.append((y.detach(), net[0].weight.grad.clone()))
        assert torch.equal(made[0][0], made[1][0])
        assert torch.equal(made[0][1], made[1][1])
    torch.compiler.reset()
    assert len(programs) == (2 if name in TWO else 1)


@pytest.mark.parametrize("name", RECIPES)
def test_layers_of_no_memory(name):
    """Shapes and dtypes of a training step on the meta device, as estimates of memory ask for; it has no autocast."""
    net = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    ao_lab.convert_for_training_(net, name)
    x = torch.ones(16, 128, device="meta", requires_grad=True)
    y = net.to("meta")(x)
    y.sum().backward()
    assert (y.shape, y.device.type, y.dtype) == (x.shape, "meta", x.dtype)
    assert (x.grad.shape, net[0].weight.grad.shape) == (x.shape, (128, 128))
