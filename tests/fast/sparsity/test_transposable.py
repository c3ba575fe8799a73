"""`fast.prune_transposable` and `fast.compress_transposable` of CPU tensors: the bits of the reference, without gradients."""

import pytest
import torch

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits, fill


def weights(dtype, shape=(8, 64)):
    return torch.from_numpy(fill("normals", shape).copy()).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_masks_and_both_orientations(dtype):
    w = weights(dtype)
    assert_same_bits(fast.prune_transposable(w), reference.prune_transposable(w))
    scores = w.flip(-1)
    for method in ("exact", "greedy"):
        assert_same_bits(
            fast.prune_transposable(w, scores=scores, method=method),
            reference.prune_transposable(w, scores=scores, method=method),
        )
    for made, wanted in zip(fast.compress_transposable(w), reference.compress_transposable(w), strict=True):
        assert isinstance(made, reference.Compressed)
        for one, other in zip(made, wanted, strict=True):
            assert_same_bits(one, other)


def both(w):
    """For the compiler, a program with an input."""
    rows, columns = fast.compress_transposable(w * 1)
    return rows.values, rows.metadata, columns.values, columns.metadata, fast.prune_transposable(w)


def test_compiled_programs_and_parameters():
    w = weights("float32", (2, 8, 12))
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    for one, other in zip(compiled(w), both(w), strict=True):
        assert_same_bits(one, other)
    assert not any(part.requires_grad for part in both(torch.nn.Parameter(w)))


def test_what_is_refused():
    with pytest.raises(TypeError, match="takes torch tensors"):
        fast.prune_transposable(weights("float32").numpy())
    with pytest.raises(ValueError, match="method is one of exact, greedy"):
        fast.prune_transposable(weights("float32"), method="best")
    with pytest.raises(ValueError, match="multiples of 4"):
        fast.compress_transposable(weights("float32")[:6])
