"""Sums in the order of `reference.quantize.statistics`, along any axis."""

import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits, fill
from fast.quantize.statistics import tree_sum
from reference.arrays.namespace import namespace_of
from reference.quantize import statistics

NUMPY = namespace_of(np.zeros(1))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 100])
@pytest.mark.parametrize("kind", ["normals", "subnormals", "zeros", "specials"])
def test_sums_are_those_of_the_reference(kind, length):
    x = fill(kind, (3, length), seed=length)
    wanted = one_nan(statistics.tree_sum(NUMPY, x.view(np.int32))[:, 0].view(np.float32))
    for made in (tree_sum(torch.from_numpy(x)), tree_sum(torch.from_numpy(x.T.copy()), 0)):
        assert_same_bits(one_nan(made.numpy()), wanted)


def one_nan(x):
    """A sum of NaN has the payload that the processor gives it."""
    return np.where(np.isnan(x), np.float32(np.nan), x)


def test_an_empty_axis():
    assert tree_sum(torch.ones(3, 0)).tolist() == [0, 0, 0]
