"""One weight: masks of the reference, bits of what is kept, pieces that change nothing."""

import numpy as np
import pytest
import torch

import reference
from ao_lab import SparsityConfig
from ao_lab.sparsity import prune_layer
from ao_lab.sparsity.prune_layer import prune_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(dtype=torch.float32, rows=16, columns=32):
    torch.manual_seed(0)
    return torch.randn(rows, columns).to(dtype)


def sums(columns=32):
    return reference.square_sums(torch.randn(50, columns) * torch.logspace(-2, 2, columns))


def reference_mask(w, config, value):
    scores = {
        "magnitude": lambda: None,
        "wanda": lambda: reference.wanda_scores(w, value),
        "ria": lambda: reference.ria_scores(w, value),
    }[config.score]()
    if config.transposable:
        return reference.prune_transposable(w, scores=scores)
    return torch.as_tensor(reference.prune(w, pattern=config.pattern, scores=scores))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", ["magnitude", "wanda", "ria"])
@pytest.mark.parametrize("kind", [{}, {"pattern": "1:4"}, {"pattern": "3:8"}, {"transposable": True}])
def test_masks_are_those_of_the_reference(score, kind, dtype, monkeypatch):
    monkeypatch.setattr(prune_layer, "PIECE", 256)  # pieces of eight rows
    config, w, value = SparsityConfig(score=score, **kind), weight(dtype), sums()
    before = w.clone()
    found = prune_weight(w, config, None if score == "magnitude" else value)
    mask = reference_mask(w, config, value)
    assert torch.equal(found.weights, torch.where(mask, w, torch.zeros((), dtype=dtype)))
    assert torch.equal(w, before)
    assert not found.weights[~mask].signbit().any()
    assert found.score == score
    if score != "magnitude":
        assert not torch.equal(mask, reference_mask(w, SparsityConfig(**kind), None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparsegpt_is_that_of_the_reference(dtype):
    w, x = weight(dtype), torch.randn(64, 32, dtype=torch.float64)
    hessian = x.T @ x
    config = SparsityConfig(score="sparsegpt", damping=0.02, block=16)
    found = prune_weight(w, config, hessian)
    array = reference.arrays.torch_bridge.to_numpy(w)
    expected = reference.sparsegpt(array, hessian.numpy(), damping=0.02, block=16)
    assert found.weights.dtype == dtype
    assert np.array_equal(found.weights.float().numpy(), expected.weights.astype(np.float32))
    assert found.facts == {"loss": expected.loss, "damping": 0.02, "floor": 0.0}
    assert not torch.equal(found.weights, prune_weight(w, SparsityConfig(), None).weights)


@pytest.mark.parametrize("score", ["wanda", "ria", "sparsegpt"])
@pytest.mark.parametrize("value", [None, torch.zeros(32)])
def test_inputs_of_zeros_leave_it_to_magnitude(score, value):
    value = value if value is None or score != "sparsegpt" else torch.zeros(32, 32)
    found = prune_weight(weight(), SparsityConfig(score=score), value)
    assert found.score == "magnitude"
    assert torch.equal(found.weights, prune_weight(weight(), SparsityConfig(), None).weights)


def test_infinite_weights_make_no_nan():
    w = torch.tensor([[torch.inf, torch.inf, -torch.inf, 1.0]])
    assert prune_weight(w, SparsityConfig(), None).weights.tolist() == [[torch.inf, torch.inf, 0.0, 0.0]]
