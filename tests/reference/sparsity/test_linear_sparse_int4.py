"""`linear_sparse_int4` is the product with the dense weight, whose codes stand where the metadata say."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits, fill
from reference.sparsity.linear_sparse_int4 import linear_sparse_int4, sparse_int4_weight
from tests.gpu.sparsity.products.int4_cases import as_tensors, exact_case, random_case, zero_points


def written_out(codes, metadata, scale, zero=None):
    """The dense weight in float64, element by element."""
    rows, length = codes.shape[0], 4 * codes.shape[1]
    w = np.zeros((rows, length))
    for n in range(rows):
        for j in range(length // 4):
            pair = int(metadata[n, j // 2]) >> 4 * (j % 2) & 15
            for nibble, index in ((codes[n, j] & 15, pair & 3), (codes[n, j] >> 4, pair >> 2)):
                code, group = (int(nibble) ^ 8) - 8, 4 * j // (length // scale.shape[1])
                code -= 0 if zero is None else int(zero[n, group])
                w[n, 4 * j + index] = code * float(scale[n, group])
    return w


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_codes_stand_where_the_metadata_say(group, storage):
    case = exact_case(3, 5, 256, group, storage=storage)
    w = written_out(*case[1:4])
    assert (reference.dequantize(sparse_int4_weight(*case[1:4])).astype(float) == w).all()
    wanted = case.x.astype(float) @ w.T + case.bias.astype(float)
    assert_same_bits(linear_sparse_int4(*case), wanted.astype(np.float32).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("group", [32, 256])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_zero_points_are_taken_off_what_is_kept(group, storage):
    case = exact_case(3, 5, 256, group, storage=storage)
    zero = zero_points(case)
    w = written_out(*case[1:4], zero)
    stored = sparse_int4_weight(*case[1:4], zero)
    assert stored.scheme.zero is not None
    assert (reference.dequantize(stored).astype(float) == w).all()
    wanted = case.x.astype(float) @ w.T + case.bias.astype(float)
    made = linear_sparse_int4(*case, zero=zero)
    assert_same_bits(made, wanted.astype(np.float32).astype(ml_dtypes.bfloat16))
    assert_same_bits(linear_sparse_int4(*as_tensors(case), zero=torch.from_numpy(zero)), made)
    assert_same_bits(np.asarray(linear_sparse_int4(*map(jnp.asarray, case), zero=jnp.asarray(zero))), made)
    for wrong, kind, message in (
        (zero.astype(np.int32), TypeError, "zero of dtype int8, got int32"),
        (zero[:4], ValueError, "one zero point a scale"),
    ):
        with pytest.raises(kind, match=message):
            linear_sparse_int4(*case, zero=wrong)


def test_it_is_the_product_with_a_pruned_weight():
    """From weights to the product: scales of the dense tensor, its mask, packed codes of what is kept."""
    w = fill("normals", (16, 128)).copy()
    scale = reference.choose_scales(w, "int4_g64").scale
    kept = reference.quantize_compressed(w, "int4_g64", scale)
    q = reference.quantize(w, "int4_g64")
    dense = np.where(reference.prune(w), q.codes, np.uint8(0))
    x = random_case(4, 16, 128, 64).x
    whole = type(q)(**{**vars(q), "codes": dense})
    made = linear_sparse_int4(x, reference.pack(kept.values, "int4"), kept.metadata, scale)
    assert_same_bits(made, reference.linear(x, whole))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_libraries_agree(dtype, storage):
    case = random_case(3, 8, 128, 32, dtype, storage)
    made = linear_sparse_int4(*case)
    assert made.dtype == case.x.dtype
    assert_same_bits(linear_sparse_int4(*as_tensors(case)), made)
    assert_same_bits(np.asarray(linear_sparse_int4(*map(jnp.asarray, case))), made)


def test_vectors_batches_and_patterns_of_scales():
    case = random_case(6, 8, 128, 32, storage="bfloat16")
    made = linear_sparse_int4(*case)
    assert_same_bits(linear_sparse_int4(case.x[0], *case[1:]), made[0])
    assert_same_bits(linear_sparse_int4(case.x.reshape(2, 3, 128), *case[1:]), made.reshape(2, 3, 8))
    assert_same_bits(linear_sparse_int4(*case._replace(scale=case.scale.view(np.uint16))), made)


X = exact_case(3, 8, 128, 32)
WRONG = {
    "x of dtype bfloat16 or float16, got float32": X._replace(x=X.x.astype(np.float32)),
    r"inputs \(3, 64\) and a weight \(8, 128\)": X._replace(x=X.x[:, :64]),
    "codes of dtype uint8, got int8": X._replace(codes=X.codes.view(np.int8)),
    "metadata of dtype uint8": X._replace(metadata=X.metadata.astype(np.int16)),
    "scale of dtype float32 or bfloat16 or uint16, got float64": X._replace(scale=X.scale.astype(np.float64)),
    r"codes of a matrix, got shape \(256,\)": X._replace(codes=X.codes.reshape(-1)),
    r"go with metadata of shape \(8, 16\)": X._replace(metadata=X.metadata[:, :8]),
    "with g one of 32, 64, 128, 256": X._replace(scale=X.scale[:, :3]),
    r"scales of shape \(8, 8\)": X._replace(scale=np.ones((8, 8), np.float32)),
    r"scales of shape \(7, 4\)": X._replace(scale=X.scale[:7]),
    r"bias has shape \(7,\)": X._replace(bias=X.bias[:7]),
}


@pytest.mark.parametrize("message", WRONG)
def test_operands_that_do_not_go_together(message):
    with pytest.raises((TypeError, ValueError), match=message):
        linear_sparse_int4(*WRONG[message])
