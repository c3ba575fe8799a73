"""`KVLayer` with tokens that are read as computed: in pieces, cropped, on the path that a GPU without a kernel takes."""

from dataclasses import replace

import pytest
import torch

from ao_lab.kv_cache.recipe import RECIPES, KVRecipe
from fast.attention.attention import _dequantized as by_torch
from fast.attention.attention import attention
from fast.attention.stored import computed_values, quantized_tokens, token_values
from reference import SCHEMES

pytest.importorskip("transformers")
LAYER = pytest.importorskip("ao_lab.kv_cache.layer")
GROUPS_OF_4 = replace(
    SCHEMES["int4_g32_asymmetric"],
    name="layer_groups_of_4",
    scale=replace(SCHEMES["int4_g32_asymmetric"].scale, block=4),
)
WINDOWS = {
    "tokens": KVRecipe(key="int4_g32", value="int4_g32", rotate=True, residual=5, sinks=2),
    "channels": KVRecipe(key=GROUPS_OF_4, key_axis=-2, value="int4_g32", residual=3, sinks=1),
    "channels of both": KVRecipe(key=GROUPS_OF_4, key_axis=-2, value=GROUPS_OF_4, value_axis=-2),
}
TOKENS, ROOM = 21, 32


def states(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, TOKENS, 32, generator=draw) for heads in (4, 2, 2))


def attended(recipe, pieces, function=attention):
    """Attention of tokens that come in pieces, all but the first one from the cache; and the layer."""
    q, k, v = states()
    layer, at, found = LAYER.KVLayer(ROOM, recipe), 0, []
    for count in pieces:
        keys, values = layer.update(k[:, :, at : at + count], v[:, :, at : at + count])
        part = q[:, :, at : at + count]
        part = LAYER.hadamard(part.contiguous(), 32) if recipe.rotate else part
        found.append(function(part, keys.store, values.store, keys.length))
        at += count
    return torch.cat(found[1:], 2), layer


@pytest.mark.parametrize("name", WINDOWS)
def test_pieces_are_tokens_one_by_one(name):
    """What is attended to and what is stored do not depend on how many tokens come at once, to float32's rounding of y."""
    one, layer = attended(WINDOWS[name], [4] + [1] * 17)
    several, other = attended(WINDOWS[name], [4, 9, 1, 7])
    assert (one - several).abs().max() <= 2.0**-22 * one.abs().max()
    for states in ("keys", "values"):
        x, y = getattr(layer, states).store, getattr(other, states).store
        assert torch.equal(x.computed, y.computed)
        assert torch.equal(token_values(x, TOKENS), token_values(y, TOKENS))


@pytest.mark.parametrize("name", WINDOWS)
def test_by_operations_of_torch(name):
    """The path of GPUs without a kernel, in float32: the reference to the roundoff of 32 products and 21 keys."""

    def function(q, keys, values, length):
        return by_torch(q, keys, values, length, None, 32**-0.5, True, 0.0)

    expected, _ = attended(WINDOWS[name], [4, 9, 1, 7])
    found, _ = attended(WINDOWS[name], [4, 9, 1, 7], function)
    assert (found - expected).abs().max() <= 64 * 2.0**-24 * expected.abs().max() * 4


def test_an_empty_batch_has_an_empty_result():
    """As on CPUs; by products in heads too, which a softcap asks for."""
    layer = LAYER.KVLayer(ROOM, WINDOWS["tokens"])
    k = torch.zeros(0, 2, 3, 32)
    keys, values = layer.update(k, k)
    for softcap in (0.0, 30.0):
        found = by_torch(
            torch.zeros(0, 4, 2, 32), keys.store, values.store, keys.length, None, 1.0, True, softcap
        )
        assert found.shape == (0, 4, 2, 32)


def test_scores_of_16_bit_tensors_are_not_rounded(monkeypatch):
    """Scores to 40 of operands that bfloat16 holds: rounded they would be off by 0.1, weights by a tenth."""
    exact = [x.bfloat16().float() for x in states()]
    monkeypatch.setitem(globals(), "states", lambda: exact)

    def function(q, keys, values, length):
        return by_torch(4 * q.bfloat16(), keys, values, length, None, 1.0, True, 0.0)

    def specified(q, keys, values, length):
        return attention(4 * q, keys, values, length, scale=1.0)

    recipe = KVRecipe(key="mxfp8_e4m3", value="mxfp8_e4m3", residual=3, sinks=1)
    found, expected = (attended(recipe, [4, 17], one)[0] for one in (function, specified))
    assert found.dtype == torch.bfloat16
    assert ((found.float() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-5).all()


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("left", [2, 13, 20])
def test_forgotten_tokens(name, left):
    """Tokens that have left the window by tokens that are forgotten are read as they are stored; all others as computed."""
    recipe = WINDOWS[name]
    _, layer = attended(recipe, [4, 17])
    _, k, v = states()
    layer.crop(left - TOKENS)
    length, window = torch.tensor(left), recipe.window
    assert int(layer.cumulative_length) == left
    for store, x in ((layer.keys.store, k), (layer.values.store, v)):
        x = LAYER.hadamard(x.contiguous(), 32) if recipe.rotate and store is layer.keys.store else x
        found = computed_values(store, token_values(store), length)
        for at in range(left):
            if at < window.sinks or at >= TOKENS - window.ring:
                assert torch.equal(found[:, :, at], x[:, :, at])
            elif at >= window.first(left):
                assert torch.equal(found[:, :, at], token_values(store)[:, :, at])
    # What comes next is written behind it.
    keys, _ = layer.update(k[:, :, left : left + 1], v[:, :, left : left + 1])
    assert int(keys.length) == left + 1


def test_sinks_do_not_move():
    """The first tokens stay as computed, whatever the ring holds."""
    _, layer = attended(WINDOWS["channels"], [4] + [1] * 17)
    _, _, v = states()
    assert torch.equal(layer.values.store.computed[:, :, 0], v[:, :, 0])
    assert not torch.equal(token_values(layer.values.store)[:, :, 0], v[:, :, 0])


def test_groups_are_those_of_quantize():
    """A full group along tokens has the codes and scales of `quantize` of all its tokens."""
    _, layer = attended(WINDOWS["channels"], [4] + [1] * 17)
    _, k, _ = states()
    held = quantized_tokens(layer.keys.store, TOKENS)
    import fast

    expected = fast.quantize(k[:, :, :20].contiguous(), GROUPS_OF_4, axis=2, packed=True)
    for part in ("codes", "scale", "zero"):
        assert torch.equal(getattr(held, part), getattr(expected, part))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"key": "int4_g32", "key_axis": 0}, "key_axis is -1"),
        ({"key": "int8_rowwise", "key_axis": -2}, "blocks along tokens have a length"),
        ({"value_axis": -2}, "value is as they are"),
        ({"key": "int4_g32", "value": "int4_g64", "key_axis": -2, "value_axis": -2}, "of one length"),
        ({"residual": -1}, "residual is a number of tokens"),
    ],
)
def test_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        KVRecipe(**fields)


def test_text():
    assert str(WINDOWS["channels"]).endswith(
        "a channel, values int4_g32, 1 first tokens as computed, 3 last tokens as computed"
    )
    assert "as computed" not in str(RECIPES["fp8"])
