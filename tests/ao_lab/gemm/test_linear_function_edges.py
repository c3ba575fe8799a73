"""F.linear outside of the dispatcher gives what the dispatcher gives; what is kept with a weight never grows stale."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from ao_lab import (
    Float8DynamicActivationFloat8WeightConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    NVFP4WeightOnlyConfig,
    quantize_,
    quantized,
)
from tests.support.runs import forks

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
        wanted = quantized(values, config.recipe())
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
