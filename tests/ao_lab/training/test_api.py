"""Conversion of models: in place, all or nothing, listed; checkpoints load both ways."""

import copy
import io

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.training.layers import LowPrecisionLinear
from reference.training import RECIPES


def model(dtype=torch.bfloat16, outputs=128):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, outputs, bias=False)).to(dtype)


def test_the_module_its_parameters_and_hooks_stay():
    net = model()
    first, weight, seen = net[0], net[0].weight, []
    first.register_forward_hook(lambda *_: seen.append(1))
    names = list(net.state_dict())
    report = ao_lab.convert_for_training_(net, "rowwise")
    assert report.changed == ("0", "2")
    assert net[0] is first
    assert net[0].weight is weight
    assert list(net.state_dict()) == names
    net(torch.randn(5, 128).bfloat16())
    assert seen == [1]
    assert "recipe=rowwise" in repr(net)


@pytest.mark.parametrize("name", RECIPES)
def test_checkpoints_load_both_ways(name):
    trained, plain = model(), model()
    ao_lab.convert_for_training_(trained, name)
    nn.init.normal_(trained[0].weight)
    stored = io.BytesIO()
    torch.save(trained.state_dict(), stored)
    stored.seek(0)
    plain.load_state_dict(torch.load(stored, weights_only=True))
    assert torch.equal(plain[0].weight, trained[0].weight)
    trained.load_state_dict(model().state_dict())


def test_training_learns():
    """Forty steps of every recipe: the loss falls to a tenth, as bfloat16's does."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 128, generator=generator).bfloat16()
    y = torch.randint(16, (64,), generator=generator)
    for name in RECIPES:
        net = model(outputs=16)
        ao_lab.convert_for_training_(net, name, pad=True)
        optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
        losses = []
        for _ in range(40):
            loss = nn.functional.cross_entropy(net(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 10, name


def test_layers_that_a_recipe_cannot_take_are_listed():
    net = model(outputs=10)
    report = ao_lab.convert_for_training_(net, "rowwise")
    assert report.changed == ("0",)
    assert "out_features = 10 is no multiple of 16" in report.left["2"]
    assert "1 of 2 layers train by rowwise" in str(report)
    assert type(net[2]) is nn.Linear


def test_padding_takes_them():
    """Columns of zeros change nothing: the same outputs as of a layer that has them."""
    net = model(outputs=10)
    wide = copy.deepcopy(net)
    wide[2] = nn.Linear(256, 16, bias=False).bfloat16()
    with torch.no_grad():
        wide[2].weight.zero_()[:10] = net[2].weight
    x = torch.randn(7, 128).bfloat16()
    for one in (net, wide):
        ao_lab.convert_for_training_(one, "rowwise", pad=True)
    assert torch.equal(net(x), wide(x)[:, :10])


@pytest.mark.parametrize("rows", [1, 7, 31, 33])
def test_any_number_of_rows(rows):
    net = model()
    ao_lab.convert_for_training_(net, "mxfp8")
    x = torch.randn(rows, 128).bfloat16().requires_grad_()
    y = net(x)
    y.float().square().sum().backward()
    assert y.shape == (rows, 128)
    assert x.grad.shape == x.shape
    assert x.grad.isfinite().all()


def test_no_rows():
    net = model()
    ao_lab.convert_for_training_(net, "rowwise")
    assert net(torch.empty(0, 128).bfloat16()).shape == (0, 128)


def test_wrong_calls_change_nothing():
    net = model(outputs=10)
    with pytest.raises(ValueError, match="unknown recipe 'rowise'"):
        ao_lab.convert_for_training_(net, "rowise")
    with pytest.raises(ValueError, match="filter_fn refused all"):
        ao_lab.convert_for_training_(net, "rowwise", lambda module, name: False)
    with pytest.raises(ValueError, match="takes none of 2: 2: out_features = 10"):
        ao_lab.convert_for_training_(net, "rowwise", lambda module, name: name == "2")
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ao_lab.convert_for_training_("net", "rowwise")
    assert not any(isinstance(module, LowPrecisionLinear) for module in net.modules())


def test_a_second_conversion_says_what_is_there():
    net = model()
    ao_lab.convert_for_training_(net, "rowwise")
    with pytest.raises(
        ValueError, match=r"trains by recipe .rowwise. already; ao_lab.convert_from_training_"
    ):
        ao_lab.convert_for_training_(net, "mxfp8")
    assert ao_lab.convert_from_training_(net) == ("0", "2")
    ao_lab.convert_for_training_(net, "mxfp8")


def test_tied_layers_are_converted_once():
    net = model()
    net.append(net[2])
    assert ao_lab.convert_for_training_(net, "rowwise").changed == ("0", "2", "3")
    assert ao_lab.convert_from_training_(net) == ("0", "2", "3")


def test_inputs_of_another_dtype_and_autocast():
    net = model(torch.float32)
    ao_lab.convert_for_training_(net, "rowwise")
    x = torch.randn(4, 128)
    with pytest.raises(TypeError, match=r"inputs are torch.bfloat16.*autocast"):
        net(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).dtype == torch.bfloat16


def test_explain_and_deepcopy():
    net = model()
    ao_lab.convert_for_training_(net, "rowwise")
    assert "trains by recipe 'rowwise'" in str(ao_lab.explain(net))
    again = copy.deepcopy(net)
    x = torch.randn(4, 128).bfloat16()
    assert torch.equal(again(x), net(x))
    with pytest.raises(ValueError, match="convert_from_training_"):
        ao_lab.quantize_(net, ao_lab.Int8WeightOnlyConfig())


# torch's tracer makes an instance of the function, of which torch itself warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["rowwise", "tensorwise", "mxfp8"])
def test_compiled_in_one_graph(name):
    net = model()
    ao_lab.convert_for_training_(net, name)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    grads = []
    for step in (net, compiled):
        net.zero_grad()
        step(torch.ones(16, 128).bfloat16()).float().sum().backward()
        grads.append(net[0].weight.grad.clone())
    assert torch.equal(*grads)
