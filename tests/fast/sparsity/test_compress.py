"""`fast.prune`, `fast.compress` and `fast.decompress` of CPU tensors: the bits of the reference, without gradients.

`fast.prune_transposable` and `fast.compress_transposable` of CPU tensors: the bits of the reference, without gradients.
"""

import platform

import pytest
import torch

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits, fill
from fast import dispatch
from fast.kernels.sm90_sparse24_gemm.arrange import pack_bits
from fast.sparsity import prune as module
from fast.sparsity.prune import prune_into

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


@pytest.mark.parametrize("mask", ["2:4", "given"])
def test_codes_of_kept_elements(mask):
    w = weights("bfloat16")
    mask = fast.prune(w, pattern="1:4") if mask == "given" else mask
    for name in ("fp8_rowwise", "int8_rowwise"):
        scales = fast.choose_scales(w, name)
        made = fast.quantize_compressed(w, name, scales, mask)
        for one, other in zip(made, reference.quantize_compressed(w, name, scales, mask), strict=True):
            assert_same_bits(one, other)
    assert not fast.quantize_compressed(
        torch.nn.Parameter(w), "int8_rowwise", scales.scale
    ).values.requires_grad


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


# `prune_into`: masks of `prune` and `prune_transposable` in memory that is there, by their kernels without a copy.
@pytest.mark.parametrize("transposable", [False, True])
@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_the_mask_is_written(pattern, transposable):
    w = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(32, 16, dtype=torch.bool).t()
    assert prune_into(w, out, pattern=pattern, transposable=transposable) is out
    wanted = reference.prune_transposable(w) if transposable else reference.prune(w, pattern=pattern)
    assert torch.equal(out, torch.as_tensor(wanted))
    bits = torch.full((16, 4), 255, dtype=torch.uint8)
    assert prune_into(w, bits, pattern=pattern, transposable=transposable) is bits
    assert torch.equal(bits, pack_bits(torch.as_tensor(wanted)))


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
def test_kernels_write_it(monkeypatch):
    """One launch each; other memory goes by a copy."""
    from tests.fast.kernels.compiling.kernel_compiler import launched

    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
    w = torch.zeros(64, 64, dtype=torch.bfloat16)
    for out in (torch.zeros(64, 64, dtype=torch.bool), torch.zeros(64, 8, dtype=torch.uint8)):
        for transposable, kernel in ((False, "mask_kernel"), (True, "transposable_kernel")):
            seen = launched(lambda t=transposable, out=out: prune_into(w, out, transposable=t))
            assert [one.kernel for one in seen] == [kernel]


def test_bits_of_other_patterns_go_by_a_copy():
    """Kernels write the bits of 2:4 of floats alone."""
    bits = torch.zeros(4, 2, dtype=torch.uint8)
    w = torch.randn(4, 16)
    assert module._in_place(w, bits, "2:4")
    assert not module._in_place(w, bits, "1:4")
    assert not module._in_place(w.to(torch.int8), bits, "2:4")
    assert not module._in_place(w, bits[:, :1], "2:4")


def test_other_memory_is_asked_about_in_every_call(monkeypatch):
    """A remembered call reads its tensors as contiguous copies, and would leave such a mask as it was."""
    monkeypatch.setattr(module, "execute", lambda *_: pytest.fail("a remembered call"))
    w, out = torch.randn(16, 32), torch.zeros(32, 16, dtype=torch.bool).t()
    assert bool(prune_into(w, out).any())


def transposable_weights(dtype, shape=(8, 64)):
    return torch.from_numpy(fill("normals", shape).copy()).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_masks_and_both_orientations(dtype):
    w = transposable_weights(dtype)
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
    w = transposable_weights("float32", (2, 8, 12))
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    for one, other in zip(compiled(w), both(w), strict=True):
        assert_same_bits(one, other)
    assert not any(part.requires_grad for part in both(torch.nn.Parameter(w)))


def test_what_is_refused():
    with pytest.raises(TypeError, match="takes torch tensors"):
        fast.prune_transposable(transposable_weights("float32").numpy())
    with pytest.raises(ValueError, match="method is one of exact, greedy"):
        fast.prune_transposable(transposable_weights("float32"), method="best")
    with pytest.raises(ValueError, match="multiples of 4"):
        fast.compress_transposable(transposable_weights("float32")[:6])
