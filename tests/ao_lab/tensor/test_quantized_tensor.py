"""`QuantizedTensor`: what it stands for, how it is stored, saved and laid out."""

import copy
import io
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from ao_lab import QuantizedTensor, Recipe, quantized
from ao_lab.tensor.metadata import described, meta_from
from reference import SCHEMES, Scales
from tests.support.quantized_weights import STORED, same, specified, stored, weight

HOUSE = sorted(name for name in SCHEMES if "." not in name)


@pytest.mark.parametrize("scheme", HOUSE)
def test_values_are_those_of_the_reference(scheme):
    for dtype in (torch.float32, torch.bfloat16):
        dense = weight(32, 512, dtype=dtype)
        t = quantized(dense, scheme)
        assert (t.shape, t.dtype, t.device) == (dense.shape, dtype, dense.device)
        assert same(t.dequantize(), specified(dense, scheme))
        assert same(t.t().dequantize(), specified(dense, scheme).t())


@settings(max_examples=30)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["int4_g32", "mxfp4", "nvfp4"]),
)
def test_bits_of_any_numbers(rows, blocks, seed, scheme):
    bits = np.random.default_rng(seed).integers(0, 2**16, (rows, 32 * blocks), dtype=np.uint16)
    dense = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    ours, theirs = quantized(dense, scheme).dequantize(), specified(dense, scheme)
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_codes_below_eight_bits_are_packed():
    sizes = {"int8_rowwise": 512, "int4_g32": 256, "mxfp6_e2m3": 384, "int3_g32": 192, "int2_g32": 128}
    for scheme, size in sizes.items():
        assert quantized(weight(4, 512), scheme).codes.shape == (4, size)


def test_only_floats_can_be_quantized():
    with pytest.raises(TypeError, match=r"torch\.int64"):
        quantized(torch.ones(4, 32, dtype=torch.int64), "int8_rowwise")


@pytest.mark.parametrize("name", STORED)
def test_saved_and_loaded_without_pickled_classes(name):
    layer = nn.Linear(256, 128)
    t = stored(name, 128, 256)
    t = t.with_recipe(activation=SCHEMES["int8_tensorwise"]).remade(
        {**t.parts, "input_scale": torch.tensor(0.5)}
    )
    layer.weight = nn.Parameter(t, requires_grad=False)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert torch.equal(state["weight"], t)
    assert torch.equal(pickle.loads(pickle.dumps(t.t())), t.t())
    fresh = nn.Linear(256, 128)
    fresh.load_state_dict(state, assign=True)
    assert type(fresh.weight) is type(t)
    assert isinstance(fresh.weight, nn.Parameter)
    other = nn.Linear(256, 128)
    other.weight = nn.Parameter(torch.zeros_like(t), requires_grad=False)
    other.load_state_dict(state)
    assert torch.equal(other.weight, t)
    assert isinstance(copy.deepcopy(layer).weight, nn.Parameter)


def test_a_whole_module_moves():
    layer = nn.Linear(256, 128)
    layer.weight = nn.Parameter(quantized(weight(128, 256), "int4_g32"), requires_grad=False)
    layer = layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert layer(weight(2, 256, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_descriptions_survive_as_plain_values(scheme):
    recipe = Recipe(weight=SCHEMES[scheme], activation=SCHEMES["fp8_rowwise"], kernel="dequantize")
    plain = quantized(weight(4, 64), "mxfp4").meta
    for changes in (
        {"recipe": recipe},
        {"recipe": replace(recipe, activation=None, accumulation="blocked", kernel="auto")},
        {"axis": -2, "transposed": True, "dtype": torch.bfloat16},
        {"layout": "tiled", "flat": (2, 8)},
    ):
        t = QuantizedTensor({"codes": torch.zeros(4, 4)}, replace(plain, **changes), (4, 4))
        assert t.meta != plain
        assert meta_from(json.loads(json.dumps(described(t.meta)))) == t.meta


def test_a_later_version_is_refused():
    fields = described(quantized(weight(4, 64), "mxfp4").meta)
    with pytest.raises(ValueError, match="version 99"):
        meta_from({**fields, "version": 99})


@pytest.mark.parametrize("scheme", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_layouts_have_an_inverse(scheme):
    t = quantized(weight(128, 256), scheme)
    tiled = t.to_layout("tiled")
    assert tiled.scale.dim() == 1
    assert torch.equal(tiled.to_layout("plain"), t)
    assert same(tiled.dequantize(), t.dequantize())
    assert same(tiled[:64].dequantize(), t[:64].dequantize())
    x = weight(3, 256)
    assert same(functional.linear(x, tiled), functional.linear(x, t))
    with pytest.raises(ValueError, match="unknown layout"):
        t.to_layout("other")


def test_caches_of_programs_tell_recipes_apart():
    """The text that torch's cache keeps is the same for one description, whatever the numbers, and another for another."""
    t = quantized(weight(32, 64), "int4_g32")
    same_description = quantized(weight(32, 64, seed=1), "int4_g32")
    others = [
        quantized(weight(32, 64), "int4_g64"),
        quantized(weight(64, 64), "int4_g32"),
        t.t(),
        t.to(torch.bfloat16),
        t.with_recipe(kernel="dequantize"),
        quantized(weight(32, 64), "int4_g32", input_scales=Scales(torch.tensor(0.5))),
    ]
    assert t._stable_hash_for_caching() == same_description._stable_hash_for_caching()
    assert len({x._stable_hash_for_caching() for x in [t, *others]}) == 7
