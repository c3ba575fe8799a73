"""The image encoder: attention in windows beside a loop over pairs of tokens, and the counts of the published models."""

import pytest
import torch
from torch import nn

import reference
from ao_lab.config.recipe import named
from experiments.data.evaluation import Stored, stored, stored_plain
from experiments.models.encoders import (
    TINY,
    VIT_H,
    VIT_L,
    SamAttention,
    SamConfig,
    SamEncoder,
    VisionConfig,
    VisionTransformer,
    is_mlp,
    patches,
    random_encoder,
    whole_of,
    windows_of,
)
from experiments.models.llama import LanguageModel, ModelSettings
from experiments.models.quantized_model import PLAIN, quantized_model
from tests.support.quantized_weights import same

# The quantized copy of the trained model: the bits and bytes that the specification has for every linear layer.

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
    with pytest.raises(ValueError, match=r"cannot be quantized in|divide no layer's inputs"):
        quantized_model(odd, "int4_g32", None)


# Patches, means over squares, and sizes that do not fit.

VISION_TRANSFORMER_TINY = VisionConfig(
    name="tiny", image=8, patch=2, width=8, layers=1, heads=2, feed_forward=16, classes=3, grid=2
)


def test_patches_are_squares_row_by_row():
    images = torch.arange(2 * 16.0).view(2, 1, 4, 4)
    found = patches(images, 2)
    assert found.shape == (2, 4, 4)
    assert found[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert torch.equal(found[1], found[0] + 16)


def test_each_prediction_is_of_the_tokens_of_its_square():
    torch.manual_seed(0)
    model = VisionTransformer(VISION_TRANSFORMER_TINY)
    # The tokens of a square, by their places in a 4 x 4 image of tokens.
    squares = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    x = torch.randn(3, 16, 8)
    expected = torch.stack([x[:, places].mean(1) for places in squares], 1)
    assert torch.allclose(model.means(x), expected, atol=1e-6)
    assert model(torch.randn(3, 1, 8, 8)).shape == (3, 4, 3)


def test_vision_transformer_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="patches of 3 pixels"):
        VisionConfig(name="x", image=8, patch=3, width=8, layers=1, heads=2, feed_forward=8, classes=2)
    with pytest.raises(ValueError, match="3 heads a width of 8"):
        VisionConfig(name="x", image=8, patch=2, width=8, layers=1, heads=3, feed_forward=8, classes=2)


def test_relative_positions_add_a_term_for_each_pair_of_tokens():
    torch.manual_seed(0)
    attention, side = SamAttention(TINY, 3).double(), 3
    x = torch.randn(1, side, side, TINY.width, dtype=torch.float64)
    head = TINY.width // TINY.heads
    q, k, v = attention.qkv(x.view(1, side**2, -1))[0].view(side**2, 3, TINY.heads, head).permute(1, 2, 0, 3)
    expected = torch.zeros(side**2, TINY.heads, head, dtype=torch.float64)
    for number in range(TINY.heads):
        for query in range(side**2):
            scores = []
            for key in range(side**2):
                down, right = query // side - key // side + side - 1, query % side - key % side + side - 1
                position = attention.rows[down] + attention.columns[right]
                scores.append(q[number, query] @ k[number, key] * head**-0.5 + q[number, query] @ position)
            weights = torch.stack(scores).softmax(0)
            expected[query, number] = weights @ v[number]
    y = attention.proj(expected.flatten(1))
    # Sums of 32 products in float64: a few times 1e-16 of values near 1.
    assert (attention(x)[0].view(side**2, -1) - y).abs().max() < 1e-13


def test_windows_are_put_together_again():
    x = torch.randn(2, 8, 8, 5)
    parts = windows_of(x, 3)
    assert parts.shape == (2 * 9, 3, 3, 5)
    assert torch.equal(parts[0], x[0, :3, :3])
    assert torch.equal(parts[5][:, :2], x[0, 3:6, 6:])
    assert (parts[5][:, 2] == 0).all()
    assert torch.equal(whole_of(parts, 3, 8), x)


@pytest.mark.parametrize(("config", "millions"), [(VIT_L, 308), (VIT_H, 637)])
def test_encoders_have_the_published_numbers_of_parameters(config, millions):
    """308 and 636 million of the paper (section D), the latter without its decoder."""
    with torch.device("meta"):
        model = SamEncoder(config)
    assert round(sum(one.numel() for one in model.parameters()) / 1e6) == millions
    found = [name for name, module in model.named_modules() if is_mlp(module, name)]
    assert len(found) == 2 * config.layers


def test_a_forward_pass_and_its_seed():
    model = random_encoder(TINY, "cpu", torch.float32, 3)
    again = random_encoder(TINY, "cpu", torch.float32, 3)
    images = torch.randn(2, 3, TINY.image, TINY.image)
    y = model(images)
    assert y.shape == (2, TINY.outputs, TINY.side, TINY.side)
    assert torch.equal(y, again(images))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="patches of 16 pixels must divide images of 100"):
        SamConfig(name="x", width=64, layers=1, heads=2, whole=(), image=100)
