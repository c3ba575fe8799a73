"""`linear_sparse`: its roundings, its bound, what it refuses; and `linear_sparse_int4`, the product of a dense weight."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits, fill
from reference import linear_sparse, linear_sparse_error_bound
from reference.sparsity.linear_sparse import PAIRS
from reference.sparsity.linear_sparse_int4 import linear_sparse_int4, sparse_int4_weight
from tests.gpu.sparsity.cases import as_tensors, exact_case, random_case, zero_points
from tests.support.refusals import refused

SIZE = (6, 5, 64)


def given(kinds=("float8_e4m3fn",) * 2, size=SIZE, seed=0):
    """x, values, metadata, the dense weight; kinds: of values and x."""
    m, n, k = size
    g = torch.Generator().manual_seed(seed)
    spread = 30 if kinds[0] == "int8" else 1
    w, x = (torch.randn(shape, generator=g) * spread for shape in ((n, k), (m, k)))
    kept = reference.prune(w)
    w = torch.where(kept, w, 0.0).to(getattr(torch, kinds[0]))
    return x.to(getattr(torch, kinds[1])), *reference.compress(w, kept), w


def rest(seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, generator=g), {
        "x_scale": torch.rand(6, 1, generator=g),
        "scale": torch.rand(5, 1, generator=g),
    }


@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_each_operation_is_rounded_to_float32(kinds, out):
    x, values, metadata, w = given(kinds)
    bias, scales = rest()
    # Products of 8 bits are exact in float64, and so are their sums; 16 bits nearly: rounding twice would need a tie.
    sums = (x.double() @ w.double().T).float()
    wanted = ((sums * scales["x_scale"]) * scales["scale"].T + bias).to(getattr(torch, out))
    got = linear_sparse(x, values, metadata, bias, out_dtype=out, **scales)
    assert got.dtype == wanted.dtype
    assert torch.equal(got, wanted)


def test_no_operation_is_left_out_where_there_is_no_scale():
    x, values, metadata, w = given()
    assert torch.equal(linear_sparse(x, values, metadata), (x.double() @ w.double().T).float())
    bias, _ = rest()
    assert torch.equal(linear_sparse(x, values, metadata, bias), (x.double() @ w.double().T).float() + bias)
    one = {"x_scale": torch.tensor(0.3), "scale": torch.tensor([[0.7]])}
    wanted = (x.double() @ w.double().T).float() * one["x_scale"] * one["scale"]
    assert torch.equal(linear_sparse(x, values, metadata, **one), wanted)


@pytest.mark.parametrize(
    ("kind", "name"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("int8", "float32")]
)
def test_the_result_has_x_dtype_where_there_is_one(kind, name):
    x, values, metadata, _ = given((kind, kind))
    assert linear_sparse(x, values, metadata).dtype == getattr(torch, name)


def test_leading_axes_and_libraries():
    x, values, metadata, _ = given()
    bias, scales = rest()
    wanted = linear_sparse(x, values, metadata, bias, **scales)
    folded = {**scales, "x_scale": scales["x_scale"].view(2, 3, 1)}
    assert torch.equal(
        linear_sparse(x.view(2, 3, 64), values, metadata, bias, **folded), wanted.view(2, 3, 5)
    )
    arrays = [
        x.float().numpy().astype(np.float16),
        values.float().numpy().astype(np.float16),
        metadata.numpy(),
    ]
    got = linear_sparse(
        *arrays, bias.numpy(), out_dtype="float32", **{n: s.numpy() for n, s in scales.items()}
    )
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, wanted.numpy())


def test_integers_are_exact():
    x, values, metadata, w = given(("int8", "int8"), (3, 5, 4096))
    got = linear_sparse(x, values, metadata, out_dtype="int32")
    assert torch.equal(got, (x.long() @ w.long().T).int())


def test_integers_that_do_not_fit():
    """2**17 products of 2**14 are one more than int32 holds."""
    values = torch.full((1, 1 << 17), -128, dtype=torch.int8)
    metadata = torch.full((1, 1 << 15), 0x44, dtype=torch.uint8)
    x = torch.full((1, 1 << 18), -128, dtype=torch.int8)
    refused(ValueError, "does not fit int32", linear_sparse, x, values, metadata, out_dtype="int32")
    assert linear_sparse(x, values, metadata)[0, 0] == 2.0**31


@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("fast_sums", [True, False])
def test_results_of_other_sums_are_within_the_bound(kinds, fast_sums):
    """Of the model of the tensor core, which keeps 14 bits of float8; and the reference itself."""
    x, values, metadata, w = given(kinds, (4, 5, 512))
    eight = kinds[0].startswith("float8")
    bias, scales = rest()
    scales["x_scale"] = scales["x_scale"][:4]
    truth = (x.double() @ w.double().T) * scales["x_scale"].double() * scales[
        "scale"
    ].double().T + bias.double()
    bound = linear_sparse_error_bound(
        x, values, metadata, bias, fast_sums=fast_sums, out_dtype="float32", **scales
    )
    assert bool(
        (
            (linear_sparse(x, values, metadata, bias, out_dtype="float32", **scales).double() - truth).abs()
            <= bound
        ).all()
    )
    if eight:
        sums = reference.matmul(x, w.T, accumulation="hopper_fp8", promote=None if fast_sums else 128)
        made = sums * scales["x_scale"] * scales["scale"].T + bias
        assert bool(((made.double() - truth).abs() <= bound).all())
        exact = ((x.double() @ w.double().T).float() * scales["x_scale"]) * scales["scale"].T + bias
        assert not torch.equal(made, exact)
    assert bool((bound < (1.0 if eight else 0.01) * (1 + truth.abs().max())).all())


def test_the_bound_is_tight_for_integers_and_none_for_int32():
    x, values, metadata, _ = given(("int8", "int8"))
    assert bool((linear_sparse_error_bound(x, values, metadata, out_dtype="int32") == 0).all())
    bias, scales = rest()
    bound = linear_sparse_error_bound(x, values, metadata, bias, **scales)
    assert bool((bound <= 5 * 2.0**-24 * 64 * 1e4).all())


def test_promoted_sums_have_the_smaller_bound():
    x, values, metadata, _ = given(size=(2, 3, 2048))
    bounds = [linear_sparse_error_bound(x, values, metadata, fast_sums=fast) for fast in (False, True)]
    assert bool((bounds[0] < bounds[1]).all())


def test_nothing_is_promised_beyond_float32():
    x, values, metadata, _ = given()
    huge = {"x_scale": torch.tensor(3e38), "scale": torch.tensor(3e38)}
    assert bool(linear_sparse_error_bound(x, values, metadata, **huge).isinf().all())
    assert bool(linear_sparse(x, values, metadata, **huge).isinf().any())


BAD = {
    "x of another dtype": (TypeError, "by the same", lambda a: a.update(x=a["x"].float())),
    "codes": (TypeError, "view codes", lambda a: a.update(values=a["values"].view(torch.uint8))),
    "other K": (ValueError, "x \\(..., K\\)", lambda a: a.update(x=a["x"][:, :60])),
    "metadata": (ValueError, "metadata of shape", lambda a: a.update(metadata=a["metadata"][:, 1:])),
    "metadata's dtype": (TypeError, "uint8", lambda a: a.update(metadata=a["metadata"].int())),
    "bias": (ValueError, "bias has shape", lambda a: a.update(bias=torch.ones(4))),
    "bias's dtype": (TypeError, "bias of float32", lambda a: a.update(bias=torch.ones(5).double())),
    "x_scale": (ValueError, "x_scale has shape", lambda a: a.update(x_scale=torch.ones(6))),
    "scale": (ValueError, "scale has shape", lambda a: a.update(scale=torch.ones(1, 5))),
    "scale's dtype": (TypeError, "scale in float32", lambda a: a.update(scale=torch.ones(5, 1).bfloat16())),
    "out_dtype": (ValueError, "out_dtype", lambda a: a.update(out_dtype="float64")),
    "int32 of floats": (ValueError, "int32 is for int8", lambda a: a.update(out_dtype="int32")),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_refused(what):
    x, values, metadata, _ = given()
    kind, message, change = BAD[what]
    arguments = {"x": x, "values": values, "metadata": metadata}
    change(arguments)
    for function in (linear_sparse, linear_sparse_error_bound):
        refused(kind, message, function, **arguments)


# `linear_sparse_int4` is the product with the dense weight, whose codes stand where the metadata say.


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
        refused(kind, message, linear_sparse_int4, *case, zero=wrong)


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
    refused((TypeError, ValueError), message, linear_sparse_int4, *WRONG[message])
