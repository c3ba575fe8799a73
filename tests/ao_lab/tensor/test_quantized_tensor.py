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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from ao_lab import QuantizedTensor, Recipe, quantized
from ao_lab.gemm import choices
from ao_lab.gemm.operand import kept
from ao_lab.tensor import quantized_tensor
from ao_lab.tensor.metadata import PARTS, described, meta_from
from reference import SCHEMES, Scales
from tests.support.quantized_weights import STORED, same, specified, stored, weight

DEFAULTS = sorted(name for name in SCHEMES if "." not in name)


@pytest.mark.parametrize("scheme", DEFAULTS)
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
    assert same(functional.linear(x, tiled), functional.linear(x, t.with_recipe(kernel="dequantize")))
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


def test_caches_of_programs_tell_versions_and_choices_apart(no_choices, monkeypatch):
    """A program on disk that another version's operations made, or other choices of `tune`, is not taken."""
    t = quantized(weight(32, 64), "int4_g32")
    texts = [t._stable_hash_for_caching()]
    with FakeTensorMode() as mode:
        traced = mode.from_tensor(t)
        assert texts[0] in traced.__reduce_ex__(2)[1]  # what torch 2.11 reads
        assert copy.copy(traced).shape == t.shape
    problem = choices.problem_of("inference", "", "int4_g32", (4, 32, 64), t.dtype)
    for kernel in ("fused", "dequantize"):
        choices.choices_for(t.device).add(choices.Choice(problem, kernel))
        texts.append(t._stable_hash_for_caching())
    with choices.default_choices():
        assert t._stable_hash_for_caching() == texts[0]
    other = choices.Choice(choices.problem_of("inference", "", "int4_g32", (4, 48, 64), t.dtype), "fused")
    choices.choices_for(t.device).add(other)
    assert t._stable_hash_for_caching() == texts[-1]
    choices.forget()
    monkeypatch.setattr(quantized_tensor, "sources_key", lambda *packages: "others")
    assert len({*texts, t._stable_hash_for_caching()}) == 4


# A part of a weight that another takes the place of: products, guards and copies see the new one.

X = torch.linspace(-2, 2, 3 * 64).reshape(3, 64)
REPLACED = ["int8_rowwise", "int4_g32_asymmetric", "nvfp4", "int8_rowwise_static"]


def made(scheme, seed):
    dense = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    if scheme.endswith("_static"):
        recipe = Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_tensorwise"])
        return quantized(dense, recipe, input_scales=Scales(torch.tensor(0.02 * (1 + seed))))
    return quantized(dense, scheme)


def replaced(make, names, x=X):
    """Whether after each replacement the product is that of a fresh weight of the same parts."""
    w, other = make(0), make(1)
    for name in names:
        if getattr(w, name) is None:
            continue
        w.stored, functional.linear(x, w), w.__tensor_flatten__()
        before = w.dequantize()
        setattr(w, name, getattr(other, name).clone())
        fresh = w.remade(w.parts)
        assert torch.equal(functional.linear(x, w), functional.linear(x, fresh)), name
        assert torch.equal(w.dequantize(), fresh.dequantize())
        assert name.startswith("input") or not torch.equal(w.dequantize(), before), name
    assert torch.equal(functional.linear(x, w), functional.linear(x, other))


@pytest.mark.parametrize("scheme", REPLACED)
def test_products_see_it(scheme):
    with torch.no_grad():
        replaced(lambda seed: made(scheme, seed), PARTS)


@pytest.mark.parametrize("scheme", ["int8_rowwise_2:4", "int4_g32_asymmetric_2:4"])
def test_products_of_sparse_weights_see_it(scheme):
    with torch.no_grad():
        replaced(lambda seed: stored(scheme, 32, 64, seed=seed), PARTS)


def test_the_description_too():
    w, other = made("int8_rowwise", 0), made("int8_rowwise_static", 0)
    with torch.no_grad():
        functional.linear(X, w)
        w.input_scale, w.meta = other.input_scale, other.meta
        assert torch.equal(functional.linear(X, w), functional.linear(X, other))


def test_a_compiled_program_sees_it():
    torch.compiler.reset()
    layer = nn.Linear(64, 32, bias=False)
    layer.weight = nn.Parameter(made("int8_rowwise", 0), requires_grad=False)
    compiled, other = (
        torch.compile(layer, fullgraph=True, backend="aot_eager"),
        made("int4_g32_asymmetric", 1),
    )
    with torch.no_grad():
        compiled(X)
        for name in PARTS:
            setattr(layer.weight, name, getattr(other, name))
        layer.weight.meta = other.meta
        torch.testing.assert_close(compiled(X), functional.linear(X, other))


def test_what_is_arranged_of_codes_is_made_anew_for_other_memory():
    codes, metadata = torch.ones(2, 4, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
    first = kept(codes, metadata, "product", lambda: codes.clone())
    codes.data = torch.full((2, 4), 7, dtype=torch.uint8)
    assert kept(codes, metadata, "product", lambda: codes.clone()) is not first


def test_another_attribute_takes_nothing_away():
    w = made("int8_rowwise", 0)
    with torch.no_grad():
        functional.linear(X, w)
    known = w.stored
    w.note = "mine"
    assert w.stored is known
    assert isinstance(w, QuantizedTensor)
