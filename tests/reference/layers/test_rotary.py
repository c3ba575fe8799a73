"""`rotary`: the bits of torch's own expression and of its gradient, tables of every shape, what is refused."""

import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from experiments.models.llama import apply_rotary
from reference.layers.rotary import rotary


def numbers(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_and_gradient_are_those_of_torch(dtype):
    """Also where the halves of the tables differ."""
    x, g = (numbers(2, 3, 5, 12, dtype=dtype, seed=seed) for seed in (0, 1))
    c, s = (numbers(5, 12, dtype=dtype, seed=seed) for seed in (2, 3))
    leaf = x.clone().requires_grad_()
    y = apply_rotary(leaf, c, s)
    assert_same_bits(rotary(x, c, s), y.detach())
    y.backward(g)
    assert_same_bits(rotary(g, c, s, inverse=True), leaf.grad)


def test_tables_of_batches():
    x, c, s = numbers(2, 3, 5, 12), numbers(2, 5, 12, seed=1), numbers(2, 5, 12, seed=2)
    parts = [rotary(x[i : i + 1], c[i], s[i : i + 1]) for i in range(2)]
    assert_same_bits(rotary(x, c, s), torch.cat(parts))


def test_one_half_turns_the_other():
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4)
    zeros, ones = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
    assert rotary(x, zeros, ones).ravel().tolist() == [-2, -3, 0, 1]
    assert rotary(x, zeros, ones, inverse=True).ravel().tolist() == [2, 3, 0, -1]


def test_what_is_refused():
    x, table = np.ones((1, 2, 3, 4), np.float32), np.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match=r"even D, got \(1, 2, 3, 3\)"):
        rotary(x[..., :3], table, table)
    with pytest.raises(ValueError, match=r"cosine is float32 of shape \(3, 4\).*got float32 of \(2, 4\)"):
        rotary(x, table[:2], table)
    with pytest.raises(ValueError, match=r"sine is float32.*got float16"):
        rotary(x, table, table.astype(np.float16))
    with pytest.raises(TypeError, match="got float64"):
        rotary(x.astype(np.float64), table, table)
