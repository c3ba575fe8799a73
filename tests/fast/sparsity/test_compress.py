"""`fast.prune`, `fast.compress` and `fast.decompress` of CPU tensors: the bits of the reference, without gradients."""

import pytest
import torch

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits, fill

DTYPES = ["float32", "bfloat16", "float16"]


def weights(dtype):
    return torch.from_numpy(fill("normals", (8, 64)).copy()).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["2:4", "1:8"])
def test_masks_are_those_of_the_reference(dtype, pattern):
    w = weights(dtype)
    assert_same_bits(fast.prune(w, pattern=pattern), reference.prune(w, pattern=pattern))
    scores = w.flip(-1)
    assert_same_bits(
        fast.prune(w, pattern=pattern, scores=scores), reference.prune(w, pattern=pattern, scores=scores)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_compressed_values_come_back(dtype):
    w = weights(dtype)
    mask = fast.prune(w)
    values, metadata = fast.compress(w, mask)
    expected = reference.compress(w, mask)
    assert_same_bits(values, expected.values)
    assert_same_bits(metadata, expected.metadata)
    assert_same_bits(
        fast.decompress(values, metadata, (8, 64)), torch.where(mask, w, torch.zeros((), dtype=w.dtype))
    )


def test_parameters_have_no_gradient_and_other_arrays_are_refused():
    parameter = torch.nn.Parameter(weights("float32"))
    values, metadata = fast.compress(parameter, "2:4")
    assert not values.requires_grad
    assert not fast.decompress(values, metadata).requires_grad
    with pytest.raises(TypeError):
        fast.prune(parameter.detach().numpy())


def compressed(w):
    """For the compiler, a program with an input."""
    return tuple(fast.compress(w * 1))


@pytest.mark.parametrize("run", [compressed, torch.compile(compressed, fullgraph=True, backend="eager")])
def test_a_dense_matrix_is_refused_and_pruned_where_asked(run):
    """A compiled program too: the operator counts when it runs."""
    w = weights("float32")
    with pytest.raises(ValueError, match="128 of 128 groups have more that are not zero"):
        run(w)
    mask = fast.prune(w)
    for made in (run(w * mask), fast.compress(w, "2:4"), fast.compress(w, mask)):
        assert_same_bits(made[0], reference.compress(w, mask).values)
        assert_same_bits(made[1], reference.compress(w, mask).metadata)
