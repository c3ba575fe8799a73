"""A part of a weight that another takes the place of: products, guards and copies see the new one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ao_lab import QuantizedTensor, Recipe, SparsityConfig, quantized, sparsify_
from ao_lab.gemm.sparse import kept
from ao_lab.tensor.metadata import PARTS
from ao_lab.tensor.sparse import quantized_compressed
from reference import SCHEMES as RECORDS
from reference import Scales

X = torch.linspace(-2, 2, 3 * 64).reshape(3, 64)
SCHEMES = ["int8_rowwise", "int4_g32_asymmetric", "nvfp4", "int8_rowwise_static"]


def weight(scheme, seed):
    dense = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    if scheme.endswith("_static"):
        recipe = Recipe(weight=RECORDS["int8_rowwise"], activation=RECORDS["int8_tensorwise"])
        return quantized(dense, recipe, input_scales=Scales(torch.tensor(0.02 * (1 + seed))))
    return quantized(dense, scheme)


def sparse(scheme, seed):
    layer = nn.Linear(64, 32)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(seed))
    sparsify_(layer, SparsityConfig("2:4"))
    return quantized_compressed(layer.weight.detach(), weight(scheme, 0).recipe)


def replaced(make, names, x=X):
    """Whether after each replacement the product is that of a fresh weight of the same parts."""
    w, other = make(0), make(1)
    for name in names:
        if getattr(w, name) is None:
            continue
        w.stored, F.linear(x, w), w.__tensor_flatten__()
        before = w.dequantize()
        setattr(w, name, getattr(other, name).clone())
        fresh = w.remade(w.parts)
        assert torch.equal(F.linear(x, w), F.linear(x, fresh)), name
        assert torch.equal(w.dequantize(), fresh.dequantize())
        assert name.startswith("input") or not torch.equal(w.dequantize(), before), name
    assert torch.equal(F.linear(x, w), F.linear(x, other))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_see_it(scheme):
    with torch.no_grad():
        replaced(lambda seed: weight(scheme, seed), PARTS)


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g32_asymmetric"])
def test_products_of_sparse_weights_see_it(scheme):
    with torch.no_grad():
        replaced(lambda seed: sparse(scheme, seed), PARTS)


def test_the_description_too():
    w, other = weight("int8_rowwise", 0), weight("int8_rowwise_static", 0)
    with torch.no_grad():
        F.linear(X, w)
        w.input_scale, w.meta = other.input_scale, other.meta
        assert torch.equal(F.linear(X, w), F.linear(X, other))


def test_a_compiled_program_sees_it():
    torch.compiler.reset()
    layer = nn.Linear(64, 32, bias=False)
    layer.weight = nn.Parameter(weight("int8_rowwise", 0), requires_grad=False)
    compiled, other = (
        torch.compile(layer, fullgraph=True, backend="aot_eager"),
        weight("int4_g32_asymmetric", 1),
    )
    with torch.no_grad():
        compiled(X)
        for name in PARTS:
            setattr(layer.weight, name, getattr(other, name))
        layer.weight.meta = other.meta
        torch.testing.assert_close(compiled(X), F.linear(X, other))


def test_what_is_arranged_of_codes_is_made_anew_for_other_memory():
    codes, metadata = torch.ones(2, 4, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
    first = kept(codes, metadata, "product", lambda: codes.clone())
    codes.data = torch.full((2, 4), 7, dtype=torch.uint8)
    assert kept(codes, metadata, "product", lambda: codes.clone()) is not first


def test_another_attribute_takes_nothing_away():
    w = weight("int8_rowwise", 0)
    with torch.no_grad():
        F.linear(X, w)
    known = w.stored
    w.note = "mine"
    assert w.stored is known
    assert isinstance(w, QuantizedTensor)
