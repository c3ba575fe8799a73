"""The quantized copy of the trained model: the bits and bytes that the specification has for every linear layer."""

import pytest
import torch
from torch import nn

import reference
from ao_lab.config.recipe import named
from experiments.data.measures import Stored, stored, stored_plain
from experiments.models.llama import LanguageModel, ModelSettings
from experiments.models.quantized_model import PLAIN, quantized_model
from tests.support.quantized_weights import same

SCHEMES = [
    "int4_g32_asymmetric",
    "int8_rowwise",
    "fp8_tensorwise",
    "fp8_128x128",
    "mxfp4",
    "nvfp4",
    "nf4",
    "int3_g64",
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LanguageModel(ModelSettings(layers=1)).requires_grad_(False)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_and_sizes_are_those_of_the_specification(model, scheme):
    found = quantized_model(model, scheme, None)
    sizes, layers = Stored(0), model.linears()
    assert list(found.model.linears()) == list(layers)
    for name, layer in found.model.linears().items():
        q = reference.quantize(layers[name].weight.detach(), named(scheme))
        assert same(layer.weight.detach(), reference.dequantize(q))
        assert type(layer.weight) is nn.Parameter
        sizes += stored(q)
    assert found.linears == sizes
    dense = [p for name, p in model.named_parameters() if name.removesuffix(".weight") not in layers]
    assert found.others == sum(map(stored_plain, dense), Stored(0))


@pytest.mark.parametrize("name", PLAIN)
def test_plain_formats_are_casts(model, name):
    found = quantized_model(model, name, None)
    for path, layer in found.model.linears().items():
        assert same(layer.weight.detach(), model.linears()[path].weight.detach().to(PLAIN[name]).float())


def test_inputs_are_rounded_sequence_by_sequence(model):
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))
    found = quantized_model(model, "int8_rowwise", "fp8_tensorwise")
    with torch.no_grad():
        whole = found.model(tokens)
        alone = torch.cat([found.model(sequence[None]) for sequence in tokens])
    assert torch.allclose(whole, alone, atol=1e-5)
    assert not same(whole, model(tokens))


def test_a_layer_that_cannot_be_quantized_is_an_error():
    odd = LanguageModel(ModelSettings(width=36, heads=3, kv_heads=3, layers=1))
    with pytest.raises(ValueError, match=r"cannot be quantized in|none of them can be changed"):
        quantized_model(odd, "int4_g32", None)
